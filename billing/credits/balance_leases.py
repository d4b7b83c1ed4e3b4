"""Balance leases: the amounts of a prepaid org's grants that gateways may spend without asking the
books. Pure; knows no Redis.

A lease is a pending transfer from a grant's account to the org's receivable. All leases of an org
expire together and are renewed together. An org may spend `funded` in all:

    funded = paid + leases, and of each grant: posted + leased <= credited (a constraint, too)

`funded` never falls while a lease lives, since gateways may still be spending it. The leased part
of a revoked or expired grant stays leased until the lease ends, or until its holders release it
(`released`). Settled usage is burned from the grants in their order and posts against their leases,
which shrink by as much as `paid` grows; `credit_burns` records which grant has paid which part of
which transfer. A lease that is not renewed expires, and its amount is free again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from billing.credits.grants import Burn, Grant, Usage, burn, sort_grants
from billing.ledger.accounts import CASH, account_of
from billing.ledger.transfers import GRANT_PREFIX, Transfer
from billing.money import PICO_PER_USD, Pico

LEASE_TTL = timedelta(seconds=60)
EXPIRY_MARGIN = timedelta(seconds=10)
"""A lease expires in the books so much later than for its holders, because clocks differ."""
HORIZON_S = 30.0
"""A lease lasts for so long at the recent rate of spending."""
MIN_ELAPSED_S = 1.0
MIN_LEASE_PICO = PICO_PER_USD // 10
MAX_LEASE_PICO = 100 * PICO_PER_USD
"""A lease has at most so much beyond current spending, unless one request needs more."""
REFILL_SHARE = 2
"""A lease is topped up when less than 1/REFILL_SHARE of it is left."""
BREAKAGE = "house:breakage"


class CreditLine(msgspec.Struct, frozen=True, kw_only=True):
    """The credit line of an org that is prepaid or was ever given credit."""

    org_id: str
    version: int
    told: int = 0
    """The last version that was announced to the holders of leases. Versions that have to shrink a
    lease are not announced."""
    paid_pico: Pico
    """The part of all past spending that grants or invoices have paid."""
    is_prepaid: bool
    leased_until: datetime | None = None
    leased_at: datetime | None = None
    spent_pico: Pico = 0
    """Spending and reservations at `leased_at`."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    spent_pico: Pico
    """All spending ever, and the reservations of running requests."""
    wanted_pico: Pico = 0
    """The amount that a waiting request needs beyond that."""
    released: int | None = None
    """The version up to which the holders have released their leases."""


class LeasePlan(msgspec.Struct, frozen=True, kw_only=True):
    line: CreditLine
    burns: Sequence[Burn]
    transfers: Sequence[Transfer]
    leases: Mapping[str, Transfer]
    """The open leases by grant."""
    ended: Sequence[str]
    """Grants of which nothing is left."""
    owed: Mapping[str, Pico]
    """The unpaid part of each transfer of usage."""
    refill_pico: Pico
    """A top-up is due when less is left; 0: it would bring nothing."""
    refill_by_model: Mapping[str, Pico]
    """The same by model, where only grants for these models have more."""
    is_dry: bool
    """True if everything that may be leased is leased."""
    must_shrink: bool
    """True if a revoked or expired grant has a lease."""

    def does_anything(self, usages: Sequence[Usage]) -> bool:
        return bool(self.transfers or self.ended) or len(self.owed) < len(usages)

    def funded_pico(self, grants: Mapping[str, Grant]) -> tuple[Pico, dict[str, Pico]]:
        """Return the amount that is funded for any model, and by model what is added to it."""
        general, by_model = self.line.paid_pico, dict[str, Pico]()
        for grant_id, lease in self.leases.items():
            models = grants[grant_id].models
            if models is None:
                general += lease.amount_pico
            for model in models or ():
                by_model[model] = by_model.get(model, 0) + lease.amount_pico
        return general, by_model

    def is_short(self, grants: Mapping[str, Grant], request: LeaseRequest) -> bool:
        """True if the balance does not cover a waiting request, whatever its model."""
        general, by_model = self.funded_pico(grants)
        free = general + max(by_model.values(), default=0) - request.spent_pico
        return self.is_dry and not self.must_shrink and free < request.wanted_pico


