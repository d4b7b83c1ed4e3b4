"""Encodes a replica's events as OpenAI's chat completions: one encoder per request.

Knows no HTTP and no replica. A stream's constant parts are encoded once, so that a delta costs one
small encode. Usage is always written here, from what is billed: an upstream's own stays hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from billing.pricing.rating import RatedUsage
from foundation import sse
from gateway.generate_request import AnswerHeader, ChatPrompt, GenerateRequest
from gateway.generation_events import (
    Item,
    MeteredUsage,
    PromptLogprob,
    PromptReport,
    RawBody,
    RawChunk,
    RawRun,
    TextDelta,
    TokenInfo,
)
from gateway.wire.openai.chat import CompletionTokensDetails, CompletionUsage, PromptTokensDetails
from gateway.wire.openai.chat_answer import (
    ChatCompletion,
    ChoiceCollector,
    ChoiceLogprobs,
    call_id,
    reason_of,
)
from gateway.wire.usage.cost import to_usage_cost

_encode = msgspec.json.Encoder().encode

Items = Sequence[Item]


PLAIN_ROLE = b'{"role":"assistant","content":"","refusal":null}'
ROLE = b'{"role":"assistant","content":null,"refusal":null}'
"""The first delta of an answer that does not begin with text."""
NO_TEXT = b'{"content":""}'


class ChatEncoder(Protocol):
    def encode(self, items: Items) -> bytes:
        """Return the bytes that may go out now; none where the answer is one body."""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        """The rest, once the attempt is billed. `cost`: of who asked what it is."""


def to_openai(request: GenerateRequest, heading: AnswerHeader) -> ChatEncoder:
    """An upstream's answer keeps its own id and time."""
    head = (VllmHead if request.speaks_vllm else ChatHead)(
        id=heading.id,
        created=heading.created,
        model=request.model,
        service_tier=heading.service_tier,
    )
    if request.stream:
        if request.forward is not None:
            return RawStream(head, request.include_usage)
        return ChatStream(
            head,
            request.include_usage,
            echo=echo_of(request.prompt),
            calls_function=request.calls_function,
            ends_with_text=request.speaks_vllm,
        )
    if request.forward is not None:
        return RawBodies()
    prompt = request.prompt
    names_ids = prompt is not None and prompt.return_token_ids is not None
    return ChatBody(
        head,
        request.n,
        echo=echo_of(prompt),
        names_token_ids=names_ids,
        calls_function=request.calls_function,
        speaks_vllm=request.speaks_vllm,
    )


def echo_of(prompt: ChatPrompt | None) -> str:
    """Return the beginning of the answer that is to be said again."""
    if prompt is None or not prompt.echo or prompt.messages[-1]["role"] != "assistant":
        return ""
    said: str = prompt.messages[-1]["content"]
    return said


def to_usage(usage: MeteredUsage, cost: RatedUsage | None = None) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.output,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=usage.cache_read,
            cache_write_tokens=usage.cache_write + usage.cache_write_1h,
        ),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_output),
        cost=UNSET if cost is None else to_usage_cost(cost),
    )


