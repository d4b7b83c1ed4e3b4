"""The tensors of one checkpoint folder: safetensors, in one file or sharded with an index.

Above: `weights/loader.py`. Implements `layers/weight_source.py`. Below: safetensors. Knows names
and shapes, not what they mean. Files are mapped, so a part of a tensor reads only that part.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
"""Derived values that old checkpoints store; they are recomputed."""


class Index(msgspec.Struct):
    """INDEX_FILE, as far as it is read."""

    weight_map: dict[str, str]
    """Tensor name -> file name."""


class Checkpoint:
    """Every tensor of one folder, by name. All files are opened at once; they are closed when the
    last reference is dropped.

    Raises ConfigError that names the file or the tensor that is absent, broken or misshapen.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._readers: dict[str, Any] = {}
        self._file_of = self._locate()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def num_parameters(self) -> int:
        """Elements of all tensors, from the files' headers."""
        shapes = (self._slice(name).get_shape() for name in self._file_of)
        return sum(torch.Size(shape).numel() for shape in shapes)

    def read(self, name: str, shape: tuple[int, ...], dim: int, part: tuple[int, int]) -> Tensor:
        """As `WeightSource.take`; a view of the mapped file, in the dtype it is stored in."""
        if name not in self._file_of:
            raise ConfigError(f"{self.folder}: tensor {name} is missing")
        view, path = self._slice(name), self.folder / self._file_of[name]
        found = tuple(view.get_shape())
        if found != shape:
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        if view.get_dtype() not in FLOAT_DTYPES:
            raise ConfigError(f"{path}: tensor {name} is {view.get_dtype()}, not a float")
        index, count = part
        size = shape[dim] // count
        tensor: Tensor = view[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)]
        return tensor

    def _slice(self, name: str) -> Any:
        return self._readers[self._file_of[name]].get_slice(name)

    def _locate(self) -> dict[str, str]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        try:
            located = msgspec.json.decode(index.read_bytes(), type=Index).weight_map
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{index}: {error}") from error
        stored = {file: frozenset(self._open(file).keys()) for file in set(located.values())}
        for name, file in located.items():
            if name not in stored[file]:
                raise ConfigError(f"{self.folder / file}: tensor {name} is missing")
        return located

    def _open(self, file: str) -> Any:
        path = self.folder / file
        if path.parent != self.folder:
            raise ConfigError(f"{self.folder / INDEX_FILE}: {file!r} lies outside the folder")
        try:
            self._readers[file] = safe_open(path, framework="pt", device="cpu")
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing") from error
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error
        return self._readers[file]


class CheckpointWeights:
    """A `WeightSource` over a checkpoint that converts, and remembers what was taken."""

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._taken: set[str] = set()

    def take(
        self, name: str, shape: tuple[int, ...], *, dim: int = 0, part: tuple[int, int] = (0, 1)
    ) -> Tensor:
        """See `WeightSource.take`."""
        tensor = self._checkpoint.read(name, shape, dim, part)
        self._taken.add(name)
        # A copy even where nothing changes: the model must not depend on the file once loaded.
        return tensor.to(dtype=self._dtype, device=self._device, copy=True)

    def check_all_taken(self, *, optional: frozenset[str]) -> None:
        """ConfigError names tensors no layer asked for: the model would not be the one stored."""
        left = self._checkpoint.names - self._taken - optional
        extra = sorted(name for name in left if not BUFFERS.search(name))
        if extra:
            shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
            raise ConfigError(
                f"{self._checkpoint.folder}: {len(extra)} tensors belong to no layer of this "
                f"architecture: {shown}"
            )
