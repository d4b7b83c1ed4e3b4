"""A batch's input is checked, and what is wrong is told by line."""

from __future__ import annotations

import asyncio
import json
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.lines_in import MAX_ERRORS, LinesReader, TooLong, split
from gateway.batches.states import (
    after_validation,
    at_the_end,
    code_of_unrun,
    is_over,
    while_written,
)
from gateway.wire.openai.batches import MAX_CUSTOM_ID_CHARS
from gateway.wire.shared.batch import ENDED

CHAT = "/v1/chat/completions"
BODY = {"model": "penny", "messages": []}
GOOD = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}


def reader(**options: Any) -> LinesReader:
    return LinesReader(CHAT, lambda model: model == "penny", **{"max_lines": 10, **options})


def test_a_good_line_is_its_body_as_it_was_written() -> None:
    found = reader().read(
        3,
        b'{"custom_id":"a","method":"POST","url":"%b","body": {"model" :"penny"}}' % CHAT.encode(),
    )
    assert found is not None
    assert (found.number, found.custom_id, found.model) == (3, "a", "penny")
    assert found.body == b'{"model" :"penny"}'


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff{}", "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        ({"custom_id": ""}, "invalid_request", "custom_id"),
        ({"custom_id": 7}, "invalid_request", "custom_id"),
        ({"custom_id": "\0"}, "invalid_custom_id", "custom_id"),
        ({"custom_id": "x" * (MAX_CUSTOM_ID_CHARS + 1)}, "invalid_request", "custom_id"),
        ({"custom_id": None}, "missing_required_parameter", "custom_id"),
        ({"method": "GET"}, "invalid_method", "method"),
        ({"url": "/v1/embeddings"}, "invalid_url", "url"),
        ({"body": [1]}, "invalid_request", "body"),
        ({"body": {"messages": []}}, "missing_required_parameter", "body.model"),
        ({"body": {"model": 7}}, "invalid_request", "body.model"),
        ({"body": {"model": "nobody"}}, "model_not_found", "body.model"),
        ({"body": {**BODY, "stream": True}}, "invalid_request", "body.stream"),
    ],
)
def test_what_is_wrong_is_said_of_the_line(
    line: bytes | dict[str, Any], code: str, param: str | None
) -> None:
    if isinstance(line, dict):
        merged = {name: value for name, value in (GOOD | line).items() if value is not None}
        line = json.dumps(merged).encode()
    found = reader()
    assert found.read(7, line) is None
    (error,) = found.errors
    assert (error.code, error.param, error.line) == (code, param, 7)
    assert error.message.endswith(".")


def test_an_unknown_field_is_refused_by_its_name() -> None:
    found = reader()
    assert found.read(1, json.dumps({**GOOD, "priority": 1}).encode()) is None
    assert "priority" in found.errors[0].message


def test_a_custom_id_stands_once() -> None:
    found = reader()
    line = json.dumps(GOOD).encode()
    assert found.read(1, line) is not None
    assert found.read(2, line) is None
    (error,) = found.errors
    assert (error.code, error.line) == ("duplicate_custom_id", 2)
    assert "line 1" in error.message


def test_what_is_too_much_is_told_once() -> None:
    found = reader(max_lines=1)
    assert found.read(1, json.dumps(GOOD).encode()) is not None
    assert found.read(2, json.dumps({**GOOD, "custom_id": "b"}).encode()) is None
    assert found.has_given_up and [each.code for each in found.errors] == ["too_many_requests"]
    broken = reader()
    for number in range(MAX_ERRORS):
        assert not broken.has_given_up
        broken.read(number, b"{")
    assert broken.has_given_up


def test_an_empty_file_is_an_error_of_no_line() -> None:
    found = reader()
    found.end()
    assert [(each.code, each.line) for each in found.errors] == [("empty_file", None)]


async def pieces_of(content: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    places = sorted({0, *(cut % (len(content) + 1) for cut in cuts), len(content)})
    for start, end in zip(places, places[1:], strict=False):
        yield content[start:end]


@given(
    st.lists(st.sampled_from([b"", b" ", b"{}", b"abc"])),
    st.booleans(),
    st.lists(st.integers(0)),
    st.booleans(),
)
def test_lines_are_the_same_however_a_file_is_cut(
    texts: list[bytes], ends: bool, cuts: list[int], marked: bool
) -> None:
    content = BOM_UTF8 * marked + b"\n".join(texts) + (b"\n" if ends else b"")

    async def found() -> list[tuple[int, bytes]]:
        return [each async for each in split(pieces_of(content, cuts), max_line_bytes=100)]

    wanted = [(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    assert asyncio.run(found()) == wanted


async def test_a_mark_within_a_file_is_part_of_its_line() -> None:
    content = BOM_UTF8 * 2 + b"{}\n" + BOM_UTF8
    found = [each async for each in split(pieces_of(content, [1, 2]), max_line_bytes=100)]
    assert found == [(1, BOM_UTF8 + b"{}"), (2, BOM_UTF8)]


async def test_a_line_without_an_end_is_not_kept_in_memory() -> None:
    with pytest.raises(TooLong) as caught:
        pieces = pieces_of(b"{}\n" + b"x" * 1000, list(range(1, 1000, 7)))
        assert [each async for each in split(pieces, max_line_bytes=100)]
    assert caught.value.number == 2


def test_a_batch_ends_by_what_became_of_its_lines() -> None:
    assert after_validation("validating", is_valid=True) == "in_progress"
    assert after_validation("cancelling", is_valid=True) == "cancelling"
    assert after_validation("validating", is_valid=False) == "failed"
    late = {"is_late": True}
    assert not is_over("in_progress", num_open=1, num_leased=0, is_late=False)
    assert is_over("in_progress", num_open=0, num_leased=0, is_late=False)
    assert is_over("in_progress", num_open=1, num_leased=0, **late)
    assert not is_over("in_progress", num_open=1, num_leased=1, **late)
    assert not is_over("cancelling", num_open=1, num_leased=1, is_late=False)
    assert is_over("finalizing", num_open=0, num_leased=0, is_late=False)
    assert not is_over("completed", num_open=0, num_leased=0, **late)
    ends = {
        at_the_end(while_written(status), num_unrun=unrun)
        for status in ("in_progress", "cancelling")
        for unrun in (0, 1)
    }
    assert ends == {"completed", "expired", "cancelled"} < ENDED
    assert code_of_unrun("cancelling") == "batch_cancelled"
    assert code_of_unrun("in_progress") == "batch_expired"
