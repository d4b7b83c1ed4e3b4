"""The one protocol behind which an in-repo engine and an OpenAI-compatible upstream look alike.

Knows no tenant and no price.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from gateway.fleet.engine.cache_outcome import CacheOutcome, MessagePlace
from gateway.generate_request import GenerateRequest, ToTokenize
from gateway.lanes import Turn

FinishReason = Literal["stop", "length", "content_filter", "tool_calls", "function_call"]


class MeteredUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative over the attempt, in tokens; monotone from event to event, but for the step from
    an estimate to the replica's own count.

    prompt = uncached_input + cache_read + cache_write + cache_write_1h + embedding_input.
    `wasted_output` was generated but lies behind a stop string, so nobody sees it or pays for it.
    """

    uncached_input: int = 0
    cache_read: int = 0
    cache_write: int = 0
    """For five minutes."""
    cache_write_1h: int = 0
    embedding_input: int = 0
    """Read to make embeddings of it."""
    output: int = 0
    reasoning_output: int = 0
    """Part of `output`."""
    wasted_output: int = 0
    estimated: bool = False
    """True where a count is ours and not the replica's."""

    @property
    def prompt_tokens(self) -> int:
        cached = self.cache_read + self.cache_write + self.cache_write_1h
        return self.uncached_input + cached + self.embedding_input

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output


class TokenTop(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenInfo(msgspec.Struct, frozen=True):
    """OpenAI's `logprobs.content[]` entry."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenTop]


class CallDelta(msgspec.Struct, frozen=True):
    """What came of call `index` of a choice: its name, once, and a piece of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Text our engine added to choice `index`."""

    index: int
    text: str
    reasoning: str = ""
    """What came of it before `text`."""
    calls: tuple[CallDelta, ...] = ()
    """What came of them behind `text`."""
    logprobs: list[TokenInfo] | None = None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    """The one of the client's at which it ended."""


class PromptEcho(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of choice `index`, said again before anything else."""

    index: int
    text: str
    first: bytes
    """Its first token: nothing comes before it, so nothing is said of it."""
    logprobs: list[TokenInfo] | None
    """Of the others; None: not asked for."""


class EmbeddingVector(msgspec.Struct, frozen=True):
    """What prompt `index` became."""

    index: int
    vector: bytes
    """float32, little-endian."""


class RawChunk(msgspec.Struct, frozen=True):
    """An upstream's `chat.completion.chunk`, as JSON without its usage and under our model name."""

    payload: bytes


class RawRun(msgspec.Struct, frozen=True):
    """Such chunks, one behind the other, that differ in one text alone: before, text, after."""

    before: bytes
    texts: list[bytes]
    after: bytes

    @property
    def last(self) -> bytes:
        return self.before + self.texts[-1] + self.after


class RawBody(msgspec.Struct, frozen=True):
    """An upstream's whole `chat.completion`, as JSON under our model name."""

    payload: bytes


Item = TextDelta | PromptEcho | EmbeddingVector | RawChunk | RawRun | RawBody
Items = Sequence[Item]


class ReplicaEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of a replica brought. `usage` is None until the replica has begun to work:
    there is nothing to bill.

    The last event of an attempt has `finished=True` and its final usage.
    """

    items: tuple[Item, ...] = ()
    usage: MeteredUsage | None = None
    finished: bool = False
    queue_time_s: float | None = None
    cache: CacheOutcome | None = None
    """With the last event: why so much of the prompt was cached and no more. None: nobody says."""


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can run on this replica: counted, bounded and translated."""

    request: GenerateRequest
    input_tokens: int
    input_estimated: bool
    most_input_tokens: int | None = None
    """Whoever counts them, where the request is capped. None: as many as `input_tokens`."""
    max_output_tokens: int
    """Over all choices; the worst case a limiter may have to hold."""
    max_tokens_given: bool
    payload: Any
    """What `stream` needs; the replica's own business."""


class ReplicaHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for the router and /health/ready."""

    name: str
    available: bool
    num_running: int = 0
    num_waiting: int = 0
    backlog: float = 0.0
    """Of an upstream, here: 0 where one more request would be sent at once."""


class InTokens(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    texts: list[str] | None
    """None: not asked for."""
    max_model_len: int


ANYBODYS = Turn()


class Replica(Protocol):
    """One place that can run one model."""

    name: str
    weight: int

    async def prepare(self, request: GenerateRequest, turn: Turn = ANYBODYS) -> PreparedRequest:
        """Translate and count, off the event loop and in its turn where it is heavy.

        Raises: fleet.errors.BadField (names the field), ContextTooLong, NoPlace.
        """
        ...

    async def count(self, request: GenerateRequest, turn: Turn = ANYBODYS) -> int:
        """Tokens of its prompt, exact or estimated as those of `prepare`, be they more than fit.

        Raises: fleet.errors.BadField, NoPlace.
        """
        ...

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        """What `prepare` would make of it, had it been told to write no more than that over all
        choices; counted once. Of a capped one that names no bound.

        Raises: fleet.errors.BadField.
        """
        ...

    def predicted_ttft_s(self, prepared: PreparedRequest, turn: Turn) -> float | None:
        """How long its first token will take, if it is asked now. None: nobody knows."""
        ...

    def stream(
        self, prepared: PreparedRequest, *, attempt_id: str, cache_salt: str, turn: Turn = ANYBODYS
    ) -> AsyncGenerator[ReplicaEvent, None]:
        """Run it. Raises ReplicaUnavailable, ReplicaOverloaded or UpstreamRefused before the first
        event, ReplicaLost after it. Closing the generator early aborts."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Stop within a step (engine) or 1 s (upstream). `stream` then yields its last event,
        `finished=True` with what was generated so far; an unknown id is ignored."""
        ...

    async def rest(self, attempt_id: str, *, resting: bool) -> None:
        """Stop writing, as soon as may be, until told to go on. A replica that cannot goes on
        writing; an unknown id is ignored."""
        ...

    async def acknowledge(self, attempt_id: str) -> None:
        """What the last event of `stream` said was used is on disk. A replica that keeps its own
        record of usage may drop it; where nothing was acknowledged it brings it up again."""
        ...

    def health(self) -> ReplicaHealth: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class Tokenizing(Protocol):
    """A replica whose tokenizer is here."""

    async def tokenize(self, asked: ToTokenize, turn: Turn) -> InTokens:
        """Raises: BadField, ContextTooLong, NoPlace, ReplicaUnavailable."""
        ...

    async def detokenize(self, token_ids: list[int], turn: Turn) -> str:
        """Raises: BadField, NoPlace, ReplicaUnavailable."""
        ...


@runtime_checkable
class Locating(Protocol):
    """A replica that knows what it made of a conversation."""

    async def locate(
        self, prepared: PreparedRequest, position: int, turn: Turn
    ) -> MessagePlace | None:
        """The message in which a token of the prompt lies, when nobody waits for anything. None:
        there is none, or it cannot be told. Raises: BadField, NoPlace."""
        ...
