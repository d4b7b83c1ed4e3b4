"""GET /v1/admin/forecast: what the month will have cost at its end, with its error."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from billing.money import format_usd
from billing.reports.forecast import CONFIDENCE_PERCENT, MonthForecast, forecast_month
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.wire.shared.page_query import OrgId
from gateway.wire.shared.resource import view_of


class ForecastQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`project_id`: of that alone."""

    project_id: OrgId | None = None


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
    mape = None if found.mape is None else f"{found.mape * 100:.1f}"
    return view_of(
        ForecastView,
        found,
        project_id=project_id,
        period_start=int(month.start.timestamp()),
        period_end=int(month.end.timestamp()),
        spent_usd=format_usd(month.spent_pico),
        backtest=view_of(BacktestView, found, mape_percent=mape),
    )


forecasts = AdminResource[ForecastView](
    path="/v1/admin/forecast", tag="Forecast", view=ForecastView
)


@forecasts.get(
    "What the month will have cost at its end, and how far such forecasts were off",
    query=ForecastQuery,
)
async def forecast(request: AdminRequest, query: ForecastQuery) -> ForecastView:
    async with request.transaction() as conn:
        month = await forecast_month(conn, request.org_id, datetime.now(UTC), query.project_id)
    return to_view(query.project_id, month)


routes = [forecast]
