"""Says what one attempt asks of an engine, and how its outputs are read, whatever the surface.

Made by `replica` of conversations, by `plain_jobs` of plain prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Protocol

import msgspec

from engine.protocol import EngineOutput, EngineRequest, ReplicaStatus, SamplingParams
from gateway.fleet.engine.kept_prefixes import NO_PREFIXES, Prefixes
from gateway.fleet.engine.model_format import RenderedPrompt
from gateway.generate_request import OutputForm, OutputOptions, out_of_vocabulary
from gateway.generation_events import ReplicaEvent


class Reader(Protocol):
    """A reader of one attempt's outputs."""

    @property
    def over(self) -> bool:
        """Tell whether all that was asked for is there, whether or not the engine knows."""

    def read(self, output: EngineOutput) -> ReplicaEvent: ...

    def last(self) -> ReplicaEvent:
        """Return the last event in place of the engine's own, which will not come."""


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    """The request of one attempt to an engine: the payload of a `PreparedRequest`."""

    request: EngineRequest
    """The request without the caller and the deadline, which `stream` adds."""
    reader: Callable[[], Reader] | None = None
    """None: as a conversation is read."""
    param_names: Mapping[str, str]
    """The engine's fields that a client knows under another name."""
    prefixes: Prefixes = NO_PREFIXES
    form: OutputForm | None = None
    """The grammar that the output must follow."""
    rendered: RenderedPrompt | None = None
    """The rendered prompt of a conversation."""
    span_keys: tuple[int, ...] = ()
    """The keys of its first prompt's spans (`engine.prefix_digests`)."""


def check_token_ids(prompt: OutputOptions, vocab_size: int) -> None:
    """Raises BadField."""
    for param, ids in (
        ("logit_bias", prompt.logit_bias),
        ("stop_token_ids", prompt.stop_token_ids),
        ("logprob_token_ids", prompt.logprob_token_ids),
    ):
        unknown = next((i for i in ids if i >= vocab_size), None)
        if unknown is not None:
            raise out_of_vocabulary(unknown, param, vocab_size)


def to_sampling(
    prompt: OutputOptions, max_tokens: int, form: OutputForm | None = None
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=prompt.min_tokens,
        temperature=prompt.temperature,
        top_p=prompt.top_p,
        top_k=prompt.top_k,
        min_p=prompt.min_p,
        repetition_penalty=prompt.repetition_penalty,
        frequency_penalty=prompt.frequency_penalty,
        presence_penalty=prompt.presence_penalty,
        logit_bias=prompt.logit_bias,
        stop_token_ids=prompt.stop_token_ids,
        ignore_eos=prompt.ignore_eos,
        seed=prompt.seed,
        logprobs=prompt.logprobs,
        logprob_token_ids=prompt.logprob_token_ids,
        prompt_logprobs=prompt.prompt_logprobs,
        grammar=None if form is None else form.grammar,
    )


def ends_of(
    prompt: OutputOptions, form: OutputForm | None, status: ReplicaStatus
) -> Container[int] | None:
    """Return the tokens that end an output kept to a form, which may be complete without any of
    these; None: whichever comes last."""
    return None if form is None else {*status.eos_token_ids, *prompt.stop_token_ids}
