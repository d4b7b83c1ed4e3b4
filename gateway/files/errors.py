"""The errors that keep the content of a file from being written or read.

FilesError
├── FileStoreAway       the store does not answer, or does not let us in: nothing has changed
├── FileStoreUnknown    this gateway was not told of the store that has it
└── ContentLost         its row is there, and the store has nothing of it, or not all
"""

from __future__ import annotations

from foundation.errors import LocatedError


class FilesError(LocatedError):
    """An error about the content of a file, which `param` names by its id; the text is for the
    log."""


class FileStoreAway(FilesError):
    pass


class FileStoreUnknown(FilesError):
    pass


class ContentLost(FilesError):
    pass
