"""The sampling parameters of a batch as tensors, for the kernels that draw on the device.

Copies to the device only, from pinned memory: the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.sampling.types import LogitAdjustments, SamplingTensors
from engine.runner.batch.batch import SampleRow
from engine.runner.sampling.logit_adjustments import allowed_tokens, is_adjusted, stop_ids


class SamplingScratch:
    """The two [rows, vocab] buffers of the adjustments, kept between steps and grown at need."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._adjusted: Tensor | None = None

    def take(self, rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """counts int32, all zero, and adjusted float32; both [>= rows, vocab]."""
        held = self._counts
        if held is None or self._adjusted is None or held.shape[0] < rows:
            self._counts = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
            self._adjusted = torch.empty(rows, vocab, dtype=torch.float32, device=device)
        assert self._counts is not None and self._adjusted is not None
        return self._counts, self._adjusted


def plain_parameters(rows: Rows[SampleRow], vocab: int) -> dict[str, NDArray[np.generic]]:
    """Fields of `SamplingTensors` by name; entry i for `rows[i]`. All but the adjustments."""
    params = [row.sampling for row in rows]
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float32)
    return {
        "temperature": np.array([p.temperature for p in params], np.float32),
        "log_min_p": min_p.log().numpy(),
        "top_k": np.array([min(p.top_k, vocab) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "seeds": np.array([row.seed for row in rows], np.uint64).view(np.int64),
        "positions": np.array([row.num_output_tokens for row in rows], np.int64),
    }


def sampling_tensors(
    rows: Rows[SampleRow],
    vocab: int,
    eos_token_ids: frozenset[int],
    device: torch.device,
    scratch: SamplingScratch,
) -> SamplingTensors:
    """Row i for `rows[i]`."""
    plain = plain_parameters(rows, vocab)
    return SamplingTensors(
        **{name: to_device(values, values.dtype.type, device) for name, values in plain.items()},
        adjustments=logit_adjustments(rows, vocab, eos_token_ids, device, scratch),
    )


def to_device(
    values: Rows[float] | Rows[Rows[float]] | NDArray[np.generic],
    dtype: type[np.generic],
    device: torch.device,
) -> Tensor:
    """A copy on `device`, under way."""
    host = torch.from_numpy(np.array(values, dtype))
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def logit_adjustments(
    rows: Rows[SampleRow],
    vocab: int,
    eos_token_ids: frozenset[int],
    device: torch.device,
    scratch: SamplingScratch,
    last_tokens: Tensor | None = None,
) -> LogitAdjustments | None:
    """None where no row asks for any. last_tokens: int64 [S], the last token of each row as the
    device knows it; the host may not, while the step that samples it runs."""
    if not any(is_adjusted(row) for row in rows):
        return None
    params = [row.sampling for row in rows]
    early = [row.num_output_tokens < row.sampling.min_tokens for row in rows]
    stops = [
        sorted(stop_ids(p, eos_token_ids)) if yes else []
        for p, yes in zip(params, early, strict=True)
    ]
    said = [row.token_ids if row.sampling.penalises else [] for row in rows]
    allowed = allowed_tokens(rows, vocab)
    counts, adjusted = scratch.take(len(rows), vocab, device)
    floats, ints = np.float32, np.int32
    totals = [row.num_prompt_tokens + row.num_output_tokens for row in rows]
    # A draft is drawn behind others that nobody here knows: all but the last go unpenalised.
    lengths = to_device(
        [
            min(total, len(ids) + 1) if ids else total
            for total, ids in zip(totals, said, strict=True)
        ],
        ints,
        device,
    )
    history = to_device(_padded(said, room=1), ints, device)
    if last_tokens is not None:
        last = (lengths.long() - 1).clamp(max=history.shape[1] - 1)
        history.scatter_(1, last[:, None], last_tokens.int()[:, None])
    return LogitAdjustments(
        repetition=to_device([p.repetition_penalty for p in params], floats, device),
        frequency=to_device([p.frequency_penalty for p in params], floats, device),
        presence=to_device([p.presence_penalty for p in params], floats, device),
        history=history,
        lengths=lengths,
        prompt_lengths=to_device([row.num_prompt_tokens for row in rows], ints, device),
        bias_ids=to_device(_padded([list(p.logit_bias) for p in params]), ints, device),
        bias_values=to_device(
            _padded([list(p.logit_bias.values()) for p in params]), floats, device
        ),
        num_bias=to_device([len(p.logit_bias) for p in params], ints, device),
        stop_ids=to_device(_padded(stops), ints, device),
        num_stop=to_device([len(stop) for stop in stops], ints, device),
        min_tokens=to_device([p.min_tokens for p in params], ints, device),
        allowed=None if allowed is None else to_device(allowed, ints, device),
        counts=counts,
        adjusted=adjusted,
    )


def _padded(rows: Rows[Rows[float]], room: int = 0) -> NDArray[np.float64]:
    """[S, longest + room], zeros behind the ends; at least one column."""
    padded = np.zeros((len(rows), max(1, *map(len, rows)) + room))
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
