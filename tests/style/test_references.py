"""Names and paths of the repository that comments, docstrings and documents cite exist."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from deployments.config.arbiter_section import ArbiterConfig
from tests.style import sources
from tests.style.sources import ROOT, broken_in

CODE_FOLDERS = ("arbiter", "policies", "deployments", "models", "benchmarks", "tests", "tools")
CODE = sorted(p for folder in CODE_FOLDERS for p in (ROOT / folder).rglob("*.py"))
# What a note under docs/benchmarks says was so on its day.
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/adr/*.md")])
DOTTED = re.compile(
    r"(?<![\w/.@-])(?:arbiter|deployments|policies)(?:\.(?!(?:py|sqlite)\b)[A-Za-z_]\w*)+"
)
TOP = "|".join((*CODE_FOLDERS, "docs"))
PATH = re.compile(rf"(?<![\w/.~-])(?:{TOP})/[\w/.-]*\.(?:py|md|json|txt)\b")
HAS_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def prose_of(source: str) -> Iterator[str]:
    """Comments and docstrings: strings that a program reads name other things too."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, HAS_DOCSTRING):
            yield ast.get_docstring(node) or ""


@cache
def members_of(file: Path) -> dict[str, set[str]]:
    """Top-level names of a module, imported ones included, each with the names in its class."""
    references: dict[str, set[str]] = {}
    for node in sources.nodes_of(file):
        if isinstance(node, ast.ClassDef):
            references[node.name] = set(names_bound(node.body))
    return {name: set() for name in names_bound(sources.tree_of(file).body)} | references


def names_bound(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name) for a in node.names)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))


def exists(name: str) -> bool:
    """Whether a dotted name is a module, a name in one or in a class of one, or a table's key."""
    package, *parts = name.split(".")
    folder = ROOT / package
    if package == "arbiter" and parts[0] in ArbiterConfig.model_fields:
        return True
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if parts and (file := folder / f"{parts[0]}.py").exists():
        parts.pop(0)
    else:
        file = folder / "__init__.py"
    if not parts:
        return True
    members = members_of(file) if file.exists() else {}
    return parts[0] in members and (len(parts) == 1 or parts[1] in members[parts[0]])


def cited_in_vain(path: Path) -> list[str]:
    text = sources.text_of(path)
    gone = gone_of(text, path)
    # Code is told from prose, which takes long, only where something seems to be gone.
    return gone_of("\n".join(prose_of(text)), path) if gone and path.suffix == ".py" else gone


def gone_of(text: str, path: Path) -> list[str]:
    missing = [name for name in DOTTED.findall(text) if not exists(name)]
    cited = set(PATH.findall(text))
    missing += [p for p in cited if not ((ROOT / p).exists() or (path.parent / p).exists())]
    return sorted(set(missing))


def test_cited_names_and_paths_exist() -> None:
    gone = broken_in(CODE + DOCUMENTS, cited_in_vain)
    assert not gone, "renamed or gone"


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("arbiter.core.records.ticket", True),
        ("arbiter.core.records.ticket.TRANSITIONS", True),
        ("arbiter.client.admin.call_arbiter", True),
        ("deployments.replica.residency.Residency.use", True),
        ("arbiter.evict", True),
        ("arbiter.node.spares", False),
        ("arbiter.core.records.ticket.GONE", False),
        ("deployments.replica.residency.Residency.gone", False),
    ],
)
def test_name_is_found_where_it_is_and_nowhere_else(name: str, is_there: bool) -> None:
    assert exists(name) is is_there


def test_comments_and_docstrings_are_read_and_other_strings_are_not() -> None:
    source = '"""Of arbiter.one."""\nx = "arbiter.two"  # see arbiter.three\n'
    assert DOTTED.findall("\n".join(prose_of(source))) == ["arbiter.three", "arbiter.one"]
