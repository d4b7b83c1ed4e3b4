"""Makes the row of the request log of each answered request for a model, in the thread of the
access log.

A request that nobody signed is no tenant's and has no row; nor has what is asked beside inference.
The row of a line of a batch is written with its bill (`batches.ending`).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from gateway.batches.states import MESSAGES
from gateway.principal import Principal
from gateway.request_log.answers import NotedAnswer, RequestOwner, TokenCounts, to_row
from gateway.request_log.rows import RequestRow
from gateway.routes.asgi.access_log import AccessLine
from gateway.telemetry.captured_content import CapturedContent
from gateway.telemetry.metrics import UNKNOWN_MODEL
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.surfaces import RESPONSES, SURFACES

PLAYGROUND = "/console/playground/completions"
ROUTES = frozenset({*SURFACES, RESPONSES, MESSAGES, PLAYGROUND})
"""The templates of the routes that ask a model."""


def recording(
    put: Callable[[RequestRow], None],
    put_content: Callable[[RequestRow, CapturedContent], None] | None = None,
) -> Callable[[NotedAnswer, AccessLine], None]:
    """Return what an access log calls for each answer. `put_content`: takes what was asked and
    answered, where its project stores that."""

    def record(answer: NotedAnswer, line: AccessLine) -> None:
        owner = owner_of(answer, line)
        if owner is None:
            return
        tokens = line.tokens if isinstance(line.tokens, TokenCounts) else TokenCounts()
        cost = 0 if line.cost_pico_usd is UNSET else line.cost_pico_usd
        row = to_row(owner, answer, tokens, cost)
        put(row)
        if put_content is not None and answer.meter is not None:
            content = answer.meter.content
            if content is not None:
                put_content(row, content)

    return record


def owner_of(answer: NotedAnswer, line: AccessLine) -> RequestOwner | None:
    """Return whose a request is; None: it has no row, or what bills it writes that."""
    who, meter = answer.principal, answer.meter
    if answer.kind in ("queued", "batch"):
        return None
    if not isinstance(who, Principal) or answer.context is None or answer.route not in ROUTES:
        return None
    return RequestOwner(
        org=who.org_id,
        project=who.project_id,
        key=who.key_id,
        model=UNKNOWN_MODEL if line.model is UNSET else line.model,
        lane=lane_of(who, meter),
        tags=None if meter is None else meter.tags,
    )


def lane_of(who: Principal, meter: RequestMeter | None) -> str:
    """Return the lane that a request was in, or would have been in where it was refused."""
    if meter is not None and meter.lane is not None:
        return meter.lane
    return who.org_plan.lane or who.key_lane or "interactive"
