"""The errors of a server that is a process of ours.

StdioError                code                    is a `mcp_bridge.errors.BridgeError`
├── BadLaunch             bad_launch              a spec or a value that cannot be (names `field`)
├── DigestMismatch        launch_digest_mismatch  what lies on the disk is not what was pinned
├── CannotIsolate         cannot_isolate          nothing here would keep it from what is ours
├── TooManyProcesses      too_many_processes      a bound on living servers is reached
├── StartFailed           start_failed            the kernel refused, or there is no such command
└── UpstreamEnded         upstream_ended          calls that waited have no answer
    ├── LineTooLong       line_too_long           a line beyond the caps of bytes and values
    └── NotSpeaking       not_speaking            too many lines that are no JSON-RPC

Every text names the upstream and never what it wrote.
"""

from __future__ import annotations

from typing import ClassVar

from foundation.errors import LocatedError
from mcp_bridge.errors import BridgeError


class StdioError(BridgeError, LocatedError):
    """An error about an upstream, which `param` names."""

    code: ClassVar[str] = "stdio_error"


class BadLaunch(StdioError):
    code = "bad_launch"

    def __init__(self, upstream: str, field: str, message: str) -> None:
        super().__init__(upstream, f"{field}: {message}")
        self.field = field


class DigestMismatch(StdioError):
    code = "launch_digest_mismatch"


class CannotIsolate(StdioError):
    code = "cannot_isolate"


class TooManyProcesses(StdioError):
    code = "too_many_processes"


class StartFailed(StdioError):
    code = "start_failed"


class UpstreamEnded(StdioError):
    code = "upstream_ended"


class LineTooLong(UpstreamEnded):
    code = "line_too_long"


class NotSpeaking(UpstreamEnded):
    code = "not_speaking"
