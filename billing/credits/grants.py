"""Credit grants: which usage they pay, and in which order. Pure, no I/O.

A grant pays for usage of its models and components that was admitted before it expires. Grants pay
in the order of `priority` (lowest first), then of expiry, then of age.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import msgspec

from billing.money import Pico

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 50, 100
EXPIRY_GRACE = timedelta(hours=1)
"""An expired grant waits so long for usage that was admitted before."""
UNKNOWN = ""
"""Stands for the component of usage that is paid in part, or was priced late."""
NEVER = datetime.max.replace(tzinfo=UTC)


class GrantTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of a grant, by which grants are ordered."""

    id: str
    priority: int = DEFAULT_PRIORITY
    expires_at: datetime | None = None
    models: tuple[str, ...] | None = None
    """None: all models."""
    components: tuple[str, ...] | None = None
    """None: all components."""
    created_at: datetime
    revoked_at: datetime | None = None


class Grant(GrantTerms, frozen=True, kw_only=True):
    left_pico: Pico
    """The unpaid part, leases included."""

    @property
    def is_scoped(self) -> bool:
        return self.models is not None or self.components is not None

    def is_valid(self, now: datetime) -> bool:
        """True if more of it may be leased."""
        return self.revoked_at is None and now < (self.expires_at or NEVER)

    def is_over(self, now: datetime) -> bool:
        """True if the part that is not leased goes back to the house."""
        if self.revoked_at is not None:
            return True
        return self.expires_at is not None and self.expires_at + EXPIRY_GRACE <= now


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer of usage that no grant has paid yet."""

    transfer_id: str
    model: str
    admitted_at: datetime
    amounts: Mapping[str, Pico]
    """Pico-USD by component."""

    @property
    def amount_pico(self) -> Pico:
        return sum(self.amounts.values())


class Burn(msgspec.Struct, frozen=True):
    """The payment of a part of a transfer by a grant."""

    transfer_id: str
    grant_id: str
    amount_pico: Pico


def burn_order(one: GrantTerms) -> tuple[int, datetime, datetime, str]:
    return (one.priority, one.expires_at or NEVER, one.created_at, one.id)


def sort_grants(grants: Iterable[Grant]) -> list[Grant]:
    """Sort grants in the order in which they pay."""
    return sorted(grants, key=burn_order)


def burn(grants: Iterable[Grant], usages: Sequence[Usage]) -> list[Burn]:
    """Pay `usages` with `grants`, as far as they go."""
    ordered = sort_grants(grants)
    left = {grant.id: grant.left_pico for grant in ordered}
    burns: list[Burn] = []
    for usage in usages:
        owed = dict(usage.amounts)
        for grant in ordered:
            paid = _pay(grant, left[grant.id], usage, owed)
            if paid:
                left[grant.id] -= paid
                burns.append(Burn(usage.transfer_id, grant.id, paid))
    return burns


def _pay(grant: Grant, left_pico: Pico, usage: Usage, owed: dict[str, Pico]) -> Pico:
    """Deduct what a grant pays from `owed`, and return its sum."""
    if grant.models is not None and usage.model not in grant.models:
        return 0
    if usage.admitted_at >= (grant.expires_at or NEVER):
        return 0
    paid = 0
    for component, amount in owed.items():
        if grant.components is None or component in grant.components:
            part = min(amount, left_pico - paid)
            owed[component] -= part
            paid += part
    return paid
