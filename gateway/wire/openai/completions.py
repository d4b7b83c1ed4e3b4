"""OpenAI's legacy completions: what our engine honours of a request, and how it becomes a
`GenerateRequest`.

Knows no HTTP and no replica. The shapes of an answer are in `to_completions`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.generate_request import CompletionPrompt, Dialect, GenerateRequest
from gateway.request_errors import BadField
from gateway.wire.openai.chat import MAX_CHOICES, MAX_TOP_LOGPROBS, SampledRequest, Unsupported
from gateway.wire.openai.forward_plain import forward_completion
from gateway.wire.openai.from_chat import (
    as_vllms,
    output_form,
    refuse_beside_ends,
    sampling,
    usage_of_stream,
)
from gateway.wire.openai.plain_prompts import PlainPrompts, check_other_values, to_prompts
from gateway.wire.shared.refusals import MAX_INT64, decode, unsupported

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SampledRequest, kw_only=True):
    """The body of `POST /v1/completions` for our own engine."""

    prompt: PlainPrompts
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_INT64)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """OpenAI allows 5."""
    user: str | None = None

    prompt_embeds: str | list[str] | None = None
    """vLLM's clients send an empty one beside a prompt."""

    suffix: Unsupported = None


class SentCompletion(CompletionRequest, kw_only=True):
    """The same as it is decoded: `to_prompts` reads the prompt."""

    prompt: msgspec.Raw  # type: ignore[assignment]


_request_decoder = msgspec.json.Decoder(SentCompletion)


def from_completions(body: bytes, dialect: Dialect) -> GenerateRequest:
    """Raises BadField."""
    if dialect == "upstream":
        return forward_completion(body, DEFAULT_MAX_TOKENS)
    check_other_values(body, "prompt")
    request = to_generate(decode(_request_decoder, body))
    return as_vllms(request) if dialect == "vllm" else request


def to_generate(request: SentCompletion) -> GenerateRequest:
    usage = usage_of_stream(request.stream_options, request.stream)
    n, form = request.n or 1, output_form(request)
    check_choices(request, n)
    if request.min_tokens:
        refuse_beside_ends(request.stop, form)
    if request.prompt_embeds:
        raise unsupported("prompt_embeds", "not supported: a prompt is text or token ids")
    return GenerateRequest(
        model=request.model,
        stream=bool(request.stream),
        include_usage=usage.included,
        continuous_usage=usage.continuous,
        n=n,
        completion=CompletionPrompt(
            prompts=to_prompts(request.prompt, "prompt", MAX_CHOICES // n),
            echo=bool(request.echo),
            max_tokens=max_tokens(request),
            logprobs=request.logprobs,
            form=form,
            **sampling(request),
        ),
    )


def check_choices(request: CompletionRequest, n: int) -> None:
    """Raises BadField."""
    if request.best_of not in (None, n):
        raise unsupported("best_of", "not supported: every choice that is made is returned")
    if (request.min_tokens or 0) > max_tokens(request):
        raise BadField(
            "Invalid value for 'min_tokens': more than the tokens that the completion may have.",
            param="min_tokens",
        )


def max_tokens(request: CompletionRequest) -> int:
    return DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
