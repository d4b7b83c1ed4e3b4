"""A model at a source that lies in memory, and breaks when told to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.model_cache.cache import Access, ModelCache
from engine.model_cache.remote_files import Checksum, RemoteFile, RemoteModel, SourceAway
from engine.model_cache.sources import ModelSource, parse_source
from engine.text.hub_weights import Transfer

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "model.safetensors": bytes(range(256)) * 40,
}
SOURCE = parse_source("s3://bucket/model")
PIECE_BYTES = 1000


def tell(_: Transfer) -> None:
    pass


class Remote:
    """A source as it was opened. `sums`: it says the SHA-256 of its files."""

    def __init__(
        self,
        files: Mapping[str, bytes] = FILES,
        *,
        source: ModelSource = SOURCE,
        sums: bool = True,
    ) -> None:
        self.source, self.contents = source, dict(files)
        listed = repr(sorted(files.items())).encode()
        self.state = hashlib.sha256(listed).hexdigest()
        self.files: Mapping[str, RemoteFile] = {
            name: RemoteFile(
                len(content),
                Checksum("sha256", hashlib.sha256(content).hexdigest()) if sums else None,
            )
            for name, content in files.items()
        }
        self.reads: list[tuple[str, int]] = []
        self.cuts: dict[str, list[int]] = {}
        """The places in a file at which its next reads break off."""

    def read(self, name: str, start: int) -> Iterator[bytes]:
        self.reads.append((name, start))
        cut = self.cuts[name].pop(0) if self.cuts.get(name) else None
        content = self.contents[name][:cut]
        for at in range(start, len(content), PIECE_BYTES):
            yield content[at : at + PIECE_BYTES]
        if cut is not None:
            raise SourceAway("the line was cut")


class Sources(Access):
    """Opens what lies in memory."""

    def __new__(cls, *remotes: Remote) -> Sources:
        made = super().__new__(cls)
        made.remotes = {each.source: each for each in remotes}  # type: ignore[attr-defined]
        return made

    def open(self, source: ModelSource, revision: str | None) -> RemoteModel:
        remotes: dict[ModelSource, Remote] = self.remotes  # type: ignore[attr-defined]
        if source not in remotes:
            raise SourceAway("nobody answers")
        return remotes[source]


def cache_of(root: Path, *remotes: Remote, max_bytes: int = 1 << 30) -> ModelCache:
    return ModelCache(root, max_bytes, Sources(*remotes))
