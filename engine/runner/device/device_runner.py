"""Runs one scheduled step on a device with kernels, without ever waiting for it.

Knows neither queues nor blocks but as numbers in a table.

A step is one copy to the device, one small kernel that completes its inputs there, the model, and
the draw; what was drawn leaves on a stream of its own. A decode, one token for each sequence, is
replayed as a CUDA graph with the draw in it; if a row wants its logits adjusted, the draw is done
again behind it. So is a step that verifies guesses, of up to MAX_VERIFYING sequences: kernels read
on the device how many of a graph's tokens a sequence has. Everything else, and decodes larger than
any graph, is launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.attention.types import AttentionPlan, AttentionShape, DeviceMetadata, KVLayer
from engine.kernels.sampling import dispatch as sampling
from engine.kernels.step_inputs import dispatch as step_inputs
from engine.models.decoder import Decoder, States
from engine.runner.batch.batch import StepParts, lay_out
from engine.runner.device.cuda_graphs import (
    CalledGraphs,
    CudaGraphs,
    Decode,
    DecodeGraphs,
    GraphBackend,
    decodes_to_record,
    graph_sizes,
)
from engine.runner.device.device_buffers import (
    DeviceBuffers,
    StepLayout,
    StepSize,
    StepViews,
    layout_of,
)
from engine.runner.device.step_packer import StepPacker
from engine.runner.model_runner import LaunchedStep, ModelRunner
from engine.runner.sampling.device_sampler import DeviceSampler
from engine.runner.sampling.logit_adjustments import is_adjusted
from engine.scheduling.step_plan import SchedulerOutput

MAX_VERIFIED = 8
"""New tokens of a sequence, drafts included, up to which it is attended to as a decode."""
MAX_VERIFYING = 32
"""Sequences of a graph that verifies guesses: each has logits for all of its tokens, and larger
steps take so long that launching hides behind them."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """No step is larger."""

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_draft_tokens: int = 0
    """Verified for a sequence at most; 0: none are."""

    @property
    def queries(self) -> int:
        """New tokens of a sequence whose guesses a graph verifies; 1 where none does."""
        queries = self.num_draft_tokens + 1
        return queries if queries <= min(MAX_VERIFIED, self.max_num_tokens) else 1

    @property
    def largest_verifying(self) -> int:
        return min(self.largest_decode, MAX_VERIFYING, self.max_num_tokens // self.queries)

    @property
    def largest_decode(self) -> int:
        return min(self.max_num_tokens, self.max_num_seqs)

    @property
    def largest_graph(self) -> int:
        """In tokens."""
        largest = graph_sizes(self.largest_decode)[-1]
        return max(largest, self.largest_verifying * self.queries) if self.queries > 1 else largest


class _GraphMemory:
    """The memory that the work of the graphs writes to, shared by all of them: one runs at a
    time.
    """

    def __init__(self, model: Decoder, shape: AttentionShape, num_tokens: int) -> None:
        def zeros(width: int) -> Tensor:
            return torch.zeros(num_tokens, width, dtype=model.dtype, device=model.device)

        self.logits = zeros(model.config.vocab_size)
        # Padding attends to nothing, so its rows stay as they are: they should hold numbers.
        self.attended = zeros(shape.num_heads * shape.head_dim)

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.logits, self.attended))


class DeviceRunner(ModelRunner):
    def __init__(
        self,
        model: Decoder,
        cache: Rows[KVLayer],
        shape: AttentionShape,
        *,
        eos_token_ids: frozenset[int],
        limits: StepLimits,
    ) -> None:
        super().__init__(model, cache, shape, eos_token_ids=eos_token_ids)
        self._limits = limits
        self._buffers = DeviceBuffers(
            shape.device,
            max_num_tokens=limits.max_num_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_num_blocks=-(-limits.max_model_len // shape.block_size),
        )
        self._packer = StepPacker(
            max_num_seqs=limits.max_num_seqs,
            block_size=shape.block_size,
            vocab_size=model.config.vocab_size,
        )
        self._device_sampler = DeviceSampler(eos_token_ids)
        self._graphs: DecodeGraphs | None = None
        self._graph_memory = _GraphMemory(model, shape, limits.largest_graph)
        self._graph_views: dict[StepSize, StepViews] = {}
        if model.adapters is not None:
            model.adapters.rows.reserve(limits.max_num_tokens)

    @property
    def num_bytes(self) -> int:
        """Device memory that is held from the start, without the graphs' own."""
        return self._buffers.num_bytes + self._graph_memory.num_bytes

    def decodes(self) -> list[Decode]:
        """Those that are worth a graph."""
        if not self._model.config.generates:
            return []
        limits = self._limits
        wanted = decodes_to_record(limits.largest_decode, limits.max_model_len, self._programs)
        if limits.queries > 1:
            wanted += self._verifying()
        if self._model.adapters is None:
            return wanted
        return wanted + [decode._replace(adapted=True) for decode in wanted]

    def _verifying(self) -> list[Decode]:
        limits = self._limits

        def of(decode: Decode) -> Decode:
            return decode._replace(queries=limits.queries)

        most, longest = limits.largest_verifying, limits.max_model_len
        found = decodes_to_record(most, longest, lambda decode: self._programs(of(decode)))
        return [of(decode) for decode in found]

    @torch.inference_mode()
    def capture(self, backend: GraphBackend, decodes: Rows[Decode] | None = None) -> None:
        """Record decodes; None: all that are worth it. Nothing is written to the KV cache."""
        decodes = self.decodes() if decodes is None else decodes
        if not decodes:
            return
        graphs = DecodeGraphs(backend, decodes)
        graphs.capture(self._decode_work)
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput, before: LaunchedStep | None = None) -> LaunchedStep:
        """Start a step; the host waits for nothing."""
        parts = lay_out(output, MAX_VERIFIED)
        try:
            return self._launch(parts, before)
        except Exception:
            # Whether the device got what changed in the block tables is not known.
            self._packer.forget()
            raise

    def _launch(self, parts: StepParts, before: LaunchedStep | None) -> LaunchedStep:
        num_rows = len(parts.rows)
        graph = self._graph_for(parts)
        pooled = scores = None
        if self._model.adapters is not None:
            self._model.adapters.assign(parts.adapters)
        drawn = self._buffers.drawn[:num_rows]
        if graph is not None and self._graphs is not None:
            self._send(parts, before, layout_of(_size(graph)))
            self._device_sampler.let_answers_pass()
            self._graphs.replay(graph)
            views = self._views_of(graph)
            logits, last_tokens = self._graph_memory.logits[:num_rows], views.token_ids[:num_rows]
        else:
            size = StepSize(len(parts.token_ids), len(parts.entries), num_rows)
            layout = StepLayout(size)
            self._send(parts, before, layout)
            self._device_sampler.let_answers_pass()
            views = StepViews(self._buffers, size, layout)
            states = self._states(views, _metadata(views, parts), None)
            pooled = self._pooler(states, parts.pooled)
            scores = self._scorer(states, parts.scored)
            if num_rows == 0:
                return LaunchedStep(parts.rows, None, pooled, scores)
            logits = self._model.logits(states, views.sampling_rows)
            last_tokens = views.token_ids[views.sampling_rows]
        if any(is_adjusted(row) for row in parts.rows):
            self._device_sampler.draw_adjusted(
                logits, parts.rows, views.sampling, last_tokens, drawn
            )
        elif graph is None:
            sampling.sample(logits, views.sampling, drawn)
        answer = self._device_sampler.answer(logits, drawn, parts.rows)
        return LaunchedStep(parts.rows, answer, pooled, scores)

    def _graph_for(self, parts: StepParts) -> Decode | None:
        """Return what a graph must be for to do this step; None if there is none."""
        # Every token is drawn behind: there is no prompt but of one token, and none to tell of.
        if self._graphs is None or len(parts.rows) != len(parts.token_ids):
            return None
        adapted = any(name for name, _ in parts.adapters)
        queries, longest = int(parts.query_lens.max()), int(parts.seq_lens.max())
        return self._graphs.find(Decode(len(parts.entries), longest, adapted, queries))

    def _send(self, parts: StepParts, before: LaunchedStep | None, layout: StepLayout) -> None:
        """Put the step's inputs under way to the device."""
        previous = {}
        if parts.unknown:
            assert before is not None, "tokens that nobody samples"
            previous = before.token_of()
        staging = self._buffers.next_staging()
        num_bytes = self._packer.pack(parts, previous, layout, staging.open())
        staging.send(self._buffers.inputs, num_bytes)

    def _states(self, views: StepViews, metadata: DeviceMetadata, out: Tensor | None) -> States:
        """Compute the states of the step whose inputs are on the device. out: where attention
        writes.
        """
        # Only devices with Triton have this runner: nothing else should have to load it.
        from engine.kernels.attention.triton import TritonAttentionPlan

        buffers, shape = self._buffers, self._shape
        step_inputs.complete(
            views.inputs, buffers.drawn, buffers.kept_tables, buffers.tables, shape.block_size
        )
        plans: dict[int | None, AttentionPlan] = {
            window: TritonAttentionPlan(metadata, shape, window, out=out)
            for window in self._windows
        }
        return self._model.states(views.token_ids, views.positions, plans, self._cache)

    def _views_of(self, decode: Decode) -> StepViews:
        """The inputs of a decode with a graph."""
        size = _size(decode)
        if size not in self._graph_views:
            self._graph_views[size] = StepViews(self._buffers, size, layout_of(size))
        return self._graph_views[size]

    def _metadata_of(self, decode: Decode) -> DeviceMetadata:
        """Return metadata that holds whatever the sequences' lengths will be: kernels read those on
        the device.
        """
        views = self._views_of(decode)
        return DeviceMetadata(
            views.query_start,
            views.seq_lens,
            views.tables,
            views.slots,
            num_single=decode.num_seqs,
            max_query_len=decode.queries,
            max_seq_len=decode.max_seq_len,
            max_single_query_len=decode.queries,
        )

    def _programs(self, decode: Decode) -> int:
        """See `decodes_to_record`."""
        from engine.kernels.attention.triton import TritonAttentionPlan

        metadata = self._metadata_of(decode)
        plans = [TritonAttentionPlan(metadata, self._shape, window) for window in self._windows]
        return max(plan.num_splits for plan in plans)

    def _decode_work(self, decode: Decode) -> Callable[[], None]:
        """Return what the graph for `decode` does; until then, for padding alone."""
        size = decode.num_tokens
        layout = layout_of(_size(decode))
        staging = self._buffers.next_staging()
        staging.send(self._buffers.inputs, self._packer.pad(layout, staging.open()))
        if self._model.adapters is not None:
            self._model.adapters.assign_any(size if decode.adapted else 0)
        views, metadata = self._views_of(decode), self._metadata_of(decode)
        memory, drawn = self._graph_memory, self._buffers.drawn[:size]

        def work() -> None:
            states = self._states(views, metadata, memory.attended)
            logits = self._model.logits(states, views.sampling_rows)
            memory.logits[:size].copy_(logits)
            sampling.sample(logits, views.sampling, drawn)

        return work


def graph_backend(device: torch.device) -> GraphBackend:
    return CudaGraphs(device) if device.type == "cuda" else CalledGraphs()


def _size(decode: Decode) -> StepSize:
    """A draw behind every token."""
    return StepSize(decode.num_tokens, decode.num_seqs, decode.num_tokens)


def _metadata(views: StepViews, parts: StepParts) -> DeviceMetadata:
    singles = parts.query_lens[: parts.num_single]
    return DeviceMetadata(
        views.query_start,
        views.seq_lens,
        views.tables,
        views.slots,
        num_single=parts.num_single,
        max_query_len=int(parts.query_lens.max()),
        max_seq_len=int(parts.seq_lens.max()),
        max_single_query_len=int(singles.max(initial=1)),
    )
