"""/v1/admin/balance/settings and /v1/admin/top-ups: what clients write and read.

Money is a decimal text in USD, exact; moments are Unix seconds. A field that a change leaves out
stays as it is.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from billing.credits.balance_watch import AutoTopUp, BalanceSettings
from billing.credits.top_ups import TopUpState
from billing.money import format_usd, usd
from gateway.wire.admin.billing.spend_caps import AmountUsd

MAX_PER_DAY = 24
Reason = Annotated[str, Meta(min_length=1, max_length=200)]


class AutoTopUpForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule of automatic top-ups: when no more than `below_usd` is left, `amount_usd` is asked
    for, once until the balance has been above again, and at most so often in any 24 hours."""

    amount_usd: AmountUsd
    below_usd: AmountUsd
    max_per_day: Annotated[int, Meta(ge=1, le=MAX_PER_DAY)] = 1


class BalanceSettingsPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of the settings. `low_usd`: to be told when no more is left. Null switches off."""

    low_usd: AmountUsd | None | UnsetType = UNSET
    auto_top_up: AutoTopUpForm | None | UnsetType = UNSET


class BalanceSettingsView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "balance_settings"
    org_id: str
    low_usd: str | None
    auto_top_up: AutoTopUpForm | None


class TopUpFailure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Reason


class TopUpView(msgspec.Struct, frozen=True, kw_only=True):
    """A top-up. `left_usd`: when it was requested. `credit_id`: what a granted one was credited
    as."""

    object: str = "top_up"
    id: str
    org_id: str
    amount_usd: str
    left_usd: str
    state: TopUpState
    requested_at: int
    expires_at: int
    ended_at: int | None
    credit_id: str | None
    failure: str | None


def to_values(patch: BalanceSettingsPatch) -> dict[str, Any]:
    """Return the values of `Wanted` that it changes."""
    values: dict[str, Any] = {}
    if patch.low_usd is not UNSET:
        values["low_pico"] = None if patch.low_usd is None else usd(patch.low_usd)
    if patch.auto_top_up is not UNSET:
        form = patch.auto_top_up
        values["top_up"] = None if form is None else to_auto_top_up(form)
    return values


def to_auto_top_up(form: AutoTopUpForm) -> AutoTopUp:
    return AutoTopUp(
        amount_pico=usd(form.amount_usd),
        below_pico=usd(form.below_usd),
        max_per_day=form.max_per_day,
    )


def to_settings_view(org_id: str, wanted: BalanceSettings) -> BalanceSettingsView:
    top_up, low = wanted.top_up, wanted.low_pico
    form = None
    if top_up is not None:
        form = AutoTopUpForm(
            amount_usd=format_usd(top_up.amount_pico),
            below_usd=format_usd(top_up.below_pico),
            max_per_day=top_up.max_per_day,
        )
    return BalanceSettingsView(
        org_id=org_id, low_usd=None if low is None else format_usd(low), auto_top_up=form
    )
