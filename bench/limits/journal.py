"""Write down what a loaded process did, line by line, on disk before it goes on: a SIGKILL loses
nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.limits.outcomes import Units


class Entry(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One line."""


class Ready(Entry, frozen=True):
    """It can begin."""


class Admitted(Entry, frozen=True):
    id: str
    at_us: int
    """Redis' time of the admission."""
    who: str
    model: str
    input_tokens: int
    output_tokens: int
    """Reserved."""


class Wrote(Entry, frozen=True):
    id: str
    at_us: int
    tokens: int


class Ends(Entry, frozen=True):
    """It is about to be settled."""

    id: str
    at_us: int
    voided: bool = False


class Counted(Entry, frozen=True):
    """The counts of what else happened, written when the process ends."""

    refused: int
    replayed: int
    """Admissions asked for again."""
    replay_refused: int
    """Admissions asked for again after their end, which are no requests any more."""
    settled_twice: int
    double_refused: int
    of_slices: int
    """Admitted without asking Redis."""
    extended: int
    rested: int


Line = Ready | Admitted | Wrote | Ends | Counted
encoder = msgspec.json.Encoder()
decoder = msgspec.json.Decoder(Line)


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, line: Line) -> None:
        os.write(self._file, encoder.encode(line) + b"\n")


@dataclass
class Request:
    """All that is known of one."""

    admitted: Admitted
    wrote: list[Wrote] = field(default_factory=list)
    ends: Ends | None = None

    @property
    def used(self) -> Units:
        if self.ends is not None and self.ends.voided:
            return Units()
        written = sum(each.tokens for each in self.wrote)
        return Units(input_tokens=self.admitted.input_tokens, output_tokens=written)


@dataclass
class Story:
    """Everything that one process wrote."""

    is_ready: bool = False
    requests: dict[str, Request] = field(default_factory=dict)
    counted: Counted | None = None


def read(path: Path) -> Story:
    """A line that a SIGKILL cut off is none."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return tell(decoder.decode(line) for line in whole.splitlines())


def tell(lines: Iterable[Line]) -> Story:
    story = Story()
    for line in lines:
        match line:
            case Ready():
                story.is_ready = True
            case Admitted():
                story.requests[line.id] = Request(line)
            case Wrote():
                story.requests[line.id].wrote.append(line)
            case Ends():
                story.requests[line.id].ends = line
            case Counted():
                story.counted = line
    return story
