"""Encodes a replica's events as OpenAI's legacy completions: one encoder per request.

Knows no HTTP and no replica.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from billing.pricing.rating import RatedUsage
from foundation import sse
from gateway.generate_request import AnswerHeader, GenerateRequest
from gateway.generation_events import (
    FinishReason,
    Item,
    MeteredUsage,
    PromptEcho,
    PromptLogprob,
    PromptReport,
    TextDelta,
    TokenInfo,
    TokenTop,
)
from gateway.wire.openai.chat import CompletionUsage
from gateway.wire.openai.to_chat import ChatEncoder, ChatHead, RawBodies, RawStream, VllmHead

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
    token_ids: list[int] | None | UnsetType = UNSET
    """vLLM's, as the next ones: of who names `return_token_ids`; null: who declines them."""
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None | UnsetType = UNSET


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
    head = (VllmHead if request.speaks_vllm else ChatHead)(
        id=heading.id,
        object=OBJECT,
        created=heading.created,
        model=request.model,
        service_tier=UNSET,
    )
    prompt = request.completion
    if prompt is None:
        return RawStream(head, request.include_usage) if request.stream else RawBodies()
    parts = CompletionParts(tokens_as_ids=prompt.return_tokens_as_token_ids)
    if request.stream:
        return CompletionStream(head, request.include_usage, parts)
    return CompletionBody(
        head,
        request.n * len(prompt.prompts),
        parts,
        names_token_ids=prompt.return_token_ids is not None,
        speaks_vllm=request.speaks_vllm,
    )


class LogprobsProgress:
    """Tracks how far a choice has come, which the log-probabilities of its tokens need to know."""

    def __init__(self, *, tokens_as_ids: bool) -> None:
        """`tokens_as_ids`: tokens are named as they came, not by their texts."""
        self._as_ids = tokens_as_ids
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_echo(self, echo: PromptEcho) -> CompletionLogprobs | None:
        if echo.logprobs is None:
            return None
        first_at = self._pass(bytes(echo.first.bytes))
        found = self.of_tokens(echo.logprobs)
        found.text_offset.insert(0, first_at)
        found.tokens.insert(0, self._name(echo.first))
        found.token_logprobs.insert(0, None)
        found.top_logprobs.insert(0, None)
        return found

    def of_tokens(self, infos: Sequence[TokenInfo]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[self._pass(bytes(each.bytes)) for each in infos],
            token_logprobs=[each.logprob for each in infos],
            tokens=[self._name(each) for each in infos],
            top_logprobs=[self._tops(each) for each in infos],
        )

    def _name(self, token: TokenInfo | TokenTop) -> str:
        return token.token if self._as_ids else name_of(bytes(token.bytes))

    def _tops(self, info: TokenInfo) -> dict[str, float]:
        """Return the token that stands there with the likeliest ones, so there may be one more than
        asked for."""
        found = {self._name(info): info.logprob}
        for top in info.top_logprobs:
            found.setdefault(self._name(top), top.logprob)
        return found

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


class CompletionParts:
    """Makes parts of choices of what a replica yields, item by item."""

    def __init__(self, *, tokens_as_ids: bool) -> None:
        self._as_ids = tokens_as_ids
        self._written: dict[int, LogprobsProgress] = {}
        self._reports: dict[int, list[PromptReport]] = {}
        """By choice: what its next part tells of its prompt."""

    def of(self, item: Item) -> CompletionChoice | None:
        """Return what an item adds to its choice. None: what comes next says it."""
        if isinstance(item, PromptReport):
            self._reports.setdefault(item.index, []).append(item)
            return None
        part = self._part(item)
        for report in self._reports.pop(part.index, ()) if self._reports else ():
            if report.token_ids is not None:
                part.prompt_token_ids = report.token_ids
            if report.logprobs is not None:
                part.prompt_logprobs = report.logprobs
        return part

    def _part(self, item: Item) -> CompletionChoice:
        assert isinstance(item, PromptEcho | TextDelta)
        place = self._written.get(item.index)
        if place is None:  # a decoder is not made for each chunk
            place = self._written[item.index] = LogprobsProgress(tokens_as_ids=self._as_ids)
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
            token_ids=UNSET if item.token_ids is None else item.token_ids,
        )


class CompletionStream:
    def __init__(self, head: ChatHead, include_usage: bool, parts: CompletionParts) -> None:
        self._head = head
        self._include_usage = include_usage
        self._before = head.opened() + b',"choices":['
        self._after = b'],"usage":null}' if include_usage else b"]}"
        self._parts = parts

    def encode(self, items: Sequence[Item]) -> bytes:
        found = map(self._parts.of, items)
        return b"".join(self._chunk(part) for part in found if part is not None)

    def note_usage(self, usage: MeteredUsage) -> None:
        """Take the usage so far, which the next chunks say."""
        self._after = b"]" + self._head.usage_field(usage) + b"}"

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return sse.encode(self._before + _encode(choice) + self._after)

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return (self._head.usage_chunk(usage, cost) if self._include_usage else b"") + sse.DONE


class CompletionBody:
    """Collects all of it as one `text_completion`."""

    def __init__(
        self,
        head: ChatHead,
        num_choices: int,
        parts: CompletionParts,
        *,
        names_token_ids: bool = False,
        speaks_vllm: bool = False,
    ) -> None:
        """`names_token_ids`: the answer has a place for them. `speaks_vllm`: so it has for all that
        vLLM can tell."""
        self._head = head
        self._names_ids = names_token_ids or speaks_vllm
        self._names_logprobs = speaks_vllm
        self._of_choices: list[list[CompletionChoice]] = [[] for _ in range(num_choices)]
        self._parts = parts

    def encode(self, items: Sequence[Item]) -> bytes:
        for item in items:
            part = self._parts.of(item)
            if part is not None:
                self._of_choices[part.index].append(part)
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        choices = [joined(index, parts) for index, parts in enumerate(self._of_choices)]
        if self._names_ids:
            for each in choices:
                each.token_ids = each.token_ids or None
                each.prompt_token_ids = each.prompt_token_ids or None
        if self._names_logprobs:
            for each in choices:
                each.prompt_logprobs = each.prompt_logprobs or None
        return _encode(
            Completion(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=choices,
                usage=self._head.usage_of(usage, cost),
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
    ids = [part.token_ids for part in parts if isinstance(part.token_ids, list)]
    return CompletionChoice(
        index=index,
        text="".join(part.text for part in parts),
        logprobs=logprobs if told else None,
        finish_reason=next((part.finish_reason for part in parts if part.finish_reason), None),
        token_ids=[each for some in ids for each in some] if ids else UNSET,
        prompt_token_ids=next((p.prompt_token_ids for p in parts if p.prompt_token_ids), UNSET),
        prompt_logprobs=next((p.prompt_logprobs for p in parts if p.prompt_logprobs), UNSET),
    )
