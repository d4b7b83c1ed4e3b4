"""What a request must be to run at all; everything else is refused here, naming its field.

Above: `scheduler.py`, and any other engine that wants to refuse the same things. Below:
`protocol.py`, `errors.py`. Knows no queue and no block: whether there is room is not asked here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.protocol import NOTHING_SAMPLED, EngineRequest, Grammar, Lane, SamplingParams

MAX_CHOICES = 128
"""Largest `EngineRequest.n`."""
MAX_LOGPROBS = 20
"""Largest `SamplingParams.logprobs` (OpenAI's top_logprobs)."""
# Beyond these a number means nothing, and float32, in which logits are adjusted, may make 0 or
# infinity of it.
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
"""Of either sign (OpenAI's)."""
MAX_TENANT_CHARS = 256
MAX_WEIGHT = 64.0
"""Of a tenant; the least is one over this."""
MAX_DEADLINE_S = 86_400.0
MAX_GRAMMAR_BYTES = 128 * 1024
"""Of a grammar's text in UTF-8."""


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int) -> None:
    """InvalidRequest with `param`, or ContextLengthExceeded, unless the request can run.

    A max_tokens beyond what the context leaves is no error: generation ends with "length". An
    embedding's prompt may be as long as the context.
    """
    prompt, embed = request.prompt_token_ids, request.embed
    _check_turn(request)
    if not 1 <= request.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt_token_ids")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(
            f"prompt token ids must be between 0 and {vocab_size - 1}", param="prompt_token_ids"
        )
    if not embed:
        check_sampling(request.sampling, vocab_size=vocab_size)
    elif request.n != 1:
        raise InvalidRequest("n must be 1: a prompt has one embedding", param="n")
    elif request.sampling != NOTHING_SAMPLED:
        raise InvalidRequest("sampling is not for embeddings", param="sampling")
    if len(prompt) > max_model_len - (not embed):
        what = "an embedding's prompt" if embed else "prompt and answer together"
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt)} tokens, but {what} may have {max_model_len}",
            param="prompt_token_ids",
        )


def _check_turn(request: EngineRequest) -> None:
    """What says when it is its turn."""
    deadline_s = request.deadline_s
    rules = (
        ("lane", request.lane in get_args(Lane), f"one of {', '.join(get_args(Lane))}"),
        (
            "tenant",
            len(request.tenant) <= MAX_TENANT_CHARS,
            f"at most {MAX_TENANT_CHARS} characters",
        ),
        (
            "weight",
            1 / MAX_WEIGHT <= request.weight <= MAX_WEIGHT,
            f"between 1/{MAX_WEIGHT:g} and {MAX_WEIGHT:g}",
        ),
        (
            "deadline_s",
            deadline_s is None or 0 < deadline_s <= MAX_DEADLINE_S,
            f"above 0 and at most {MAX_DEADLINE_S:g}",
        ),
    )
    for param, holds, allowed in rules:
        if not holds:
            raise InvalidRequest(f"{param} must be {allowed}", param=param)


def check_head(request: EngineRequest, *, generates: bool, embedding_size: int) -> None:
    """InvalidRequest unless the model's head is for such a request."""
    if not request.embed and not generates:
        raise InvalidRequest(
            "the model has no head to generate with: it only embeds", param="embed"
        )
    if request.dimensions is None:
        return
    if not request.embed:
        raise InvalidRequest("dimensions is for embeddings alone", param="dimensions")
    if not 1 <= request.dimensions <= embedding_size:
        raise InvalidRequest(
            f"dimensions must be between 1 and {embedding_size}", param="dimensions"
        )


def check_adapter(request: EngineRequest, adapters: Collection[str]) -> None:
    """InvalidRequest unless the engine has the adapter."""
    if request.adapter and request.adapter not in adapters:
        raise InvalidRequest("the engine has no such adapter", param="adapter")


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """InvalidRequest, with `param` the field's name, unless every field is in its range."""
    p, ids = params, range(vocab_size)
    known = f"token ids between 0 and {vocab_size - 1}"
    low, high, bias = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, MAX_LOGIT_BIAS
    rules: tuple[tuple[str, bool, str], ...] = (
        ("max_tokens", p.max_tokens >= 1, "at least 1"),
        ("min_tokens", 0 <= p.min_tokens <= p.max_tokens, "between 0 and max_tokens"),
        (
            "temperature",
            0 <= p.temperature <= MAX_TEMPERATURE,
            f"between 0 and {MAX_TEMPERATURE:g}",
        ),
        ("top_p", 0 < p.top_p <= 1, "above 0 and at most 1"),
        ("top_k", p.top_k >= 0, "at least 0"),
        ("min_p", 0 <= p.min_p <= 1, "between 0 and 1"),
        (
            "repetition_penalty",
            low <= p.repetition_penalty <= high,
            f"between {low:g} and {high:g}",
        ),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, "between -2 and 2"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, "between -2 and 2"),
        ("logprobs", 0 <= (p.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        ("logit_bias", all(i in ids for i in p.logit_bias), f"keyed by {known}"),
        (
            "logit_bias",
            all(-bias <= value <= bias for value in p.logit_bias.values()),
            f"between {-bias:g} and {bias:g}",
        ),
        ("stop_token_ids", all(i in ids for i in p.stop_token_ids), known),
    )
    for param, holds, allowed in rules:
        if not holds:
            raise InvalidRequest(f"{param} must be {allowed}", param=param)
    if p.grammar is not None:
        _check_grammar(p.grammar, known=known, is_known=(p.grammar.after_token_id or 0) in ids)
        if p.ignore_eos:
            raise InvalidRequest(
                "ignore_eos must be false: a grammar says where an output ends", param="ignore_eos"
            )


def _check_grammar(grammar: Grammar, *, known: str, is_known: bool) -> None:
    """Whether it can be compiled is another matter. is_known: of its after_token_id."""
    if not is_known:
        raise InvalidRequest(f"grammar's after_token_id must be {known}", param="grammar")
    try:
        size_bytes = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest("grammar holds a lone surrogate", param="grammar") from error
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"grammar must be at most {MAX_GRAMMAR_BYTES} bytes, it has {size_bytes}",
            param="grammar",
        )
