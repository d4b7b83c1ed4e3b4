"""Reads what the stages of a request say of its way: `route`, why its replica was chosen among
several and what was predicted of each (`gateway.fleet.routing.explain` writes it); `prefill`, where
cached tokens were found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.generation_events import CachedTokens
from gateway.request_log.answers import MAX_ROUTE_CHARS

CANDIDATE = re.compile(
    r"(?P<replica>\S+) in (?P<predicted_s>\S+) s(?: with (?P<cached>\d+))?"
    r"(?: and (?P<fetched>\d+) of (?P<fetched_from>\S+))?"
)
SPLIT = re.compile(
    r"prefill at (?P<prefill>\S+) and decode at (?P<decode>\S+) after (?P<transfer_s>\S+) s"
)
MOVE = re.compile(r"from (?P<replica>\S+) with (?P<left_s>\S+) s left")


class RouteCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that a request could have gone to. `replica`: the number with which its name ends,
    behind the cell that lends it and a colon, if one does.
    `cached_tokens`: of the prompt, in the replica's own cache; `fetched_tokens`: more of them that
    it would have read from the cache of `fetched_from`."""

    replica: str
    predicted_ttft_s: float
    cached_tokens: int
    fetched_tokens: int
    fetched_from: str | None


class RouteSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a generation between two replicas, by the numbers with which their names end.
    `transfer_s`: until the second one was expected to have what the first one computed."""

    prefill: str
    decode: str
    transfer_s: float


class RouteMove(msgspec.Struct, frozen=True, kw_only=True):
    """The replica at which a request waited before it was moved, by the number with which its name
    ends. `left_s`: until its first token there, as it was expected then."""

    replica: str
    left_s: float


class RouteChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a replica for one generation. `reason`: cached, least_work, spread, key,
    split, cell_down, cell_late, or moved where it is about a request that waited at another
    replica. `candidates`: the chosen one first, then those that would have been asked after it.
    `split`: null: one replica does all. `moved`: null: it did not wait elsewhere before."""

    reason: str
    candidates: list[RouteCandidate]
    split: RouteSplit | None = None
    moved: RouteMove | None = None


def choices_of(stages: Iterable[tuple[Any, ...]]) -> list[RouteChoice]:
    """Return the choices made for a request: one for each of its generations for which there was
    more than one replica, and one more for each that moved."""
    found = (read_choice(str(about)) for name, _, _, about, *_ in stages if name == "route")
    return [each for each in found if each is not None]


def found_of(stages: Iterable[tuple[Any, ...]]) -> list[CachedTokens]:
    """Return what each attempt of a request found cached, of those that came to a first token and
    of which that is known."""
    return [
        read_found(str(about)) for name, _, _, about, *_ in stages if name == "prefill" and about
    ]


def read_found(text: str) -> CachedTokens:
    """Read what `str` of it says."""
    parts = (each.rpartition(" ") for each in text.split(", "))
    numbers = {name: int(number) for name, _, number in parts if number.isdecimal()}
    return CachedTokens(*(numbers.get(name, 0) for name in CachedTokens.__struct_fields__))


def read_choice(text: str) -> RouteChoice | None:
    """Return what a stage says; None: it says nothing of the kind."""
    reason, *told = text.split(", ")
    parts = SPLIT.fullmatch(told[0]) if told else None
    move = MOVE.fullmatch(told[0]) if told else None
    if parts is not None or move is not None:
        del told[0]
    if len(text) >= MAX_ROUTE_CHARS:  # the last one is cut
        told.pop()
    read = [CANDIDATE.fullmatch(each) for each in told]
    candidates = [to_candidate(each) for each in read if each is not None]
    if not candidates or len(candidates) < len(told):
        return None
    return RouteChoice(
        reason=reason,
        candidates=candidates,
        split=None if parts is None else to_split(parts),
        moved=None if move is None else to_move(move),
    )


def to_move(found: re.Match[str]) -> RouteMove:
    return RouteMove(replica=found["replica"], left_s=float(found["left_s"]))


def to_split(found: re.Match[str]) -> RouteSplit:
    return RouteSplit(
        prefill=found["prefill"], decode=found["decode"], transfer_s=float(found["transfer_s"])
    )


def to_candidate(found: re.Match[str]) -> RouteCandidate:
    return RouteCandidate(
        replica=found["replica"],
        predicted_ttft_s=float(found["predicted_s"]),
        cached_tokens=int(found["cached"] or 0),
        fetched_tokens=int(found["fetched"] or 0),
        fetched_from=found["fetched_from"],
    )
