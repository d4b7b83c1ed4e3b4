"""RFC 8785's own vectors, and that no two documents share a digest."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge import canonical_json as canonical
from mcp_bridge.canonical_json import canonical_bytes, digest, plain_json, pointer, walk
from mcp_bridge.errors import NotCanonical

documents = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)

# RFC 8785, appendix B: the bits of an IEEE 754 double and how it is written.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.mark.parametrize(("bits", "written"), NUMBERS)
def test_the_numbers_of_appendix_b(bits: str, written: str) -> None:
    number = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert canonical_bytes(number).decode() == written


@pytest.mark.parametrize("bits", ["7fffffffffffffff", "7ff0000000000000", "fff0000000000000"])
def test_what_is_no_number_there_is_refused(bits: str) -> None:
    with pytest.raises(NotCanonical, match="no finite number"):
        canonical_bytes({"a": struct.unpack(">d", bytes.fromhex(bits))[0]})


def test_the_sample_of_section_3_2_2() -> None:
    sample = json.loads(
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
        "literals": [null, true, false]}"""
    )
    assert (
        canonical_bytes(sample)
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )


def test_the_order_of_section_3_2_3() -> None:
    sample = json.loads(
        r"""{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet",
        "1": "One", "\ud83d\ude00": "Emoji", "\u0080": "Control", "\u00f6": "Latin"}"""
    )
    assert list(json.loads(canonical_bytes(sample)).values()) == [
        "Carriage Return", "One", "Control", "Latin", "Euro Sign", "Emoji", "Hebrew Letter Dalet",
    ]  # fmt: skip


@given(documents)
def test_writing_again_changes_nothing(document: object) -> None:
    written = canonical_bytes(document)
    assert canonical_bytes(json.loads(written)) == written


def test_a_large_number_that_was_written_can_be_read_again() -> None:
    for number in (2**53, -(2**53), 10**17, 2.0**68, 1e20):
        written = canonical_bytes({"a": [number]})
        assert canonical_bytes(json.loads(written)) == written


@given(documents, documents)
def test_one_digest_is_one_document(one: object, other: object) -> None:
    assert (digest(one) == digest(other)) == (canonical_bytes(one) == canonical_bytes(other))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, 2**53 + 1]}, "/a/1"),
        ({"a": [1, 2**64 - 1]}, "/a/1"),
        ({"a": 10**400}, "/a"),
        ({"a/b": {"~": float("nan")}}, "/a~1b/~0"),
        ({"a": "\ud800"}, "/a"),
        ({"a": {"\udc00": 1}}, "/a"),
        ({"a": {1: 1}}, "/a"),
        ({"a": b"x"}, "/a"),
    ],
)
def test_what_cannot_be_written_exactly_is_refused_by_path(value: object, path: str) -> None:
    with pytest.raises(NotCanonical) as caught:
        canonical_bytes(value)
    assert caught.value.param == path


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(NotCanonical, match="deeper"):
        canonical_bytes(deep)
    monkeypatch.setattr(canonical, "MAX_NODES", 10)
    with pytest.raises(NotCanonical, match="more than 10 values"):
        canonical_bytes(list(range(10)))
    monkeypatch.setattr(canonical, "MAX_BYTES", 10)
    with pytest.raises(NotCanonical, match="12 bytes"):
        canonical_bytes("0123456789")


def test_a_walk_meets_every_place_once() -> None:
    places = [pointer(parts) for parts, _ in walk({"a": [1, {"b/": 2}], "c": None})]
    assert places == ["", "/a", "/a/0", "/a/1", "/a/1/b~1", "/c"]


PLAIN_KEYS = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Z")), max_size=6)
plain_documents = st.dictionaries(
    PLAIN_KEYS,
    st.recursive(
        st.booleans() | st.integers(-(2**70), 2**70) | PLAIN_KEYS | st.floats(allow_nan=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_KEYS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@given(plain_documents | documents)
def test_what_is_written_plainly_is_canonical(document: object) -> None:
    read = json.loads(json.dumps(document, ensure_ascii=False))
    plain = plain_json(read)
    assert plain is None or plain == canonical_bytes(read)


def test_what_definitions_mostly_are_is_written_plainly() -> None:
    tool = {"name": "a", "inputSchema": {"properties": {"n": {"maximum": 12}}, "required": ["n"]}}
    assert plain_json(tool) == canonical_bytes(tool)


@pytest.mark.parametrize(
    "unsure", [None, 0.5, 1e22, 2**53, 'a "', "\x7f", "\n", "é", "12.5", {"a": [[]] * 65}]
)
def test_what_needs_thought_is_not(unsure: object) -> None:
    assert plain_json({"a": unsure}) is None
