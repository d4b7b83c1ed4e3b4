"""/v1/admin/reratings: what clients write and read.

Amounts are decimal texts in USD, exact to the pico; moments are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from billing.corrections.rerating import (
    LineChange,
    RatingDifference,
    Rerating,
    ReratingPlan,
    ReratingScope,
)
from billing.tables import to_moment
from gateway.wire.admin.billing.billing_account import Moment
from gateway.wire.admin.billing.spend_caps import Id
from gateway.wire.shared.resource import view_of

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class NewRerating(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A re-rating of usage that was admitted from `starts_at` on and before `ends_at`.
    `price_list`: by which it is priced now; null: by the one that it was admitted by. `digest`: of
    what was shown."""

    starts_at: Moment
    ends_at: Moment
    model: Name | None = None
    price_list: Name | None = None
    digest: Digest


class PreviewQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query of a preview. `org_id`: for operators, another org than their own."""

    org_id: Id | None = None
    starts_at: Moment
    ends_at: Moment
    model: Name | None = None
    price_list: Name | None = None


class ReratingLineView(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a re-rating. `invoice`: the number of the final invoice that has it, whose
    difference joins the next one; null: it is on none yet."""

    object: str = "rerating.line"
    invoice: str | None
    project_id: str
    model: str
    tier: str
    component: str
    price_id_before: str | None
    price_id_after: str | None
    quantity: int
    num_events: int
    before_usd: str
    after_usd: str
    difference_usd: str


class ShownView(msgspec.Struct, frozen=True, kw_only=True):
    org_id: str
    starts_at: int
    ends_at: int
    model: str | None
    price_list: str | None
    digest: str
    num_events: int
    difference_usd: str
    lines: list[ReratingLineView]


class PreviewView(ShownView, frozen=True, kw_only=True):
    """A preview: `num_events` would cost something else; `num_unpriced` stay as they are, for not
    all that they used has a price."""

    object: str = "rerating.preview"
    num_unpriced: int


class ReratingView(ShownView, frozen=True, kw_only=True):
    """A re-rating. `applied_at` null: send it again, it goes on. In the end `num_applied` is less
    than `num_events` by those that somebody has priced otherwise since they were shown."""

    object: str = "rerating"
    id: str
    num_applied: int
    created_at: int
    applied_at: int | None


def to_span(wanted: NewRerating | PreviewQuery, org_id: str) -> ReratingScope:
    return ReratingScope(
        org_id=org_id,
        start=to_moment(wanted.starts_at),
        end=to_moment(wanted.ends_at),
        model=wanted.model,
        price_list=wanted.price_list,
    )


def to_preview(plan: ReratingPlan) -> PreviewView:
    return view_of(PreviewView, plan, **_span_and_lines(plan))


def to_view(rerating: Rerating) -> ReratingView:
    return view_of(ReratingView, rerating, **_span_and_lines(rerating))


def _span_and_lines(shown: RatingDifference) -> dict[str, Any]:
    span = shown.span
    return {
        "org_id": span.org_id,
        "starts_at": int(span.start.timestamp()),
        "ends_at": int(span.end.timestamp()),
        "model": span.model,
        "price_list": span.price_list,
        "lines": [_to_line(line) for line in shown.lines],
    }


def _to_line(line: LineChange) -> ReratingLineView:
    return view_of(
        ReratingLineView,
        line,
        invoice=line.invoice or None,
        project_id=line.project,
        price_id_before=line.price_before or None,
        price_id_after=line.price_after or None,
    )
