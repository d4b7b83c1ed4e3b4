"""One of our own engines as a `Replica`: text in, exact token ids over the socket, text and exact
usage out.

Above: `inference` and the router. Below: the engine's client, tokenizer, chat template and
detokenizer. Knows no tenant, no price and no wire format. Stop strings are found here: the
engine knows ids only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Container
from contextlib import aclosing

import msgspec

from billing.cache_contracts import DEFAULT_CONTRACT, TTL_S, ContractName
from engine.chat_template import ChatTemplate
from engine.client import Engine
from engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
)
from engine.output_parser import OutputFormat
from engine.protocol import Breakpoint, EngineRequest, ReplicaStatus, SamplingParams
from engine.tokenizer import Tokenizer
from gateway.fleet.choice_text import GenerationText
from gateway.fleet.errors import (
    BadField,
    ContextTooLong,
    FleetError,
    NoPlace,
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaUnavailable,
)
from gateway.fleet.kept_prefixes import (
    AskedToKeep,
    OnAsked,
    Prefixes,
    num_renders,
    under,
    unheard,
)
from gateway.fleet.model_format import ModelFormat, Rendered
from gateway.fleet.prefix_memory import PrefixMemory
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import ANYBODYS, PreparedRequest, ReplicaEvent, ReplicaHealth
from gateway.lanes import Turn, first_token_s
from gateway.wire.request import ChatPrompt, GenerateRequest, OutputForm, bounded_to

RESTART_S = 1.0
"""What a client is told to wait for an engine that is away: its supervisor is starting it again."""

CHARS_PER_MESSAGE = 128
"""What a message costs beyond its text, in characters' worth of tokenizing: the template's work
and its delimiters take some 50 microseconds."""

THEIR_NAMES = {"prompt_token_ids": "messages", "logprobs": "top_logprobs"}
"""The engine's fields that a client knows under another name."""


class Job(msgspec.Struct, frozen=True):
    """`PreparedRequest.payload`."""

    rendered: Rendered
    sampling: SamplingParams


