"""Lists the files of a model by their digests: so machines tell each other what they have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import ConfigError
from engine.model_cache.remote_files import ADAPTER_FILES, MAX_FILES, Part
from engine.model_files import sha256s_of, version_of
from engine.text.hub import INDEX_FILE, choose_files

MAX_NAME_CHARS = 255
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ListedFile(msgspec.Struct, frozen=True):
    """A file by its content. `size`: bytes."""

    size: Annotated[int, Meta(ge=0, le=1 << 46)]
    sha256: Sha256


class ModelListing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one model, of its texts alone, or of an adapter, by their names."""

    version: str
    part: Part
    files: Annotated[dict[str, ListedFile], Meta(max_length=MAX_FILES)]

    @property
    def has_weights(self) -> bool:
        return self.part != "texts"

    def check(self, at: str) -> None:
        """Raises: ConfigError, which begins with `at`, where it is not what it says, or a name
        leads out of a folder."""
        for name in self.files:
            places = name.split("/")
            if len(name) > MAX_NAME_CHARS or not name.isprintable() or "\\" in name:
                raise ConfigError(f"{at}: {name[:MAX_NAME_CHARS]!r} is no name of a file")
            if any(each in ("", ".", "..") for each in places):
                raise ConfigError(f"{at}: {name!r} leads out of the model's folder")
        found = version_of({name: each.sha256 for name, each in self.files.items()})
        if found != self.version:
            raise ConfigError(f"{at}: its files are version {found}, not {self.version}")


def list_folder(folder: Path, part: Part, hashes: Path | None) -> ModelListing:
    """Return what a folder has of what would be fetched of it. `hashes`: as of
    `engine.model_files.contents_of`. Raises: ConfigError, OSError."""
    names: Iterable[str] = ADAPTER_FILES
    if part != "adapter":
        there = [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]
        chosen = choose_files(
            str(folder),
            there,
            None if part == "texts" else lambda: (folder / INDEX_FILE).read_bytes(),
        )
        names = (*chosen.texts, *chosen.weights)
    digests = sha256s_of({name: folder / name for name in names}, hashes)
    files = {
        name: ListedFile((folder / name).stat().st_size, digest) for name, digest in digests.items()
    }
    return ModelListing(version=version_of(digests), part=part, files=files)
