"""Checks what a request must be to run at all; everything else is refused here, naming its field.

Knows no queue and no block: whether there is room is not asked here.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import get_args

from engine.errors import ContextLengthExceeded, InvalidRequest
from engine.protocol import (
    MAX_GRAMMAR_BYTES,
    MAX_PROMPT_SCORES,
    NOTHING_SAMPLED,
    EngineRequest,
    Grammar,
    Lane,
    SamplingParams,
)

MAX_CHOICES = 128
"""The bound on choices of a request: `n` for each of its prompts."""
MAX_EMBEDDED = 2048
"""Prompts of a request that embeds (OpenAI's)."""
MAX_LOGPROBS = 20
"""Largest `SamplingParams.logprobs` (OpenAI's top_logprobs) and `prompt_logprobs` (vLLM's)."""
MAX_LOGPROB_TOKEN_IDS = 128
"""vLLM's bound on tokens named for their logprobs."""
# Beyond these a number means nothing, and float32, in which logits are adjusted, may make 0 or
# infinity of it.
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
"""The largest bias of either sign (OpenAI's)."""
MAX_TENANT_CHARS = 256
MAX_WEIGHT = 64.0
MIN_WEIGHT = 1 / MAX_WEIGHT
"""The smallest weight of a tenant."""
MAX_DEADLINE_S = 86_400.0
MAX_BREAKPOINTS = 4
MAX_LEASE_TTL_S = 3600.0
"""(Anthropic's, both.)"""
_LANES: tuple[Lane, ...] = get_args(Lane)


def check_request(request: EngineRequest, *, vocab_size: int, max_model_len: int) -> None:
    """InvalidRequest with `param`, or ContextLengthExceeded, unless the request can run.

    A max_tokens beyond what the context leaves is no error: generation ends with "length". An
    embedding's prompt may be as long as the context.
    """
    _check_turn(request)
    _check_choices(request)
    for prompt in request.prompts:
        _check_prompt(prompt, vocab_size)
    _check_breakpoints(request)
    if not request.embed:
        check_sampling(request.sampling, vocab_size=vocab_size)
    elif request.sampling != NOTHING_SAMPLED:
        raise InvalidRequest("sampling is not for embeddings", param="sampling")
    longest = max(map(len, request.prompts))
    _check_scores(request.sampling, longest)
    _check_said(request, vocab_size, max_model_len)
    if longest > max_model_len - (not request.embed):
        what = "an embedding's prompt" if request.embed else "prompt and answer together"
        raise ContextLengthExceeded(
            f"the prompt has {longest} tokens, but {what} may have {max_model_len}",
            param="prompt_token_ids",
        )


def _check_scores(p: SamplingParams, num_tokens: int) -> None:
    if p.prompt_logprobs is not None and num_tokens * (1 + p.prompt_logprobs) > MAX_PROMPT_SCORES:
        most = MAX_PROMPT_SCORES // num_tokens - 1
        message = f"at most {most} of a prompt of {num_tokens} tokens"
        if most < 0:
            message = f"of a prompt of at most {MAX_PROMPT_SCORES} tokens"
        raise _must_be("prompt_logprobs", message)


def _check_choices(request: EngineRequest) -> None:
    num_prompts = len(request.prompts)
    if request.embed and request.n != 1:
        raise InvalidRequest("n must be 1: a prompt has one embedding", param="n")
    if not 1 <= request.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
    most = MAX_EMBEDDED if request.embed else MAX_CHOICES // request.n
    if num_prompts > most:
        what = "embeddings" if request.embed else f"{request.n} choices each"
        raise InvalidRequest(
            f"{num_prompts} prompts of {what} are too many: at most {most} are taken",
            param="more_prompts",
        )


def _check_said(request: EngineRequest, vocab_size: int, max_model_len: int) -> None:
    """Check what the choices said elsewhere, and that one of them has more to say."""
    said, ended = request.said, request.ended
    if not said and not ended:
        return
    num_choices = len(request.prompts) * request.n
    if request.embed:
        raise InvalidRequest("said is not for embeddings", param="said")
    if any(after <= before for before, after in pairwise((-1, *ended, num_choices))):
        raise _must_be("ended", f"indices of {num_choices} choices, in order")
    if len(ended) == num_choices:
        raise _must_be("ended", "fewer than all choices")
    if said and len(said) != num_choices:
        raise _must_be("said", f"of {num_choices} choices, not of {len(said)}")
    for index, output in enumerate(said):
        if output and (min(output) < 0 or max(output) >= vocab_size):
            raise _must_be("said", _known(vocab_size))
        room = max_model_len - len(request.prompts[index // request.n])
        most = min(request.sampling.max_tokens, room)
        if len(output) >= most and index not in ended:
            raise _must_be("said", f"less than the {most} tokens that choice {index} may have")


def _check_prompt(prompt: list[int], vocab_size: int) -> None:
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="prompt_token_ids")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequest(
            f"prompt token ids must be between 0 and {vocab_size - 1}", param="prompt_token_ids"
        )


def _must_be(param: str, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {allowed}", param=param)


def _check_turn(request: EngineRequest) -> None:
    """Check the lane, tenant, weight and deadline, which say when it is its turn."""
    if request.lane not in _LANES:
        raise _must_be("lane", f"one of {', '.join(_LANES)}")
    if len(request.tenant) > MAX_TENANT_CHARS:
        raise _must_be("tenant", f"at most {MAX_TENANT_CHARS} characters")
    if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:
        raise _must_be("weight", f"between 1/{MAX_WEIGHT:g} and {MAX_WEIGHT:g}")
    deadline_s = request.deadline_s
    if deadline_s is not None and not 0 < deadline_s <= MAX_DEADLINE_S:
        raise _must_be("deadline_s", f"above 0 and at most {MAX_DEADLINE_S:g}")


def _check_breakpoints(request: EngineRequest) -> None:
    places = [0, *(each.num_tokens for each in request.breakpoints)]
    if request.breakpoints and request.more_prompts:
        what = "be of a single prompt"
    elif len(request.breakpoints) > MAX_BREAKPOINTS:
        what = f"be at most {MAX_BREAKPOINTS}"
    elif any(after <= before for before, after in pairwise(places)):
        what = "come one behind the other"
    elif places[-1] > len(request.prompt_token_ids):
        what = f"lie in the prompt of {len(request.prompt_token_ids)} tokens"
    elif not all(0 < each.ttl_s <= MAX_LEASE_TTL_S for each in request.breakpoints):
        what = f"have a ttl_s above 0 and at most {MAX_LEASE_TTL_S:g}"
    else:
        return
    raise InvalidRequest(f"breakpoints must {what}", param="breakpoints")


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
    _check_lengths(params)
    _check_penalties(params)
    _check_ids(params, vocab_size)
    if params.grammar is not None:
        _check_grammar(params.grammar, vocab_size)
        if params.ignore_eos:
            raise _must_be("ignore_eos", "false: a grammar says where an output ends")


def _check_lengths(p: SamplingParams) -> None:
    """And what is drawn from."""
    if p.max_tokens < 1:
        raise _must_be("max_tokens", "at least 1")
    if not 0 <= p.min_tokens <= p.max_tokens:
        raise _must_be("min_tokens", "between 0 and max_tokens")
    if not 0 <= p.temperature <= MAX_TEMPERATURE:
        raise _must_be("temperature", f"between 0 and {MAX_TEMPERATURE:g}")
    if not 0 < p.top_p <= 1:
        raise _must_be("top_p", "above 0 and at most 1")
    if p.top_k < 0:
        raise _must_be("top_k", "at least 0")
    if not 0 <= p.min_p <= 1:
        raise _must_be("min_p", "between 0 and 1")


def _check_penalties(p: SamplingParams) -> None:
    low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    if not low <= p.repetition_penalty <= high:
        raise _must_be("repetition_penalty", f"between {low:g} and {high:g}")
    if not -2 <= p.frequency_penalty <= 2:
        raise _must_be("frequency_penalty", "between -2 and 2")
    if not -2 <= p.presence_penalty <= 2:
        raise _must_be("presence_penalty", "between -2 and 2")


def _check_ids(p: SamplingParams, vocab_size: int) -> None:
    ids = range(vocab_size)
    if p.logprobs is not None and not 0 <= p.logprobs <= MAX_LOGPROBS:
        raise _must_be("logprobs", f"between 0 and {MAX_LOGPROBS}")
    if len(p.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise _must_be("logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS}")
    if p.logprob_token_ids and p.logprobs is None:
        raise _must_be("logprob_token_ids", "beside logprobs")
    if not all(i in ids for i in p.logprob_token_ids):
        raise _must_be("logprob_token_ids", _known(vocab_size))
    if p.prompt_logprobs is not None and not 0 <= p.prompt_logprobs <= MAX_LOGPROBS:
        raise _must_be("prompt_logprobs", f"between 0 and {MAX_LOGPROBS}")
    if p.logit_bias:
        bias = MAX_LOGIT_BIAS
        if not all(i in ids for i in p.logit_bias):
            raise _must_be("logit_bias", f"keyed by {_known(vocab_size)}")
        if not all(-bias <= value <= bias for value in p.logit_bias.values()):
            raise _must_be("logit_bias", f"between {-bias:g} and {bias:g}")
    if p.stop_token_ids and not all(i in ids for i in p.stop_token_ids):
        raise _must_be("stop_token_ids", _known(vocab_size))


def _known(vocab_size: int) -> str:
    return f"token ids between 0 and {vocab_size - 1}"


def _check_grammar(grammar: Grammar, vocab_size: int) -> None:
    """Whether it can be compiled is another matter."""
    if (grammar.after_token_id or 0) not in range(vocab_size):
        message = f"grammar's after_token_id must be {_known(vocab_size)}"
        raise InvalidRequest(message, param="grammar")
    try:
        size_bytes = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest("grammar holds a lone surrogate", param="grammar") from error
    if size_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"grammar must be at most {MAX_GRAMMAR_BYTES} bytes, it has {size_bytes}",
            param="grammar",
        )
