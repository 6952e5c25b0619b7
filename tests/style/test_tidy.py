"""Rules of the style guide that a tool other than ruff or import-linter must check."""

import ast
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

import pytest

from arbiter.core.records.ticket import TRANSITIONS
from deployments.replica import held_model
from tests.style import states_diagram
from tests.style.sources import ROOT, broken_in, name_of, nodes_of, text_of, tree_of

PACKAGES = ("arbiter", "policies", "deployments", "models")
CODE = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
PURE_MODULES = ("arbiter.core", "arbiter.errors", "arbiter.units", "policies")
PURE = [ROOT / "arbiter" / "units.py"]
PURE += sorted(
    path
    for folder in ("arbiter/errors", "arbiter/core", "policies")
    for path in (ROOT / folder).rglob("*.py")
)
ALLOWED = {
    "bisect", "collections", "collections.abc", "dataclasses", "difflib", "enum", "functools",
    "heapq", "itertools", "math", "operator", "re", "typing",
    "copy", "io", "pickle",  # a state is copied for a dry run
}  # fmt: skip
# Files with one table of words or numbers, which ruff would set in a column.
SET_BY_HAND = (
    "deployments/monitoring/story.py",
    "deployments/remotes/body.py",
    "deployments/replica/model_files/remote_files.py",
    "models/chat_tasks.py",
)
# A file holds one subject; most stay under 400 lines, and 600 is the wall.
LINES_PER_FILE, LINES_PER_FUNCTION, LINES_PER_CAPABILITY = 600, 50, 150
SLOW_LIBRARIES = {"torch", "transformers", "vllm", "diffusers", "sentence_transformers", "peft"}
# The unit ends the name of a plain number; these count or rank things that have no unit.
UNITS = ("_bytes", "_ns", "_s", "_fraction", "_count", "_loads", "_ticks", "_micros")
UNITLESS = {
    "inflight", "attempt", "rank", "role_rank", "turn", "position", "times", "waiting", "bound",
    "status_code", "sequence", "version", "estimates_version",
    "pid", "parent", "group", "session", "fd",  # the kernel's names of things
}  # fmt: skip
# How a value came: `reply`, `message`, `request` or `event` would say what it is.
NO_THING = {"said", "asked", "told", "heard", "asks", "says"}