class EngineReplica:
    """`client` is connected, or connecting, by whoever made it; `close` closes it, and may do so
    once for each of several replicas that share it. `adapter`: the engine's name of a LoRA adapter;
    empty: the model as it is. `on_asked` hears what an attempt asked the engine to keep.
    `output_format`: None where the template says it."""

    def __init__(
        self,
        *,
        name: str,
        client: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        threads: PrepareThreads,
        weight: int = 1,
        adapter: str = "",
        cache_contract: ContractName = DEFAULT_CONTRACT,
        on_asked: OnAsked = unheard,
        output_format: OutputFormat | None = None,
    ) -> None:
        self.name = name
        self.weight = weight
        self._adapter = adapter
        self._cache_contract = cache_contract
        self._on_asked = on_asked
        self._sent = PrefixMemory()
        self._client = client
        self._tokenizer = tokenizer
        tokenizer.fewest_tokens(0)  # the vocabulary is looked through now, not at a request
        self._format = ModelFormat(tokenizer, template, output_format)
        self._threads = threads

    async def start(self) -> None:
        """The client connects by itself, for as long as it takes."""

    async def close(self) -> None:
        await self._client.close()

    def health(self) -> ReplicaHealth:
        if not self._client.connected:
            return ReplicaHealth(name=self.name, available=False)
        status = self._client.status
        return ReplicaHealth(
            name=self.name,
            available=True,
            num_running=status.num_running,
            num_waiting=status.num_waiting,
        )

    async def abort(self, attempt_id: str) -> None:
        await self._client.abort(attempt_id)

    async def rest(self, attempt_id: str, *, resting: bool) -> None:
        await (self._client.pause(attempt_id) if resting else self._client.resume(attempt_id))

    async def acknowledge(self, attempt_id: str) -> None:
        await self._client.acknowledge(attempt_id)

    async def prepare(self, request: GenerateRequest, turn: Turn = ANYBODYS) -> PreparedRequest:
        prompt = request.prompt
        assert prompt is not None, "a request for an upstream"
        status = self._status()
        self._refuse_the_hopeless(prompt, status.max_model_len)
        self._format.check(prompt)
        block_size = status.block_size if self._cache_contract == "explicit" else None
        rendered = await self._threads.run(
            turn, prompt_size(prompt), self._format.render, prompt, block_size
        )
        check_token_ids(prompt, status.vocab_size)
        return to_prepared(request, prompt, rendered, status.max_model_len)

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        request = bounded_to(prepared.request, max_output_tokens)
        assert request.prompt is not None
        assert isinstance(prepared.payload, Job)
        rendered = prepared.payload.rendered
        return to_prepared(request, request.prompt, rendered, self._status().max_model_len)

    def predicted_ttft_s(self, prepared: PreparedRequest, turn: Turn) -> float | None:
        """By what waits in its lane and what of its own prompt is not cached."""
        if not self._client.connected:
            return None
        lane = self._client.status.lanes.get(turn.lane)
        if lane is None or not lane.prefill_tokens_per_s:
            return None
        assert isinstance(prepared.payload, Job)
        token_ids = prepared.payload.rendered.token_ids
        left = len(token_ids) - self._sent.cached_tokens(turn.tenant, token_ids)
        return first_token_s(lane, left)

    async def stream(
        self, prepared: PreparedRequest, *, attempt_id: str, cache_salt: str, turn: Turn = ANYBODYS
    ) -> AsyncGenerator[ReplicaEvent, None]:
        request = prepared.request
        assert request.prompt is not None
        assert isinstance(prepared.payload, Job)
        rendered = prepared.payload.rendered
        breakpoints = rendered.kept.breakpoints
        self._sent.sent(turn.tenant, rendered.token_ids)
        self._ask_to_keep(rendered.kept, attempt_id, cache_salt, turn.tenant)
        generation = GenerationText(
            request.prompt,
            request.n,
            self._tokenizer,
            self._cache_contract,
            breakpoints=breakpoints,
            ends=self._ends(request.prompt, rendered),
            parsing=self._format.parsing(request.prompt, rendered),
        )
        outputs = self._client.generate(
            EngineRequest(
                request_id=attempt_id,
                prompt_token_ids=rendered.token_ids,
                sampling=prepared.payload.sampling,
                n=request.n,
                cache_salt=cache_salt,
                adapter=self._adapter,
                lane=turn.lane,
                tenant=turn.tenant,
                weight=turn.weight,
                deadline_s=turn.deadline_s,
                breakpoints=tuple(
                    Breakpoint(each.position, TTL_S[each.ttl]) for each in breakpoints
                ),
            )
        )
        begun = False
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finish_reason == "error":
                        raise EngineUnavailable(f"the step failed: {output.error_code}")
                    was_over = generation.over
                    event = generation.read(output)
                    begun = True
                    yield event
                    if generation.over and not was_over and not event.finished:
                        await self._client.abort(attempt_id)
        except (InvalidRequest, EngineOverloaded, DeadlineExceeded) as error:
            raise self._to_refusal(error, rendered.form) from error
        except EngineUnavailable as error:
            if not generation.over:
                raise self._to_loss(error, begun) from error
            # The client has its whole answer; only the waste is not known to the last token.
            yield generation.last()

    def _refuse_the_hopeless(self, prompt: ChatPrompt, max_model_len: int) -> None:
        """Megabytes that cannot fit are refused before they cost seconds of tokenizing."""
        num_chars = sum(len(message["content"].strip()) for message in prompt.messages)
        fewest = self._tokenizer.fewest_tokens(num_chars)
        if fewest > max_model_len:
            raise ContextTooLong(
                f"This model's maximum context length is {max_model_len} tokens. However, your "
                f"messages have at least {fewest}. Please reduce the length of the messages.",
                param="messages",
            )

    def _status(self) -> ReplicaStatus:
        try:
            return self._client.status
        except EngineUnavailable as error:
            raise ReplicaUnavailable(error.message, retry_after_s=RESTART_S) from error

    def _ask_to_keep(self, kept: Prefixes, attempt_id: str, cache_salt: str, tenant: str) -> None:
        if kept.breakpoints and self._client.connected:
            asked = AskedToKeep(
                org_id=tenant,
                model=self.name,
                engine_id=self._client.status.engine_id,
                asked_at=time.time(),
                breakpoints=kept.breakpoints,
                prefixes=under(cache_salt, kept.digests),
            )
            self._on_asked(attempt_id, asked)

    def _ends(self, prompt: ChatPrompt, rendered: Rendered) -> Container[int] | None:
        """An output that is kept to a form may be complete without any of these."""
        if rendered.form is None:
            return None
        return {*self._status().eos_token_ids, *prompt.stop_token_ids}

    def _to_refusal(
        self, error: InvalidRequest | EngineOverloaded | DeadlineExceeded, form: OutputForm | None
    ) -> FleetError:
        match error:
            case DeadlineExceeded():
                return NoPlace(f"{self.name}: {error.message}")
            case EngineOverloaded():
                return ReplicaOverloaded(f"{self.name}: {error.message}")
            case ContextLengthExceeded():
                return ContextTooLong("The messages are too long for this model.", param="messages")
            case InvalidRequest(param="adapter"):  # no customer's mistake, but the operator's
                return ReplicaUnavailable(f"{self.name}: {error.message}", retry_after_s=RESTART_S)
            case InvalidRequest():
                param = THEIR_NAMES.get(error.param or "", error.param)
                if param == "grammar" and form is not None:
                    param = form.param
                return BadField(f"Invalid value for '{param}': {error.message}.", param=param)

    def _to_loss(self, error: EngineUnavailable, begun: bool) -> FleetError:
        if begun:
            return ReplicaLost(f"{self.name}: {error.message}")
        return ReplicaUnavailable(f"{self.name}: {error.message}", retry_after_s=RESTART_S)


