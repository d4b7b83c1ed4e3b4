"""The inference APIs that a body alone says everything of: how each is read and how it is answered.

Knows no HTTP and no route but the paths that a batch may name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from billing.pricing.rating import RatedUsage
from gateway.generate_request import AnswerHeader, Dialect, GenerateRequest
from gateway.generation_events import Item, MeteredUsage
from gateway.wire.anthropic.from_anthropic import from_anthropic
from gateway.wire.anthropic.to_anthropic import to_anthropic, to_opening
from gateway.wire.openai.completions import from_completions
from gateway.wire.openai.embeddings import (
    from_embeddings,
    to_embeddings,
)
from gateway.wire.openai.from_chat import from_openai
from gateway.wire.openai.to_chat import to_openai
from gateway.wire.openai.to_completions import to_completions


class Encoder(Protocol):
    """Turns events into the bytes of an answer; one instance per request (`wire.openai`)."""

    def encode(self, items: Sequence[Item]) -> bytes: ...

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes: ...


@runtime_checkable
class CountingEncoder(Encoder, Protocol):
    """An encoder whose chunks can say the usage so far."""

    def note_usage(self, usage: MeteredUsage) -> None: ...


Opening = Callable[[MeteredUsage], bytes]
"""The first bytes of a stream, which say how many tokens its prompt had."""


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A vendor's format of an answer, streamed or whole."""

    id_prefix: str
    """The prefix of an answer's id: `chatcmpl-`."""
    encoder: Callable[[GenerateRequest, AnswerHeader], Encoder]
    opening: Callable[[GenerateRequest, AnswerHeader], Opening | None] | None = None
    """Makes what a stream begins with, once the prompt is counted. None: nothing."""
    knows_batches: bool = False
    """Its answers can name the tier `batch`."""


class ApiSurface(AnswerFormat, frozen=True, kw_only=True):
    """An inference API: its answers, and how a body is read that alone says what is asked."""

    read: Callable[[bytes, Dialect], GenerateRequest]
    """Raises BadField."""


CHAT = ApiSurface(id_prefix="chatcmpl-", read=from_openai, encoder=to_openai)
COMPLETIONS = ApiSurface(id_prefix="cmpl-", read=from_completions, encoder=to_completions)
EMBEDDINGS = ApiSurface(id_prefix="embd-", read=from_embeddings, encoder=to_embeddings)
MESSAGES = ApiSurface(
    id_prefix="msg_",
    read=from_anthropic,
    encoder=to_anthropic,
    opening=to_opening,
    knows_batches=True,
)
SURFACES: dict[str, ApiSurface] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
}
"""The surfaces that a batch may name, by path."""
RESPONSES = "/v1/responses"
