"""The values of a document are counted before it is read, and no text is taken for one."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foundation.json_values import has_more_values

LEAVES = st.none() | st.integers() | st.sampled_from(['a, "b": [{', "\\", "}]", ""])
KEYS = st.text(st.characters(codec="utf-8"), max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def count_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(inner) + sum(count_values(each) for each in inner)


@given(VALUES, st.integers(0, 40))
def test_values_are_counted_and_text_is_not(value: Any, most: int) -> None:
    document = json.dumps(value).encode()
    empty = json.dumps(value).count("[]") + json.dumps(value).count("{}")
    count = count_values(value)
    more = has_more_values(document, most) is not None
    # An empty array or object counts as if it held one value.
    assert more or count <= most
    assert not more or count + empty > most


def test_the_place_of_the_first_value_too_many_is_told() -> None:
    document = b'{"a": [1, "x, y", 3]}'
    assert has_more_values(document, 3) == document.index(b" 3")
    assert has_more_values(document, 4) is None
    assert has_more_values(b'{"a": [1, "' + b"," * 99, 4) is None, "a text that nothing closes"
