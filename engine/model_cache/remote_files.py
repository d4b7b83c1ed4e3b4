"""Describes the files of a model at its source, what their checksums are, and which are fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, Protocol

from engine.errors import ConfigError
from engine.model_cache.sources import ModelSource
from engine.text.hub import INDEX_FILE, choose_files

Part = Literal["model", "texts", "adapter"]
"""A part of a source to fetch: a whole model, one without its weights, or a LoRA adapter."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_FILES = 1000
MAX_INDEX_BYTES = 64 << 20


class Checksum(NamedTuple):
    """A source's word for the content of a file: its SHA-256, or the id of its blob in git."""

    kind: Literal["sha256", "git"]
    digest: str


class RemoteFile(NamedTuple):
    """A file at its source."""

    size: int
    checksum: Checksum | None
    """None: the source says nothing of its content."""


class SourceAway(Exception):
    """A source did not answer, or its answer broke off: it may be asked again."""


class RemoteModel(Protocol):
    """A model at its source, as it was when it was opened: a commit of a repository, or the objects
    that a store listed."""

    source: ModelSource
    state: str
    """The commit, or a digest of what the store listed: equal while nothing has changed."""
    files: Mapping[str, RemoteFile]

    def read(self, name: str, start: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` on. Raises: SourceAway; ConfigError, where asking
        again is of no use."""


class RunningHash:
    """Hashes a file's bytes as they come, by SHA-256 and by what its source says of it."""

    def __init__(self, file: RemoteFile) -> None:
        self._expected = file.checksum
        self._sha256 = hashlib.sha256()
        self._other = None
        if file.checksum is not None and file.checksum.kind == "git":
            head = b"blob %d\0" % file.size
            self._other = hashlib.sha1(head, usedforsecurity=False)

    def update(self, piece: bytes) -> None:
        self._sha256.update(piece)
        if self._other is not None:
            self._other.update(piece)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def is_as_expected(self) -> bool:
        found = self._sha256 if self._other is None else self._other
        return self._expected is None or found.hexdigest() == self._expected.digest


def choose(remote: RemoteModel, part: Part) -> list[str]:
    """Return the names of the files to fetch. Raises: ConfigError, SourceAway."""
    at = str(remote.source)
    if part == "adapter":
        for name in ADAPTER_FILES:
            if name not in remote.files:
                raise ConfigError(f"{at} has no {name}: it is no adapter")
        return list(ADAPTER_FILES)
    chosen = choose_files(
        at, remote.files, None if part == "texts" else lambda: read_small(remote, INDEX_FILE)
    )
    names = sorted({*chosen.texts, *chosen.weights})
    if len(names) > MAX_FILES:
        raise ConfigError(f"{at} has {len(names)} files: a model may have {MAX_FILES}")
    return names


def read_small(remote: RemoteModel, name: str) -> bytes:
    """Return the verified content of a file that fits into memory. Raises: ConfigError,
    SourceAway."""
    file = remote.files[name]
    if file.size > MAX_INDEX_BYTES:
        raise ConfigError(f"{remote.source}: {name} has {file.size} bytes: too many for an index")
    found, running = bytearray(), RunningHash(file)
    for piece in remote.read(name, 0):
        running.update(piece)
        found += piece
    if len(found) != file.size:
        raise SourceAway(f"{name} broke off")
    if not running.is_as_expected():
        raise ConfigError(f"{remote.source}: {name} is not what its checksum says")
    return bytes(found)
