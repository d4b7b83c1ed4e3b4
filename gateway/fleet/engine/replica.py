"""Makes one of our own engines a `Replica`: text in, exact token ids over the socket, text and
exact usage out.

Knows no tenant, no price and no wire format. Stop strings are found here: engines know ids.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal

import msgspec

from billing.cache_contracts import DEFAULT_CONTRACT, TTL_S, ContractName
from engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineOverloaded,
    EngineStepFailed,
    EngineUnavailable,
    InvalidRequest,
    TakenBack,
)
from engine.prefix_digests import SPAN_BLOCKS, span_keys
from engine.protocol import (
    Breakpoint,
    EngineOutput,
    EngineRequest,
    ReplicaStatus,
    Usage,
    cache_namespace,
)
from engine.text.chat_template import ChatTemplate
from engine.text.output_parser.output_format import OutputFormat
from engine.text.tokenizer import Tokenizer
from engine.transport.client import Engine
from foundation.request_context import LOG_CONTEXT
from gateway.fleet.drain_marks import NEVER_DRAINED, DrainMark
from gateway.fleet.engine.cache_outcome import Circumstances, outcome_of, prefix_digest
from gateway.fleet.engine.cached_prefixes import cached_tokens
from gateway.fleet.engine.choice_text import GenerationText
from gateway.fleet.engine.folder_options import NO_OPTIONS, FolderOptions
from gateway.fleet.engine.job import (
    EngineJob,
    FirstTokenSaid,
    Reader,
    ResumableReader,
    Transcript,
    check_token_ids,
    ends_of,
    failure_of,
    first_token_of,
    to_sampling,
    up_to_the_first,
    within_a_loan,
)
from gateway.fleet.engine.kept_prefixes import (
    NO_PREFIXES,
    KeepRequest,
    OnAsked,
    Prefixes,
    num_renders,
    under,
    unheard,
)
from gateway.fleet.engine.model_format import ModelFormat, RenderedPrompt, refuse_more
from gateway.fleet.engine.plain_jobs import PlainJobs
from gateway.fleet.engine.prefix_memory import PrefixMemory
from gateway.fleet.engine_view import EngineView
from gateway.fleet.errors import (
    FleetError,
    NoSlot,
    PromptComputed,
    ReplicaDied,
    ReplicaLost,
    ReplicaOverloaded,
    ReplicaStepFailed,
    ReplicaUnavailable,
    RequestTakenBack,
)
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.predicted_time import Prompt
from gateway.fleet.prepare_threads import INLINE_CHARS, PrepareThreads
from gateway.fleet.replica import (
    ANYBODYS,
    EventTaker,
    InTokens,
    MessagePlace,
    PreparedRequest,
    ReplicaHealth,
    ViewedReplica,
)
from gateway.fleet.sent_work import SentWork
from gateway.generate_request import ChatPrompt, GenerateRequest, ToTokenize, WrittenIds, bounded_to
from gateway.generation_events import CachedTokens, CacheOutcome, ReplicaEvent
from gateway.lanes import Priority
from gateway.request_errors import BadField, ContextTooLong, UnsupportedField

RESTART_S = 1.0
"""The `Retry-After` for an engine that is down: its supervisor is restarting it."""

CHARS_PER_MESSAGE = 128
"""The cost of a message beyond its text, in characters: its template takes 50 microseconds."""

SEEDS = random.Random()

CHAT_NAMES = {"prompt_token_ids": "messages", "logprobs": "top_logprobs"}
"""The engine's fields that a client knows under another name."""

TakeOutput = Callable[[EngineOutput], Literal["left", "taken", "enough"]]
"""Takes an output at once, as `Engine.generate` is given it."""


