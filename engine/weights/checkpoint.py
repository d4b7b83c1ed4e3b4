"""The tensors of one checkpoint folder: safetensors, in one file or sharded with an index.

Knows names and shapes, not what they mean.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.parallel import WHOLE, Shard
from engine.weights.reading import Source, TensorReader

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
"""Derived values that old checkpoints store, recomputed here."""
ROTATED = re.compile(r"\.[qk]_proj\.(weight|bias)$")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
LENGTH_BYTES = 8
"""A safetensors file: the header's length, little-endian; the header, JSON; the data."""


class Index(msgspec.Struct):
    """INDEX_FILE, as far as it is read."""

    weight_map: dict[str, str]
    """Tensor name -> file name."""


class _Entry(msgspec.Struct):
    """The entry of one tensor in a file's header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class StoredTensor(NamedTuple):
    """One tensor where it lies."""

    path: Path
    offset: int
    """Bytes from the start of the file."""
    dtype: str
    """As safetensors writes it: a key of DTYPES, or one that is not known here."""
    shape: tuple[int, ...]


class Checkpoint:
    """Every tensor of one folder, by name. The files' headers are read and checked at once.

    Raises ConfigError that names the file or the tensor that is absent, broken or misshapen.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored = self._locate()
        self.has_head = True
        if EMBEDDING in self._stored:  # stored from within the model that has the head
            self.has_head = HEAD in self._stored
            self._stored = {
                name if name == HEAD else f"model.{name}": stored
                for name, stored in self._stored.items()
            }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def num_parameters(self) -> int:
        """Elements of all tensors, from the files' headers."""
        return sum(torch.Size(stored.shape).numel() for stored in self._stored.values())

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """Return where `name` lies; it must have `shape`."""
        if name not in self._stored:
            raise ConfigError(f"{self.folder}: tensor {name} is missing")
        stored = self._stored[name]
        if stored.shape != shape:
            raise ConfigError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)}, "
                f"config.json asks for {list(shape)}"
            )
        return stored

    def split(self, name: str, parts: Sequence[tuple[str, int]]) -> None:
        """Show what lies in one tensor, if there is such a one, as tensors of their own.

        parts: (name, rows), behind each other. Raises ConfigError.
        """
        stored = self._stored.get(name)
        if stored is None:
            return
        if stored.dtype not in FLOATS:
            raise ConfigError(f"{stored.path}: tensor {name} is {stored.dtype}, not a float")
        self.find(name, (sum(rows for _, rows in parts), *stored.shape[1:]))
        row_bytes = torch.Size(stored.shape[1:]).numel() * DTYPES[stored.dtype].itemsize
        offset = stored.offset
        for part, rows in parts:
            shape = (rows, *stored.shape[1:])
            self._stored[part] = StoredTensor(stored.path, offset, stored.dtype, shape)
            offset += rows * row_bytes
        del self._stored[name]

    def dtype_of(self, name: str) -> str | None:
        return self._stored[name].dtype if name in self._stored else None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._stored[name].shape if name in self._stored else None

    def _locate(self) -> dict[str, StoredTensor]:
        index = self.folder / INDEX_FILE
        if not index.exists():
            return self._open(SINGLE_FILE)
        try:
            located = msgspec.json.decode(index.read_bytes(), type=Index).weight_map
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{index}: {error}") from error
        files = {file: self._open(file) for file in sorted(set(located.values()))}
        for name, file in located.items():
            if name not in files[file]:
                raise ConfigError(f"{self.folder / file}: tensor {name} is missing")
        return {name: files[file][name] for name, file in located.items()}

    def _open(self, file: str) -> dict[str, StoredTensor]:
        path = self.folder / file
        if path.parent != self.folder:
            raise ConfigError(f"{self.folder / INDEX_FILE}: {file!r} lies outside the folder")
        try:
            with safe_open(path, framework="pt", device="cpu"):  # checks sizes, offsets, overlaps
                return _read_header(path)
        except FileNotFoundError as error:
            raise ConfigError(f"{path} is missing") from error
        except (SafetensorError, msgspec.MsgspecError, OSError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from error


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    found = {}
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=_Entry)
        offset = LENGTH_BYTES + length + entry.data_offsets[0]
        found[name] = StoredTensor(path, offset, entry.dtype, entry.shape)
    return found


class CheckpointWeights:
    """The `Tensors` of a checkpoint that converts, and remembers what was taken."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        reader: TensorReader,
        *,
        dtype: torch.dtype,
        device: torch.device,
        channels: Tensor | None = None,
    ) -> None:
        """reader: open for as long as tensors are taken, on the same device. channels: the order of
        those of a head in queries and keys; None: as they are stored."""
        self.dtype = dtype
        self.taken_s = 0.0
        """Spent in reading and converting."""
        self._checkpoint = checkpoint
        self._reader = reader
        self._device = device
        self._channels = None if channels is None else channels.to(device)
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...], shard: Shard = WHOLE) -> Tensor:
        """See `WeightSource.take`. The bytes go from the file to the tensor that is returned: there
        is no whole copy between them, and the model does not depend on the file once loaded."""
        tensor = self._read(name, shape, FLOATS, self.dtype, shard)
        if self._channels is None or not ROTATED.search(name):
            return tensor
        heads = tensor.view(-1, len(self._channels), *tensor.shape[1:])
        return heads[:, self._channels].view(tensor.shape)

    def take_stored(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str], shard: Shard = WHOLE
    ) -> Tensor:
        """As `take`, in the dtype it is stored in, which must be one of `dtypes`."""
        return self._read(name, shape, dtypes, None, shard)

    def dtype_of(self, name: str) -> str | None:
        """As safetensors writes it; None when there is no such tensor."""
        return self._checkpoint.dtype_of(name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape_of(name)

    def pass_over(self, name: str) -> None:
        """Nobody needs this tensor, should it be there."""
        self._taken.add(name)

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

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: Collection[str],
        dtype: torch.dtype | None,
        shard: Shard,
    ) -> Tensor:
        stored = self._checkpoint.find(name, shape)
        if stored.dtype not in dtypes:
            kind = "a float" if dtypes is FLOATS else "/".join(sorted(dtypes))
            raise ConfigError(f"{stored.path}: tensor {name} is {stored.dtype}, not {kind}")
        if shape and shape[shard.dim] % shard.parts:
            raise ConfigError(
                f"{stored.path}: {name} {list(shape)} does not fall into {shard.parts}"
            )
        self._taken.add(name)
        began = time.perf_counter()
        kept = DTYPES[stored.dtype]
        source = Source(stored.path, stored.offset, kept, stored.shape)
        tensor = self._reader.read(source, shard, dtype=dtype or kept)
        self.taken_s += time.perf_counter() - began
        return tensor


def paired_channels(head_dim: int, rotary_dim: int) -> Tensor:
    """Return the order of a head's channels in which those that a checkpoint rotates together are
    head_dim / 2 apart, int64 [head_dim].

    A checkpoint pairs channel i with i + rotary_dim / 2, the rotation with i + head_dim / 2. Where
    queries and keys have the same order, it makes no difference to their products. Channels that
    are not rotated pair with each other, at frequency 0.
    """
    rotated, kept = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    halves = zip(rotated.chunk(2), kept.chunk(2), strict=True)
    return torch.cat([part for half in halves for part in half])
