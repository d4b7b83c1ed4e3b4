"""Credits: what an org has paid in advance. Given by operators, kept in the ledger.

Above: admin routes. Below: `billing.credits`. Of an org that is prepaid the sum of its credits is
one more hard cap on all that it spends, ever (`spend_caps.to_spend_caps`): its counter starts from
what the ledger has against it, so the ledger's balance funds it, whatever Redis forgets.
"""

from __future__ import annotations

import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits import Credit, balance_of, post_credit
from billing.money import PICO_PER_USD, Pico, format_usd
from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.tenancy.changes import EVERYTHING, changing
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.spend_caps import MAX_AMOUNT_PICO, PICO_PER_NANO
from gateway.tenancy.tables import orgs


async def create_credit(
    db: AsyncEngine,
    redis: Redis,
    *,
    org_id: str,
    amount_pico: Pico,
    operator_org: str,
    actor: Actor,
) -> Credit:
    """Every worker goes by it within a second. `db` sees the house's books.

    Raises: InvalidField, NotFound (a live org), ChangeNotAnnounced.
    """
    if amount_pico <= 0 or amount_pico % PICO_PER_NANO:
        raise InvalidField("amount_usd", "must be more than nothing")
    async with changing(db, redis, EVERYTHING, org_id=org_id) as conn:
        live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
        if await conn.scalar(live.with_for_update(key_share=True)) is None:
            raise NotFound("org_id", f"no organization {org_id!r}")
        before = await balance_of(conn, org_id)
        if before.credited_pico + amount_pico > MAX_AMOUNT_PICO:
            most = MAX_AMOUNT_PICO // PICO_PER_USD
            raise InvalidField("amount_usd", f"an organization has {most} USD of credit at most")
        credit_id = f"credit_{uuid7().hex}"
        made = await post_credit(conn, credit_id=credit_id, org=org_id, amount_pico=amount_pico)
        entry = {
            "actor": actor,
            "action": "credit.created",
            "target": credit_id,
            "after": {"amount_usd": format_usd(amount_pico), "organization": org_id},
        }
        await record(conn, org_id=org_id, **entry)  # type: ignore[arg-type]
        if operator_org != org_id:
            await record(conn, org_id=operator_org, **entry)  # type: ignore[arg-type]
        return made
