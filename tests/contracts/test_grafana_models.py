"""Grafana's own models of a dashboard (its Foundation SDK, made from Grafana's schemas) read the
one that we write. Their decoder passes over a key that it does not know, so that what does not
survive decoding and encoding is what Grafana would overlook.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import (
    dashboard,
    prometheus,
    statetimeline,
    timeseries,
    units,
)
from pydantic import ConfigDict, TypeAdapter, ValidationError

from deployments.monitoring import files
from deployments.monitoring.panels import PANELS

plugins.register_default_plugins()
CUSTOM = {"timeseries": timeseries.FieldConfig, "state-timeline": statetimeline.FieldConfig}


@pytest.fixture(scope="module", params=["alone", "ray"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The dashboard as `arbiter metrics install` writes it, and that for Ray's Grafana."""
    folder = tmp_path_factory.mktemp("grafana")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(folder))
        path = (
            files.write_for_ray()
            if request.param == "ray"
            else files.write(folder, "localhost:8000", "http", has_key=False)[0]
        )
    assert path.name.endswith(".json")
    return json.loads(Path(path).read_text())


@pytest.fixture(scope="module")
def read(written: Any) -> dashboard.Dashboard:
    return dashboard.Dashboard.from_json(written)


@pytest.mark.spec("K2", "K5")
def test_nothing_of_the_dashboard_is_unknown_to_grafana(
    written: Any, read: dashboard.Dashboard
) -> None:
    again = json.loads(json.dumps(read, cls=JSONEncoder))
    assert list(lost(written, again, "dashboard")) == []


@pytest.mark.spec("K2", "K5")
def test_values_of_the_dashboard_are_of_the_types_that_grafana_gives_them(
    read: dashboard.Dashboard,
) -> None:
    assert list(mistyped(read, "dashboard")) == []


@pytest.mark.spec("K2", "K5")
def test_panels_targets_and_variable_are_what_grafana_draws_and_asks(
    read: dashboard.Dashboard,
) -> None:
    assert read.templating is not None and read.templating.list_val is not None
    [variable] = read.templating.list_val
    assert variable.type_val == dashboard.VariableType.DATASOURCE
    assert (variable.name, variable.query) == ("datasource", "prometheus")
    known_units = {value for value in vars(units).values() if isinstance(value, str)}
    assert read.panels is not None and len(read.panels) == len(PANELS) == 12
    for panel, ours in zip(read.panels, PANELS, strict=True):
        assert isinstance(panel, dashboard.Panel) and panel.title == ours.title
        config = panel.field_config
        assert config is not None and config.defaults.unit in known_units
        assert isinstance(config.defaults.custom, CUSTOM[panel.type_val])
        targets = panel.targets or []
        assert len(targets) == len(ours.queries) > 0
        for target, query in zip(targets, ours.queries, strict=True):
            assert isinstance(target, prometheus.Dataquery), "asked of Prometheus"
            assert target.expr.replace("ray_arbiter_", "arbiter_") == query.promql
            assert target.legend_format == query.legend
            assert target.datasource is not None
            assert target.datasource.uid == f"${{{variable.name}}}"
        assert len({target.ref_id for target in targets}) == len(targets)
    places = [panel.grid_pos for panel in read.panels if isinstance(panel, dashboard.Panel)]
    assert all(place is not None and place.x + place.w <= 24 for place in places)
    assert len({(p.x, p.y) for p in places if p is not None}) == len(PANELS)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d["panels"][0]["targets"][0].update(legend="x"),
        lambda d: d["panels"][0]["fieldConfig"]["defaults"]["custom"].update(stack="normal"),
        lambda d: d["panels"][0]["fieldConfig"]["defaults"]["custom"]["stacking"].update(mode="up"),
        lambda d: d["panels"][2]["fieldConfig"]["defaults"]["mappings"][0].update(values={}),
        lambda d: d["panels"][0]["gridPos"].update(width=3),
        lambda d: d["panels"][0]["gridPos"].update(w="3"),
        lambda d: d["templating"]["list"][0].update(type="datasauce"),
        lambda d: d["templating"].update(variables=[]),
        lambda d: d.update(refreshes="10s"),
    ],
)
def test_each_kind_of_mistake_is_found(written: Any, spoil: Any) -> None:
    spoilt = json.loads(json.dumps(written))
    spoil(spoilt)
    read = dashboard.Dashboard.from_json(spoilt)
    again = json.loads(json.dumps(read, cls=JSONEncoder))
    found = [*lost(spoilt, again, "dashboard"), *mistyped(read, "dashboard")]
    assert found


def lost(before: Any, after: Any, place: str) -> Iterator[str]:
    """The places of `before` that are not so in `after`, which may have more."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            if key in after:
                yield from lost(value, after[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{place}[{number}]")
    elif before != after:
        yield f"{place}: {before!r} became {after!r}"


def mistyped(value: Any, place: str) -> Iterator[str]:
    """The places of a decoded value that are not of their annotated type: the models check none."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from mistyped(one, f"{place}[{number}]")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from mistyped(one, f"{place}.{key}")
    elif hasattr(value, "to_json"):
        for name, hint in get_type_hints(type(value)).items():
            one = getattr(value, name)
            yield from mistyped(one, f"{place}.{name}")
            if not fits(one, hint):
                yield f"{place}.{name}: {one!r} is no {hint}"


def fits(value: Any, hint: Any) -> bool:
    """As it is: a string of a number is no number, but that of an enumeration is its member."""
    try:
        return bool(adapter(hint).validate_python(value) == value)
    except ValidationError:
        return False


@cache
def adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
