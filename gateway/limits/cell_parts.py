"""Fits requests into a cell's parts of limits: what a plan lets pass passes in a cell, too, whose
part is smaller than it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.limits.cells.budgets import CellBudgets
from gateway.limits.cells.shares import TAKEN_OVER_S
from gateway.limits.outcomes import COUNTED, KINDS, Admission, Refusal
from gateway.limits.redis.scope_limits import ScopeLimits

MAX_PARTS = 4
"""A request of so many times a cell's part of a minute passes, and its bucket rests for as many
minutes; a larger one waits until the cell has more."""
OF_STREAMS = KINDS["s"]
OF_INPUT = ("tokens", "input_tokens")


def fitted_input(scopes: Sequence[ScopeLimits], input_tokens: int) -> int:
    """Return how much of its input a request reserves: what is beyond a cell's part of a minute,
    and not beyond what the plan lets pass in one, becomes debt when it is settled."""
    found = input_tokens
    for scope in scopes:
        for bucket, of_plan in zip(scope.buckets, scope.of_plan.buckets, strict=True):
            if COUNTED[bucket.letter] in OF_INPUT and (
                input_tokens <= min(of_plan.limit, MAX_PARTS * bucket.limit)
            ):
                found = min(found, bucket.limit)
    return found


def note_asked(cells: CellBudgets, wanted: Admission, input_tokens: int) -> None:
    """Tell what a request wants, whether it passes or not."""
    asked = msgspec.structs.replace(wanted.reserved, input_tokens=input_tokens)
    cells.note(wanted.org_id, wanted.scopes, asked.by_letter(requests=1))


def refused_in_cell(cells: CellBudgets, wanted: Admission, verdict: Refusal) -> Refusal:
    """Tell of a refusal, and return what the client hears."""
    for scope in wanted.scopes:
        if verdict.kind == OF_STREAMS and scope.scope == verdict.scope:
            cells.note_refused_stream(wanted.org_id, scope)
    return with_wait(verdict, wanted.scopes, wanted.reserved.by_letter(requests=1))


def with_wait(refusal: Refusal, scopes: Sequence[ScopeLimits], units: Mapping[str, int]) -> Refusal:
    """Return a refusal that says when to come again if it is by a cell's part alone: shares move
    to where they are asked for."""
    if refusal.retry_after_s is not None:
        return refusal
    for scope in scopes:
        if scope.scope != refusal.scope or scope.plan is None:
            continue
        fits = any(
            KINDS[bucket.letter] == refusal.kind and units.get(bucket.letter, 1) <= bucket.limit
            for bucket in scope.plan.buckets
        )
        if fits:
            return msgspec.structs.replace(refusal, retry_after_s=TAKEN_OVER_S)
    return refusal
