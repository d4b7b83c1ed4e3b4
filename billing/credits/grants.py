"""Credit grants: which pays for what, and in which order. Pure, no I/O.

A grant pays for usage that was admitted before it expires, of the models and the components it was
given for; the one of the lowest `priority` first, among equals the one that expires first, then the
oldest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

from billing.money import Pico

MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = 0, 50, 100
EXPIRY_GRACE = timedelta(hours=1)
"""So long after its expiry what a grant has left waits for usage that was admitted before."""
UNKNOWN = ""
"""The component of what is paid in part already, or was priced late."""
NEVER = datetime.max.replace(tzinfo=UTC)


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    left_pico: Pico
    """What is leased of it included."""
    priority: int = DEFAULT_PRIORITY
    expires_at: datetime | None = None
    models: tuple[str, ...] | None = None
    components: tuple[str, ...] | None = None
    """None: all."""
    created_at: datetime
    revoked_at: datetime | None = None

    @property
    def is_scoped(self) -> bool:
        return self.models is not None or self.components is not None

    def is_valid(self, now: datetime) -> bool:
        """Whether more of it may be promised."""
        return self.revoked_at is None and now < (self.expires_at or NEVER)

    def is_over(self, now: datetime) -> bool:
        """Whether what nobody was promised of it goes back."""
        if self.revoked_at is not None:
            return True
        return self.expires_at is not None and self.expires_at + EXPIRY_GRACE <= now


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer of usage that nobody has paid yet."""

    transfer_id: str
    model: str
    admitted_at: datetime
    amounts: Mapping[str, Pico]
    """By component."""

    @property
    def amount_pico(self) -> Pico:
        return sum(self.amounts.values())


class Burn(msgspec.Struct, frozen=True):
    """So much of a transfer a grant has paid."""

    transfer_id: str
    grant_id: str
    amount_pico: Pico


class GrantTerms(Protocol):
    """The fields that decide when it is a credit's turn."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def expires_at(self) -> datetime | None: ...
    @property
    def created_at(self) -> datetime: ...


def burn_order(one: GrantTerms) -> tuple[int, datetime, datetime, str]:
    return (one.priority, one.expires_at or NEVER, one.created_at, one.id)


def sort_grants(grants: Iterable[Grant]) -> list[Grant]:
    """As they are burned."""
    return sorted(grants, key=burn_order)


def burn(grants: Iterable[Grant], usages: Sequence[Usage]) -> list[Burn]:
    """Pay `usages` with `grants`; nobody pays for what is not in the result."""
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
    """Takes what the grant pays from `owed`."""
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
