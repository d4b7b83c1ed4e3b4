"""The one protocol behind which an in-repo engine and an OpenAI-compatible upstream look alike.

Knows no tenant and no price.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import msgspec

from engine.protocol import KVSource
from gateway.fleet.contact import Contact
from gateway.fleet.engine_view import EngineView
from gateway.generate_request import GenerateRequest, ToTokenize, WrittenIds
from gateway.generation_events import ReplicaEvent
from gateway.lanes import Priority


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can run on this replica: counted, bounded and translated."""

    request: GenerateRequest
    input_tokens: int
    most_input_tokens: int | None = None
    """The upper bound of input tokens that a spending cap reserves for. None: `input_tokens`."""
    max_output_tokens: int
    """Over all choices; the worst case a limiter may have to hold."""
    max_tokens_given: bool
    payload: Any
    """The replica's private data, which `stream` takes back."""
    fetch: KVSource | None = None
    """The engine that the replica may read the prompt's beginning from."""
    prefill_only: bool = False
    """The replica says the first token alone, and `stream` raises PromptComputed behind it."""
    computed_by: str | None = None
    """The name of the replica that computed the prompt for others."""


class ReplicaHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for the router and /health/ready."""

    name: str
    available: bool
    num_running: int = 0
    num_waiting: int = 0
    is_drained: bool = False
    """It ends what it runs, and gets nothing new."""
    drain_changed_at: float | None = None
    """When it was drained, or ceased to be, in Unix seconds; None: it never was."""
    is_vacant: bool = False
    """It is a place for an engine that joins, and none is there."""
    backlog: float = 0.0
    """For an upstream, the local backlog: 0 if one more request would be sent at once."""


class InTokens(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    texts: list[str] | None
    """None: not asked for."""
    max_model_len: int


ANYBODYS = Priority()


class EventTaker(Protocol):
    """Takes a replica's events the moment they come, so that no task is woken for each."""

    @property
    def is_ready(self) -> bool:
        """Tell whether there is room for an event."""

    def take(self, event: ReplicaEvent) -> None:
        """Take an event that is not the last, once `is_ready`."""


class Replica(Protocol):
    """A place that can run one model."""

    name: str
    weight: int

    async def prepare(
        self, request: GenerateRequest, priority: Priority = ANYBODYS, cache_salt: str = ""
    ) -> PreparedRequest:
        """Translate and count, off the event loop and in its turn where it is heavy. `cache_salt`:
        as `stream` is given it.

        Raises: BadField (names the field), ContextTooLong, NoSlot.
        """
        ...

    async def count(self, request: GenerateRequest, priority: Priority = ANYBODYS) -> int:
        """Count the tokens of its prompt, exact or estimated as those of `prepare`, be they more
        than fit.

        Raises: BadField, NoSlot.
        """
        ...

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        """Return what `prepare` would make of it, had it been told to write no more than that over
        all choices; counted once. Of a capped one that names no bound.

        Raises: BadField.
        """
        ...

    def predicted_ttft_s(self, prepared: PreparedRequest, priority: Priority) -> float | None:
        """Predict how long its first token will take, if it is asked now. None: nobody knows."""
        ...

    def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority = ANYBODYS,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        """Run it. Closing the generator early aborts. `taker`: may be given events that are not
        yielded then.

        Raises: ReplicaUnavailable, ReplicaOverloaded or UpstreamRefused before the first event,
        ReplicaLost after it."""
        ...

    async def abort(self, attempt_id: str) -> None:
        """Stop within a step (engine) or 1 s (upstream). `stream` then yields its last event,
        `finished=True` with what was generated so far; an unknown id is ignored."""
        ...

    async def set_paused(self, attempt_id: str, *, paused: bool) -> None:
        """Stop writing, as soon as may be, until told to go on. A replica that cannot goes on
        writing; an unknown id is ignored."""
        ...

    async def acknowledge(self, attempt_id: str) -> None:
        """Tell the replica that the usage of the last event of `stream` is on disk. A replica that
        keeps its own record of usage may drop it; where nothing was acknowledged it brings it up
        again."""
        ...

    def health(self) -> ReplicaHealth: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class TokenizingReplica(Protocol):
    """A replica whose tokenizer is here."""

    async def tokenize(self, asked: ToTokenize, priority: Priority) -> InTokens:
        """Raises: BadField, ContextTooLong, NoSlot, ReplicaUnavailable."""
        ...

    async def detokenize(self, token_ids: WrittenIds, priority: Priority) -> str:
        """Raises: BadField, NoSlot, ReplicaUnavailable."""
        ...

    def describe_tokenizer(self) -> dict[str, Any]:
        """Return its `tokenizer_config.json`, with the chat template that is in use."""
        ...


