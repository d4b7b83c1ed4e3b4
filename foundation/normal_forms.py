"""Unicode normal forms (UAX #15) of what strangers write, in linear time.

`unicodedata.normalize` sorts the marks behind a letter by insertion, and holds the interpreter's
lock: 50 KB of marks take two seconds, 200 KB half a minute.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from typing import Literal

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
MAX_MARKS = 30
"""In a row: no script needs more (UAX #15, Stream-Safe Text Format)."""
JOINER = "\u034f"
"""The combining grapheme joiner, which is no mark and is not seen. It parts longer rows."""
FIRST_MARK, LAST_MARK = 0x0300, 0x1E950
SLICE_CHARS = 64 * 1024
"""Counted at once, while other threads wait."""


def normalized(form: Form, text: str) -> str:
    """Return a text in a normal form. Rows of more than MAX_MARKS marks are parted."""
    if text.isascii():
        return text
    return unicodedata.normalize(form, long_rows().sub(parted, text))


def size_decomposed(form: Literal["NFD", "NFKD"], text: str) -> int:
    """Return the bytes of UTF-8 that a text has in a decomposed form. `text`: no surrogates."""
    counts: Counter[str] = Counter()
    for start in range(0, len(text), SLICE_CHARS):
        counts.update(text[start : start + SLICE_CHARS])
    return sum(number * size_of(form, char) for char, number in counts.items())


@lru_cache(maxsize=16_384)
def size_of(form: Form, char: str) -> int:
    return len(unicodedata.normalize(form, char).encode())


def parted(marks: re.Match[str]) -> str:
    row = marks[0]
    return JOINER.join(row[at : at + MAX_MARKS] for at in range(0, len(row), MAX_MARKS))


@cache
def long_rows() -> re.Pattern[str]:
    found = [char for char in map(chr, range(FIRST_MARK, LAST_MARK)) if is_mark(char)]
    return re.compile(f"[{''.join(found)}]{{{MAX_MARKS + 1},}}")


def is_mark(char: str) -> bool:
    """True for what is sorted behind a letter, or becomes it when it is decomposed."""
    if not unicodedata.decomposition(char):
        return unicodedata.combining(char) != 0
    return unicodedata.combining(unicodedata.normalize("NFKD", char)[0]) != 0
