"""A number that is slow to read is found wherever it stands, and no text is taken for one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foundation.json_numbers import MAX_NUMBER_CHARS, MAX_SMALL_NUMBERS, slow_number

LONG = "9" * (MAX_NUMBER_CHARS + 1)
WRITTEN = {
    "digits": LONG,
    "a negative one": f"-{LONG}",
    "behind the point": "0." + "1" * MAX_NUMBER_CHARS,
    "in the exponent": "1e" + "0" * MAX_NUMBER_CHARS + "1",
    "on both sides of the e": "1" * 129 + "e-" + "0" * 127,
    "what the tester sent": "7" * 4299,
}
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text('"\\9.e-', max_size=20)
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("number", WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize(
    "document", ["%s", '{"a":[1,%s]}', '["\\"9", %s , "x"]', "[" + "1,2," * 900 + "%s]"]
)
def test_a_number_that_is_too_long_is_found(document: str, number: str) -> None:
    found = slow_number((document % number).encode())
    assert found is not None
    assert found.offset == document.index("%s") + number.startswith("-")
    assert found.reason == "a number of more than 256 characters"


@given(VALUES, VALUES, st.integers(0, 70))
@example("\\", '"', 0)
def test_it_is_found_among_anything(before: Any, after: Any, spaces: int) -> None:
    mark = "\u00a7"
    written = " " * spaces + json.dumps([before, mark, after])
    document = written.replace(json.dumps(mark), LONG, 1).encode()
    found = slow_number(document)
    assert found is not None
    assert document[found.offset :].startswith(LONG.encode())


@given(VALUES)
def test_what_encoders_write_is_let_pass(value: Any) -> None:
    assert slow_number(json.dumps([value] * 9).encode()) is None


def test_texts_of_digits_are_let_pass() -> None:
    pi = "3." + "14159" * 100_000
    assert (
        slow_number(json.dumps({"pi": pi, "quoted": f'"{pi}', pi: ["e-300 " * 2000]}).encode())
        is None
    )


@pytest.mark.parametrize("small", ["5e-324", "2.2250738585072011E-308", "0." + "0" * 190 + "1e-99"])
def test_few_numbers_are_close_to_zero(small: str) -> None:
    most = [small] * MAX_SMALL_NUMBERS
    assert slow_number(f"[{','.join(most)}, 1e-99, 2.5e+300]".encode()) is None
    begin = f"[{','.join(most)}, 1e-99, "
    found = slow_number(f"{begin}{small}]".encode())
    assert found is not None
    assert found == (len(begin), "more than 1000 numbers close to zero")


@given(st.binary() | st.from_regex(re.compile(rb'["\\\[\]{},:0-9.eE+-]{0,60}')))
@example(b'"' + b"9" * 300)
@example(b'"\\' + b"9" * 300)
def test_what_is_no_json_is_let_pass_or_found(document: bytes) -> None:
    found = slow_number(document)
    assert found is None or document[found.offset : found.offset + 1].isdigit()