def lease_amount(used_pico: Pico, elapsed_s: float) -> Pico:
    """Return the size of a lease by the recent rate of spending."""
    expected = int(used_pico * HORIZON_S / max(elapsed_s, MIN_ELAPSED_S))
    return max(MIN_LEASE_PICO, min(MAX_LEASE_PICO, expected))


def plan(
    line: CreditLine,
    grants: Sequence[Grant],
    leases: Mapping[str, Transfer],
    usages: Sequence[Usage],
    request: LeaseRequest | None,
    now: datetime,
) -> LeasePlan:
    """Burn usage, give back what is left of revoked and expired grants, and lease what is requested
    (None: nothing). `grants`: all that are open."""
    burns = burn(grants, usages)
    burned, owed = _sums(burns, usages)
    left = {each.id: each.left_pico - burned.get(each.id, 0) for each in grants}
    released = None if request is None else request.released
    is_released = released is not None and released >= line.told
    is_live = bool(leases) and not is_released and _ends_at(leases) > now
    kept = {
        grant_id: max(0, lease.amount_pico - burned.get(grant_id, 0)) if is_live else 0
        for grant_id, lease in leases.items()
    }
    paid = line.paid_pico + sum(burned.values())
    if not line.is_prepaid:  # the rest is on an invoice
        paid, owed = paid + sum(owed.values()), {}
    leased, refill = kept, 0
    if request is not None and line.is_prepaid:
        leased, refill = _lease(line, grants, left, kept, request, paid, now)
    valid = [each for each in grants if each.is_valid(now)]
    must_shrink = any(leased.get(each.id) for each in grants if each not in valid)
    until = _until(line, grants, leased, request, must_shrink, now)
    following = msgspec.structs.replace(
        line, version=line.version + 1, paid_pico=paid, leased_until=until
    )
    if request is not None and not must_shrink:
        following = msgspec.structs.replace(
            following, told=following.version, leased_at=now, spent_pico=request.spent_pico
        )
    transfers, open_leases = _transfers(following, grants, leases, leased, burned, now)
    back = _give_back(following, grants, left, leased, now)
    given = {each.debit: each.amount_pico for each in back}
    after = {each.id: left[each.id] - given.get(account(each.id), 0) for each in grants}
    spare = [
        each
        for each in valid
        if each.components is None and after[each.id] > leased.get(each.id, 0)
    ]
    refill_pico, refill_by_model = _refills(spare, refill // REFILL_SHARE)
    return LeasePlan(
        line=following,
        burns=burns,
        transfers=[*transfers, *back],
        leases=open_leases,
        ended=[grant_id for grant_id, amount in after.items() if amount == 0],
        owed=owed,
        refill_pico=refill_pico,
        refill_by_model=refill_by_model,
        is_dry=not spare,
        must_shrink=must_shrink,
    )


def _refills(spare: Sequence[Grant], refill_pico: Pico) -> tuple[Pico, dict[str, Pico]]:
    """Return the refill amount for any model, or, if only grants for certain models have more, by
    model."""
    if any(each.models is None for each in spare):
        return refill_pico, {}
    models = sorted({model for each in spare for model in each.models or ()})
    return 0, dict.fromkeys(models, refill_pico)


def account(grant_id: str) -> str:
    return f"{GRANT_PREFIX}{grant_id}"


def _sums(
    burns: Sequence[Burn], usages: Sequence[Usage]
) -> tuple[dict[str, Pico], dict[str, Pico]]:
    """Add up what is burned of each grant, and what is still owed of each usage."""
    burned: dict[str, Pico] = {}
    owed = {usage.transfer_id: usage.amount_pico for usage in usages}
    for each in burns:
        burned[each.grant_id] = burned.get(each.grant_id, 0) + each.amount_pico
        owed[each.transfer_id] -= each.amount_pico
    return burned, {name: amount for name, amount in owed.items() if amount}


def _ends_at(leases: Mapping[str, Transfer]) -> datetime:
    return max(lease.expires_at for lease in leases.values() if lease.expires_at is not None)


def _lease(
    line: CreditLine,
    grants: Sequence[Grant],
    left: Mapping[str, Pico],
    kept: Mapping[str, Pico],
    request: LeaseRequest,
    paid: Pico,
    now: datetime,
) -> tuple[dict[str, Pico], Pico]:
    """Return the new lease of each grant, and the amount that they are ahead of spending."""
    elapsed_s = (now - line.leased_at).total_seconds() if line.leased_at else HORIZON_S
    used = max(0, request.spent_pico - line.spent_pico) if line.leased_at else 0
    ahead = max(request.wanted_pico, lease_amount(used, elapsed_s))
    target = max(0, request.spent_pico - paid) + ahead
    leased = dict(kept)
    missing = target - sum(leased.get(each.id, 0) for each in grants if not each.is_scoped)
    for grant in sort_grants(each for each in grants if each.is_valid(now)):
        if grant.components is not None:
            continue  # its part of a request is unknown in advance
        held = leased.get(grant.id, 0)
        if grant.models is not None:
            leased[grant.id] = max(held, min(left[grant.id], target))
            continue
        more = max(0, min(left[grant.id] - held, missing))
        leased[grant.id] = held + more
        missing -= more
    return leased, ahead


def _until(
    line: CreditLine,
    grants: Sequence[Grant],
    leased: Mapping[str, Pico],
    request: LeaseRequest | None,
    must_shrink: bool,
    now: datetime,
) -> datetime | None:
    """Return the end of the leases: no lease outlives its grant's expiry, and none is renewed while
    one has to shrink."""
    if not any(leased.values()):
        return None
    if request is None or must_shrink:
        return line.leased_until
    ends = [each.expires_at for each in grants if leased.get(each.id) and each.expires_at]
    return min([now + LEASE_TTL, *ends])


def _transfers(
    line: CreditLine,
    grants: Sequence[Grant],
    leases: Mapping[str, Transfer],
    leased: Mapping[str, Pico],
    burned: Mapping[str, Pico],
    now: datetime,
) -> tuple[list[Transfer], dict[str, Transfer]]:
    """Return the transfers of a settlement and the open leases: usage posts against the old leases,
    and beyond them at once; then come the new leases."""
    made, still = list[Transfer](), dict[str, Transfer]()
    for grant in grants:
        before, used = leases.get(grant.id), burned.get(grant.id, 0)
        next_pico, name = leased.get(grant.id, 0), f"{line.org_id}:{line.version}:{grant.id}"
        expires_at = line.leased_until + EXPIRY_MARGIN if line.leased_until else None
        if before is not None and not used and before.amount_pico == next_pico:
            if before.expires_at == expires_at:
                still[grant.id] = before
                continue
        posted = min(used, before.amount_pico) if before else 0
        if before is not None:
            made.append(_end(before, f"end:{name}", posted, now))
        paying = Transfer(
            id=f"burn:{name}",
            debit=account(grant.id),
            credit=account_of(line.org_id),
            amount_pico=used - posted,
            kind="burn",
        )
        if used > posted:
            made.append(paying)
        if next_pico:
            still[grant.id] = msgspec.structs.replace(
                paying,
                id=f"lease:{name}",
                amount_pico=next_pico,
                kind="lease",
                phase="pending",
                expires_at=expires_at,
            )
            made.append(still[grant.id])
    return made, still


def _end(lease: Transfer, transfer_id: str, posted: Pico, now: datetime) -> Transfer:
    if posted:
        return lease.post(transfer_id, posted)
    assert lease.expires_at is not None
    return lease.expire(transfer_id) if lease.expires_at <= now else lease.void(transfer_id)


def _give_back(
    line: CreditLine,
    grants: Sequence[Grant],
    left: Mapping[str, Pico],
    leased: Mapping[str, Pico],
    now: datetime,
) -> list[Transfer]:
    """Return the transfers that move what is not leased out of revoked grants, and out of expired
    ones, whose remainder the house keeps."""
    made = []
    for grant in grants:
        free = left[grant.id] - leased.get(grant.id, 0)
        if free and grant.is_over(now):
            revoked = grant.revoked_at is not None
            made.append(
                Transfer(
                    id=f"over:{line.org_id}:{line.version}:{grant.id}",
                    debit=account(grant.id),
                    credit=CASH if revoked else BREAKAGE,
                    amount_pico=free,
                    kind="revoked" if revoked else "expired",
                )
            )
    return made
