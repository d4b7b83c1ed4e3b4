"""Makes the folder map of ARCHITECTURE.md from the first sentence of each package: `make map`.

A room's folders have a line each; what lies deeper is named in its folder's line.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

from tests.test_tidy import ROOMS, ROOT

PAGE = ROOT / "ARCHITECTURE.md"
BEGIN, END = "<!-- folders: make map -->\n", "<!-- /folders -->\n"
MAX_LINE_CHARS = 120
WIDTH = 24


def first_sentence(package: Path) -> str:
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    flat = " ".join(text.split("\n\n")[0].split())
    return re.split(r"[.?!](?:\s|$)", flat, maxsplit=1)[0].removesuffix(".")


def packages_in(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.glob("*/__init__.py"))


def folder_lines(folder: Path) -> list[str]:
    """Return a folder's line, and what more it takes to name the folders in it."""
    head = f"{folder.relative_to(ROOT)}/".ljust(WIDTH)
    sentence = first_sentence(folder)
    if len(head + sentence) > MAX_LINE_CHARS:
        sentence = re.split(r"[:;] ", sentence)[0]
    inner = [str(p.parent.relative_to(folder)) for p in sorted(folder.glob("*/**/__init__.py"))]
    line = head + textwrap.shorten(sentence, MAX_LINE_CHARS - len(head), placeholder=" ...")
    indented = dict.fromkeys(("initial_indent", "subsequent_indent"), "    ")
    return [line, *textwrap.wrap(", ".join(inner), MAX_LINE_CHARS, **indented)]


def folder_map() -> str:
    lines = ["```"]
    for room in ROOMS:
        lines.append(folder_lines(ROOT / room)[0])
        lines += [line for each in packages_in(ROOT / room) for line in folder_lines(each)]
    return "\n".join([*lines, "```"]) + "\n"


def with_map(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + folder_map() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