@runtime_checkable
class SizedReplica(Protocol):
    """A replica that may know how long a prompt and its answer can be together."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens. None: it is not known, or not yet."""


@runtime_checkable
class TemplatedReplica(Protocol):
    """A replica that knows what its model can be told: it has the chat template."""

    @property
    def takes_chats(self) -> bool: ...

    @property
    def takes_tools(self) -> bool: ...


class ViewedReplica(Replica, Protocol):
    """A replica whose work is known: one of our own engines."""

    view: EngineView
    is_prefill: bool
    """It computes prompts for others of its model."""
    cell: str | None
    """The other cell that lends it; None: it is of this home."""
    round_trip: Callable[[], float]
    """Returns the seconds to its cell and back; 0: it is of this home, or nobody knows."""

    @property
    def is_available(self) -> bool: ...

    @property
    def is_drained(self) -> bool: ...

    def cached_tokens(
        self, prepared: PreparedRequest, replicas: Sequence[ViewedReplica]
    ) -> Sequence[int]:
        """Return how many tokens of a prompt's front each of these replicas, of one model, probably
        has cached."""
        ...

    def may_split(self, prepared: PreparedRequest) -> bool:
        """Tell whether one engine can compute the prompt and another one go on."""
        ...


def is_viewed(replica: Replica) -> TypeGuard[ViewedReplica]:
    """Tell whether it is an engine of ours."""
    return hasattr(replica, "view")


def cell_of(replica: Replica) -> str | None:
    """Return the other cell that lends a replica; None: it is of this home, or an upstream."""
    return replica.cell if is_viewed(replica) else None


def are_viewed(replicas: Sequence[Replica]) -> TypeGuard[Sequence[ViewedReplica]]:
    """Tell whether the replicas of a route are engines of ours: all of them are, or none."""
    return is_viewed(replicas[0])


class ObservedReplica(Protocol):
    """A replica that is known by what requests saw of it: it is somebody else's."""

    contact: Contact
    identity: str
    """The same in every worker that reaches it at this address with this key, and in no other."""

    @property
    def name(self) -> str: ...


def is_observed(replica: Replica) -> TypeGuard[ObservedReplica]:
    """Tell whether it is somebody else's. Each replica is asked every second: to ask by a protocol
    that is checked at run time takes a hundred times as long."""
    return hasattr(replica, "contact")


@runtime_checkable
class ReturningReplica(Protocol):
    """A replica that is started again when it dies."""

    async def wait_until_back(self, timeout_s: float) -> bool:
        """Wait until it can be asked, and tell whether it can."""
        ...


@runtime_checkable
class HeardReplica(Protocol):
    """A replica that is heard of all the time while it is well."""

    @property
    def is_silent(self) -> bool:
        """Tell whether it was not heard of for longer than that."""

    def leave(self, attempt_id: str) -> None:
        """Give it up: `stream` raises behind what has come of the attempt, and nothing more is
        taken of it. An unknown id is ignored."""


@runtime_checkable
class RepeatableReplica(Protocol):
    """A replica that can be asked what another one is being asked."""

    def may_repeat(self, prepared: PreparedRequest) -> bool:
        """Tell whether a second try leaves nothing behind: nothing of it is to be kept cached."""
        ...

    def take_back(self, attempt_id: str) -> None:
        """Ask for an attempt of which nothing has run: `stream` raises RequestTakenBack then. One
        that has begun goes on, and an unknown id is ignored. Of use once."""


@runtime_checkable
class ResumingReplica(Protocol):
    """A replica that can go on with what another one of the same model has begun."""

    def may_go_on(self, rest: PreparedRequest) -> bool:
        """Tell whether it runs that model, as far as is known: one that was never heard of may."""
        ...

    @property
    def model_identity(self) -> str | None:
        """Return what tells its model from others; None: it was never heard of."""


@runtime_checkable
class LocatingReplica(Protocol):
    """A replica that knows what it made of a conversation."""

    async def locate(
        self, prepared: PreparedRequest, position: int, priority: Priority
    ) -> MessagePlace | None:
        """Find the message in which a token of the prompt lies, when nobody waits for anything.
        None: there is none, or it cannot be told. Raises: BadField, NoSlot."""
        ...


class MessagePlace(msgspec.Struct, frozen=True):
    """The message of a conversation that a token lies in."""

    path: str
    """The path in the client's body: `messages[2]`, `tools`."""
    index: int | None = None
    """The index among the messages that the model reads; None: not a message."""
    role: str | None = None
