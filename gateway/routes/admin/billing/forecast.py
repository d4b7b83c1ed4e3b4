"""GET /v1/admin/forecast: what the month will have cost at its end, with its error."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from litestar import Response, get

from billing.money import Pico, format_usd
from billing.reports.forecast import CONFIDENCE_PERCENT
from billing.reports.spend_history import MonthForecast, forecast_month
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.wire.admin.billing.spend_caps import Id
from gateway.wire.organization.usage import parse_query


class ForecastQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`project_id`: of that alone."""

    project_id: Id | None = None


class BacktestView(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast as it would have been made on an earlier day for as many days ahead."""

    horizon_days: int
    num_backtests: int
    mape_percent: str | None
    """Mean absolute percentage error; null: the past is too short."""


class ForecastView(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of the calendar month in UTC.

    Low and high are what the errors of the backtests span; null: there are too few.
    """

    object: str = "forecast"
    project_id: str | None
    period_start: int
    period_end: int
    spent_usd: str
    point_usd: str
    low_usd: str | None
    high_usd: str | None
    confidence_percent: int = CONFIDENCE_PERCENT
    backtest: BacktestView


def to_view(project_id: str | None, month: MonthForecast) -> ForecastView:
    found = month.found
    return ForecastView(
        project_id=project_id,
        period_start=int(month.start.timestamp()),
        period_end=int(month.end.timestamp()),
        spent_usd=format_usd(month.spent_pico),
        point_usd=format_usd(found.point_pico),
        low_usd=_format(found.low_pico),
        high_usd=_format(found.high_pico),
        backtest=BacktestView(
            horizon_days=found.horizon_days,
            num_backtests=found.num_backtests,
            mape_percent=None if found.mape is None else f"{found.mape * 100:.1f}",
        ),
    )


def _format(amount_pico: Pico | None) -> str | None:
    return None if amount_pico is None else format_usd(amount_pico)


@get(
    "/v1/admin/forecast",
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Forecast"],
    summary="What the month will have cost at its end, and how far such forecasts were off",
    operation_class=describes(query=ForecastQuery, answer=ForecastView),
)
async def forecast(request: AuthenticatedRequest) -> Response[bytes]:
    project_id, org_id = (
        parse_query(request.url.query, ForecastQuery).project_id,
        request.user.org_id,
    )
    async with tenant(services(request).db, org_id) as conn:
        month = await forecast_month(conn, org_id, datetime.now(UTC), project_id)
    return answer(request, to_view(project_id, month))


routes = [forecast]
