"""engine.text.output_parser.reading.json_text follows a JSON value to its last character, and no
further.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.output_parser.reading.json_text import MAX_DEPTH, MAX_NUMBER_CHARS, JsonText

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
KEYS = st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=3)


def follow(text: str, step: int = 1) -> tuple[str, bool, bool]:
    """Return what was taken, and whether it is complete or broken, fed so many characters at a
    time.
    """
    value = JsonText()
    taken = ""
    for start in range(0, len(text), step):
        piece = text[start : start + step]
        at = 0
        at = value.take(piece, at)
        taken += piece[:at]
        if at < len(piece):
            break
    return taken, value.is_complete, value.is_broken


@given(OBJECTS, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 7), st.text(max_size=3))
def test_an_object_is_followed_to_its_end(
    value: dict[str, object], indent: int | None, ascii_only: bool, step: int, behind: str
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert follow(text + behind, step) == (text, True, False)


@given(st.lists(st.sampled_from('{}[]:," \\\n0129-+.eEtrufalsn"abx\x01'), max_size=14).map("".join))
def test_what_is_taken_is_the_longest_beginning_of_json(text: str) -> None:
    """By what Python reads: a beginning can be completed, one character more cannot."""
    taken, complete, broken = follow(text)
    assert follow(text, step=100) == (taken, complete, broken)
    if complete:
        json.loads(taken)
    elif broken:
        assert not any(is_json(taken + text[len(taken)] + rest) for rest in ENDINGS)


ENDINGS = ("", "}", "]", '"', '"}', '":1}', ":1}", "1}", "1]", "0", "rue", "alse", "ull", "e", "l")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a": 01}', '{"a": 0'),
        ('{"a": 1.}', '{"a": 1.'),
        ('{"a": -}', '{"a": -'),
        ('{"a": tru}', '{"a": tru'),
        ('{"a": NaN}', '{"a": '),
        ('{"a" 1}', '{"a" '),
        ('{"a": 1,}', '{"a": 1,'),
        ("{'a': 1}", "{"),
        ('{"a": "line\nfeed"}', '{"a": "line'),
        ('{"a": "\\x"}', '{"a": "\\'),
        ('{"a": "\\u12g4"}', '{"a": "\\u12'),
        ("[1, 2,]", "[1, 2,"),
        ('{"a": [1}', '{"a": [1'),
        ("[" * (MAX_DEPTH + 1), "[" * MAX_DEPTH),
        ("[" + "1" * (MAX_NUMBER_CHARS + 1), "[" + "1" * MAX_NUMBER_CHARS),
    ],
)
def test_where_it_breaks_off(text: str, taken: str) -> None:
    for step in (1, 2, len(text)):
        assert follow(text, step)[0] == taken
        assert not follow(text, step)[1]
