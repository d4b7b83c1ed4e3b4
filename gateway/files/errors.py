"""The errors that keep the content of a file from being written or read.

FilesError
├── FileStoreAway       the store does not answer, or does not let us in: nothing has changed
├── FileStoreUnknown    this gateway was not told of the store that has it
└── ContentLost         its row is there, and the store has nothing of it, or not all
"""

from __future__ import annotations


class FilesError(Exception):
    """`file_id`: whose content; the text is for the log."""

    def __init__(self, file_id: str, text: str) -> None:
        super().__init__(f"{file_id}: {text}")
        self.file_id = file_id


class FileStoreAway(FilesError):
    pass


class FileStoreUnknown(FilesError):
    pass


class ContentLost(FilesError):
    pass
