"""Defines what a batch can be, and what comes next. Pure.

    validating ──> failed
        │
        └──> in_progress ──> finalizing ──> completed
                 │   │            └───────> expired       its window ended before all was done
                 │   └── cancelling ──────> cancelled
                 └ (cancelling may come while it is validated, too)

The same batch is seen in two shapes: OpenAI's, made of a file, and Anthropic's, made of requests.

A line is open until it has ended, done or failed, and then for good; while somebody works on it it
is leased.
"""

from __future__ import annotations

from typing import Literal

from gateway.wire.shared.batch import Shape, Status

MESSAGES = "/v1/messages"
"""The endpoint of all batches in Anthropic's shape, and of no other."""
LineState = Literal["open", "done", "failed"]
"""`done`: answered with a 2xx, and billed. `failed`: everything else, and nobody pays."""
LineCode = Literal["batch_expired", "batch_cancelled"]
WHY: dict[LineCode, str] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed, because its batch was cancelled.",
}


def shape_of(endpoint: str) -> Shape:
    return "anthropic" if endpoint == MESSAGES else "openai"


def may_cancel(status: Status) -> bool:
    """Return whether a batch may be cancelled, or is cancelled already, in which case nothing is
    changed."""
    return status in ("validating", "in_progress", "cancelling")


def after_validation(status: Status, *, is_valid: bool) -> Status:
    """Return the status after validation. `status`: now; it may have been cancelled meanwhile."""
    assert status in ("validating", "cancelling"), status
    if not is_valid:
        return "failed"
    return "in_progress" if status == "validating" else "cancelling"


def is_over(status: Status, *, num_open: int, num_leased: int, is_late: bool) -> bool:
    """Return whether nothing more is run and nobody works on it. `is_late`: its window has
    ended."""
    if status == "finalizing":
        return True
    if status == "cancelling" or (status == "in_progress" and is_late):
        return num_leased == 0
    return status == "in_progress" and num_open == 0


def while_written(status: Status) -> Status:
    """Return the status while the results are written; a cancelled one stays what people were
    told."""
    return "cancelling" if status == "cancelling" else "finalizing"


def at_the_end(status: Status, *, num_unrun: int) -> Status:
    """Return the final status. `num_unrun`: of its lines."""
    if status == "cancelling":
        return "cancelled"
    return "expired" if num_unrun else "completed"


def code_of_unrun(status: Status) -> LineCode:
    return "batch_cancelled" if status == "cancelling" else "batch_expired"
