"""A body of requests is read as msgspec reads it whole, however its bytes come."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.request_errors import BadField
from gateway.wire.anthropic.batched_requests import BodyReader, read_request

texts = st.text(st.sampled_from('a"\\{}[]:,\n \u00e9\u2028\U0001f600'), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
params = st.dictionaries(texts, values, max_size=3)
bodies = st.lists(params, min_size=1, max_size=5).map(
    lambda found: {"requests": [{"custom_id": f"r{n}", "params": p} for n, p in enumerate(found)]}
)
styles = st.fixed_dictionaries(
    {"indent": st.sampled_from([None, 0, 2]), "ensure_ascii": st.booleans()}
)


def in_pieces(body: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({min(cut, len(body)) for cut in cuts} | {len(body)})
    return [body[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def read(pieces: list[bytes], **bounds: int) -> list[bytes]:
    """Raises BadField."""
    given: dict[str, int] = {"max_requests": 100, "max_request_bytes": 10_000, **bounds}
    reader = BodyReader(**given)
    found = [line for piece in pieces for line in reader.feed(piece)]
    reader.end()
    assert reader.num_requests == len(found)
    return found


@given(bodies, styles, st.lists(st.integers(0, 400), max_size=12))
def test_requests_are_those_of_the_body_however_it_is_cut(
    body: dict[str, Any], style: dict[str, Any], cuts: list[int]
) -> None:
    lines = read(in_pieces(json.dumps(body, **style).encode(), cuts))
    assert all(b"\n" not in line for line in lines)
    assert [json.loads(line) for line in lines] == body["requests"]
    for line, asked in zip(lines, body["requests"], strict=True):
        assert json.loads(bytes(read_request(line, "x").params)) == asked["params"]


@given(bodies, styles, st.data())
def test_a_body_that_is_cut_off_or_goes_on_is_refused(
    body: dict[str, Any], style: dict[str, Any], data: st.DataObject
) -> None:
    whole = json.dumps(body, **style).encode()
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadField):
        read([whole[:end]])
    with pytest.raises(BadField):
        read([whole, b" x"])


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=6))
def test_bytes_are_refused_as_a_whole_reader_refuses_them(found: bytes, cuts: list[int]) -> None:
    """The bytes stand between a good request and the end; whatever is taken is JSON."""
    body = b'{"requests":[{"custom_id":"a","params":{}}' + found
    try:
        lines = read(in_pieces(body, cuts))
    except BadField:
        return
    assert len(msgspec.json.decode(body)["requests"]) == len(lines)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"{", None),
        (b"{}", "requests"),
        (b'{"requests":[]}', "requests"),
        (b'{"requests":null}', "requests"),
        (b'{"requests":[{},]}', "requests[0].custom_id"),
        (b'{"requests":[{"custom_id":"a","params":{}},]}', "requests[1]"),
        (b'{"requests":[{"custom_id":"a","params":{}}],"requests":[]}', "requests"),
        (b'{"request":[]}', "request"),
        (b'{"' + b"x" * 300, None),
        (b'{"requests":[{"custom_id":1,"params":{}}]}', "requests[0].custom_id"),
        (rb'{"requests":[{"custom_id":"a\n","params":{}}]}', "requests[0].custom_id"),
        (b'{"requests":[{"custom_id":"a","params":"\xff"}]}', "requests[0].params"),
        (b'{"requests":[{"custom_id":"\xff","params":{}}]}', "requests[0]"),
        (b'{"requests":[{"custom_id":"a","params":{]}]}', "requests[0]"),
        (b'{"requests":[{"custom_id":"a","params":' + b"[" * 5000, "requests[0]"),
        (b'{"requests":[{"custom_id":"a","params":' + b"[" * 5000 + b"]" * 5000 + b"}]}", None),
    ],
)
def test_what_is_in_the_way_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(BadField) as caught:
        read([body], max_request_bytes=20_000)
    if b"]" * 5000 in body:
        assert (caught.value.param or "").startswith("requests[0]")
    else:
        assert caught.value.param == param


def test_a_request_beyond_the_bounds_is_refused_before_it_is_whole() -> None:
    begun = b'{"requests":[{"custom_id":"a","params":{"x":"' + b"y" * 1000
    with pytest.raises(BadField, match="longer than 500 bytes"):
        list(BodyReader(max_requests=9, max_request_bytes=500).feed(begun))
    two = [{"custom_id": name, "params": {}} for name in "ab"]
    with pytest.raises(BadField, match="at most 1 requests"):
        read([json.dumps({"requests": two}).encode()], max_requests=1)
