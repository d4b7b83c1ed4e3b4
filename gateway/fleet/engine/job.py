"""Says what one attempt asks of an engine, how its outputs are read, whatever the surface, and what
another engine would be asked to go on with.

Made by `replica` of conversations, by `plain_jobs` of plain prompts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Container, Mapping
from contextlib import aclosing
from typing import Protocol, runtime_checkable

import msgspec

from engine.errors import EngineStepFailed, EngineUnavailable, GrammarExhausted
from engine.protocol import EngineOutput, EngineRequest, ReplicaStatus, SamplingParams
from gateway.fleet.engine.kept_prefixes import NO_PREFIXES, Prefixes
from gateway.fleet.engine.model_format import RenderedPrompt
from gateway.fleet.replica import PreparedRequest
from gateway.generate_request import OutputForm, OutputOptions, out_of_vocabulary
from gateway.generation_events import ReplicaEvent

FIRST_OF_ALL = -(2**31)
"""A priority ahead of all that waits of its tenant: its client has read some of it."""


class Reader(Protocol):
    """A reader of one attempt's outputs."""

    @property
    def over(self) -> bool:
        """Tell whether all that was asked for is there, whether or not the engine knows."""

    def read(self, output: EngineOutput) -> ReplicaEvent: ...

    def last(self) -> ReplicaEvent:
        """Return the last event in place of the engine's own, which will not come."""


@runtime_checkable
class ResumableReader(Reader, Protocol):
    """A reader that can go on with the outputs of another engine."""

    @property
    def ended(self) -> tuple[int, ...]:
        """Return the choices that have their end, by index, whether or not the engine knows."""

    def resume(self) -> None:
        """Note that what comes next is another engine's, which computes again what was read."""


class EngineJob(msgspec.Struct, frozen=True, kw_only=True):
    """The request of one attempt to an engine: the payload of a `PreparedRequest`."""

    request: EngineRequest
    """The request without the caller and the deadline, which `stream` adds."""
    reader: Callable[[], Reader] | None = None
    """None: as a conversation is read."""
    begun_by: str | None = None
    """The identity (`ReplicaStatus.identities`) of the engine that has begun it, and of which
    `reader` has read what it said. None: nobody has."""
    param_names: Mapping[str, str]
    """The engine's fields that a client knows under another name."""
    prefixes: Prefixes = NO_PREFIXES
    form: OutputForm | None = None
    """The grammar that the output must follow."""
    rendered: RenderedPrompt | None = None
    """The rendered prompt of a conversation."""
    span_keys: tuple[int, ...] = ()
    """The keys of its first prompt's spans (`engine.prefix_digests`)."""

    @property
    def may_split(self) -> bool:
        """Tell whether one engine can compute the prompt and another one go on: it has one choice
        of more than one token, and tells nothing of the prompt itself."""
        asked, sampling = self.request, self.request.sampling
        is_one = asked.n == 1 and not asked.more_prompts and not asked.embed
        tells = sampling.prompt_logprobs is not None
        return self.begun_by is None and is_one and not tells and sampling.max_tokens > 1


class FirstTokenSaid(EngineUnavailable):
    """Says that an engine has ended a request behind the first token, as it was asked."""


class Transcript:
    """The tokens of each choice, over all attempts: those that `request` says were taken before,
    and each output that is added."""

    def __init__(self, request: EngineRequest) -> None:
        num_choices = len(request.prompts) * request.n
        self._said: list[list[int]] = [[] for _ in range(num_choices)]
        for output, said in zip(self._said, request.said, strict=False):
            output += said

    def add(self, output: EngineOutput) -> None:
        self._said[output.index] += output.token_ids

    def rest_of(self, request: EngineRequest, ended: Collection[int]) -> EngineRequest:
        """Return the request of what is left: it draws what `request` would have drawn. `ended`:
        the choices that have their end. What it asked to keep of its prompt was lost with the
        engine, and is not kept again."""
        said = ([] if index in ended else each for index, each in enumerate(self._said))
        return msgspec.structs.replace(
            request,
            said=tuple(said),
            ended=tuple(sorted(ended)),
            priority=FIRST_OF_ALL,
            breakpoints=(),
        )


def first_token_of(request: EngineRequest) -> EngineRequest:
    """Return the request of its first token alone, which is drawn as if all were asked for."""
    sampling = request.sampling
    sampling = msgspec.structs.replace(
        sampling, max_tokens=1, min_tokens=min(1, sampling.min_tokens)
    )
    return msgspec.structs.replace(request, sampling=sampling)


async def up_to_the_first(
    outputs: AsyncGenerator[EngineOutput, None],
) -> AsyncGenerator[EngineOutput, None]:
    """Yield outputs of a request that was cut behind its first token as if it were not; an answer
    that ends there is whole. Raises: FirstTokenSaid behind the last one."""
    async with aclosing(outputs):
        async for output in outputs:
            if output.finish_reason != "length":
                yield output
                continue
            yield msgspec.structs.replace(output, finish_reason=None, finished=False)
            raise FirstTokenSaid("the prompt is computed, and the first token said")


def failure_of(last: EngineOutput) -> EngineStepFailed | GrammarExhausted:
    """Return what ended a request amid its output."""
    if last.error_code == GrammarExhausted.code:
        return GrammarExhausted("grammar needs too much work amid the output", param="grammar")
    return EngineStepFailed(f"the step failed: {last.error_code}")


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


def within_a_loan(prepared: PreparedRequest) -> PreparedRequest:
    """Return a request as the engine of another cell is asked it: nothing of it is kept cached
    there, where its next turn does not come."""
    job = prepared.payload
    assert isinstance(job, EngineJob)
    if not job.prefixes.breakpoints:
        return prepared
    asked = msgspec.structs.replace(job.request, breakpoints=())
    kept_nowhere = msgspec.structs.replace(job, request=asked, prefixes=NO_PREFIXES)
    return msgspec.structs.replace(prepared, payload=kept_nowhere)
