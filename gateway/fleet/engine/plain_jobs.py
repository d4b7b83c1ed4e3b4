"""Turns prompts without a conversation to token ids as they are, for completions and for
embeddings.

Knows no queue. Several prompts are one request of the engine, which counts them as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from billing.cache_contracts import ContractName
from engine.errors import InvalidRequest
from engine.prefix_digests import span_keys
from engine.protocol import EngineOutput, EngineRequest, ReplicaStatus
from engine.text.tokenizer import Tokenizer
from gateway.fleet.engine.completion_text import CompletionText
from gateway.fleet.engine.job import EngineJob, check_token_ids, ends_of, to_sampling
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import PreparedRequest
from gateway.generate_request import (
    CompletionPrompt,
    EmbeddingPrompt,
    GenerateRequest,
    PlainPrompt,
    ToTokenize,
    WrittenIds,
    out_of_vocabulary,
)
from gateway.generation_events import EmbeddingVector, MeteredUsage, ReplicaEvent
from gateway.lanes import Priority
from gateway.request_errors import BadField, ContextTooLong

MAX_TOKENS_TOGETHER = 300_000
"""The bound on all prompts of an embeddings request together (as OpenAI has it); one prompt alone
may fill the context."""
CHARS_PER_PROMPT = 64
"""The tokenizing cost of a prompt beyond its text, in characters."""
TOKENS_PER_CHAR = 4
"""So many ids are read in the time of tokenizing one character."""
CHARS_PER_TOKEN = 4
"""The cost of detokenizing one token, in characters of tokenizing."""
MAX_DETOKENIZED = 100_000
"""The bound on tokens to detokenize, where the model's context is none that long."""
COMPLETION_NAMES: Mapping[str, str] = {"prompt_token_ids": "prompt", "more_prompts": "prompt"}
EMBEDDING_NAMES: Mapping[str, str] = {"prompt_token_ids": "input", "more_prompts": "input"}


class PlainJobs:
    """The prompts of one model."""

    def __init__(
        self, tokenizer: Tokenizer, threads: PrepareThreads, contract: ContractName
    ) -> None:
        """`contract`: by which what the engine reused is counted."""
        self._tokenizer = tokenizer
        self._threads = threads
        self._contract = contract

    async def to_complete(
        self,
        request: GenerateRequest,
        prompt: CompletionPrompt,
        status: ReplicaStatus,
        priority: Priority,
        namespace: str,
    ) -> PreparedRequest:
        """`namespace`: within which it may find its prefix cached. Raises: BadField,
        ContextTooLong, NoSlot."""
        asked = prompt.max_tokens
        assert asked is not None, "who names none is given the default"
        check_token_ids(prompt, status.vocab_size)
        at_least = max(asked, 1)  # an engine says one token in any case
        found = await self.encoded(prompt.prompts, "prompt", status, priority, room=at_least)
        sampling, names = to_sampling(prompt, at_least, prompt.form), COMPLETION_NAMES
        if prompt.echo and prompt.logprobs is not None:
            most = max(prompt.logprobs, prompt.prompt_logprobs or 0)
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=most)
            if most != prompt.prompt_logprobs:
                names = {**COMPLETION_NAMES, "prompt_logprobs": "logprobs"}
        return PreparedRequest(
            request=request,
            input_tokens=sum(map(len, found)),
            max_output_tokens=asked * request.n * len(found),
            max_tokens_given=True,
            payload=EngineJob(
                request=EngineRequest(
                    request_id="",
                    prompt_token_ids=found[0],
                    more_prompts=tuple(found[1:]),
                    sampling=sampling,
                    n=request.n,
                    priority=prompt.priority,
                ),
                reader=partial(
                    CompletionText,
                    prompt,
                    found,
                    request.n,
                    self._tokenizer,
                    self._contract,
                    ends_of(prompt, prompt.form, status),
                ),
                param_names=names,
                form=prompt.form,
                span_keys=await self._threads.run(
                    priority, len(found[0]), span_keys, namespace, found[0], status.block_size
                ),
            ),
        )

    async def to_embed(
        self,
        request: GenerateRequest,
        prompt: EmbeddingPrompt,
        status: ReplicaStatus,
        priority: Priority,
    ) -> PreparedRequest:
        """Raises: BadField, ContextTooLong, NoSlot."""
        check_dimensions(prompt.dimensions, status.embedding_size)
        found = await self.encoded(prompt.prompts, "input", status, priority, room=0)
        num_tokens = sum(map(len, found))
        return PreparedRequest(
            request=request,
            input_tokens=num_tokens,
            max_output_tokens=0,
            max_tokens_given=True,
            payload=EngineJob(
                request=EngineRequest(
                    request_id="",
                    prompt_token_ids=found[0],
                    more_prompts=tuple(found[1:]),
                    embed=True,
                    dimensions=prompt.dimensions,
                ),
                reader=partial(PromptVectors, len(found)),
                param_names=EMBEDDING_NAMES,
            ),
        )

    async def tokenized(
        self, asked: ToTokenize, status: ReplicaStatus, priority: Priority
    ) -> list[int]:
        """Raises: BadField, ContextTooLong, NoSlot."""
        text, most, special = asked.text, status.max_model_len, asked.add_special_tokens
        assert text is not None, "a conversation"
        self._refuse_the_hopeless(text, "prompt", most)
        return await self._threads.run(
            priority, len(text), self._ids_of, text, "prompt", most, special
        )

    async def detokenized(
        self, written: WrittenIds, status: ReplicaStatus, priority: Priority
    ) -> str:
        """Raises: BadField, ContextTooLong, NoSlot."""
        check_length(len(written), 0, written.param, max(status.max_model_len, MAX_DETOKENIZED))

        def decode() -> str:
            return self._tokenizer.decode(written.read(status.vocab_size).tolist(), False)

        return await self._threads.run(priority, CHARS_PER_TOKEN * len(written), decode)

    async def encoded(
        self,
        prompts: Sequence[PlainPrompt],
        field: str,
        status: ReplicaStatus,
        priority: Priority,
        *,
        room: int,
    ) -> list[list[int]]:
        """Return the token ids of each; each leaves `room` in the context.

        Raises: BadField, ContextTooLong, NoSlot.
        """
        for prompt in prompts:
            self._refuse_the_hopeless(prompt, field, status.max_model_len)
        size = sum(map(work_of, prompts))
        return await self._threads.run(priority, size, self._encode, prompts, field, status, room)

    def _encode(
        self, prompts: Sequence[PlainPrompt], field: str, status: ReplicaStatus, room: int
    ) -> list[list[int]]:
        """Stop at the first prompt that is too long, or with which all are."""
        found: list[list[int]] = []
        total = 0
        for index, each in enumerate(prompts):
            if isinstance(each, str):
                param = place(field, index, len(prompts))
                found.append(self._ids_of(each, param, status.max_model_len, True))
                check_ids(found[-1], param, status.vocab_size)
            else:
                found.append(each.read(status.vocab_size).tolist())
            check_length(len(found[-1]), room, field, status.max_model_len)
            total += len(found[-1])
            if len(prompts) > 1 and total > MAX_TOKENS_TOGETHER:
                raise BadField(
                    f"Invalid value for '{field}': {total} tokens in {len(found)} of"
                    f" {len(prompts)} prompts, of which several may have"
                    f" {MAX_TOKENS_TOGETHER} together.",
                    param=field,
                )
        return found

    def _ids_of(
        self, text: str, param: str, max_model_len: int, add_special_tokens: bool
    ) -> list[int]:
        if len(text) > max_model_len:
            fewest = self._tokenizer.fewest_tokens_in(text)
            if fewest > max_model_len:
                raise too_long(f"at least {fewest} tokens", param, max_model_len)
        try:
            return self._tokenizer.encode(text, add_special_tokens)
        except InvalidRequest as error:
            message = f"Invalid value for '{param}': {error.message}."
            raise BadField(message, param=param) from error

    def _refuse_the_hopeless(self, prompt: PlainPrompt, field: str, max_model_len: int) -> None:
        """Refuse megabytes that cannot fit, before they cost seconds of tokenizing."""
        fewest = len(prompt)
        if isinstance(prompt, str):
            fewest = self._tokenizer.fewest_tokens(len(prompt.strip()))
        if fewest > max_model_len:
            raise too_long(f"at least {fewest} tokens", field, max_model_len)


