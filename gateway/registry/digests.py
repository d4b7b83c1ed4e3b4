"""Digests of what a version answers with: config, tokenizer and weights of a model's folder, an
adapter beside them, or where an upstream is and what it is called there.

A file that did not change is not read again. Blocks: call it in a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

from gateway.lru import Lru
from gateway.settings.models import ModelConfig

PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *(
        "chat_template.*",
        "tollgate.json",
        "adapter_config.json",
        "modules.json",
        "1_Pooling/*.json",
    ),
)
"""The files of a folder that decide what a model answers."""
OF_ANSWERS = ("load_format", "quantization", "dtype", "kv_cache_dtype")
"""The options of an engine that do, too."""
MAX_KNOWN_FILES = 4096
"""File digests that a process remembers."""
READ_BYTES = 1 << 20

Stamp = tuple[Path, int, int, int]
"""A file's path, inode, time and size."""


class FileDigests:
    """Reads the digests of files, each once for as long as the file stays as it is. From any
    thread."""

    def __init__(self) -> None:
        self._known: Lru[Stamp, str] = Lru(MAX_KNOWN_FILES)
        self._lock = Lock()

    def of(self, path: Path) -> str:
        """Raises: OSError."""
        found = path.stat()
        stamp = (path, found.st_ino, found.st_mtime_ns, found.st_size)
        with self._lock:
            known = self._known.get(stamp)
        if known is None:
            known = digest_of_file(path)
            with self._lock:
                self._known.put(stamp, known)
        return known


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits. Raises: OSError."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            found.update(chunk)
    return found.hexdigest()


def digest_of(model: ModelConfig, files: FileDigests, adapter: str = "") -> str:
    """Return the digest of a model of the settings, or of an adapter of it. Raises: OSError."""
    lines = [f"{key} {value}" for key, value in parts_of(model, files, adapter)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def parts_of(model: ModelConfig, files: FileDigests, adapter: str) -> Iterator[tuple[str, object]]:
    if model.path is None:
        for upstream in sorted((each.upstream, each.upstream_model) for each in model.replicas):
            yield "upstream", upstream
        return
    for option in OF_ANSWERS:
        yield option, getattr(model.engine_options, option)
    if model.chat_template is not None:
        yield "template", files.of(model.chat_template)
    yield from folder_parts(model.path, files)
    for each in model.adapters:
        if each.name == adapter:
            yield "adapter", each.name if each.path is None else ""
            if each.path is not None:
                yield from folder_parts(each.path, files)


def folder_parts(folder: Path, files: FileDigests) -> Iterator[tuple[str, str]]:
    for path in files_of(folder):
        yield str(path.relative_to(folder)), files.of(path)


def files_of(folder: Path) -> Sequence[Path]:
    """Return the files of a folder that decide what a model answers, in the order of their
    names."""
    found = {path for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return sorted(found)
