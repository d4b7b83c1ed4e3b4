"""Measure what the wire layer takes: for each streamed chunk, and to read a request.

`python -m bench.wire [--rounds N] [--chunks N] [--dry]`. A chunk is one `TextDelta` of our engine
made to the bytes of a server-sent event, on each surface by its own encoder. Beside it, in the same
round: what the vendor's SDK and the standard library take for the same chunk (its typed objects,
dumped, `json.dumps`, framed), and a struct of the whole chunk that is there already, encoded by
msgspec: what an encoder takes that keeps nothing of the chunk before.
A request is its body's bytes made to what the gateway runs; beside it `json.loads`, which checks
nothing, and msgspec's untyped decoder, the least that any reader takes.

Processor time of this thread alone, so whatever else runs on the machine counts little; a figure is
the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from anthropic.types import RawContentBlockDeltaEvent
from anthropic.types import TextDelta as AnthropicText
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta
from openai.types.responses import ResponseTextDeltaEvent

from bench.tools.record import record
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import TextDelta
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.anthropic.to_anthropic import to_anthropic
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai.to_chat import to_openai
from gateway.wire.openai.to_completions import to_completions
from gateway.wire.openai_responses.answer import begun
from gateway.wire.openai_responses.from_responses import own_items, read_response, to_generate
from gateway.wire.openai_responses.to_responses import ResponseEncoder

TEXTS = (" the", " gate", "way", " says", " “yes”", "\n", " to", " 42")
HEADING = AnswerHeader(id="id-0192f0c1", created=1_790_000_000)
MODEL = "penny"
NUM_MESSAGES, NUM_TOOLS = 100, 50
REQUESTS_EACH = 20
"""The requests of one round."""
SIDES = ("ours", "sdk", "struct")
READERS = ("ours", "json", "untyped")

Encode = Callable[[Sequence[TextDelta]], bytes]
Payload = dict[str, Any]


class Chunks(NamedTuple):
    """One surface's way to stream. `sdk`: the same chunk as the vendor's object, of the fields that
    a whole stream repeats and of its own text."""

    encoder: Callable[[], Encode]
    sdk: Callable[[Payload, str], Any]
    is_named: bool = False
    """Its events have names."""


# ---- chunks


def chat_encoder() -> Encode:
    return to_openai(read_chat(body_of_chat()), HEADING).encode


def completions_encoder() -> Encode:
    asked = msgspec.json.encode({"model": MODEL, "prompt": "Say.", "stream": True})
    return to_completions(from_completions(asked, "engine"), HEADING).encode


def responses_encoder() -> Encode:
    request = read_response(body_of_response())
    response = begun(
        request,
        id=HEADING.id,
        created_at=HEADING.created,
        service_tier=HEADING.service_tier,
        status="in_progress",
    )
    return ResponseEncoder(response, stream=True).encode


def messages_encoder() -> Encode:
    return to_anthropic(read_message(body_of_message()), HEADING).encode


def chat_object(shown: Payload, text: str) -> ChatCompletionChunk:
    choice = Choice(index=0, delta=ChoiceDelta(content=text), finish_reason=None, logprobs=None)
    return ChatCompletionChunk(
        id=shown["id"],
        object="chat.completion.chunk",
        created=shown["created"],
        model=shown["model"],
        service_tier=shown["service_tier"],
        system_fingerprint=None,
        choices=[choice],
    )


def completion_object(shown: Payload, text: str) -> Completion:
    # Of a chunk before the last, which has no reason to finish, the SDK's type does not know.
    choice = CompletionChoice(index=0, text=text, finish_reason="stop", logprobs=None)
    return Completion(
        id=shown["id"],
        object="text_completion",
        created=shown["created"],
        model=shown["model"],
        system_fingerprint=None,
        choices=[choice],
    )


def response_object(shown: Payload, text: str) -> ResponseTextDeltaEvent:
    return ResponseTextDeltaEvent(
        type="response.output_text.delta",
        sequence_number=shown["sequence_number"],
        item_id=shown["item_id"],
        output_index=shown["output_index"],
        content_index=0,
        delta=text,
        logprobs=[],
    )


def message_object(shown: Payload, text: str) -> RawContentBlockDeltaEvent:
    delta = AnthropicText(type="text_delta", text=text)
    return RawContentBlockDeltaEvent(type="content_block_delta", index=0, delta=delta)


CHUNKS = {
    "chat": Chunks(chat_encoder, chat_object),
    "completions": Chunks(completions_encoder, completion_object),
    "responses": Chunks(responses_encoder, response_object, is_named=True),
    "messages": Chunks(messages_encoder, message_object, is_named=True),
}


def delta(text: str) -> TextDelta:
    return TextDelta(index=0, text=text)


def payload_of(event: bytes) -> Payload:
    """Return the payload of the last event in `event`."""
    found: Payload = json.loads(event.rsplit(b"data: ", 1)[1])
    return found


def framed(data: str, name: str | None) -> bytes:
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {data}\n\n".encode()


def ready(value: Any) -> Any:
    """A JSON value with structs for its objects."""
    if isinstance(value, list):
        return [ready(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = msgspec.defstruct("Ready", [(name, Any) for name in value], frozen=True)
    return kind(*(ready(each) for each in value.values()))


def sides_of(chunks: Chunks, texts: Sequence[str]) -> dict[str, Callable[[], int]]:
    """Each makes all chunks of a stream that has begun; returns its bytes."""
    opening = chunks.encoder()
    opening([delta("")])
    shown = payload_of(opening([delta(TEXTS[0])]))
    name = shown.get("type") if chunks.is_named else None
    structs = [ready(payload_of(opening([delta(text)]))) for text in texts]
    encode_json = msgspec.json.Encoder().encode
    encode = chunks.encoder()
    encode([delta(TEXTS[0])])
    deltas = [[delta(text)] for text in texts]

    def ours() -> int:
        return sum(len(encode(items)) for items in deltas)

    def sdk() -> int:
        return sum(len(as_sdk(chunks.sdk(shown, text), name)) for text in texts)

    def struct() -> int:
        return sum(len(encode_json(each)) for each in structs)

    check_same(chunks.sdk(shown, TEXTS[0]), shown)
    return {"ours": ours, "sdk": sdk, "struct": struct}


def as_sdk(made: Any, name: str | None) -> bytes:
    return framed(json.dumps(made.model_dump(mode="json", exclude_unset=True)), name)


def check_same(made: Any, shown: Payload) -> None:
    """Both sides say the same. Raises: SystemExit."""
    said = made.model_dump(mode="json", exclude_unset=True)
    if compared(said) != compared(shown):
        raise SystemExit(f"not the same chunk: {said} and {shown}")


def compared(value: Any) -> Any:
    if isinstance(value, dict):
        told = {name: each for name, each in value.items() if name != "finish_reason"}
        return {name: compared(each) for name, each in told.items() if each is not None}
    return [compared(each) for each in value] if isinstance(value, list) else value


# ---- requests


def read_chat(body: bytes) -> GenerateRequest:
    return from_openai(body, "engine")


def read_message(body: bytes) -> GenerateRequest:
    return from_anthropic(body, "engine")


def read_items(body: bytes) -> GenerateRequest:
    request = read_response(body)
    return to_generate(request, own_items(request, {}))


def turns(count: int) -> list[Payload]:
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": f"What the {i}th of us says, in a sentence."}
        for i in range(count | 1)
    ]


def schema() -> Payload:
    fields = {name: {"type": "string", "description": f"The {name}."} for name in ("city", "day")}
    return {"type": "object", "properties": fields, "required": ["city"]}


def body_of_chat(num_messages: int = 1, num_tools: int = 0) -> bytes:
    about = "Looks something up."
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "description": about, **parameters()}}
        for i in range(num_tools)
    ]
    body = {"model": MODEL, "stream": True, "temperature": 0.5, "messages": turns(num_messages)}
    return msgspec.json.encode(body | ({"tools": tools} if tools else {}))


def body_of_message(num_messages: int = 1, num_tools: int = 0) -> bytes:
    tools = [
        {"name": f"f{i}", "description": "Looks something up.", "input_schema": schema()}
        for i in range(num_tools)
    ]
    body = {"model": MODEL, "stream": True, "max_tokens": 64, "messages": turns(num_messages)}
    return msgspec.json.encode(body | ({"tools": tools} if tools else {}))


def body_of_response(num_messages: int = 1, num_tools: int = 0) -> bytes:
    tools = [
        {"type": "function", "name": f"f{i}", "description": "Looks it up.", **parameters()}
        for i in range(num_tools)
    ]
    body = {"model": MODEL, "stream": True, "temperature": 0.5, "input": turns(num_messages)}
    return msgspec.json.encode(body | ({"tools": tools} if tools else {}))


def parameters() -> Payload:
    return {"parameters": schema()}


READS: dict[str, tuple[Callable[[bytes], GenerateRequest], Callable[..., bytes]]] = {
    "chat": (read_chat, body_of_chat),
    "responses": (read_items, body_of_response),
    "messages": (read_message, body_of_message),
}
BODIES = {
    "small": (1, 0),
    f"{NUM_MESSAGES} messages": (NUM_MESSAGES, 0),
    f"{NUM_TOOLS} tools": (1, NUM_TOOLS),
}


def readers_of(read: Callable[[bytes], Any], body: bytes) -> dict[str, Callable[[], int]]:
    decode = msgspec.json.Decoder().decode

    def repeated(reader: Callable[[bytes], Any]) -> Callable[[], int]:
        def run() -> int:
            for _ in range(REQUESTS_EACH):
                reader(body)
            return REQUESTS_EACH * len(body)

        return run

    return {"ours": repeated(read), "json": repeated(json.loads), "untyped": repeated(decode)}


# ---- the run


def timed_us(run: Callable[[], int], count: int) -> float:
    began = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - began) / 1000 / count


def measured(
    runs: Mapping[str, Mapping[str, Callable[[], int]]], count: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Median microseconds of each side of each row; sides and rows take turns."""
    took: dict[str, dict[str, list[float]]] = {
        row: {side: [] for side in sides} for row, sides in runs.items()
    }
    for row, sides in runs.items():  # a first time to warm up
        for side in sides:
            sides[side]()
            took[row][side].clear()
    for _ in range(rounds):
        for row, sides in runs.items():
            for side, run in sides.items():
                took[row][side].append(timed_us(run, count))
    return {
        row: {side: round(statistics.median(each), 3) for side, each in sides.items()}
        for row, sides in took.items()
    }


