"""What Ray's own exporter shows of an arbiter, on a real cluster."""

import pytest

from tests.support import own_cluster


@pytest.mark.spec("K2")
def test_series_on_rays_exporter_stay_as_many_over_restarts_of_models_and_replicas() -> None:
    own_cluster.run("tests.integration.exported_series")
