"""engine.transport.frames: what is written is read, and what is malformed is named."""

from __future__ import annotations

import asyncio
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.transport.frames
from engine.errors import ConfigError, ProtocolError
from engine.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    ClientMessage,
    EngineOutput,
    EngineRequest,
    OrphanAck,
    OrphanedUsage,
    Outputs,
    Pause,
    Rejection,
    Resume,
    SamplingParams,
    ServerMessage,
    Submit,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from engine.transport.frames import FrameReader, encode_frame, parse_address

USAGE = Usage(prompt_tokens=3, cached_tokens=1, generated_tokens=7, prefilled=True)
FROM_CLIENT = [
    Submit(
        EngineRequest(
            request_id="a",
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(max_tokens=5, logit_bias={7: -1.5}, stop_token_ids=(2,)),
            n=2,
            cache_salt="org",
            lane="batch",
            tenant="org",
            weight=2.0,
            deadline_s=1.5,
        )
    ),
    Abort("a"),
    Pause("a"),
    Resume("a"),
    OrphanAck(["a", "b"]),
]
FROM_SERVER = [
    Outputs(
        [
            EngineOutput(request_id="a", usage=USAGE, token_ids=[5]),
            EngineOutput(
                request_id="b",
                usage=USAGE,
                index=1,
                logprobs=[TokenLogprobs(TokenLogprob(5, -0.5), [TokenLogprob(5, -0.5)])],
                finish_reason="error",
                finished=True,
                error_code="engine_step_failed",
            ),
        ]
    ),
    Rejection(request_id="a", code="invalid_request", message="no", param="n"),
    OrphanedUsage(request_id="a", usage=USAGE),
]


def reader_of(*chunks: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    for chunk in chunks:
        reader.feed_data(chunk)
    reader.feed_eof()
    return reader


@given(cuts=st.lists(st.integers(0, 400), max_size=10))
def test_messages_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    async def check(messages: list[object], union: object) -> None:
        wire = b"".join(encode_frame(message) for message in messages)  # type: ignore[arg-type]
        bounds = [0, *sorted(cuts), len(wire)]
        reader = reader_of(*(wire[a:b] for a, b in zip(bounds, bounds[1:], strict=False)))
        frames: FrameReader[object] = FrameReader(reader, union)
        assert [await frames.read() for _ in messages] == messages
        assert await frames.read() is None

    asyncio.run(check([*FROM_CLIENT], ClientMessage))
    asyncio.run(check([*FROM_SERVER], ServerMessage))


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b"\x00\x00", "inside a frame's length"),
        (struct.pack(">I", 10) + b"abc", "after 3 of a frame's 10 bytes"),
        (struct.pack(">I", 2**32 - 1), "4294967295 bytes exceeds"),
        (struct.pack(">I", 0), "undecodable"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "undecodable"),
        (struct.pack(">I", 8) + b"\x81\xa1t\xa4what", "undecodable"),
        (struct.pack(">I", 4) + b"\x81\xa1\xff\x01", "undecodable"),
        (struct.pack(">I", 9) + b"\x82\xa1t\xa5abort", "undecodable"),
        (struct.pack(">I", 100_004) + b"\x81\xa1b" + b"\x91" * 100_001, "undecodable"),
        (struct.pack(">I", 20) + b"\x82\xa1t\xa5abort\xaarequest_id", "undecodable"),
    ],
)
async def test_a_malformed_frame_is_a_protocol_error(wire: bytes, message: str) -> None:
    frames: FrameReader[ClientMessage] = FrameReader(reader_of(wire), ClientMessage)
    with pytest.raises(ProtocolError, match=message):
        await frames.read()


async def test_a_length_is_refused_before_its_body_is_read() -> None:
    reader = asyncio.StreamReader()  # the body never comes
    reader.feed_data(struct.pack(">I", MAX_FRAME_BYTES + 1))
    frames: FrameReader[ClientMessage] = FrameReader(reader, ClientMessage)
    with pytest.raises(ProtocolError, match="exceeds"):
        await asyncio.wait_for(frames.read(), 30)


def test_a_message_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.transport.frames, "MAX_FRAME_BYTES", 100)
    assert encode_frame(Abort("x" * 70))
    with pytest.raises(ProtocolError, match="exceeds 100"):
        encode_frame(Abort("x" * 100))


@pytest.mark.parametrize(
    "address", ["unix:/run/engine.sock", "tcp:127.0.0.1:0", "tcp:localhost:65535", "tcp:[::1]:80"]
)
def test_addresses(address: str) -> None:
    assert str(parse_address(address)) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:/" + "x" * 107,
        "tcp:",
        "tcp::80",
        "tcp:host",
        "tcp:host:",
        "tcp:host:65536",
        "tcp:host:-1",
        "tcp:host:²",
        "http://host:80",
        "/run/engine.sock",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(address)
