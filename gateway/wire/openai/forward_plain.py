"""Prepares bodies of plain prompts for an OpenAI-compatible upstream: it is sent everything but
what would change the bill."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.generate_request import GenerateRequest, PlainForward
from gateway.wire.openai.chat import MAX_CHOICES
from gateway.wire.openai.forward import (
    MAX_TOKENS,
    check_price,
    check_stream_options,
    without_ours,
)
from gateway.wire.openai.plain_prompts import check_other_values, is_ids, to_prompts
from gateway.wire.shared.refusals import decode


class CompletionFields(msgspec.Struct, frozen=True):
    """The fields that the gateway itself needs to know."""

    model: str
    prompt: msgspec.Raw
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stream: bool | None = None


class EmbeddingFields(msgspec.Struct, frozen=True):
    model: str
    input: msgspec.Raw


_completion_decoder = msgspec.json.Decoder(CompletionFields)
_embedding_decoder = msgspec.json.Decoder(EmbeddingFields)
_parts_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_any_decoder = msgspec.json.Decoder(dict[str, Any])


def forward_completion(body: bytes, unsaid_max_tokens: int) -> GenerateRequest:
    """Raises BadField."""
    check_other_values(body, "prompt")
    fields, sent = decode(_completion_decoder, body), to_sent(body, "prompt")
    check_price(sent)
    stream, n = bool(fields.stream), fields.n or 1
    max_tokens = unsaid_max_tokens if fields.max_tokens is None else fields.max_tokens
    prompts = to_prompts(fields.prompt, "prompt", MAX_CHOICES // n)
    included, continuous = check_stream_options(sent.get("stream_options"), stream)
    return GenerateRequest(
        model=fields.model,
        stream=stream,
        include_usage=included,
        continuous_usage=continuous,
        n=n * len(prompts),
        forward={**without_ours(sent), "max_tokens": max_tokens},
        plain=PlainForward(path="completions", prompts=prompts, max_tokens=max_tokens),
    )


def forward_embedding(body: bytes, most: int) -> GenerateRequest:
    """Raises BadField."""
    check_other_values(body, "input")
    fields, sent = decode(_embedding_decoder, body), to_sent(body, "input")
    check_price(sent)
    return GenerateRequest(
        model=fields.model,
        stream=False,
        include_usage=False,
        forward={name: value for name, value in sent.items() if name != "stream"},
        plain=PlainForward(path="embeddings", prompts=to_prompts(fields.input, "input", most)),
    )


def to_sent(body: bytes, field: str) -> dict[str, Any]:
    """Return what the upstream is sent; token ids as they are written. Raises BadField."""
    parts = decode(_parts_decoder, body)
    if field in parts and is_ids(bytes(parts[field])):
        others = {name: msgspec.json.decode(each) for name, each in parts.items() if name != field}
        return {**others, field: parts[field]}
    return decode(_any_decoder, body)
