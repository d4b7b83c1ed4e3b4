"""Turns what an upstream answers into the same `TextDelta`s that our own engines bring: for
surfaces other than OpenAI's chat completions, which pass it on as it came.

Pure. It reads payloads that `meter` has counted. Chunks that differ in their text alone
are read at once, as one with all their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gateway.fleet.upstream.meter import BrokenAnswer
from gateway.generation_events import (
    CallDelta,
    FinishReason,
    RawBody,
    RawChunk,
    RawRun,
    TextDelta,
    TokenInfo,
    TokenTop,
)

FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",  # Mistral's
    "content_filter": "content_filter",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
"""Finish reasons by name; any other reason becomes `stop`."""


class _Part(msgspec.Struct):
    """A part of a content in parts (Mistral's)."""

    text: str = ""
    thinking: list[_Part] = []


class _Function(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function = _Function()


class _ChoiceText(msgspec.Struct):
    """A chunk's `delta`, or an answer's `message`."""

    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    """DeepSeek's name of it, and vLLM's."""
    reasoning: str | None = None
    """OpenRouter's, and of late vLLM's."""
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Top(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class _Token(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _TextChoice(msgspec.Struct):
    index: int = 0
    delta: _ChoiceText | None = None
    message: _ChoiceText | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """vLLM's: which of the stop strings, or of the token ids."""


class _Answer(msgspec.Struct):
    choices: list[_TextChoice] | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class UpstreamText:
    """The text of one answer. `stop`: the strings that end it."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = stop
        self._calls: dict[int, list[int | str | None]] = {}
        """By choice, the keys that tell its calls apart, in order of arrival."""

    def read(self, items: Sequence[RawChunk | RawRun | RawBody]) -> tuple[TextDelta, ...]:
        """Raises BrokenAnswer."""
        return tuple(delta for item in items for delta in self._deltas(payload_of(item)))

    def _deltas(self, payload: bytes) -> Iterator[TextDelta]:
        try:
            choices = _decode(payload).choices or []
        except (msgspec.DecodeError, RecursionError) as fault:
            raise BrokenAnswer(f"not a chat completion: {fault}") from fault
        for choice in choices:
            said = choice.delta or choice.message or _ChoiceText()
            text, thought = text_of(said)
            delta = TextDelta(
                index=choice.index,
                text=text,
                reasoning=thought,
                calls=tuple(self._called(choice.index, said.tool_calls or ())),
                logprobs=to_infos(choice.logprobs),
                finish_reason=finish_reason(choice),
                stop_string=self._stop_string(choice),
            )
            if delta != TextDelta(index=choice.index, text=""):
                yield delta

    def _called(self, index: int, calls: Sequence[_Call]) -> Iterator[CallDelta]:
        """Vendors tell calls apart by their place, or by their id where each comes whole."""
        known = self._calls.setdefault(index, [])
        for call in calls:
            key = (call.id or None) if call.index is None else call.index
            arguments = call.function.arguments or ""
            if key is not None and key in known:
                yield CallDelta(known.index(key), None, arguments)
            elif call.function.name is not None:
                known.append(key)
                yield CallDelta(len(known) - 1, call.function.name, arguments)
            elif known:
                yield CallDelta(len(known) - 1, None, arguments)

    def _stop_string(self, choice: _TextChoice) -> str | None:
        """Return the stop string of a choice; None also where an upstream does not say it."""
        found = choice.stop_reason
        return found if isinstance(found, str) and found in self._stop else None


def payload_of(item: RawChunk | RawRun | RawBody) -> bytes:
    if isinstance(item, RawRun):
        return b"".join((item.before, *item.texts, item.after))
    return item.payload


def text_of(said: _ChoiceText) -> tuple[str, str]:
    """Return what was said, a refusal too, and what was thought."""
    thought = said.reasoning_content or said.reasoning or ""
    if not isinstance(said.content, list):
        return (said.content or "") + (said.refusal or ""), thought
    text = "".join(part.text for part in said.content)
    thoughts = (inner.text for part in said.content for inner in part.thinking)
    return text + (said.refusal or ""), thought + "".join(thoughts)


def finish_reason(choice: _TextChoice) -> FinishReason | None:
    reason = choice.finish_reason
    return FINISH_REASONS.get(reason, "stop") if reason else None


def to_infos(logprobs: _Logprobs | None) -> list[TokenInfo] | None:
    if logprobs is None or not logprobs.content:
        return None
    return [
        TokenInfo(
            token=each.token,
            logprob=each.logprob,
            bytes=bytes_of(each),
            top_logprobs=[
                TokenTop(top.token, top.logprob, bytes_of(top)) for top in each.top_logprobs
            ],
        )
        for each in logprobs.content
    ]


def bytes_of(each: _Top) -> list[int]:
    return list(each.token.encode()) if each.bytes is None else each.bytes