def table(title: str, rows: Mapping[str, Mapping[str, float]], sides: Sequence[str]) -> str:
    lines = ["".join([f"{title:28}", *(f"{side:>10}" for side in sides), f"{'ratio':>10}"])]
    for row, found in rows.items():
        figures = "".join(f"{found[side]:10.2f}" for side in sides)
        lines.append(f"{row:28}{figures}{found[sides[0]] / found[sides[-1]]:9.2f}x")
    return "\n".join(lines)


def shown(result: Payload) -> str:
    chunks = table("us a chunk", result["chunk_us"], SIDES)
    return chunks + "\n" + table("us a request", result["request_us"], READERS)


def run(num_chunks: int, rounds: int) -> Payload:
    texts = [TEXTS[i % len(TEXTS)] for i in range(num_chunks)]
    streams = {name: sides_of(chunks, texts) for name, chunks in CHUNKS.items()}
    requests = {
        f"{surface}, {title}": readers_of(read, body(*sizes))
        for surface, (read, body) in READS.items()
        for title, sizes in BODIES.items()
    }
    return {
        "rounds": rounds,
        "chunks": num_chunks,
        "chunk_us": measured(streams, num_chunks, rounds),
        "request_us": measured(requests, REQUESTS_EACH, rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--chunks", type=int, default=1000, help="of a stream, timed together")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    result = run(options.chunks, options.rounds)
    print(shown(result))
    print(json.dumps(result))
    if not options.dry:
        print(record("wire", result))


if __name__ == "__main__":
    main()
