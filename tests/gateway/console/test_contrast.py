"""Every text of the console's stylesheet can be read: WCAG 2.2, 1.4.3, in both themes."""

from __future__ import annotations

import re
from itertools import product

import pytest

from gateway.console.assets import FOLDER

TEXTS = ("ink", "ink-2", "ink-3", "accent", "warn", "bad", "good")
GROUNDS = ("bg", "panel")
PAIRS = [
    *product(TEXTS, GROUNDS),
    ("ink", "accent-soft"),
    ("ink-2", "line"),
    ("on-accent", "accent"),
    ("panel", "bad"),
    ("warn", "warn-soft"),
    ("bad", "bad-soft"),
    ("good", "good-soft"),
]
EDGES = [*product(("line-strong", "accent", "bad", "warn"), GROUNDS)]
"""Edges of what can be done, and bars: 3:1 (1.4.11)."""


def themes() -> dict[str, dict[str, str]]:
    style = (FOLDER / "console.css").read_text()
    light = style.partition(":root {")[2].partition("}")[0]
    dark = style.partition(':root[data-theme="dark"] {')[2].partition("}")[0]
    by_system = style.partition(':root:not([data-theme="light"]) {')[2].partition("}")[0]
    assert tokens(by_system) == tokens(dark), "the chosen theme is the system's"
    return {"light": tokens(light), "dark": tokens(dark)}


def tokens(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_ratio_is_wcags() -> None:
    assert round(contrast("#000000", "#ffffff"), 2) == 21.0
    assert round(contrast("#777777", "#ffffff"), 2) == 4.48


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_pairs_of_colours_can_be_told_apart(theme: str) -> None:
    found = themes()[theme]
    low = {
        f"{one} on {ground}": round(contrast(found[one], found[ground]), 2)
        for pairs, least in ((PAIRS, 4.5), (EDGES, 3.0))
        for one, ground in pairs
        if contrast(found[one], found[ground]) < least
    }
    assert low == {}
