"""Requests as `conversations` makes them, sent to a running worker, and what came back: answered in
time, refused as its vendor refuses, or well formed to its last event and as the official SDK's own
accumulator makes it whole again."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
from anthropic.types import RawMessageStreamEvent
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.gateway.fuzz.conversations import FuzzRequest, to_raw
from tests.gateway.wire.anthropic.test_to_anthropic import read_stream, read_whole
from tests.gateway.wire.openai.test_to_chat import sdk
from tests.journeys.sdk.sdk_shapes import extras, said, said_by, said_in

TIMEOUT_S = 60.0
"""A request that takes longer hangs: none asks for more than some hundred tokens."""
EVENT_STREAM = "text/event-stream"
ENDS = {
    "responses": ("response.completed", "response.incomplete"),
    "messages": ("message_stop",),
}
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Answer(msgspec.Struct, frozen=True):
    status: int
    request_id: str
    content: bytes
    is_stream: bool

    @property
    def json(self) -> Any:
        return json.loads(self.content)


VLLMS = ("token_ids", "prompt_token_ids", "prompt_logprobs")


def send(
    http: httpx.Client,
    asked: FuzzRequest,
    *,
    stream: bool,
    heard: Callable[[bytes], object] = len,
) -> Answer:
    """Ask, and read all of it. `heard`: is told of each part of the body when it comes."""
    raw = asked.raw or to_raw(moded(asked, stream=stream))
    with http.stream("POST", asked.path, content=raw) as answer:
        leaves = asked.shape == "left" and answer.status_code == 200
        parts = answer.iter_raw() if leaves else answer.iter_bytes()
        content = next(parts) if leaves else read_all(parts, heard)
        media_type = answer.headers.get("content-type", "")
        headers = answer.headers
        return Answer(
            answer.status_code,
            headers.get("x-request-id") or headers["request-id"],
            content,
            media_type.startswith(EVENT_STREAM),
        )


def read_all(parts: Iterator[bytes], heard: Callable[[bytes], object]) -> bytes:
    whole = b""
    for part in parts:
        heard(part)
        whole += part
    return whole


def moded(asked: FuzzRequest, *, stream: bool) -> dict[str, Any]:
    """A stream of OpenAI's says what it used where it is asked to."""
    if not stream:
        return asked.body
    body = {"stream": True, **asked.body}
    if asked.surface in ("chat", "completions"):
        body.setdefault("stream_options", {"include_usage": True})
    return body


def check_refusal(asked: FuzzRequest, answer: Answer) -> None:
    assert answer.status < 500, answer.content
    found = answer.json
    if asked.path.startswith("/v1/messages"):
        assert found.keys() == {"type", "error", "request_id"} and found["type"] == "error"
        assert found["error"].keys() == {"type", "message"} and found["error"]["message"]
        return
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "type", "param", "code"}
    assert found["error"]["message"] and found["error"]["type"]


# ---- answers that are one body


def check_whole(asked: FuzzRequest, answer: Answer, *, strict: bool) -> Any:
    """As the official SDK reads it; None where its surface is nobody's SDK's. `strict`: its types
    have all of its fields."""
    if asked.surface == "completions":
        with sdk(lenient(answer.content), "application/json") as client:
            found: Any = client.completions.create(model="m", prompt="")
    elif asked.surface == "chat":
        with sdk(answer.content, "application/json") as client:
            found = client.chat.completions.create(model="m", messages=[])
    elif asked.surface == "responses":
        with sdk(answer.content, "application/json") as client:
            found = client.responses.create(model="m")
    elif asked.surface == "input_tokens":
        with sdk(answer.content, "application/json") as client:
            found = client.responses.input_tokens.count(model="m")
    elif asked.surface == "conversations":
        with sdk(answer.content, "application/json") as client:
            found = client.conversations.create()
    elif asked.surface == "items of one":
        with sdk(answer.content, "application/json") as client:
            found = client.conversations.items.create("x", items=[])
    elif asked.surface == "messages":
        found = read_whole(answer.content)
    elif asked.surface == "embeddings":
        with sdk(unpacked(answer.content), "application/json") as client:
            found = client.embeddings.create(model="m", input="", encoding_format="float")
    else:
        assert answer.json
        return None
    assert not strict or unexpected(found) == []
    return found


def unexpected(found: Any) -> list[str]:
    """Fields that are neither OpenAI's nor vLLM's of who asks for them."""
    return [path for path in extras(found) if path.rpartition(".")[2] not in VLLMS]


