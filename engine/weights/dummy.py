"""Random weights of the right size and scale, for benchmarks: `--load-format dummy`.

Implements `Tensors` of `weights/quantization.py`. Knows names only to tell a norm from a
matrix. Nothing is read but config.json.

A tensor is a stretch of one short random sequence, repeated: that is as fast as memory is written,
where drawing every number would take a CPU seconds a billion. The sequence's length is prime, so
that no two rows of a matrix are alike until it has gone round for every offset.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.parallel import WHOLE, Shard

POOL = 1_048_573
"""Random numbers that are drawn, a prime; 2 to 4 MB, which stay in a core's cache."""


class DummyWeights:
    """The same seed gives the same model, however many ranks share it. `Tensors` that store
    nothing quantised, nor anything else."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype = dtype
        self._device = device
        drawn = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))
        self._pool = drawn.to(dtype=dtype, device=device)

    def take(self, name: str, shape: tuple[int, ...], shard: Shard = WHOLE) -> Tensor:
        """See `WeightSource.take`; no name is absent. Matrices have variance 1 / inputs, so that
        activations neither vanish nor overflow, norms are 1, and other vectors 0."""
        size = shape[shard.dim] // shard.parts
        if shard.dim > 0:
            whole = self.take(name, shape)
            return whole.narrow(shard.dim, shard.place * size, size).contiguous()
        own = (size, *shape[1:])
        tensor = torch.empty(own, dtype=self.dtype, device=self._device)
        if len(shape) < 2:
            tensor.fill_(1.0 if name.lower().endswith("norm.weight") else 0.0)
        else:
            first = shard.place * size * torch.Size(shape[1:]).numel()
            self._repeat(tensor.view(-1), zlib.crc32(name.encode()) + first, shape[-1] ** -0.5)
        return tensor

    def take_stored(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str], shard: Shard = WHOLE
    ) -> Tensor:
        raise ConfigError(f"dummy weights have no {name}")

    def dtype_of(self, name: str) -> str | None:
        return None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return None

    def pass_over(self, name: str) -> None:
        """There is nothing to leave."""

    def _repeat(self, flat: Tensor, offset: int, scale: float) -> None:
        """Fill `flat` with `scale` times the pool's numbers from `offset` on, round and round."""
        at, place = offset % POOL, 0
        while place < len(flat):
            length = min(POOL - at, len(flat) - place)
            torch.mul(self._pool[at : at + length], scale, out=flat[place : place + length])
            at, place = 0, place + length