def prompt_size(prompt: ChatPrompt) -> int:
    """What rendering and tokenizing cost, in characters of text."""
    others = prompt.num_other_chars + (0 if prompt.tools is None else prompt.tools.num_chars)
    others += num_renders(prompt) * CHARS_PER_MESSAGE * len(prompt.messages)
    return others + sum(
        CHARS_PER_MESSAGE + len(message["content"]) + len(message.get("name", ""))
        for message in prompt.messages
    )


def to_prepared(
    request: GenerateRequest, prompt: ChatPrompt, rendered: Rendered, max_model_len: int
) -> PreparedRequest:
    """Raises ContextTooLong, or BadField for `min_tokens`."""
    num_prompt_tokens = len(rendered.token_ids)
    max_tokens = output_bound(prompt, num_prompt_tokens, max_model_len)
    return PreparedRequest(
        request=request,
        input_tokens=num_prompt_tokens,
        input_estimated=False,
        max_output_tokens=max_tokens * request.n,
        max_tokens_given=prompt.max_tokens is not None,
        payload=Job(rendered, to_sampling(prompt, max_tokens, rendered.form)),
    )


def output_bound(prompt: ChatPrompt, num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that one choice may have. Raises ContextTooLong, or BadField for `min_tokens`."""
    limit = f"This model's maximum context length is {max_model_len} tokens."
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"{limit} However, your messages resulted in {num_prompt_tokens} tokens. "
            "Please reduce the length of the messages.",
            param="messages",
        )
    max_tokens = room if prompt.max_tokens is None else prompt.max_tokens
    if max_tokens > room:
        raise ContextTooLong(
            f"{limit} However, you requested {num_prompt_tokens + max_tokens} tokens "
            f"({num_prompt_tokens} in the messages, {max_tokens} in the completion). "
            "Please reduce the length of the messages or completion.",
            param="messages",
        )
    if prompt.min_tokens > max_tokens:
        raise BadField(
            f"Invalid value for 'min_tokens': more than the {max_tokens} tokens that the "
            "completion may have.",
            param="min_tokens",
        )
    return max_tokens


def check_token_ids(prompt: ChatPrompt, vocab_size: int) -> None:
    """Raises BadField."""
    for param, ids in (
        ("logit_bias", prompt.logit_bias),
        ("stop_token_ids", prompt.stop_token_ids),
    ):
        unknown = next((i for i in ids if i >= vocab_size), None)
        if unknown is not None:
            raise BadField(
                f"Invalid value for '{param}': {unknown} is no token id of this model, which has "
                f"{vocab_size}.",
                param=param,
            )


def to_sampling(prompt: ChatPrompt, max_tokens: int, form: OutputForm | None) -> SamplingParams:
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
        grammar=None if form is None else form.grammar,
    )
