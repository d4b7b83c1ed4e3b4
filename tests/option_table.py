"""Makes the table of docs/configuration.md from the options of an engine: `make fields`."""

from __future__ import annotations

from pathlib import Path

from engine.options import Option, engine_options

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- engine options: make fields -->\n", "<!-- /engine options -->\n"


def option_table() -> str:
    lines = ["| option | values | default | |", "|---|---|---|---|"]
    for option in engine_options():
        cells = (f"`{option.name}`", values_of(option), default_of(option), meaning_of(option))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def values_of(option: Option) -> str:
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    kind = option.kind.__name__.lower()
    bound = option.bound_in_words
    return f"{bound} {kind}" if bound == "positive" else ", ".join(filter(None, (kind, bound)))


def default_of(option: Option) -> str:
    if option.default is None:
        return ""
    return f"`{str(option.default).lower() if option.kind is bool else option.default}`"


def meaning_of(option: Option) -> str:
    """Return its help; a flag that switches something off speaks of that."""
    return f"false: {option.help}" if option.default is True else option.help


def with_table(page: str) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + option_table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
