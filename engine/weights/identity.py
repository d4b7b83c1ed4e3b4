"""Names what a checkpoint folder answers with, so that two engines can tell whether they run the
same model.

The name is made of the configuration and the tokenizer in full, and of the weights by their files'
headers and by pieces of each tensor: to read all of a large model would take longer than to load
it. A tensor that differs in other places alone is not told apart.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.weights.adapters import CONFIG_FILE, TENSOR_FILE
from engine.weights.checkpoint import INDEX_FILE, LENGTH_BYTES, SINGLE_FILE, Index

WHOLE_FILES = ("config.json", "generation_config.json", "tokenizer.json", CONFIG_FILE)
"""Those that decide which token is next. A chat template has decided by then."""
WEIGHTS = (SINGLE_FILE, TENSOR_FILE)
PIECES = 3
"""How many are read of a tensor: at its begin, in its middle and at its end."""
PIECE_BYTES = 256
NAME_BYTES = 16


class _TensorPlace(msgspec.Struct):
    data_offsets: tuple[int, int]


def identities_of(config: EngineConfig) -> dict[str, str]:
    """Return the names of the model as it is, under "", and with each adapter. Raises OSError."""
    model = identity_of(config.model)
    if config.load_format == "dummy":
        model = _joined(model, f"seed {config.seed}")
    adapters = config.adapters.items()
    return {"": model, **{name: _joined(model, identity_of(path)) for name, path in adapters}}


def identity_of(folder: Path) -> str:
    """Return the name of what lies in a folder, in hex. Raises OSError, msgspec.MsgspecError."""
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for path in (folder / name for name in WHOLE_FILES):
        if path.exists():
            digest.update(_labelled(path.name, path.read_bytes()))
    for path in _weights(folder):
        digest.update(_labelled(path.name, _sample(path)))
    return digest.hexdigest()


def _weights(folder: Path) -> list[Path]:
    """Return the files that weights are loaded from."""
    if (index := folder / INDEX_FILE).exists():
        located = msgspec.json.decode(index.read_bytes(), type=Index).weight_map
        return [folder / name for name in sorted(set(located.values()))]
    return [path for name in WEIGHTS if (path := folder / name).exists()]


def _sample(path: Path) -> bytes:
    """Return the header of a safetensors file and pieces of its tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(length)
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        tensors.pop("__metadata__", None)
        found = [header]
        for raw in tensors.values():
            begin, end = msgspec.json.decode(raw, type=_TensorPlace).data_offsets
            room = max(0, end - begin - PIECE_BYTES)
            places = {begin + room * part // (PIECES - 1) for part in range(PIECES)}
            size = min(PIECE_BYTES, end - begin)
            start = LENGTH_BYTES + length
            found += (os.pread(file.fileno(), size, start + place) for place in sorted(places))
    return b"".join(found)


def _labelled(name: str, data: bytes) -> bytes:
    return b"%s %d\n%s" % (name.encode(), len(data), data)


def _joined(*names: str) -> str:
    text = "\n".join(names).encode()
    return hashlib.blake2b(text, digest_size=NAME_BYTES).hexdigest()