def without_vllms(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer or a choice without them: no accumulator of OpenAI's knows how they add up."""
    kept = {name: value for name, value in answer.items() if name not in VLLMS}
    if "choices" in kept:
        kept["choices"] = [without_vllms(choice) for choice in kept["choices"]]
    return kept


def lenient(content: bytes) -> bytes:
    """Rewrite an echo, whose first token has no logprob: null, as OpenAI sends it and its types do
    not allow."""
    found = json.loads(content)
    for choice in found["choices"]:
        logprobs = choice.get("logprobs") or {}
        for name, absent in (("token_logprobs", 0.0), ("top_logprobs", {})):
            values = logprobs.get(name) or []
            logprobs[name] = [absent if value is None else value for value in values] or None
    return json.dumps(found).encode()


def unpacked(content: bytes) -> bytes:
    """Vectors in base64, as the SDK reads them by itself where it asked for them."""
    found = json.loads(content)
    for each in found["data"]:
        if isinstance(each["embedding"], str):
            packed = base64.b64decode(each["embedding"], validate=True)
            each["embedding"] = struct.unpack(f"<{len(packed) // 4}f", packed)
    return json.dumps(found).encode()


# ---- streams


def events(answer: Answer) -> Iterator[tuple[str | None, Any]]:
    """Name and data of each; `[DONE]` is a text."""
    assert answer.content.endswith(b"\n\n")
    for written in answer.content.decode().removesuffix("\n\n").split("\n\n"):
        lines = written.split("\n")
        name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
        assert len(lines) == 1 and lines[0].startswith("data: "), written
        data = lines[0].removeprefix("data: ")
        yield name, data if data == "[DONE]" else json.loads(data)


def check_stream(asked: FuzzRequest, answer: Answer, *, strict: bool) -> Any:
    """Return what the SDK's accumulator makes of a stream; None if it has none."""
    found = list(events(answer))
    assert not any(name == "error" or "error" in data for name, data in found if name or data)
    if asked.surface in ENDS:
        assert [name for name, _ in found if name in ENDS[asked.surface]] == [found[-1][0]]
        assert all(name == data["type"] for name, data in found)
    else:
        assert [data for _, data in found].count("[DONE]") == 1 and found[-1][1] == "[DONE]"
        assert all(name is None for name, _ in found)
    match asked.surface:
        case "chat":
            return chat_of([data for _, data in found[:-1]], strict)
        case "responses":
            for _, data in found:
                assert extras(RESPONSE_EVENT.validate_python(data)) == []
            assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
            with sdk(answer.content, EVENT_STREAM) as client:
                with client.responses.stream(model="m", input="x") as stream:
                    *_, last = stream
            assert last.type in ENDS["responses"]
            return last.response
        case "messages":
            for name, data in found:
                if name != "ping":
                    assert extras(MESSAGE_EVENT.validate_python(data)) == []
            return read_stream(answer.content)
    return completion_of([data for _, data in found[:-1]])


def chat_of(chunks: list[Any], strict: bool) -> Any:
    state = ChatCompletionStreamState[Any]()
    for each in chunks:
        chunk = ChatCompletionChunk.model_validate(each)
        assert not strict or unexpected(chunk) == []
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def completion_of(chunks: list[Any]) -> list[dict[str, Any]]:
    """Choice by choice; the SDK has no accumulator for them."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            empty = {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": None}
            told = found.setdefault(choice["index"], empty)
            assert told["finish_reason"] is None, "something comes behind the end"
            told["text"] += choice["text"]
            told["finish_reason"] = choice["finish_reason"]
            for name, values in (choice["logprobs"] or {}).items():
                told["logprobs"] = told["logprobs"] or {}
                told["logprobs"][name] = told["logprobs"].get(name, []) + values
    return [found[index] for index in sorted(found)]


def check_same(asked: FuzzRequest, whole: Answer, stream: Answer) -> None:
    """Check that a whole answer and a stream with one seed say the same."""
    read = check_whole(asked, whole, strict=True)
    streamed = check_stream(asked, stream, strict=True)
    match asked.surface:
        case "chat":
            options = moded(asked, stream=True)["stream_options"] or {}
            usage = bool(options.get("include_usage"))
            told_, read_ = (said(each, usage=usage) for each in (streamed, read))
            assert without_vllms(told_) == without_vllms(read_)
        case "responses":
            assert said_in(streamed) == said_in(read)
        case "messages":
            assert said_by(streamed, usage=False) == said_by(read, usage=False)
        case "completions":
            assert streamed == [without_vllms(choice) for choice in whole.json["choices"]]


# ---- what it used


def told(asked: FuzzRequest, answer: Answer) -> tuple[int, int] | None:
    """Tokens read and written, as its answer says; None: it does not."""
    if asked.surface not in ("chat", "completions", "embeddings", "responses", "messages"):
        return None
    if not answer.is_stream:
        usage = answer.json["usage"]
    else:
        usage = None
        for _, data in events(answer):
            if isinstance(data, dict):
                usage = data.get("usage") or data.get("response", {}).get("usage") or usage
    return None if usage is None else counted(usage)


def counted(usage: dict[str, Any]) -> tuple[int, int]:
    if "input_tokens" in usage and "total_tokens" not in usage:  # Anthropic's leaves out the cached
        cached = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, usage["output_tokens"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage.get("completion_tokens", 0)
