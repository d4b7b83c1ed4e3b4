"""The base of the errors that the rooms raise on purpose.

CodedError          told apart by its `code`; `param` names what it is about, if anything
└── LocatedError    about one field, path or thing, which its text names first
"""

from __future__ import annotations

from typing import ClassVar


class CodedError(Exception):
    """An error that is told apart by its `code`."""

    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class LocatedError(CodedError):
    """An error about one field, path or thing. `message` is the text without its name."""

    param: str
    whole: ClassVar[str] = ""
    """Stands for an empty name, which is all of what was looked at."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param or self.whole}: {message}", param=param)
        self.message = message