class PromptVectors:
    """The embeddings of one attempt."""

    def __init__(self, num_prompts: int) -> None:
        self._num_left = num_prompts
        self.usage: MeteredUsage | None = None

    @property
    def over(self) -> bool:
        return self._num_left == 0

    def read(self, output: EngineOutput) -> ReplicaEvent:
        items: tuple[EmbeddingVector, ...] = ()
        if output.embedding is not None:
            self._num_left -= 1
            items = (EmbeddingVector(output.index, output.embedding),)
        if output.usage.prefilled:
            self.usage = MeteredUsage(embedding_input=output.usage.prompt_tokens)
        return ReplicaEvent(
            items=items,
            usage=self.usage,
            finished=output.finished,
            queue_time_s=output.usage.queue_time_s,
        )

    def last(self) -> ReplicaEvent:
        return ReplicaEvent(usage=self.usage, finished=True)


def work_of(prompt: PlainPrompt) -> int:
    """Return the cost of a prompt's ids, in characters of tokenizing."""
    if isinstance(prompt, str):
        return CHARS_PER_PROMPT + len(prompt)
    return len(prompt) // TOKENS_PER_CHAR


def place(field: str, index: int, num_prompts: int) -> str:
    return field if num_prompts == 1 else f"{field}[{index}]"


def check_dimensions(dimensions: int | None, most: int) -> None:
    """Raises BadField."""
    if dimensions is not None and dimensions > most:
        raise BadField(
            f"Invalid value for 'dimensions': this model's embeddings have {most}.",
            param="dimensions",
        )


def check_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Raises BadField."""
    if not ids:
        raise BadField(f"Invalid value for '{param}': it has no tokens.", param=param)
    if max(ids) >= vocab_size:
        raise out_of_vocabulary(max(ids), param, vocab_size)


def check_length(num_tokens: int, room: int, field: str, max_model_len: int) -> None:
    """Raises ContextTooLong."""
    if num_tokens + room > max_model_len:
        behind = f" and {room} for the completion" if room else ""
        raise too_long(f"{num_tokens} tokens{behind}", field, max_model_len)


def too_long(asked: str, field: str, max_model_len: int) -> ContextTooLong:
    return ContextTooLong(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested"
        f" {asked}. Please reduce the length of the prompt.",
        param=field,
    )
