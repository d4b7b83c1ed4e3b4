"""Times the stages of a request: what was done for it, when each began and when it ended.

A stage costs two readings of a clock and one small object, whether or not anybody looks at it. Who
works for a request finds its stages in the `LogContext` of the task. Times are seconds of
`time.perf_counter`.
"""

from __future__ import annotations

import random
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Literal

import msgspec

StageName = Literal[
    "authenticate",
    "read",
    "prepare",
    "route",
    "admit",
    "attempt",
    "queue",
    "prefill",
    "decode",
    "tool_call",
    "mcp_request",
    "mcp_message",
    "settle",
]
"""`read`: the body comes and is understood. `prepare`: it becomes token ids. `route`: a replica is
chosen among several. `admit`: the limits
are asked. `attempt`: one try on one replica; `queue`, `prefill` and `decode` are parts of it.
`tool_call`, `mcp_request`: an MCP server is asked. `mcp_message`: what a client of the MCP bridge
asks is answered. `settle`: the limits hear what was used."""
SPAN_IDS = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""
MAX_STAGES = 256
"""How many are kept of one request; a loop of tools has some for each round and each call."""


class Stage(msgspec.Struct, gc=False):
    """One stage, as long as a `with` block. `about`: what it was done with: of an attempt the name
    of the replica, of a prefill the tokens that were cached, by where (`pool 896, tier 128`), of a
    call `server/tool`, of a message its method and what that names."""

    name: StageName
    began_at: float
    ended_at: float = 0.0
    """0: it has not ended."""
    about: str = ""
    outcome: str = ""
    """Why it failed: the name of an error, `left` where the client was gone, `overtaken` where
    another replica answered first, or `taken_back` where another one was to be sooner; empty: it
    did not."""
    within: Stage | None = None
    """The attempt that it is a part of."""
    is_upstream: bool = False
    """It is an attempt at somebody else's replica."""
    ref: str = ""
    """The id of an attempt in the books, or of an MCP message, as its client gave it."""
    protocol: str = ""
    """The revision of MCP that a message is of, once that is known."""
    cache_cause: str = ""
    """Why an attempt read so much from a cache and no more."""
    span_id: int = 0
    """Its id in a trace, once somebody has to know it; 0: it has none."""

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None
    ) -> None:
        self.ended_at = time.perf_counter()
        if kind is not None:
            self.outcome = self.outcome or kind.__name__

    def end(self, outcome: str = "") -> None:
        """End it now. `outcome`: why it failed, unless that was said before."""
        self.ended_at = time.perf_counter()
        self.outcome = self.outcome or outcome

    @property
    def has_ended(self) -> bool:
        return self.ended_at > 0


class Stages(list[Stage]):
    """The stages of one request as they began, at most `MAX_STAGES`."""

    num_left_out = 0

    def begin(self, name: StageName, about: str = "") -> Stage:
        """Begin a stage now."""
        stage = Stage(name, time.perf_counter(), 0.0, about)
        if len(self) < MAX_STAGES:
            self.append(stage)
            return stage
        return self.add(stage)

    def add(self, stage: Stage) -> Stage:
        if len(self) < MAX_STAGES:
            self.append(stage)
        else:
            self.num_left_out += 1
        return stage

    @property
    def have_ended(self) -> bool:
        return all(stage.ended_at for stage in self)


def new_span_id() -> int:
    """Draw an id of 64 bits; zero is none."""
    return SPAN_IDS.getrandbits(64) or 1


CURRENT_ATTEMPT: ContextVar[Stage | None] = ContextVar("current_attempt", default=None)
"""The attempt that a task makes, for what it sends to a replica."""
