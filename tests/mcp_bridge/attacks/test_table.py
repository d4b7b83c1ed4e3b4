"""docs/mcp.md says which test tries which attack: those tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


def test_the_tests_of_the_table_are_there() -> None:
    text = (ROOT / "docs/mcp.md").read_text()
    table = text.partition("## Attacks")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    assert rows
    for row in rows:
        found = TEST.findall(row)
        assert found, f"no test: {row}"
        for file, name in found:
            tree = ast.parse((ROOT / file).read_text())
            names = {
                each.name
                for each in ast.walk(tree)
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in names, f"{file} has no {name}"
