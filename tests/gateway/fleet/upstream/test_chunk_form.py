"""Chunks that are compared with the one before come out, and count, as if each had been parsed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foundation.sse import EventParser
from gateway.fleet.upstream.meter import UpstreamMeter
from gateway.fleet.upstream.replica import read_all
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import RawRun
from gateway.wire.openai.to_chat import to_openai
from tests.gateway.fleet.upstream.scripted_upstream import new_meter

ODD_TEXTS = [" tok", '"', "\\", '\\"', "}", '"}}]}', "\n", "\n\ndata: ", "é", "😀", "\x00"]
TEXTS = st.text(max_size=6) | st.sampled_from(ODD_TEXTS)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "content": TEXTS | st.none(),
        "role": st.just("assistant"),
        "reasoning_content": TEXTS,
        "tool_calls": st.sampled_from([[], [{"index": 0}]]),
    },
)
CHUNKS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([" tok", "theirs"]),
        "choices": st.lists(
            st.fixed_dictionaries(
                {"index": st.integers(0, 1), "delta": FIELDS},
                optional={"finish_reason": st.sampled_from([None, "stop"])},
            ),
            max_size=2,
        ),
    },
    optional={
        "usage": st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 2}]),
        "obfuscation": TEXTS,
    },
)
DAMAGES = st.sampled_from([b"\x00", b"\xff", b"\t", b"\r", b"\n", b'"', b"\\", b"data: [DONE]"])


class ParsingMeter(UpstreamMeter):
    @property
    def compares(self) -> bool:
        return False


def framed(chunk: Any, *, ascii_only: bool) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=ascii_only).encode() + b"\n\n"


def of_text(text: str) -> Any:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"id": "chatcmpl-1", "model": "theirs", "choices": [choice]}


def passed_on(meter: UpstreamMeter, pieces: list[bytes], include_usage: bool) -> Any:
    """Return what a client gets, the usage after each piece, and what went wrong."""
    request = GenerateRequest(model="m", stream=True, include_usage=include_usage, forward={})
    encoder = to_openai(request, AnswerHeader(id="chatcmpl-2", created=1))
    parser, sent, usages = EventParser(), b"", []
    for piece in [*pieces, b""]:
        items, fault = read_all(meter, parser, piece)
        sent += encoder.encode(items)
        usages.append((meter.usage, meter.complete, meter.done))
        if fault is not None:
            return sent, usages, str(fault)
    return sent + encoder.finish(meter.usage), usages, None


@given(
    st.lists(CHUNKS, max_size=3),
    st.lists(TEXTS, min_size=2, max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1000, 4, 2, 1, 0]),
    st.data(),
)
def test_comparing_says_what_parsing_says(
    chunks: list[Any],
    texts: list[str],
    ascii_only: bool,
    include_usage: bool,
    most_output: int,
    drawn: st.DataObject,
) -> None:
    """Also of where an answer is cut."""
    chunks = drawn.draw(st.permutations([*chunks, *map(of_text, texts)]))
    stream = b"".join(framed(chunk, ascii_only=ascii_only) for chunk in chunks)
    for at in drawn.draw(st.lists(st.integers(0, len(stream)), max_size=2)):
        stream = stream[:at] + drawn.draw(DAMAGES) + stream[at:]
    cuts = sorted(drawn.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    pieces = [
        stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
    ]
    pieces = [piece for piece in pieces if piece]
    compared, parsed = (
        passed_on(new_meter(made, n=2, most_output=most_output), pieces, include_usage)
        for made in (UpstreamMeter, ParsingMeter)
    )
    assert compared == parsed


def test_of_a_stream_of_like_chunks_two_are_parsed() -> None:
    stream = b"".join(framed(of_text(f" tok{number}"), ascii_only=False) for number in range(100))
    meter = new_meter()
    items, fault = read_all(meter, EventParser(), stream + b"data: {")
    assert fault is None
    first, *runs = items
    assert len(runs) == 1
    assert isinstance(runs[0], RawRun)
    assert len(runs[0].texts) == 99
    assert json.loads(runs[0].last) == {**of_text(" tok99"), "model": "m"}


def test_who_differs_each_time_is_soon_compared_no_more() -> None:
    meter = new_meter()
    for number in range(20):
        chunk = of_text(f" tok{number}") | {"created": number}
        read_all(meter, EventParser(), framed(chunk, ascii_only=False))
    assert not meter.compares
    assert meter.form is None