def test_rule_over_files_names_those_in_which_it_is_broken() -> None:
    assert min(len(CODE), len(TESTS), len(PURE)) > 30
    rows = [ROOT / "a.py", ROOT / "b" / "c.py"]
    assert broken_in(rows, lambda path: [7] if path.name == "c.py" else []) == {"b/c.py": [7]}


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = nodes_of(path)
    return [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def long_parts(path: Path) -> list[str]:
    limit = LINES_PER_FILE * (2 if path in TESTS else 1)  # scenarios are a list, not a design
    lines = len(text_of(path).splitlines())
    whole = [f"{lines} lines"] if lines > limit else []
    return whole + [
        f"{f.name}:{f.lineno}" for f in functions(path) if length(f) > LINES_PER_FUNCTION
    ]


def test_files_and_functions_are_short() -> None:
    assert not broken_in(CODE + TESTS, long_parts)


def parts_set_by_hand(path: Path) -> list[int]:
    lines = text_of(path).splitlines()
    return [n for n, line in enumerate(lines, 1) if "# fmt: " in line]


def test_only_tables_are_set_by_hand() -> None:
    broken = broken_in(CODE, parts_set_by_hand)
    assert {name: len(lines) for name, lines in broken.items()} == dict.fromkeys(SET_BY_HAND, 1)


def lacks_a_docstring(path: Path) -> bool:
    return bool(text_of(path).strip()) and not ast.get_docstring(tree_of(path))


def test_every_module_has_a_docstring() -> None:
    assert not broken_in(CODE, lacks_a_docstring)


def imports(path: Path) -> set[str]:
    nodes = nodes_of(path)
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [f"{module}.{a.name}" for a in node.names]
            imported |= set(names) if module in ("arbiter", "policies") else {module}
    return imported


def impure(path: Path) -> set[str]:
    """What it imports from outside, and calls that reach the world."""
    ours = tuple(f"{module}." for module in PURE_MODULES)
    foreign = {m for m in imports(path) - ALLOWED if not f"{m}.".startswith(ours)}
    calls = [n.func for n in nodes_of(path) if isinstance(n, ast.Call)]
    names = {f.id for f in calls if isinstance(f, ast.Name)}
    return foreign | names & {"print", "open", "input", "eval", "exec", "__import__"}


def test_the_core_and_the_policies_are_pure() -> None:
    """They take time, randomness and bytes as arguments, and import only one another."""
    assert not broken_in(PURE, impure)


def test_the_core_does_not_know_the_policies() -> None:
    core = [path for path in PURE if ROOT / "policies" not in path.parents]
    assert not broken_in(core, lambda p: {m for m in imports(p) if m.split(".")[0] == "policies"})


def plain_number_fields(path: Path) -> list[str]:
    classes = [n for n in nodes_of(path) if isinstance(n, ast.ClassDef)]
    return [
        f"{c.name}.{f.target.id}"
        for c in classes
        if any("dataclass" in ast.dump(d) for d in c.decorator_list)
        for f in c.body
        if isinstance(f, ast.AnnAssign)
        and isinstance(f.target, ast.Name)
        and {n.id for n in ast.walk(f.annotation) if isinstance(n, ast.Name)} & {"int", "float"}
        and not f.target.id.endswith(UNITS)
        and f.target.id not in UNITLESS
        and not isinstance(f.annotation, ast.Subscript)
    ]


def test_every_number_carries_its_unit_in_its_type_or_name() -> None:
    assert not broken_in((ROOT / "arbiter").rglob("*.py"), plain_number_fields)


EVERYTHING = {"Exception", "BaseException"}


def names_of_no_thing(path: Path) -> set[str]:
    """Local names and parameters that say how a value came and not what it is. Fields of classes
    are left out: `said` is one of answers that users read."""
    nodes = nodes_of(path)
    bodies = [statement for n in nodes if isinstance(n, ast.ClassDef) for statement in n.body]
    fields = {id(s.target) for s in bodies if isinstance(s, ast.AnnAssign)}
    stored = {n.id for n in nodes if is_stored(n) and id(n) not in fields}
    return NO_THING & (stored | {n.arg for n in nodes if isinstance(n, ast.arg)})


def is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def test_names_say_what_a_value_is() -> None:
    """But for recipes of chats, in which people ask and say."""
    served = [path for path in CODE if path.relative_to(ROOT).parts[0] != "models"]
    assert not broken_in(served, names_of_no_thing)


def names_in(nodes: Iterable[ast.AST | None]) -> set[str]:
    return {n.id for node in nodes if node for n in ast.walk(node) if isinstance(n, ast.Name)}


def is_passed_on(handler: ast.ExceptHandler) -> bool:
    """It ends with a bare `raise`, and no way leads past it."""
    last, inner = handler.body[-1], list(ast.walk(handler))
    passes_on = isinstance(last, ast.Raise) and last.exc is None
    return passes_on and not any(
        isinstance(n, ast.Return | ast.Break | ast.Continue) for n in inner
    )


def catchers_of_everything(module: ast.Module) -> list[int]:
    """`except BaseException` may put something right on the way out, if it goes on up."""
    nodes = list(ast.walk(module))
    handlers = [n for n in nodes if isinstance(n, ast.ExceptHandler)]
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    wide = [h for h in handlers if h.type is None or names_in([h.type]) & EVERYTHING]
    return [
        *(h.lineno for h in wide if "Exception" in names_in([h.type]) or not is_passed_on(h)),
        *(c.lineno for c in calls
          if ast.unparse(c.func).endswith("suppress") and names_in(c.args) & EVERYTHING),
    ]  # fmt: skip


def test_no_file_catches_everything() -> None:
    assert not broken_in(CODE + TESTS, lambda path: catchers_of_everything(tree_of(path)))


@pytest.mark.parametrize(
    ("handler", "is_wrong"),
    [
        ("except ValueError: pass", False),
        ("except BaseException:\n    tidy()\n    raise", False),
        ("except BaseException: pass", True),
        ("except BaseException:\n    if tidy():\n        return\n    raise", True),
        ("except (KeyError, BaseException): pass", True),
        ("except Exception: raise", True),
        ("except: raise", False),
        ("except: pass", True),
    ],
)
def test_handler_that_catches_everything_is_found(handler: str, is_wrong: bool) -> None:
    module = ast.parse(
        f"def f():\n  try:\n    work()\n  {handler.replace(chr(10), chr(10) + '  ')}"
    )
    assert bool(catchers_of_everything(module)) is is_wrong


def test_suppression_of_everything_is_found() -> None:
    assert catchers_of_everything(ast.parse("with contextlib.suppress(Exception): work()"))
    assert not catchers_of_everything(ast.parse("with contextlib.suppress(OSError): work()"))


def sleeps(path: Path) -> list[int]:
    """Calls that let time pass, also within a loop: any sleep but `sleep(0)`, which lets others
    run, and a wait on something made on the spot, which nobody can set."""
    calls = [n for n in nodes_of(path) if isinstance(n, ast.Call)]
    methods = [(c, c.func) for c in calls if isinstance(c.func, ast.Attribute)]
    return [
        c.lineno
        for c, method in methods
        if (method.attr == "sleep" and not _is_zero(c))
        or (method.attr == "wait" and isinstance(method.value, ast.Call) and (c.args or c.keywords))
        or method.attr in ("sigtimedwait", "call_later")
    ]


def _is_zero(call: ast.Call) -> bool:
    return bool(call.args) and ast.dump(call.args[0]) == "Constant(value=0)"


def test_no_test_sleeps() -> None:
    """They wait on a condition with a bound; the loop that looks again lives in tests/support."""
    assert not broken_in((p for p in TESTS if p.name.startswith("test_")), sleeps)


def is_capability(path: Path) -> bool:
    """Whether a class in it is a subclass of `Capability`."""
    classes = [n for n in nodes_of(path) if isinstance(n, ast.ClassDef)]
    return any(ast.unparse(base).endswith("Capability") for c in classes for base in c.bases)


def test_contract_of_engine_libraries_names_all_of_deployments_but_engines() -> None:
    """import-linter has no list of what a contract leaves out, so the contract names the rest."""
    settings = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["importlinter"]
    contract = next(c for c in settings["contracts"] if "engine library" in c["name"])
    folder = ROOT / "deployments"
    modules = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/*.py")}
    named = {name.removeprefix("deployments.") for name in contract["source_modules"]}
    assert modules - {"__init__", "engines"} == named - {"arbiter", "policies"}


CAPABILITIES = [path for path in CODE if is_capability(path)]


def test_known_capabilities_are_found() -> None:
    assert {name_of(p) for p in CAPABILITIES} >= {
        "deployments/capabilities/embedding.py", "deployments/capabilities/text.py",
    }  # fmt: skip


@pytest.mark.parametrize("path", CAPABILITIES, ids=name_of)
def test_capabilities_are_small(path: Path) -> None:
    assert len(text_of(path).splitlines()) <= LINES_PER_CAPABILITY


def test_states_diagram_is_up_to_date() -> None:
    assert states_diagram.PATH.read_text() == states_diagram.page()
    for table, why in (
        (TRANSITIONS, states_diagram.WHY),
        (held_model.TRANSITIONS, states_diagram.HOLDER_WHY),
    ):
        assert {(state, to) for state, targets in table.items() for to in targets} == why.keys()


def imported_test_modules(path: Path) -> set[str]:
    nodes = [n for n in nodes_of(path) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in nodes for a in n.names}
    names |= {
        f"{n.module}.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
    }
    parts = {part for name in names if name.startswith("tests.") for part in name.split(".")[1:]}
    return {part for part in parts if part.startswith("test_")}


def test_nothing_imports_from_a_test_module() -> None:
    """What several of them need lies in tests/support."""
    assert not broken_in([*TESTS, *BENCHMARKS], imported_test_modules)


def slow_imports(path: Path) -> set[str]:
    return {module for module in imports(path) if module.split(".")[0] in SLOW_LIBRARIES}


def test_fast_tests_import_no_library_of_engines() -> None:
    """Each worker of xdist imports all its tests, and torch takes seconds; such a unit's tests are
    in tests/engines/libraries or tests/engines/vllm."""
    fast = [p for p in TESTS if p.relative_to(ROOT / "tests").parts[0] in ("unit", "model", "sim")]
    assert len(fast) > 200 and not broken_in(fast, slow_imports)
    assert slow_imports(ROOT / "tests" / "engines" / "libraries" / "test_int8.py") == {"torch"}


def reads_of_the_core(path: Path) -> list[int]:
    """Where a test looks through an arbiter's state instead of asking the driver."""
    reads = [n.value for n in nodes_of(path) if isinstance(n, ast.Attribute)]
    whole = [n for n in reads if isinstance(n, ast.Attribute) and n.attr == "state"]
    private = [n for n in nodes_of(path) if isinstance(n, ast.Attribute)]
    drivers = ("driver", "d", "made", "again")
    return [
        *(n.lineno for n in whole if ast.unparse(n.value).split(".")[-1] in drivers),
        *(n.lineno for n in private if n.attr == "_state" and "arbiter" in ast.unparse(n.value)),
    ]


def test_tests_ask_the_driver_of_the_core() -> None:
    """A rule may be given the state; what a test wants to know of it has a name in
    tests/support/core_queries.py, so that a rename in the core touches one file."""
    asked = [p for p in TESTS if p.parts[-2] == "model" or "unit" in p.parts]
    assert not broken_in(asked, reads_of_the_core)


def test_only_one_method_moves_a_held_model() -> None:
    """A field assigned elsewhere would pass by the table."""
    moves = [
        f"{name_of(path)}:{node.lineno}"
        for path in sorted((ROOT / "deployments" / "replica").rglob("*.py"))
        for node in nodes_of(path)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for part in ast.walk(target)
        if isinstance(part, ast.Attribute) and part.attr == "state"
    ]
    assert len(moves) == 1 and moves[0].startswith("deployments/replica/held_model.py")
