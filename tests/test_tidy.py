"""The house rules a linter does not know, as a ratchet: sizes, hollow code, words that do not
belong.

Exceptions are named here with their reason; the list only ever shrinks.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 70
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
ROOMS = ("foundation", "engine", "gateway", "billing", "mcp_bridge")


@cache
def python_files() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return tuple(ROOT / name for name in listed if (ROOT / name).exists())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module", autouse=True)
def all_parsed() -> None:
    """Parse the whole tree while the garbage collector is off: it would walk all syntax trees
    again and again, though none of them can go."""
    gc.disable()
    for path in python_files():
        tree_of(path)
    gc.freeze()
    gc.enable()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_there_is_something_to_check() -> None:
    assert len(python_files()) > 20


def test_no_file_is_longer_than_its_bound() -> None:
    long = {
        relative(p): n
        for p in python_files()
        if (n := len(p.read_text().splitlines())) > MAX_FILE_LINES
    }
    assert {k: v for k, v in long.items() if k not in LONG_FILES} == {}
    assert [k for k in LONG_FILES if k not in long] == [], "no longer long: drop the exception"


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{relative(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert {k: v for k, v in long.items() if k not in LONG_FUNCTIONS} == {}
    assert [k for k in LONG_FUNCTIONS if k not in long] == [], "no longer long: drop the exception"


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_says_what_it_is(room: str) -> None:
    silent = [
        relative(path)
        for path in python_files()
        if relative(path).startswith(room + "/") and not ast.get_docstring(tree_of(path))
    ]
    assert silent == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """`except:` / `except Exception:` whose body is only `pass` or `...`."""
    broad = handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )
    empty = all(
        isinstance(node, ast.Pass)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in handler.body
    )
    return broad and empty


def test_no_error_is_swallowed() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert found == []


def test_nobody_but_settings_reads_the_environment() -> None:
    allowed = {"gateway/settings/load.py"}
    pattern = re.compile(r"os\.environ|os\.getenv")
    found = [
        relative(path)
        for path in python_files()
        if relative(path).startswith(tuple(room + "/" for room in ROOMS))
        and relative(path) not in allowed
        and pattern.search(path.read_text())
    ]
    assert found == []


def test_nobody_draws_from_the_global_generator() -> None:
    """Hypothesis seeds it, and blames a test whose strategy it is used beside, by another thread:
    once in many runs. Who draws has a `random.Random` of its own."""
    guilty = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in ROOMS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr not in ("Random", "SystemRandom")
    ]
    assert guilty == []


def test_no_room_without_a_name() -> None:
    bad = ("utils", "common", "helpers", "manager", "misc")
    assert [relative(p) for p in python_files() if p.stem in bad or p.parent.name in bad] == []


def test_nothing_is_left_to_do_later() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError")
    found = [
        f"{relative(path)}:{number}"
        for path in python_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


DRAWN = {"secrets", "uuid", "uuid4", "uuid7", "random", "token_urlsafe", "token_hex", "urandom"}


def unsettled(tree: ast.Module, values: ast.expr) -> bool:
    """pytest would name these otherwise in another process, or have them in another order.

    What is in a dict or a set is not named: pytest counts those.
    """
    if isinstance(values, ast.List | ast.Tuple):
        return any(unsettled(tree, each) for each in values.elts)
    if isinstance(values, ast.Starred | ast.Call | ast.ListComp | ast.GeneratorExp):
        iterated = [each.iter for each in getattr(values, "generators", [])]
        if isinstance(values, ast.Call) and getattr(values.func, "id", "") in ("list", "tuple"):
            iterated = values.args
        if isinstance(values, ast.Starred):
            iterated = [values.value]
        if any(is_set(tree, each) for each in iterated):
            return True
    if isinstance(values, ast.Dict | ast.Set):
        return False
    return any(getattr(n, "id", getattr(n, "attr", None)) in DRAWN for n in ast.walk(values))


def is_set(tree: ast.Module, node: ast.expr) -> bool:
    """Written as one, or the name of a constant that is."""
    if isinstance(node, ast.Name):
        return any(
            is_set(tree, each.value)
            for each in tree.body
            if isinstance(each, ast.Assign) and node.id in map(ast.unparse, each.targets)
        )
    made = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("set", "frozenset")
    return made or isinstance(node, ast.Set | ast.SetComp)


HANG_S = 30
"""A test that waits so long hangs; one that waits less may wait for a busy machine."""
WALL_CLOCKS = {"monotonic", "perf_counter", "time"}


def is_elapsed(node: ast.expr) -> bool:
    """Return whether it is `time.monotonic() - started`, by whatever wall clock."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and isinstance(node.left.func, ast.Attribute)
        and node.left.func.attr in WALL_CLOCKS
    )


def is_below(node: ast.expr, most: float, least: float = 0) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and least <= value < most


def waits_for_wall_time(node: ast.AST) -> bool:
    """Return whether it bounds elapsed time, or guards against a hang too early. A shorter
    `asyncio.timeout` than of a second is meant to end."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(
            isinstance(op, ast.Lt | ast.LtE) and is_elapsed(less) and is_below(more, HANG_S)
            for less, op, more in zip(sides, node.ops, sides[1:], strict=False)
        )
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "asyncio.timeout"
        and is_below(node.args[0], HANG_S, least=1)
    )


def test_no_test_waits_for_wall_time() -> None:
    """A busy machine takes it away: `tests/pace.py` has what to use instead."""
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files()
        if relative(path).startswith("tests/")
        for node in ast.walk(tree_of(path))
        if waits_for_wall_time(node)
    ]
    assert found == []


def test_tests_have_the_same_names_in_every_process() -> None:
    """Else pytest-xdist runs none of them."""
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in python_files()
        if relative(path).startswith("tests/")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize"
        for values in node.args[1:]
        if is_set(tree_of(path), values) or unsettled(tree_of(path), values)
    ]
    assert found == []
