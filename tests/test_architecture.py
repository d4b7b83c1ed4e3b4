"""ARCHITECTURE.md and the READMEs are short, and what they name is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.folder_map import MAX_LINE_CHARS, PAGE, first_sentence, folder_map
from tests.test_tidy import ROOMS, ROOT, tree_of

STOPS = {"A chat completion": 10, "A usage event": 6, "A tool call": 8, "A change by an admin": 5}
ADDED = (
    *("endpoint", "wire field", "kernel", "model family", "price component", "plan limit"),
    *("MCP check", "alert", "CLI command", "admin resource", "metric", "engine option", "setting"),
)
STOP = re.compile(r"`([\w/]+\.py):([\w.]+)`")
NAMED = re.compile(r"`((?:[\w.]+/)+\w+\.(?:py|lua))(?::([A-Za-z_][\w.]*))?`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
PAGES = [
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("bench/README.md", "examples/README.md"),
]


DOCUMENTS = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]
    + [path for room in ROOMS if (path := ROOT / room / "README.md").is_file()]
)


def page() -> str:
    return PAGE.read_text()


def section(title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", page(), re.M | re.S)
    assert found, f"no section {title!r}"
    return found[1]


def definition(path: Path, name: str) -> ast.AST | None:
    """Return what a file defines under a name such as `generate` or `Limiter.admit`."""
    body: list[ast.stmt] = tree_of(path).body
    found: ast.AST | None = None
    for part in name.split("."):
        defined = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((n for n in body if isinstance(n, defined) and n.name == part), None)
        if not isinstance(found, defined):
            return None
        body = found.body
    return found


def test_pages_are_short() -> None:
    lines = page().splitlines()
    assert len(lines) <= 200
    assert [line for line in lines if len(line) > MAX_LINE_CHARS] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    for room in ROOMS:
        assert len((ROOT / room / "README.md").read_text().splitlines()) <= 60


def test_the_folder_map_is_that_of_the_tree() -> None:
    """`make map` writes it."""
    assert folder_map() in page()


def test_every_folder_says_what_it_is() -> None:
    packages = [p.parent for room in ROOMS for p in (ROOT / room).rglob("__init__.py")]
    silent = [str(p.relative_to(ROOT)) for p in packages if first_sentence(p).count(" ") < 2]
    assert silent == []


@pytest.mark.parametrize("title", STOPS)
def test_the_stops_of_a_walk_exist(title: str) -> None:
    text = section(title)
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", text, re.M)]
    assert numbers == list(range(1, STOPS[title] + 1))
    for stop in re.split(r"^\d+\. ", text, flags=re.M)[1:]:
        named = STOP.findall(stop)
        assert named, stop
        for path, name in named:
            assert (ROOT / path).is_file(), path
            assert definition(ROOT / path, name), f"{path}:{name}"


def test_no_stop_is_in_two_walks() -> None:
    stops = [
        line[3:] for title in STOPS for line in section(title).splitlines() if line[:1].isdigit()
    ]
    assert len(set(stops)) == len(stops)


def test_each_thing_that_is_added_often_has_its_place() -> None:
    rows = {
        cells[1].strip(): cells[2]
        for line in section("Where do I add").splitlines()
        if len(cells := line.split("|")) > 3
    }
    for thing in ADDED:
        places = re.findall(r"`([\w/.]+)`", rows[thing])
        assert places, thing
        assert [p for p in places if "/" in p and not (ROOT / p).exists()] == [], thing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert [t for t in LINK.findall(path.read_text()) if not (path.parent / t).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_modules_that_a_page_names_exist(path: Path) -> None:
    """A room's README names them from its own folder, other pages from the root."""
    missing = []
    for name, symbol in NAMED.findall(path.read_text()):
        file = next((f for base in (path.parent, ROOT) if (f := base / name).is_file()), None)
        if file is None or (symbol and definition(file, symbol) is None):
            missing.append(f"{name}:{symbol}" if symbol else name)
    assert missing == []
