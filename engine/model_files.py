"""Names the contents of a model's files: hashed once, then known by inode, size and time of change
while these stay the same; and a version by all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

MAX_HASHES = 1024
"""Other models that share the file of hashes have some of them."""
_SUFFIXES = {".json", ".safetensors"}


def contents_of(folders: Mapping[str, Path], hashes: Path | None) -> dict[str, str]:
    """Return the hash of each file that weights, tokenizers and their settings come from, by the
    name of its folder and its place there. hashes: the file that keeps what was hashed before;
    None: nothing is kept. Raises OSError."""
    files = {
        f"{name}/{path.relative_to(folder)}": path
        for name, folder in folders.items()
        for path in sorted(folder.rglob("*"))
        if path.suffix in _SUFFIXES
    }
    return _hashes_of(files, hashes, "blake2b")


def sha256s_of(files: Mapping[str, Path], hashes: Path | None) -> dict[str, str]:
    """Return the SHA-256 of each file by its name. `hashes`: as of `contents_of`. Raises:
    OSError."""
    return _hashes_of(files, hashes, "sha256")


def _hashes_of(files: Mapping[str, Path], hashes: Path | None, algorithm: str) -> dict[str, str]:
    known = {} if hashes is None else _read(hashes)
    identities = {path: f"{algorithm} {_identity(path)}" for path in files.values()}
    missing = [path for path, identity in identities.items() if identity not in known]
    with ThreadPoolExecutor() as threads:
        made = zip(missing, threads.map(partial(_hash, algorithm), missing), strict=True)
        known |= {identities[path]: digest for path, digest in made}
    if missing and hashes is not None:
        own = {identity: known[identity] for identity in identities.values()}
        _write(hashes, known if len(known) <= MAX_HASHES else own)
    return {place: known[identities[path]] for place, path in files.items()}


def version_of(hashes: Mapping[str, str]) -> str:
    """Return the version that files are: the digest of what `sha256sum` prints of them, in the
    order of their names. `hashes`: the SHA-256 of each, by name."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def sha256_of(path: Path) -> str:
    """Raises: OSError."""
    return _hash("sha256", path)


def _identity(path: Path) -> str:
    found = path.stat()
    numbers = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return " ".join(map(str, (path.resolve(), *numbers)))


def _hash(algorithm: str, path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


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
