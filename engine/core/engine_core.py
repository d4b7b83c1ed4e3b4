"""The engine: schedule, run, update.

Knows no sockets.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from engine.config import BLOCK_SIZE, EngineConfig, ResolvedConfig
from engine.core.block_sharing import SharedBlocks, check_peers, shares_blocks
from engine.core.kv_tiers import (
    check_tiers,
    describe,
    measure_prefill,
    open_loader,
    read_tier_key,
)
from engine.core.product_ways import choose_measured
from engine.core.stepper import Stepper
from engine.errors import ConfigError, InvalidRequest
from engine.kernels.attention.types import AttentionShape, KVLayer
from engine.kernels.backend import uses_triton
from engine.kv_cache.block_holds import BlockHolds, raise_generation
from engine.kv_cache.block_leases import CacheLeases
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_events import CacheEvents
from engine.kv_cache.prefix_cache import PrefixCache
from engine.kv_cache.prefix_leases import LeaseEvent
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.protocol import PROTOCOL_VERSION, EngineOutput, EngineRequest, ReplicaStatus
from engine.runner.device.device_runner import DeviceRunner, StepLimits, graph_backend
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.memory.free_memory import used_bytes
from engine.runner.memory.kv_cache import (
    allocate_kv_cache,
    attention_shape,
    kv_bytes_per_token,
    part_bytes,
    poison_block,
)
from engine.runner.memory.sizing import (
    derive_step_timeout_s,
    max_model_len_of,
    max_steps_in_flight_of,
    num_blocks_of,
    num_unkept_blocks_of,
)
from engine.runner.memory.step_memory import largest_step_bytes, warm_up
from engine.runner.model_runner import ModelRunner
from engine.runner.speculative.draft_model import Drafter
from engine.runner.speculative.guesser import GrammarProposer, Guesser, NgramProposer
from engine.scheduling.lanes import limits_of, queues_of
from engine.scheduling.pace import Pace
from engine.scheduling.prefix_loader import PrefixLoader
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.validation import check_adapter, check_head, check_request
from engine.tiers.policy import PrefillCosts
from engine.transport.startup import GIB, Startup
from engine.weights.identity import identities_of
from engine.weights.loader import load_model
from engine.weights.registry import load_model_config

if TYPE_CHECKING:
    from engine.runner.grammar.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

Runner = ModelRunner | EncoderRunner


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """A model whose weights are there."""

    model: Decoder | Encoder
    shape: AttentionShape

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.shape, self.model.config.num_layers)


class EngineCore:
    """One model on one device. Not thread-safe: all calls but `prepare` come from one thread.

    Raises ConfigError or UnsupportedModel when the engine cannot start as configured.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        startup: Startup | None = None,
    ) -> None:
        """clock: monotonic seconds, for the times in `Usage`. startup: what was measured so far."""
        startup = startup or Startup()
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        _check_draft(config)
        check_peers(config)
        device = _device(config.device)
        check_tiers(config, device)
        key = read_tier_key(config)
        loaded = [_load(config, device, startup)]
        if config.draft_model is not None:
            loaded.append(_load_draft(config, config.draft_model, device, startup))
        self.resolved = _resolve(config, loaded, startup)
        self.engine_id = str(uuid.uuid4())
        with startup.phase("KV layout"):
            self._sharing = _sharing(self.resolved, loaded, self.engine_id)
        with startup.phase("KV cache"):
            parts = None if self._sharing is None else self._sharing.parts()
            caches = [_allocate(each, self.resolved, parts) for each in loaded]
        layers = [layer for cache in caches for layer in cache]
        cache = _prefix_cache(self.resolved, clock, self._on_free(layers))
        holds = None if self._sharing is None else self._sharing.hold_in(cache)
        self._measured_costs = PrefillCosts()
        peers = None if self._sharing is None else self._sharing.peers
        self._loader = open_loader(self.resolved, layers, cache, self._prefill_costs, peers, key)
        self._scheduler = _scheduler(self.resolved, cache, clock, self._loader, holds)
        runners = [
            _runner(each, held, self.resolved, _num_drafts(config, verifies=each is loaded[0]))
            for each, held in zip(loaded, caches, strict=True)
        ]
        self._stepper = Stepper(
            self._scheduler,
            runners[0],
            max_steps_in_flight=self.resolved.max_steps_in_flight,
            guesser=_guesser(config, loaded[-1].model, runners[-1]),
        )
        self._generated_tokens = 0
        _prepare(runners, self.resolved, startup)
        if self._loader is not None:
            with startup.phase("tiers"):
                self._measured_costs = measure_prefill(runners[0], self.resolved)
            if self._loader.has_tiers:
                logger.info("%s", describe(self._loader, self._measured_costs, BLOCK_SIZE))
        if self._sharing is not None:
            self._sharing.open(layers)
        logger.info(
            "engine for %s ready in %.2f s, max_model_len %d; where time and memory went:\n%s",
            self.resolved.served_name,
            startup.total_s,
            self.resolved.max_model_len,
            startup.table(),
        )

    def close(self) -> None:
        """End the threads of the tiers, with all that is to be written, and those that serve
        other engines."""
        if self._sharing is not None:
            self._sharing.close()
        if self._loader is not None:
            self._loader.close()

    def prepare(self, request: EngineRequest) -> None:
        """Do the part of `add` that may take long: compile the grammar. Safe in any thread. Raises
        InvalidRequest, ContextLengthExceeded or EngineOverloaded.
        """
        grammar, resolved = request.sampling.grammar, self.resolved
        if grammar is not None:  # all else first, so that nothing is compiled in vain
            self._check_model_has(request)
            check_request(
                request, vocab_size=resolved.vocab_size, max_model_len=resolved.max_model_len
            )
            self._grammars.prepare(request.request_id, grammar)

    def begin_grammars(self) -> None:
        """Begin what the first grammar of all would wait for, in a thread of its own."""
        try:
            begin = self._grammars.begin
        except InvalidRequest as error:  # so will be whoever has a grammar
            logger.warning("%s", error.message)
        else:
            threading.Thread(target=begin, name="engine-grammars", daemon=True).start()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises InvalidRequest, ContextLengthExceeded or EngineOverloaded."""
        sampling, constraint = request.sampling, None
        if sampling.grammar is None:
            self._check_model_has(request)
        else:
            self.prepare(request)
            constraint = self._grammars.constraint(
                request.request_id, sampling.grammar, sampling.stop_token_ids
            )
        self._scheduler.add(request, constraint)

    def abort(self, request_id: str) -> list[EngineOutput]:
        """End a request now; a last output for each open choice, none when the id is unknown or
        finished. One that was prepared and never added is forgotten."""
        if (grammars := vars(self).get("_grammars")) is not None:  # made when first wanted
            grammars.forget(request_id)
        return self._scheduler.abort(request_id)

    def take_back(self, request_id: str) -> bool:
        """End a request of which nothing ran, unbilled, and tell whether it was one."""
        return self._scheduler.take_back(request_id)

    def pause(self, request_id: str) -> None:
        """It takes no step until `resume`; ignored when it is paused, unknown or finished."""
        self._scheduler.pause(request_id)

    def resume(self, request_id: str) -> None:
        self._scheduler.resume(request_id)

    def expire(self) -> list[str]:
        """End the requests of which nothing ran before their deadline; their ids. End the leases
        whose time is over."""
        return self._scheduler.expire()

    @property
    def cache_events(self) -> CacheEvents:
        return self._scheduler.cache.events

    def take_lease_events(self) -> list[LeaseEvent]:
        """Return what of prompts is kept, or no longer, since the last call."""
        return self._scheduler.take_lease_events()

    def has_work(self) -> bool:
        return self._stepper.has_work()

    def step(self) -> list[EngineOutput]:
        """Compute one batch and return what it, or the one before, added to each request. One
        that raises is computed again, each request alone: those whose own step raises, and those
        whose logits or vector are not finite, end with finish_reason "error"; the engine lives
        on."""
        outputs = self._stepper.step()
        self._generated_tokens += sum(len(out.token_ids) for out in outputs)
        return outputs

    def status(self) -> ReplicaStatus:
        """As of now; cheap."""
        resolved, scheduler, loader = self.resolved, self._scheduler, self._loader
        host, disk = (None, None) if loader is None else (loader.host, loader.disk)
        return ReplicaStatus(
            model=resolved.served_name,
            protocol_version=PROTOCOL_VERSION,
            max_model_len=resolved.max_model_len,
            vocab_size=resolved.vocab_size,
            eos_token_ids=list(resolved.eos_token_ids),
            block_size=resolved.block_size,
            num_blocks=resolved.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.kv_cache_usage,
            num_leased_blocks=scheduler.cache.leases.num_blocks,
            prefix_cache_query_tokens=scheduler.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=scheduler.prefix_cache_hit_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._stepper.num_steps,
            generated_tokens=self._generated_tokens,
            num_draft_tokens=self._stepper.num_draft_tokens,
            num_accepted_tokens=self._stepper.num_accepted_tokens,
            engine_id=self.engine_id,
            step_timeout_s=resolved.step_timeout_s,
            embedding_size=resolved.embedding_size,
            generates=resolved.generates,
            lanes=scheduler.lanes(),
            num_cached_blocks=scheduler.cache.num_cached_blocks,
            sliding_window=resolved.sliding_window,
            **({} if self._sharing is None or loader is None else self._sharing.status_of(loader)),
            costs=self._stepper.costs,
            max_step_tokens=scheduler.max_num_batched_tokens,
            context_tokens=scheduler.num_context_tokens,
            identities=resolved.identities,
            num_tier_blocks=0 if disk is None else disk.num_blocks,
            max_tier_blocks=0 if disk is None else disk.max_blocks,
            tier_hit_tokens=0 if loader is None else loader.hit_tokens["disk"],
            num_host_blocks=0 if host is None else host.num_blocks,
            max_host_blocks=0 if host is None else host.max_blocks,
            host_hit_tokens=0 if loader is None else loader.hit_tokens["host"],
        )

    def check_integrity(self) -> None:
        """AssertionError when a block is leaked or doubly owned."""
        self._scheduler.check_integrity()

    def _on_free(self, layers: list[KVLayer]) -> Callable[[int], None] | None:
        """Return what is done with each block that becomes free."""
        told: list[Callable[[int], None]] = []
        if self._sharing is not None:  # first of all: nobody may read what follows
            told.append(partial(raise_generation, self._sharing.generations))
        if self.resolved.config.poison_freed_blocks:
            told.append(partial(poison_block, layers))

        def tell(block: int) -> None:
            for each in told:
                each(block)

        return tell if told else None

    def _prefill_costs(self) -> PrefillCosts:
        """Return what computing a prompt takes: as it was learnt, or measured before there was
        anything to learn from."""
        learnt, budget = self._stepper.costs, self.resolved.config.max_num_batched_tokens
        if learnt.prompt_token_s <= 0:
            return self._measured_costs
        return PrefillCosts(
            learnt.prompt_token_s + learnt.step_s / budget,
            learnt.pair_s + learnt.chunk_context_token_s / budget,
        )

    def _check_model_has(self, request: EngineRequest) -> None:
        resolved = self.resolved
        check_adapter(request, resolved.config.adapters)
        check_head(request, generates=resolved.generates, embedding_size=resolved.embedding_size)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        # Where only torch and triton are, the engine starts all the same.
        try:
            from engine.runner.grammar.compiler import GrammarCompiler
            from engine.runner.grammar.constraint import Vocabulary
        except ImportError as error:
            message = f"grammar cannot be kept to: {error.name} is not installed"
            raise InvalidRequest(message, param="grammar") from error
        resolved = self.resolved
        path = resolved.config.model / "tokenizer.json"
        return GrammarCompiler(Vocabulary(str(path), resolved.vocab_size, resolved.eos_token_ids))


def _device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device")
    return torch.device(asked)


def _check_draft(config: EngineConfig) -> None:
    """ConfigError unless a draft model is named where it is asked for, and fits the model."""
    if (config.speculative == "draft") != (config.draft_model is not None):
        raise ConfigError(
            f"speculative is {config.speculative}, draft_model is {config.draft_model}: "
            "speculative draft and a draft_model go together"
        )
    if config.draft_model is None:
        return
    model, draft = load_model_config(config.model), load_model_config(config.draft_model)
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"draft_model {config.draft_model} has a vocab_size of {draft.vocab_size}, "
            f"the model {model.vocab_size}: a draft is a token of both"
        )
    for name, each in (("model", model), ("draft_model", draft)):
        if each.sliding_window is not None:
            raise ConfigError(
                f"{name} has a sliding window: blocks behind it are given back, while the other "
                "model still reads them; speculative draft is not supported with it"
            )


def _load(config: EngineConfig, device: torch.device, startup: Startup) -> _LoadedModel:
    used_before = used_bytes(device)
    model = load_model(
        config.model,
        dtype=config.dtype,
        device=device,
        quantization=config.quantization,
        adapters=config.adapters,
        load_format=config.load_format,
        deterministic=config.deterministic,
        seed=config.seed,
        max_model_len=config.max_model_len,
        startup=startup,
    )
    startup.took("weights", used_bytes(device) - used_before)
    dtype, deterministic = config.kv_cache_dtype, config.deterministic
    shape = attention_shape(model, BLOCK_SIZE, cache_dtype=dtype, deterministic=deterministic)
    with startup.phase("products"):
        choose_measured(shape)
    return _LoadedModel(model, shape)


def _load_draft(
    config: EngineConfig, folder: Path, device: torch.device, startup: Startup
) -> _LoadedModel:
    """Neither with adapters nor deterministic: whatever it says, what is verified is the same."""
    used_before = used_bytes(device)
    plain = msgspec.structs.replace(config, model=folder, adapters={}, deterministic=False)
    with startup.phase("draft model"):
        loaded = _load(plain, device, Startup())
    if not loaded.model.config.generates:
        raise ConfigError(f"draft_model {folder} has no head: it embeds and cannot guess")
    startup.took("draft model", used_bytes(device) - used_before)
    return loaded


def _guesser(config: EngineConfig, draft: Decoder | Encoder, runner: Runner) -> Guesser | None:
    """draft, runner: of the draft model, if there is one."""
    if config.speculative == "off":
        return None
    if isinstance(draft, Encoder) or isinstance(runner, EncoderRunner):
        raise ConfigError(f"speculative is {config.speculative}: the model is an encoder")
    if config.speculative != "draft":
        ngrams = NgramProposer(config.num_draft_tokens) if config.speculative == "ngram" else None
        return Guesser(GrammarProposer(config.num_draft_tokens, ngrams))
    drafter = Drafter(
        runner,
        config.num_draft_tokens,
        block_size=BLOCK_SIZE,
        max_num_tokens=config.max_num_batched_tokens,
        max_model_len=draft.config.max_model_len,
        has_graphs=isinstance(runner, DeviceRunner),
    )
    return Guesser(drafter)


def _prepare(runners: list[Runner], resolved: ResolvedConfig, startup: Startup) -> None:
    """A first step, and graphs where they are recorded."""
    config, graph_bytes = resolved.config, 0
    for runner in runners:
        with startup.phase("warm-up"):
            warm_up(
                runner,
                block_size=BLOCK_SIZE,
                num_blocks=resolved.num_blocks,
                max_num_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
            )
        if isinstance(runner, DeviceRunner):
            graphs = graph_backend(torch.device(resolved.device))
            with startup.phase("graphs of decodes"):
                runner.capture(graphs)
            graph_bytes += graphs.num_bytes()
            startup.took("graphs of decodes", graph_bytes)


def _resolve(config: EngineConfig, loaded: list[_LoadedModel], startup: Startup) -> ResolvedConfig:
    """Size the KV cache from what is free and cut max_model_len to what it can hold."""
    model, shape = loaded[0].model, loaded[0].shape
    per_token = sum(each.kv_bytes_per_token for each in loaded)
    with startup.phase("step's memory"):
        step_bytes = sum(
            largest_step_bytes(
                each.model,
                each.shape,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=config.max_model_len or model.config.max_model_len,
                num_draft_tokens=_num_drafts(config, verifies=each is loaded[0]),
            )
            for each in loaded
        )
    max_steps_in_flight = max_steps_in_flight_of(config, shape.device)
    if model.config.encoder is None:
        num_blocks = num_blocks_of(config, shape, per_token, step_bytes, startup)
    else:
        num_blocks = num_unkept_blocks_of(config, max_steps_in_flight)
    for draft in loaded[1:]:
        draft_bytes = num_blocks * BLOCK_SIZE * draft.kv_bytes_per_token
        startup.took("draft model's KV cache", draft_bytes, "of the KV cache above")
    max_model_len = max_model_len_of(config, model.config, num_blocks, max_steps_in_flight)
    return ResolvedConfig(
        config=config,
        served_name=config.served_name or config.model.resolve().name,
        device=str(shape.device),
        dtype=str(shape.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=model.config.eos_token_ids,
        sliding_window=model.config.sliding_window,
        num_blocks=num_blocks,
        kv_bytes_per_token=per_token,
        max_steps_in_flight=max_steps_in_flight,
        embedding_size=model.config.hidden_size,
        identities=identities_of(config),
        generates=model.config.generates,
        whole_prompts=model.config.encoder is not None,
        pooling=model.config.embedding.pooling,
        step_timeout_s=config.step_timeout_s
        or sum(
            derive_step_timeout_s(
                each.model.config,
                shape.device.type,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
            )
            for each in loaded
        ),
    )


def _sharing(
    resolved: ResolvedConfig, loaded: list[_LoadedModel], engine_id: str
) -> SharedBlocks | None:
    if not shares_blocks(resolved):
        return None
    sizes = (part_bytes(each.shape, each.model.config.num_layers) for each in loaded)
    return SharedBlocks(resolved, [size for each in sizes for size in each], engine_id)


def _allocate(
    loaded: _LoadedModel, resolved: ResolvedConfig, parts: Iterator[memoryview] | None
) -> list[KVLayer]:
    try:
        model = loaded.model
        return allocate_kv_cache(
            loaded.shape, model.config.num_layers, resolved.num_blocks, model.kv_scales, parts
        )
    except (RuntimeError, MemoryError) as error:  # torch's is a RuntimeError, with a trace in it
        size = resolved.num_blocks * resolved.block_size * loaded.kv_bytes_per_token
        raise ConfigError(
            f"the KV cache of {resolved.num_blocks} blocks = {size / GIB:.2f} GiB cannot be "
            f"allocated on {resolved.device}: {str(error).partition(chr(10))[0]}"
        ) from error


def _num_drafts(config: EngineConfig, *, verifies: bool) -> int:
    return config.num_draft_tokens if verifies and config.speculative != "off" else 0


def _runner(
    loaded: _LoadedModel, cache: list[KVLayer], resolved: ResolvedConfig, num_draft_tokens: int
) -> Runner:
    model, shape = loaded.model, loaded.shape
    if isinstance(model, Encoder):
        return EncoderRunner(model, shape)
    eos_token_ids = frozenset(resolved.eos_token_ids)
    if not uses_triton(shape.device):
        return ModelRunner(model, cache, shape, eos_token_ids=eos_token_ids)
    limits = StepLimits(
        max_num_tokens=resolved.config.max_num_batched_tokens,
        max_num_seqs=resolved.config.max_num_seqs,
        max_model_len=resolved.max_model_len,
        num_draft_tokens=num_draft_tokens,
    )
    return DeviceRunner(model, cache, shape, eos_token_ids=eos_token_ids, limits=limits)


def _prefix_cache(
    resolved: ResolvedConfig,
    clock: Callable[[], float],
    on_free: Callable[[int], None] | None,
) -> PrefixCache:
    config = resolved.config
    return PrefixCache(
        BlockPool(resolved.num_blocks, on_free=on_free),
        resolved.block_size,
        enabled=config.prefix_caching and not resolved.whole_prompts,
        sliding_window=resolved.sliding_window,
        leases=CacheLeases(int(resolved.num_blocks * config.cache_lease_share), clock),
    )


def _scheduler(
    resolved: ResolvedConfig,
    cache: PrefixCache,
    clock: Callable[[], float],
    loader: PrefixLoader | None,
    holds: BlockHolds | None,
) -> Scheduler:
    config = resolved.config
    return Scheduler(
        cache=cache,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=queues_of(config),
        max_model_len=resolved.max_model_len,
        vocab_size=resolved.vocab_size,
        eos_token_ids=resolved.eos_token_ids,
        clock=clock,
        seed=config.seed,
        pace=Pace(config.itl_target_s or None),
        max_steps_in_flight=resolved.max_steps_in_flight,
        penalties_ahead=uses_triton(torch.device(resolved.device)),
        whole_prompts=resolved.whole_prompts,
        pooling=resolved.pooling,
        lane_limits=limits_of(config),
        loader=loader,
        holds=holds,
    )
