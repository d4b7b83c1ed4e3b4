"""OpenAI's embeddings: what our engine honours of a request, what an answer looks like, and the way
from one to the other.

Knows no HTTP and no replica.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from billing.pricing.rating import RatedUsage
from gateway.generate_request import AnswerHeader, Dialect, EmbeddingPrompt, GenerateRequest
from gateway.generation_events import EmbeddingVector, Item, MeteredUsage
from gateway.wire.constraints.format_structs import StrictStruct
from gateway.wire.openai.chat import ModelName
from gateway.wire.openai.forward_plain import forward_embedding
from gateway.wire.openai.plain_prompts import PlainPrompts, check_other_values, to_prompts
from gateway.wire.openai.to_chat import RawBodies
from gateway.wire.shared.refusals import MAX_INT64, decode
from gateway.wire.usage.cost import UsageCost, to_usage_cost

MAX_INPUTS = 2048
FLOAT_BYTES = 4
Format = Literal["float", "base64"]


class EmbeddingRequest(StrictStruct, kw_only=True):
    """The body of `POST /v1/embeddings` for our own engine."""

    model: ModelName = ""
    input: PlainPrompts
    encoding_format: Format | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_INT64)] | None = None
    user: str | None = None


class SentEmbedding(EmbeddingRequest, kw_only=True):
    """The same as it is decoded: `to_prompts` reads the input."""

    input: msgspec.Raw  # type: ignore[assignment]


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    """The index of the input."""
    embedding: list[float] | str
    """A text: base64 of float32, little-endian."""


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    cost: UsageCost | UnsetType = UNSET
    """The cost, if it was requested."""


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


_request_decoder = msgspec.json.Decoder(SentEmbedding)
_encode = msgspec.json.Encoder().encode


def from_embeddings(body: bytes, dialect: Dialect) -> GenerateRequest:
    """Raises BadField."""
    if dialect == "upstream":
        return forward_embedding(body, MAX_INPUTS)
    check_other_values(body, "input")
    asked = decode(_request_decoder, body)
    return GenerateRequest(
        model=asked.model,
        stream=False,
        include_usage=False,
        embedding=EmbeddingPrompt(
            prompts=to_prompts(asked.input, "input", MAX_INPUTS),
            dimensions=asked.dimensions,
            as_base64=asked.encoding_format == "base64",
        ),
    )


def to_embeddings(request: GenerateRequest, heading: AnswerHeader) -> EmbeddingBody | RawEmbeddings:
    if request.embedding is None:
        return RawEmbeddings()
    return EmbeddingBody(request.model, request.embedding)


def to_usage(usage: MeteredUsage, cost: RatedUsage | None) -> EmbeddingUsage:
    return EmbeddingUsage(
        prompt_tokens=usage.prompt_tokens,
        total_tokens=usage.total_tokens,
        cost=UNSET if cost is None else to_usage_cost(cost),
    )


class EmbeddingBody:
    """Encodes vectors as they come, so that a long list holds the event loop for none of its
    length."""

    def __init__(self, model: str, prompt: EmbeddingPrompt) -> None:
        self._model = model
        self._as_base64 = prompt.as_base64
        self._found = [b""] * len(prompt.prompts)

    def encode(self, items: Sequence[Item]) -> bytes:
        for item in items:
            assert isinstance(item, EmbeddingVector)
            vector = item.vector
            numbers = to_base64(vector) if self._as_base64 else to_floats(vector)
            self._found[item.index] = _encode(Embedding(index=item.index, embedding=numbers))
        return b""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (
            b",".join(self._found),
            _encode(self._model),
            _encode(to_usage(usage, cost)),
        )


class RawEmbeddings(RawBodies):
    """An upstream's body, with the usage that is billed."""

    def finish(self, usage: MeteredUsage, cost: RatedUsage | None = None) -> bytes:
        return self.closed(_encode(to_usage(usage, cost)))


def to_base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()


def to_floats(vector: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector))
