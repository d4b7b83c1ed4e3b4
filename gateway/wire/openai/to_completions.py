"""Encodes a replica's events as OpenAI's legacy completions: one encoder per request.

Knows no HTTP and no replica.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET

from billing.pricing.rating import RatedUsage
from foundation import sse
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import (
    FinishReason,
    Item,
    MeteredUsage,
    PromptEcho,
    TextDelta,
    TokenInfo,
)
from gateway.wire.openai.chat import CompletionUsage
from gateway.wire.openai.to_chat import ChatEncoder, ChatHead, RawBodies, RawStream, to_usage

OBJECT: Literal["text_completion"] = "text_completion"
_encode = msgspec.json.Encoder().encode


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Four parallel lists with an entry for each token."""

    text_offset: list[int]
    """In characters of the choice's text, as far as the tokens alone tell."""
    token_logprobs: list[float | None]
    """None: nothing comes before it."""
    tokens: list[str]
    """`bytes:\\xe2\\x82` where it is no whole character."""
    top_logprobs: list[dict[str, float] | None]
    """The most likely ones, and the one that stands there."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    """Choices of a prompt lie side by side."""
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = OBJECT
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    system_fingerprint: str | None = None


def to_completions(request: GenerateRequest, heading: AnswerHeader) -> ChatEncoder:
    """An upstream's answer keeps its own id and time."""
    head = ChatHead(
        id=heading.id,
        object=OBJECT,
        created=heading.created,
        model=request.model,
        service_tier=UNSET,
    )
    if request.completion is None:
        return RawStream(head, request.include_usage) if request.stream else RawBodies()
    if request.stream:
        return CompletionStream(head, request.include_usage)
    return CompletionBody(head, request.n * len(request.completion.prompts))


class LogprobsProgress:
    """Tracks how far a choice has come, which the log-probabilities of its tokens need to know."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_echo(self, echo: PromptEcho) -> CompletionLogprobs | None:
        if echo.logprobs is None:
            return None
        first_at = self._pass(echo.first)
        found = self.of_tokens(echo.logprobs)
        found.text_offset.insert(0, first_at)
        found.tokens.insert(0, name_of(echo.first))
        found.token_logprobs.insert(0, None)
        found.top_logprobs.insert(0, None)
        return found

    def of_tokens(self, infos: Sequence[TokenInfo]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[self._pass(bytes(each.bytes)) for each in infos],
            token_logprobs=[each.logprob for each in infos],
            tokens=[name_of(bytes(each.bytes)) for each in infos],
            top_logprobs=[tops_of(each) for each in infos],
        )

    def _pass(self, token: bytes) -> int:
        """Return where it begins."""
        place = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return place


def name_of(data: bytes) -> str:
    """Return a token that is no text by itself as OpenAI writes it."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def tops_of(info: TokenInfo) -> dict[str, float]:
    """Return the likeliest tokens with the one that stands there, so there may be one more than
    asked for."""
    found: dict[str, float] = {}
    for top in info.top_logprobs:
        found.setdefault(name_of(bytes(top.bytes)), top.logprob)
    found.setdefault(name_of(bytes(info.bytes)), info.logprob)
    return found


class CompletionStream:
    def __init__(self, head: ChatHead, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._before = head.opened() + b',"choices":['
        self._after = b'],"usage":null}' if include_usage else b"]}"
        self._written: dict[int, LogprobsProgress] = {}

    def encode(self, items: Sequence[Item]) -> bytes:
        return b"".join(self._chunk(to_choice(item, self._written)) for item in items)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return sse.encode(self._before + _encode(choice) + self._after)

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return (self._head.usage_chunk(usage, cost) if self._include_usage else b"") + sse.DONE


def to_choice(item: Item, written: dict[int, LogprobsProgress]) -> CompletionChoice:
    """Return what an item adds to its choice."""
    assert isinstance(item, PromptEcho | TextDelta)
    place = written.get(item.index)
    if place is None:  # a decoder is not made for each chunk
        place = written[item.index] = LogprobsProgress()
    if isinstance(item, PromptEcho):
        return CompletionChoice(
            index=item.index, text=item.text, logprobs=place.of_echo(item), finish_reason=None
        )
    infos = item.logprobs
    return CompletionChoice(
        index=item.index,
        text=item.text,
        logprobs=place.of_tokens(infos) if infos else None,
        finish_reason=item.finish_reason,
    )


class CompletionBody:
    """Collects all of it as one `text_completion`."""

    def __init__(self, head: ChatHead, num_choices: int) -> None:
        self._head = head
        self._parts: list[list[CompletionChoice]] = [[] for _ in range(num_choices)]
        self._written: dict[int, LogprobsProgress] = {}

    def encode(self, items: Sequence[Item]) -> bytes:
        for item in items:
            choice = to_choice(item, self._written)
            self._parts[choice.index].append(choice)
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return _encode(
            Completion(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[joined(index, parts) for index, parts in enumerate(self._parts)],
                usage=to_usage(usage, cost),
            )
        )


def joined(index: int, parts: Sequence[CompletionChoice]) -> CompletionChoice:
    told = [part.logprobs for part in parts if part.logprobs is not None]
    logprobs = CompletionLogprobs(
        text_offset=[each for part in told for each in part.text_offset],
        token_logprobs=[each for part in told for each in part.token_logprobs],
        tokens=[each for part in told for each in part.tokens],
        top_logprobs=[each for part in told for each in part.top_logprobs],
    )
    return CompletionChoice(
        index=index,
        text="".join(part.text for part in parts),
        logprobs=logprobs if told else None,
        finish_reason=next((part.finish_reason for part in parts if part.finish_reason), None),
    )
