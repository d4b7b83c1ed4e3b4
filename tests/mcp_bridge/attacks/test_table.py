"""docs/mcp.md says which test tries which attack: those tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ATTACKS = (
    *("CVE-2025-54136", "CVE-2025-54135", "CVE-2025-6514", "CVE-2025-49596", "confused deputy"),
    *("token passthrough", "SSRF", "session replay", "shadowing", "rug pull", "hidden text"),
    *("schema bombs", "64 MiB", "stream without end", "10^6 pages", "gzip"),
)
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


def test_the_tests_of_the_table_are_there() -> None:
    text = (ROOT / "docs/mcp.md").read_text()
    table = text.partition("## Attacks")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ")][1:]
    for attack in ATTACKS:
        assert any(attack in row.split("|")[1] for row in rows), attack
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
