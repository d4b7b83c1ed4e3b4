"""Normal forms are Python's own, but where a text is made to cost a worker its time."""

from __future__ import annotations

import sys
import time
import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foundation.normal_forms import (
    JOINER,
    LAST_MARK,
    MAX_MARKS,
    is_mark,
    normalized,
    size_decomposed,
)

FORMS: tuple[Any, ...] = ("NFC", "NFD", "NFKC", "NFKD")
UNSORTED = "\u0315\u0300\u05ae"
"""Marks in the wrong order, whatever is behind them."""
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    st.sampled_from([*"aé\u1e69\ufdfa\u1100\u1161각\u0f73\u0344", *UNSORTED]), max_size=25
)


@given(text=TEXTS)
@example(text="\ufb2c\u0344\u1fb7\u0f77")
def test_they_are_pythons(text: str) -> None:
    for form in FORMS:
        assert normalized(form, text) == unicodedata.normalize(form, text)
    assert size_decomposed("NFD", text) == len(unicodedata.normalize("NFD", text).encode())
    assert size_decomposed("NFKD", text) == len(unicodedata.normalize("NFKD", text).encode())


def test_all_marks_are_known() -> None:
    assert not any(map(is_mark, map(chr, range(LAST_MARK, sys.maxunicode + 1))))


@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_marks_is_parted(form: Any) -> None:
    text = "a" + UNSORTED * 100_000
    begun = time.process_time()
    found = normalized(form, text)
    size = size_decomposed("NFD", text)
    assert time.process_time() - begun < 30, "minutes, by insertion"
    assert size == len(text.encode())
    rows = found.removeprefix("a").removeprefix("\u00e0").split(JOINER)
    assert max(map(len, rows)) == MAX_MARKS
    assert found.replace(JOINER, "").count("\u05ae") == 100_000
