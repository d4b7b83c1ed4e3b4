"""Names all that makes the KV blocks of two engines the same bytes.

Two engines with the same weights, adapters and options compute the same keys and values, up to
rounding; those of any other are never mixed with them. A name is made of the contents of the
model's files: hashed once, then known by inode, size and time of change while these stay the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from engine.config import BLOCK_SIZE, EngineConfig, ResolvedConfig

FORMAT = 1
"""To be raised when a change of the code gives the same tokens other keys or values."""
HASHES = "weights.json"
MAX_HASHES = 1024
"""Engines of other models that share the file have some of them."""
_SUFFIXES = {".json", ".safetensors"}


def layout_digest(resolved: ResolvedConfig, block_bytes: int, hashes: Path | None) -> bytes:
    """Return the 32 bytes of the name. hashes: the file that keeps what was hashed before; None:
    nothing is kept. Raises OSError."""
    config = resolved.config
    parts = {
        "format": FORMAT,
        "files": sorted(_contents(config, hashes)),
        "load_format": config.load_format,
        "seed": config.seed if config.load_format == "dummy" else 0,
        "quantization": config.quantization,
        "dtype": resolved.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_model_len": config.max_model_len,
        "block": [BLOCK_SIZE, block_bytes],
        # What is promised to the bit is not mixed with what another machine rounds otherwise.
        "deterministic": [resolved.device, torch.__version__] if config.deterministic else None,
    }
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=32).digest()


def _contents(config: EngineConfig, hashes: Path | None) -> Iterator[tuple[str, str]]:
    """The place of each file that weights come from, and its hash."""
    folders = {"model": config.model, "draft": config.draft_model}
    folders |= {f"adapter {name}": folder for name, folder in config.adapters.items()}
    files = {
        f"{place}/{path.relative_to(folder)}": path
        for place, folder in folders.items()
        if folder is not None
        for path in sorted(folder.rglob("*"))
        if path.suffix in _SUFFIXES and not path.name.startswith("tokenizer")
    }
    known = {} if hashes is None else _read(hashes)
    identities = {path: _identity(path) for path in files.values()}
    missing = [path for path, identity in identities.items() if identity not in known]
    with ThreadPoolExecutor() as threads:
        made = zip(missing, threads.map(_hash, missing), strict=True)
        known |= {identities[path]: digest for path, digest in made}
    if missing and hashes is not None:
        own = {identity: known[identity] for identity in identities.values()}
        _write(hashes, known if len(known) <= MAX_HASHES else own)
    for place, path in files.items():
        yield place, known[identities[path]]


def _identity(path: Path) -> str:
    found = path.stat()
    numbers = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return " ".join(map(str, (path.resolve(), *numbers)))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _read(hashes: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(hashes.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):  # a first start, or a write that was cut off
        return {}


def _write(hashes: Path, known: dict[str, str]) -> None:
    hashes.parent.mkdir(parents=True, exist_ok=True)
    beside = hashes.with_suffix(f".{os.getpid()}")
    beside.write_bytes(msgspec.json.encode(known))
    beside.replace(hashes)
