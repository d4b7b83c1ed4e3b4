"""Reads what a model's folder says of how to serve it: `tollgate.json`, for a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import ConfigError

FILE = "tollgate.json"
MAX_FILE_BYTES = 65_536


class FolderOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of `tollgate.json`; None: no bound."""

    default_max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """For a conversation that names no bound of its output."""
    free_string_chars: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """For a string of a schema that says nothing of its length or form."""
    free_integer_digits: Annotated[int, msgspec.Meta(ge=1, le=15)] | None = None
    free_items: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """For an array of a schema that names no bound."""
    guides_calls: bool = False
    """A call that the request leaves free is kept to the names of the offered tools and of their
    parameters, and to simple types."""

    @property
    def bounds_schemas(self) -> bool:
        bounds = (self.free_string_chars, self.free_integer_digits, self.free_items)
        return any(each is not None for each in bounds)


NO_OPTIONS = FolderOptions()


def read_folder_options(folder: Path) -> FolderOptions:
    """Read the file, if the folder has one. Raises: ConfigError, one line that names the file."""
    path = folder / FILE
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return NO_OPTIONS
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.json.decode(text, type=FolderOptions)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error