class EngineReplica:
    """A model of one of our own engines, as a replica. `client` is connected, or connecting, by
    whoever made it; `close` closes it, and may do so once for each of several replicas that share
    it. `model`: its name to customers, where the replica has another. `adapter`: the engine's name
    of a LoRA adapter; empty: the model as it is. `on_asked` hears what an attempt asked the engine
    to keep. `template`: None: it takes no conversations. `output_format`: None where the template
    says it. `options`: of the model's folder."""

    def __init__(
        self,
        *,
        name: str,
        client: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        threads: PrepareThreads,
        weight: int = 1,
        model: str | None = None,
        adapter: str = "",
        cache_contract: ContractName = DEFAULT_CONTRACT,
        on_asked: OnAsked = unheard,
        output_format: OutputFormat | None = None,
        options: FolderOptions = NO_OPTIONS,
        index: KvIndex | None = None,
        drain_mark: DrainMark = NEVER_DRAINED,
        view: EngineView | None = None,
        joins: bool = False,
        is_prefill: bool = False,
        cell: str | None = None,
        round_trip: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`index`: None: nobody says which of several engines has what cached. `drain_mark`:
        tells whether it gets nothing new now. `view`: None: nobody hears what the engine says.
        `joins`: its engine comes by itself, if one does. `is_prefill`: it computes prompts for
        others of its model. `cell`: the other cell that lends its engine; `round_trip`: returns the
        seconds to that and back."""
        self.name, self.is_prefill = name, is_prefill
        self.cell, self.round_trip = cell, round_trip
        self._model = model or name
        self._drain_mark, self._joins = drain_mark, joins
        self._options = options
        self.weight = weight
        self._adapter = adapter
        self._cache_contract = cache_contract
        self._on_asked = on_asked
        self.sent, self.index = PrefixMemory(), index
        self.view = view or EngineView(SentWork())
        self._client = client
        self._tokenizer = tokenizer
        tokenizer.fewest_tokens_in("")  # the vocabulary is looked through now, not at a request
        self._format: ModelFormat | None = None
        if template is not None:
            self._format = ModelFormat(tokenizer, template, output_format, options)
        self._plain = PlainJobs(tokenizer, threads, cache_contract)
        self._threads = threads

    async def start(self) -> None:
        """Do nothing: the client connects by itself, for as long as it takes."""

    async def close(self) -> None:
        await self._client.close()

    def health(self) -> ReplicaHealth:
        status, mark = self.status, self._drain_mark
        return ReplicaHealth(
            name=self.name,
            available=status is not None,
            num_running=0 if status is None else status.num_running,
            num_waiting=0 if status is None else status.num_waiting,
            is_drained=mark.is_set,
            drain_changed_at=mark.changed_at,
            is_vacant=status is None and self._joins,
        )

    @property
    def is_available(self) -> bool:
        return self._client.connected

    @property
    def is_drained(self) -> bool:
        return self._drain_mark.is_set

    @property
    def status(self) -> ReplicaStatus | None:
        """Return what its engine said last; None: it is away."""
        return self._client.status if self._client.connected else None

    @property
    def max_model_len(self) -> int | None:
        return self._client.status.max_model_len if self._client.connected else None

    @property
    def takes_chats(self) -> bool:
        return self._format is not None

    @property
    def takes_tools(self) -> bool:
        return self._format is not None and self._format.takes_tools

    async def abort(self, attempt_id: str) -> None:
        await self._client.abort(attempt_id)

    async def set_paused(self, attempt_id: str, *, paused: bool) -> None:
        await (self._client.pause(attempt_id) if paused else self._client.resume(attempt_id))

    @property
    def is_silent(self) -> bool:
        return self._client.is_silent

    @property
    def model_identity(self) -> str | None:
        """Return what tells its model from others; None: its engine was never heard of."""
        try:
            return self._client.status.identities.get(self._adapter, "")
        except EngineUnavailable:
            return None

    def may_go_on(self, rest: PreparedRequest) -> bool:
        job = rest.payload
        if not isinstance(job, EngineJob):
            return False
        return job.begun_by is None or self.model_identity in (None, job.begun_by)

    def may_repeat(self, prepared: PreparedRequest) -> bool:
        job = prepared.payload
        return isinstance(job, EngineJob) and not job.prefixes.breakpoints

    def take_back(self, attempt_id: str) -> None:
        self._client.take_back(attempt_id)

    def leave(self, attempt_id: str) -> None:
        self._client.leave(attempt_id)

    async def wait_until_back(self, timeout_s: float) -> bool:
        try:
            await self._client.wait_connected(timeout_s)
        except EngineUnavailable:
            return False
        return True

    async def acknowledge(self, attempt_id: str) -> None:
        await self._client.acknowledge(attempt_id)

    async def prepare(
        self, request: GenerateRequest, priority: Priority = ANYBODYS, cache_salt: str = ""
    ) -> PreparedRequest:
        status, namespace = self._status(), cache_namespace(cache_salt, self._adapter)
        if request.embedding is not None:
            return await self._plain.to_embed(request, request.embedding, status, priority)
        if not status.generates:
            raise makes_embeddings_only(request.model)
        if request.completion is not None:
            return await self._plain.to_complete(
                request, request.completion, status, priority, namespace
            )
        return await self._prepare_chat(request, status, priority, namespace)

    async def tokenize(self, asked: ToTokenize, priority: Priority) -> InTokens:
        status = self._status()
        if asked.chat is None:
            token_ids = await self._plain.tokenized(asked, status, priority)
        else:
            form, most = self._format_of_chats(), status.max_model_len
            self._refuse_the_hopeless(asked.chat, most)
            form.check(asked.chat)
            size = prompt_size(asked.chat)
            token_ids = await self._threads.run(
                priority, size, form.token_ids, asked.chat, asked, most
            )
        texts = self._tokenizer.pieces(token_ids) if asked.with_texts else None
        return InTokens(token_ids=token_ids, texts=texts, max_model_len=status.max_model_len)

    async def detokenize(self, token_ids: WrittenIds, priority: Priority) -> str:
        return await self._plain.detokenized(token_ids, self._status(), priority)

    def describe_tokenizer(self) -> dict[str, Any]:
        found = self._tokenizer.describe()
        return found if self._format is None else {**found, "chat_template": self._format.source}

    async def _prepare_chat(
        self, request: GenerateRequest, status: ReplicaStatus, priority: Priority, namespace: str
    ) -> PreparedRequest:
        prompt = request.prompt
        assert prompt is not None, "a request for an upstream"
        form = self._format_of_chats()
        self._refuse_the_hopeless(prompt, status.max_model_len)
        form.check(prompt)
        rendered = await self._threads.run(
            priority, prompt_size(prompt), self._render, form, prompt, status, namespace
        )
        check_token_ids(prompt, status.vocab_size)
        return self._to_prepared(request, prompt, rendered, status)

    def _render(
        self, form: ModelFormat, prompt: ChatPrompt, status: ReplicaStatus, namespace: str
    ) -> RenderedPrompt:
        """Raises BadField, ContextTooLong."""
        size = status.block_size
        keeps = self._cache_contract == "explicit"
        rendered = form.render(prompt, status.max_model_len, size if keeps else None)
        keys = span_keys(namespace, rendered.token_ids, size)
        return msgspec.structs.replace(rendered, span_keys=keys)

    async def count(self, request: GenerateRequest, priority: Priority = ANYBODYS) -> int:
        prompt = request.prompt
        assert prompt is not None, "a request for an upstream"
        form, most = self._format_of_chats(), self._status().max_model_len
        self._refuse_the_hopeless(prompt, most)
        form.check(prompt)
        size = prompt_size(prompt)
        return len((await self._threads.run(priority, size, form.render, prompt, most)).token_ids)

    def bounded(self, prepared: PreparedRequest, max_output_tokens: int) -> PreparedRequest:
        request = bounded_to(prepared.request, max_output_tokens)
        assert isinstance(prepared.payload, EngineJob)
        rendered = prepared.payload.rendered
        assert request.prompt is not None and rendered is not None, "a conversation names no bound"
        return self._to_prepared(request, request.prompt, rendered, self._status())

    def predicted_ttft_s(self, prepared: PreparedRequest, priority: Priority) -> float | None:
        """Predict by what waits there and what of its own prompt is not cached."""
        if not self._client.connected or not self.view.price.is_learnt:
            return None
        prompt = Prompt.of(prepared.input_tokens, cached_tokens(prepared, [self])[0])
        return self.view.seconds_to_first_token(prompt, priority.lane)

    def cached_tokens(
        self, prepared: PreparedRequest, replicas: Sequence[ViewedReplica]
    ) -> Sequence[int]:
        engines = [each for each in replicas if isinstance(each, EngineReplica)]
        assert len(engines) == len(replicas), "a model's replicas are of one kind"
        return cached_tokens(prepared, engines)

    def may_split(self, prepared: PreparedRequest) -> bool:
        job = prepared.payload
        return isinstance(job, EngineJob) and job.may_split

    async def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority = ANYBODYS,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        prepared = prepared if self.cell is None else within_a_loan(prepared)
        job = prepared.payload
        assert isinstance(job, EngineJob)
        here = self._circumstances(job, prepared.request, priority)
        self._ask_to_keep(job.prefixes, attempt_id, cache_salt, priority.tenant)
        generation = job.reader() if job.reader is not None else self._reader(prepared.request, job)
        if not self.may_go_on(prepared):
            raise ReplicaUnavailable(f"{self.name}: it runs another model now")
        identity = self.model_identity or ""
        asked = self._to_asked(prepared, attempt_id, cache_salt, priority)
        transcript = Transcript(asked)
        begun, had_it = False, self._client.connected

        def take(output: EngineOutput) -> Literal["left", "taken", "enough"]:
            nonlocal begun
            ends = output.finish_reason is not None or output.finished
            if ends or taker is None or generation.over or not taker.is_ready:
                return "left"
            begun = True
            transcript.add(output)
            taker.take(generation.read(output))
            return "enough" if generation.over else "taken"

        outputs = self._outputs(prepared, asked, take)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if output.finish_reason == "error":
                        raise failure_of(output)
                    was_over = generation.over
                    transcript.add(output)
                    event = generation.read(output)
                    begun = True
                    if event.finished and not job.request.embed and job.begun_by is None:
                        event = with_outcome(event, here, job, output.usage, cache_salt)
                    yield event
                    if generation.over and not was_over and not event.finished:
                        await self._client.abort(attempt_id)
        except (InvalidRequest, EngineOverloaded, DeadlineExceeded, TakenBack) as error:
            raise self._to_refusal(error, job) from error
        except (EngineUnavailable, EngineStepFailed) as error:
            if not generation.over and begun:
                raise self._to_lost(
                    error, prepared, asked, generation, transcript, identity
                ) from error
            if not generation.over:
                raise self._to_unavailable(error, had_it) from error
            # The client has its whole answer; only the waste is not known to the last token.
            yield generation.last()

    def _outputs(
        self, prepared: PreparedRequest, asked: EngineRequest, take: TakeOutput
    ) -> AsyncGenerator[EngineOutput, None]:
        """Ask the engine for all, or for the first token alone."""
        at_once = prepared.request.continuous_usage
        if not prepared.prefill_only:
            return self._client.generate(asked, take, at_once=at_once)
        return up_to_the_first(self._client.generate(first_token_of(asked), take, at_once=at_once))

    def _to_asked(
        self, prepared: PreparedRequest, attempt_id: str, cache_salt: str, priority: Priority
    ) -> EngineRequest:
        """Return the request as it is sent. Its seed is named here, so that whoever goes on with it
        draws the same."""
        request: EngineRequest = prepared.payload.request
        context, drawn_seed = LOG_CONTEXT.get(), request.drawn_seed
        if drawn_seed is None and request.sampling.seed is None and not request.embed:
            drawn_seed = SEEDS.getrandbits(64)
        return msgspec.structs.replace(
            request,
            request_id=attempt_id,
            log_id="" if context is None else context.request,
            drawn_seed=drawn_seed,
            cache_salt=cache_salt,
            adapter=self._adapter,
            lane=priority.lane,
            tenant=priority.tenant,
            weight=priority.weight,
            deadline_s=priority.deadline_s,
            fetch=prepared.fetch,
        )

    async def locate(
        self, prepared: PreparedRequest, position: int, priority: Priority
    ) -> MessagePlace | None:
        job, prompt = prepared.payload, prepared.request.prompt
        assert isinstance(job, EngineJob)
        if prompt is None:
            return None
        behind_all = msgspec.structs.replace(priority, lane="batch", deadline_s=None)
        renders = 2 + len(prompt.messages).bit_length()
        size = max(renders * prompt_size(prompt), INLINE_CHARS + 1)  # never on the event loop
        place_of, token_ids = self._format_of_chats().place_of, job.request.prompt_token_ids
        return await self._threads.run(behind_all, size, place_of, prompt, token_ids, position)

    def _format_of_chats(self) -> ModelFormat:
        """Raises UnsupportedField."""
        if self._format is None:
            raise UnsupportedField(
                f"The model `{self._model}` has no chat template: it completes texts alone.",
                param="model",
            )
        return self._format

    def _refuse_the_hopeless(self, prompt: ChatPrompt, max_model_len: int) -> None:
        """Refuse megabytes that cannot fit, before they cost seconds of tokenizing."""
        num_chars = sum(len(message["content"].strip()) for message in prompt.messages)
        refuse_more(self._tokenizer.fewest_tokens(num_chars), max_model_len)

    def _status(self) -> ReplicaStatus:
        try:
            return self._client.status
        except EngineUnavailable as error:
            raise ReplicaUnavailable(error.message, retry_after_s=RESTART_S) from error

    def _circumstances(
        self, job: EngineJob, request: GenerateRequest, priority: Priority
    ) -> Circumstances:
        """Return the circumstances of the job, and remember that it was sent."""
        status = self.status
        engine_id = "" if status is None else status.engine_id
        block_size = 0 if status is None else status.block_size
        return Circumstances(
            contract=self._cache_contract,
            block_size=block_size,
            engine_id=engine_id,
            before=self.sent.sent(job.span_keys, SPAN_BLOCKS * block_size, engine_id),
            breakpoints=job.prefixes.breakpoints,
            is_marked=request.prompt is not None and bool(request.prompt.breakpoints),
            is_looked_for=status is not None and job.request.sampling.prompt_logprobs is None,
        )

    def _ask_to_keep(self, kept: Prefixes, attempt_id: str, cache_salt: str, tenant: str) -> None:
        if kept.breakpoints and self._client.connected:
            asked = KeepRequest(
                org_id=tenant,
                model=self._model,
                engine_id=self._client.status.engine_id,
                asked_at=time.time(),
                breakpoints=kept.breakpoints,
                prefixes=under(cache_salt, kept.digests),
            )
            self._on_asked(attempt_id, asked)

    def _to_prepared(
        self,
        request: GenerateRequest,
        prompt: ChatPrompt,
        rendered: RenderedPrompt,
        status: ReplicaStatus,
    ) -> PreparedRequest:
        """Raises ContextTooLong, or BadField for `min_tokens`."""
        num_prompt_tokens = len(rendered.token_ids)
        max_tokens = output_bound(
            prompt, num_prompt_tokens, status.max_model_len, self._options.default_max_tokens
        )
        kept = rendered.kept
        asked = EngineRequest(
            request_id="",
            prompt_token_ids=rendered.token_ids,
            sampling=to_sampling(prompt, max_tokens, rendered.form),
            n=request.n,
            priority=prompt.priority,
            breakpoints=tuple(
                Breakpoint(each.position, TTL_S[each.ttl]) for each in kept.breakpoints
            ),
        )
        return PreparedRequest(
            request=request,
            input_tokens=num_prompt_tokens,
            max_output_tokens=max_tokens * request.n,
            max_tokens_given=prompt.max_tokens is not None,
            payload=EngineJob(
                request=asked,
                param_names=CHAT_NAMES,
                prefixes=kept,
                form=rendered.form,
                rendered=rendered,
                span_keys=rendered.span_keys,
            ),
        )

    def _reader(self, request: GenerateRequest, job: EngineJob) -> GenerationText:
        prompt, rendered = request.prompt, job.rendered
        assert prompt is not None and rendered is not None
        return GenerationText(
            prompt,
            request.n,
            self._tokenizer,
            self._cache_contract,
            prompt_token_ids=rendered.token_ids,
            breakpoints=job.prefixes.breakpoints,
            ends=ends_of(prompt, rendered.form, self._status()),
            parsing=self._format_of_chats().parsing(prompt, rendered),
        )

    def _to_refusal(
        self,
        error: InvalidRequest | EngineOverloaded | DeadlineExceeded | TakenBack,
        job: EngineJob,
    ) -> BadField | FleetError:
        match error:
            case DeadlineExceeded():
                return NoSlot(f"{self.name}: {error.message}")
            case TakenBack():
                return RequestTakenBack(f"{self.name}: {error.message}")
            case EngineOverloaded():
                return ReplicaOverloaded(f"{self.name}: {error.message}")
            case ContextLengthExceeded():
                param = job.param_names["prompt_token_ids"]
                return ContextTooLong(f"The {param} are too long for this model.", param=param)
            case InvalidRequest(param="adapter"):  # no customer's mistake, but the operator's
                return ReplicaUnavailable(f"{self.name}: {error.message}", retry_after_s=RESTART_S)
            case InvalidRequest():
                param = job.param_names.get(error.param or "", error.param or "")
                if param == "grammar" and job.form is not None:
                    param = job.form.param
                return BadField(f"Invalid value for '{param}': {error.message}.", param=param)

    def _to_lost(
        self,
        error: EngineUnavailable | EngineStepFailed,
        prepared: PreparedRequest,
        asked: EngineRequest,
        reader: Reader,
        transcript: Transcript,
        identity: str,
    ) -> ReplicaLost:
        """Return what ends an attempt behind its first event, with what is left of it."""
        message = f"{self.name}: {error.message}"
        rest = rest_of(prepared, asked, reader, transcript, identity)
        if isinstance(error, FirstTokenSaid) and rest is not None:
            rest = msgspec.structs.replace(rest, computed_by=self.name)
            return PromptComputed(message, rest=rest)
        return ReplicaLost(message, rest=rest, by_step=isinstance(error, EngineStepFailed))

    def _to_unavailable(
        self, error: EngineUnavailable | EngineStepFailed, had_it: bool
    ) -> FleetError:
        """`had_it`: the engine was there when it was asked."""
        kind = ReplicaDied if had_it and not self._client.connected else ReplicaUnavailable
        if isinstance(error, EngineStepFailed):
            kind = ReplicaStepFailed
        return kind(f"{self.name}: {error.message}", retry_after_s=RESTART_S)


def rest_of(
    prepared: PreparedRequest,
    asked: EngineRequest,
    reader: Reader,
    transcript: Transcript,
    identity: str,
) -> PreparedRequest | None:
    """Return what is left of a request, for an engine of the same model, which has this
    `identity`. The reader of its text goes on, too: what it holds back, what it looks for and where
    a call stands is in no token. None: it cannot go on."""
    if not isinstance(reader, ResumableReader):
        return None
    job: EngineJob = prepared.payload
    reader.resume()
    rest = msgspec.structs.replace(
        job,
        request=transcript.rest_of(asked, reader.ended),
        reader=lambda: reader,
        prefixes=NO_PREFIXES,
        begun_by=identity,
    )
    return msgspec.structs.replace(prepared, payload=rest, prefill_only=False)


def with_outcome(
    event: ReplicaEvent, here: Circumstances, job: EngineJob, usage: Usage, namespace: str
) -> ReplicaEvent:
    """Add the cache's outcome to the last event of an attempt; of several prompts the first
    one's."""
    if event.usage is None:
        return event
    prompt = job.request.prompt_token_ids
    cause, position = outcome_of(here, len(prompt), usage.seen, event.usage.cache_read)
    elsewhere = usage.tier_tokens + usage.fetched_tokens
    outcome = CacheOutcome(
        cause=cause,
        position=position,
        prefix=prefix_digest(namespace, prompt),
        found=CachedTokens(
            usage.cached_tokens - elsewhere, usage.tier_tokens, usage.fetched_tokens
        ),
    )
    return msgspec.structs.replace(event, cache=outcome)


def prompt_size(prompt: ChatPrompt) -> int:
    """Return what rendering and tokenizing cost, in characters of text."""
    others = prompt.num_other_chars + (0 if prompt.tools is None else prompt.tools.num_chars)
    others += num_renders(prompt) * CHARS_PER_MESSAGE * len(prompt.messages)
    return others + sum(
        CHARS_PER_MESSAGE + len(message["content"]) + len(message.get("name", ""))
        for message in prompt.messages
    )


def output_bound(
    prompt: ChatPrompt, num_prompt_tokens: int, max_model_len: int, default: int | None = None
) -> int:
    """Return the tokens that one choice may have. `default`: where the request names no bound, as
    far as its `min_tokens` allow; None: all the room. Raises ContextTooLong, or BadField for
    `min_tokens`."""
    limit = f"This model's maximum context length is {max_model_len} tokens."
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"{limit} However, your messages resulted in {num_prompt_tokens} tokens. "
            "Please reduce the length of the messages.",
            param="messages",
        )
    if prompt.max_tokens is not None:
        max_tokens = prompt.max_tokens
    else:
        max_tokens = room if default is None else min(room, max(default, prompt.min_tokens))
    if max_tokens > room and not prompt.fits_window:
        raise ContextTooLong(
            f"{limit} However, you requested {num_prompt_tokens + max_tokens} tokens "
            f"({num_prompt_tokens} in the messages, {max_tokens} in the completion). "
            "Please reduce the length of the messages or completion.",
            param="messages",
        )
    max_tokens = min(max_tokens, room)
    if prompt.min_tokens > max_tokens:
        raise BadField(
            f"Invalid value for 'min_tokens': more than the {max_tokens} tokens that the "
            "completion may have.",
            param="min_tokens",
        )
    return max_tokens


def makes_embeddings_only(model: str) -> BadField:
    return BadField(f"The model `{model}` writes no text: it only makes embeddings.", param="model")