class ChatHead(msgspec.Struct, kw_only=True):
    """The fields that every chunk of a stream repeats."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    service_tier: str | None | UnsetType
    """UNSET: such answers say nothing of it."""
    system_fingerprint: str | None = None

    def opened(self) -> bytes:
        """The object without its closing brace."""
        return bytes(_encode(self)[:-1])

    def usage_field(self, usage: MeteredUsage) -> bytes:
        """Return the field of a chunk that says the usage so far."""
        return b',"usage":' + _encode(self.usage_of(usage))

    def usage_of(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> CompletionUsage:
        return to_usage(usage, cost)

    def usage_chunk(self, usage: MeteredUsage, cost: RatedUsage | None) -> bytes:
        shown = _encode(self.usage_of(usage, cost))
        return sse.encode(self.opened() + b',"choices":[],"usage":' + shown + b"}")


class VllmHead(ChatHead, kw_only=True):
    """The same in vLLM's dialect, whose usage has no details where there is nothing to tell."""

    def usage_of(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> CompletionUsage:
        said = to_usage(usage, cost)
        prompt, written = said.prompt_tokens_details, said.completion_tokens_details
        return msgspec.structs.replace(
            said,
            prompt_tokens_details=None if prompt == PromptTokensDetails() else prompt,
            completion_tokens_details=None if written == CompletionTokensDetails() else written,
        )


class ChatStream:
    """Encodes our engine's deltas as chunks: role first, then reasoning, content and calls as they
    come, then the reason to finish, per choice."""

    def __init__(
        self,
        head: ChatHead,
        include_usage: bool,
        *,
        echo: str = "",
        calls_function: bool = False,
        ends_with_text: bool = False,
    ) -> None:
        """`echo`: said again before each choice. `calls_function`: a call is told in the older
        form. `ends_with_text`: the reason to finish stands beside the last text."""
        self._ends_with_text = ends_with_text
        self._calls_function = calls_function
        self._head = head
        self._include_usage = include_usage
        self._echo = echo
        self._before = b"data: " + head.opened() + b',"choices":[{"index":'
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._usage: MeteredUsage | None = None
        """The usage so far, which each chunk says; None: none does."""
        self._prompt_ids: list[int] | None = None
        """Those that the next chunk tells."""
        self._told_prompt = False
        self._opened: set[int] = set()
        """Choices whose role was said."""
        self._begun: set[int] = set()

    def encode(self, items: Items) -> bytes:
        chunks: list[bytes] = []
        for item in items:
            if isinstance(item, PromptReport):
                if not self._told_prompt:
                    self._prompt_ids, self._told_prompt = item.token_ids, True
                continue
            assert isinstance(item, TextDelta)
            is_plain = not (item.reasoning or item.calls)
            token_ids, reason = item.token_ids or None, item.finish_reason
            if reason is not None:
                reason = reason_of(reason, self._calls_function)
            if item.index not in self._begun:
                chunks += self._begin(item.index, says=is_plain or bool(item.text))
            if not is_plain:
                chunks += self._parsed(item)
                token_ids = None
            elif item.text or item.logprobs or (token_ids and reason is None):
                content = b'{"content":' + _encode(item.text) + b"}" if item.text else b"{}"
                # Where each chunk says the usage, each has new tokens (vLLM's clients count them).
                ends = reason if self._ends_with_text or self._usage is not None else None
                chunks.append(self._chunk(item.index, content, item.logprobs, token_ids, ends))
                token_ids, reason = None, None if ends is not None else reason
            if reason is not None:
                chunks.append(self._chunk(item.index, b"{}", None, token_ids, reason))
        return b"".join(chunks)

    def note_usage(self, usage: MeteredUsage) -> None:
        """Take the usage so far, which the next chunks say."""
        self._usage = usage

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return (self._head.usage_chunk(usage, cost) if self._include_usage else b"") + sse.DONE

    def _begin(self, index: int, *, says: bool) -> Iterator[bytes]:
        """Begin a choice behind the roles of all choices before it: OpenAI's own SDK adds them up
        in order. `says`: it begins with its text."""
        usage, self._usage = self._usage, nothing_written(self._usage)
        for earlier in range(index):
            if earlier not in self._opened:
                self._opened.add(earlier)
                yield self._chunk(earlier, ROLE)
        if index not in self._opened:
            yield self._chunk(index, PLAIN_ROLE if says else ROLE)
        elif says:
            yield self._chunk(index, NO_TEXT)
        if self._echo:
            yield self._chunk(index, b'{"content":' + _encode(self._echo) + b"}")
        self._usage = usage
        self._opened.add(index)
        self._begun.add(index)

    def _parsed(self, item: TextDelta) -> Iterator[bytes]:
        """Yield reasoning, text and calls of a parsed delta; the logprobs are of all of it."""
        logprobs, token_ids = item.logprobs, item.token_ids or None
        for delta in parsed_deltas(item, calls_function=self._calls_function):
            yield self._chunk(item.index, _encode(delta), logprobs, token_ids)
            logprobs = token_ids = None

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: list[TokenInfo] | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        shown = b"null" if logprobs is None else _encode(ChoiceLogprobs(content=logprobs))
        reason = b"null" if finish_reason is None else _encode(finish_reason)
        after = self._after
        if self._usage is not None or self._prompt_ids is not None or token_ids is not None:
            after = self._end(token_ids)
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self._before,
            index,
            delta,
            shown,
            reason,
            after,
        )

    def _end(self, token_ids: list[int] | None) -> bytes:
        """Return the end of a chunk that says more than the usual."""
        ids = b"" if token_ids is None else b',"token_ids":' + _encode(token_ids)
        told = b""
        if self._prompt_ids is not None:
            told, self._prompt_ids = b',"prompt_token_ids":' + _encode(self._prompt_ids), None
        usage = b',"usage":null' if self._include_usage else b""
        if self._usage is not None:
            usage = self._head.usage_field(self._usage)
        return b"%b}]%b%b}\n\n" % (ids, told, usage)


def nothing_written(usage: MeteredUsage | None) -> MeteredUsage | None:
    """Return the usage before the first token, which the beginning of an answer says."""
    if usage is None:
        return None
    return msgspec.structs.replace(usage, output=0, reasoning_output=0)


