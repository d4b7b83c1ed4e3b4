"""The runner of the docs' blocks runs all in order, and tells the line of the one that fails."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.docs.runner import blocks_of, run_page

GOOD = """
```bash
NAME=penny
export SAID="http://127.0.0.1:8000/v1"
```
```python
import os

said = os.environ["SAID"]
```
```python file=words.py
print("from a file")
```
Between them.
```bash skip=gpu
exit 7
```
```text
exit 8
```
```python
print(said, "by python")
```
```bash
echo "$NAME by bash"; python3 words.py; ls -d .venv/bin
```
```toml
port = 8000
```
"""


def page_of(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_blocks_run_in_order_and_know_what_was_before(tmp_path: Path) -> None:
    said = run_page(page_of(tmp_path, GOOD), tmp_path, "127.0.0.1:7")
    lines = [line for line in said.splitlines() if not line.startswith("@@")]
    assert lines == [
        "http://127.0.0.1:7/v1 by python",
        "penny by bash",
        "from a file",
        ".venv/bin",
    ]


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ("```bash\ntrue\nfalse\ntrue\n```", "page.md:3"),
        ("```bash\necho $UNKNOWN\n```", "page.md:3"),
        ("```bash\nfalse | cat\n```", "page.md:3"),
        ("```python\nraise KeyError('no such name')\n```", "no such name"),
        ("```python\nimport sys\nsys.exit(3)\n```", "page.md:3"),
        ("```toml\nprot = 8000\n```", "prot"),
        ("```\nwords\n```", "page.md:3: a language"),
        ("```sh\ntrue\n```", "page.md:3: a language"),
        ("```bash skip=lazy\ntrue\n```", "page.md:3: skip"),
        ("```bash quietly\ntrue\n```", "page.md:3: quietly"),
        ("```bash\ntrue\n", "page.md:3 has no end"),
    ],
)
def test_what_is_wrong_is_told_by_its_line(tmp_path: Path, block: str, why: str) -> None:
    page = page_of(tmp_path, f"# A page\n\n{block}\n\n```bash\necho not reached\n```\n")
    if "no end" in why:
        page = page_of(tmp_path, f"# A page\n\n{block}")
    with pytest.raises((AssertionError, msgspec.ValidationError), match=why) as failure:
        run_page(page, tmp_path, "127.0.0.1:7")
    assert "not reached" not in str(failure.value)


def test_a_block_knows_its_place_and_options(tmp_path: Path) -> None:
    found = blocks_of(page_of(tmp_path, GOOD))
    assert [block.line for block in found][:2] == [2, 6]
    assert [block.is_run for block in found] == [True, True, True, False, False, True, True, False]
    assert found[2].options == {"file": "words.py"} and found[3].options == {"skip": "gpu"}
