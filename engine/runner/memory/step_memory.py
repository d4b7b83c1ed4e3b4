"""Measures what the largest step takes beside the weights and the KV cache; and runs a first, small
step.

Knows no queues. On CUDA the step is run and measured, on a CPU it is computed from the shapes: host
memory is not accounted for by anybody, and a step of full size would cost a start seconds.
"""

from __future__ import annotations

import torch

from engine.config import Pooling
from engine.errors import ConfigError
from engine.kernels.attention.reference import MAX_SCORES
from engine.kernels.attention.types import AttentionShape
from engine.kernels.backend import uses_triton
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.protocol import SamplingParams
from engine.runner.device.cuda_graphs import CudaGraphs
from engine.runner.device.device_runner import DeviceRunner, StepLimits
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.memory.kv_cache import allocate_kv_cache
from engine.runner.model_runner import ModelRunner
from engine.runner.sampling.prompt_scores import ROWS
from engine.scheduling.step_plan import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence

WARM_UP_TOKENS = 24
WARM_UP_SEQS = 2
SAMPLER_BYTES_PER_LOGIT = 32
"""float32 logits, probabilities, sorted and summed up; int64 indices of the order; masks."""
INDEX_BYTES = 8
ADJUSTING_BYTES_PER_LOGIT = 8
"""`SamplingScratch`, which is there from the first row on that asks for adjustments."""
GRAPH_BYTES = 8 << 20
"""Allowed for what the driver keeps of one graph, and for what does not fit into the pool."""


def largest_step_bytes(
    model: Decoder | Encoder,
    shape: AttentionShape,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_draft_tokens: int = 0,
) -> int:
    """An upper bound of what a step allocates and gives back. Raises ConfigError when it does not
    fit beside the weights."""
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    if shape.device.type == "cuda":
        try:
            limits = StepLimits(
                max_num_batched_tokens, max_num_seqs, max_model_len, num_draft_tokens
            )
            return _measure(model, shape, limits)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"a step of {max_num_batched_tokens} tokens does not fit beside the weights on "
                f"{shape.device}: lower max_num_batched_tokens"
            ) from error
        finally:
            torch.cuda.empty_cache()
    return _compute(model.config, shape, max_num_batched_tokens, num_seqs, max_model_len)


def warm_up(
    runner: ModelRunner | EncoderRunner,
    *,
    block_size: int,
    num_blocks: int,
    max_num_tokens: int,
    max_num_seqs: int,
) -> None:
    """Load what a first step loads, in a step no larger than allowed. Writes to the first blocks,
    which nobody owns yet."""
    num_tokens = min(WARM_UP_TOKENS, max_num_tokens)
    num_seqs = min(WARM_UP_SEQS, max_num_seqs, num_tokens)
    if num_blocks * block_size >= num_tokens + num_seqs * block_size:
        pooling: Pooling | None = None if runner.generates else "last"
        _run(runner, _step(num_tokens, num_seqs, block_size, pooling))


def _measure(model: Decoder | Encoder, shape: AttentionShape, limits: StepLimits) -> int:
    """Run it over a cache of its own; what the allocator held at the highest, and what a runner
    with kernels holds all the time."""
    num_tokens, num_seqs = limits.max_num_tokens, limits.largest_decode
    num_blocks = -(-num_tokens // shape.block_size) + num_seqs
    cache = allocate_kv_cache(shape, model.config.num_layers, num_blocks)
    device, nothing = shape.device, frozenset[int]()
    held = 0
    runner: ModelRunner | EncoderRunner
    if isinstance(model, Encoder):
        num_seqs = max(1, num_tokens // limits.max_model_len)  # texts as long as may be
        runner = EncoderRunner(model, shape)
    elif not uses_triton(device):
        runner = ModelRunner(model, cache, shape, eos_token_ids=nothing)
    else:
        runner = DeviceRunner(model, cache, shape, eos_token_ids=nothing, limits=limits)
        held = runner.num_bytes + num_seqs * model.config.vocab_size * ADJUSTING_BYTES_PER_LOGIT
        more_rows = max(0, ROWS - num_seqs)  # of prompts that are told of
        held += more_rows * model.config.vocab_size * SAMPLER_BYTES_PER_LOGIT
        held += _graph_bytes(runner, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    poolings: list[Pooling | None] = [model.config.embedding.pooling]
    for pooling in [None, *poolings] if runner.generates else poolings:
        _run(runner, _step(num_tokens, num_seqs, shape.block_size, pooling))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + held


def _graph_bytes(runner: DeviceRunner, device: torch.device) -> int:
    """Return the bytes of all graphs, from the largest, in whose memory the others run."""
    decodes = runner.decodes()
    if not decodes:
        return 0
    graphs = CudaGraphs(device)
    runner.capture(graphs, [max(decodes, key=lambda decode: decode.num_tokens)])
    return graphs.num_bytes() + len(decodes) * GRAPH_BYTES


def _compute(
    config: ModelConfig,
    shape: AttentionShape,
    num_tokens: int,
    num_seqs: int,
    max_model_len: int,
) -> int:
    """As if nothing was given back before the step's end, within a layer."""
    item = shape.dtype.itemsize
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    row = 4 * config.hidden_size + 4 * width + 4 * config.intermediate_size
    activations = num_tokens * row * item
    rotation = num_tokens * shape.head_dim * 4 * 4
    keys = max(max_model_len, num_tokens)
    gathered = (
        len(set(config.windows))
        * keys
        * shape.num_kv_heads
        * (2 * shape.head_dim * item + INDEX_BYTES)
    )
    # Scores, their softmax and the mask; a tile holds no more than all queries against all keys.
    scores = min(MAX_SCORES, shape.num_heads * num_tokens * keys) * (2 * item + 1)
    logits = max(num_seqs, ROWS) * config.vocab_size * (item + SAMPLER_BYTES_PER_LOGIT)
    return activations + rotation + gathered + max(scores, logits)


def _run(runner: ModelRunner | EncoderRunner, step: SchedulerOutput) -> None:
    launched = runner.launch(step)
    runner.collect(launched)
    runner.embedded(launched)


def _step(
    num_tokens: int, num_seqs: int, block_size: int, pooling: Pooling | None
) -> SchedulerOutput:
    """Prompts that together have `num_tokens`, all of which sample, or are embedded."""
    scheduled = []
    next_block = 0
    for number in range(num_seqs):
        length = num_tokens // num_seqs + (number < num_tokens % num_seqs)
        sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
        seq = Sequence(
            request_id=f"warm-up-{number}",
            index=0,
            order=(number, 0),
            prompt_token_ids=[0] * length,
            sampling=sampling,
            seed=0,
            cache_salt="",
            pooling=pooling,
        )
        num_blocks = -(-length // block_size)
        seq.block_table = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        scheduled.append(
            ScheduledSequence(
                seq,
                length,
                start=0,
                samples=pooling is None,
                output_index=0,
                attempt=0,
                embeds=pooling is not None,
            )
        )
    return SchedulerOutput(scheduled=scheduled, preempted=[], num_tokens=num_tokens)