def parsed_deltas(item: TextDelta, *, calls_function: bool) -> Iterator[dict[str, Any]]:
    if item.reasoning:
        yield {"reasoning_content": item.reasoning}
    if item.text:
        yield {"content": item.text}
    for call in item.calls:
        begun: dict[str, Any] = {"index": call.index}
        function = {"arguments": call.arguments}
        if call.name is not None:
            begun |= {"id": call_id(), "type": "function"}
            function = {"name": call.name, **function}
        if calls_function:
            yield {"function_call": function}
            continue
        yield {"tool_calls": [{**begun, "function": function}]}


class ChatBody:
    """Collects our engine's deltas to one `chat.completion`."""

    def __init__(
        self,
        head: ChatHead,
        n: int,
        *,
        echo: str = "",
        names_token_ids: bool = False,
        calls_function: bool = False,
        speaks_vllm: bool = False,
    ) -> None:
        """`echo`: said again before each choice. `names_token_ids`: the answer has a place for
        token ids. `calls_function`: a call is told in the older form. `speaks_vllm`: so it has for
        all that vLLM can tell, and a text where there is none."""
        self._head = head
        self._choices = [
            ChoiceCollector(calls_function=calls_function, speaks_vllm=speaks_vllm)
            for _ in range(n)
        ]
        self._prompt_ids: list[int] | None | UnsetType = UNSET
        self._prompt_logprobs: list[dict[str, PromptLogprob] | None] | None | UnsetType = UNSET
        if speaks_vllm:
            self._prompt_logprobs = None
        if names_token_ids or speaks_vllm:
            self._prompt_ids = None
            for each in self._choices:
                each.name_token_ids()
        if echo:
            for index, each in enumerate(self._choices):
                each.add(TextDelta(index=index, text=echo))

    def encode(self, items: Items) -> bytes:
        for item in items:
            if isinstance(item, PromptReport):
                self._prompt_ids = item.token_ids or self._prompt_ids
                self._prompt_logprobs = item.logprobs or self._prompt_logprobs
                continue
            assert isinstance(item, TextDelta)
            self._choices[item.index].add(item)
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        tier = self._head.service_tier
        return _encode(
            ChatCompletion(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[each.choice(index) for index, each in enumerate(self._choices)],
                usage=self._head.usage_of(usage, cost),
                service_tier=None if tier is UNSET else tier,
                system_fingerprint=self._head.system_fingerprint,
                prompt_token_ids=self._prompt_ids,
                prompt_logprobs=self._prompt_logprobs,
            )
        )


class RawStream:
    """An upstream's chunks; its usage chunk is written anew, under the id that its others have."""

    def __init__(self, head: ChatHead, include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._usage_field = b',"usage":null' if include_usage else b""
        self._last: bytes | None = None

    def encode(self, items: Items) -> bytes:
        chunks: list[bytes] = []
        for item in items:
            if isinstance(item, RawRun):
                self._last = item.last
                chunks.append(sse.encode_run(item.before, item.texts, self._closed(item.after)))
            else:
                assert isinstance(item, RawChunk)
                self._last = item.payload
                chunks.append(sse.encode(self._closed(item.payload)))
        return b"".join(chunks)

    def _closed(self, payload: bytes) -> bytes:
        return payload[:-1] + self._usage_field + b"}" if self._usage_field else payload

    def note_usage(self, usage: MeteredUsage) -> None:
        """Take the usage so far, which the next chunks say."""
        self._usage_field = self._head.usage_field(usage)

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        if not self._include_usage:
            return sse.DONE
        head = self._head if self._last is None else like(self._head, self._last)
        return head.usage_chunk(usage, cost) + sse.DONE


class RawBodies:
    """An upstream's body, with the usage that is billed."""

    def __init__(self) -> None:
        self._body = b"{}"

    def encode(self, items: Items) -> bytes:
        for item in items:
            assert isinstance(item, RawBody)
            self._body = item.payload
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return self.closed(_encode(to_usage(usage, cost)))

    def closed(self, usage: bytes) -> bytes:
        return self._body[:-1] + b',"usage":' + usage + b"}"


class _Theirs(msgspec.Struct):
    id: str | None = None
    created: int | None = None
    service_tier: str | None = None
    system_fingerprint: str | None = None


def like(head: ChatHead, chunk: bytes) -> ChatHead:
    """Return `head` with what the upstream's chunk says of itself; vendors leave some of it out, or
    in another type."""
    try:
        theirs = msgspec.json.decode(chunk, type=_Theirs)
    except msgspec.ValidationError:
        return head
    return ChatHead(
        id=theirs.id or head.id,
        object=head.object,
        created=theirs.created or head.created,
        model=head.model,
        service_tier=theirs.service_tier if head.service_tier is not UNSET else UNSET,
        system_fingerprint=theirs.system_fingerprint,
    )
