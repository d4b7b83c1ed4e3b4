"""Seals the arguments of a call that waits for a person, in Postgres. They are for who decides,
while the call waits and no longer: the decision deletes them in its own transaction, and those that
nobody decided are deleted once their time is over. A project that keeps nothing (`zero_retention`)
has none, nor has a call with more than the queue takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.mcp.tables import approvals as table
from gateway.secret import Cipher, Secret, UnknownSecret
from mcp_bridge.trust.approvals import Approval

log = logging.getLogger(__name__)

PURPOSE = "mcp-asked-arguments"
FORGOTTEN: Mapping[str, None] = {"arguments": None, "secret_id": None}


class CallArguments:
    def __init__(self, secret: Secret) -> None:
        self._cipher = Cipher(secret, PURPOSE)

    def seal(self, approval: Approval, arguments: bytes) -> dict[str, object]:
        """Seal arguments into the columns of `approval`, with which alone they open."""
        sealed = self._cipher.seal(arguments, context_of(approval))
        return {"arguments": sealed.data, "secret_id": sealed.secret_id}

    def open(self, approval: Approval, row: Any) -> bytes | None:
        """Open the arguments of a row with its two columns; None: they do not open any more."""
        try:
            return self._cipher.open(row.arguments, context_of(approval), row.secret_id)
        except (UnknownSecret, InvalidTag, ValueError) as error:
            log.error("mcp: the arguments of %s do not open: %r", approval.id, error)
            return None


def context_of(approval: Approval) -> bytes:
    call = approval.call
    return "\0".join((call.org_id, approval.id, call.arguments_digest)).encode()


async def forget_late(db: AsyncEngine, now_s: float) -> int:
    """Delete the arguments of calls that nobody decided in time, of all orgs; return how many.
    `db`: of a role that sees them."""
    late = (table.c.arguments.is_not(None), table.c.expires_at_s <= now_s)
    async with db.begin() as conn:
        return (await conn.execute(sa.update(table).where(*late).values(**FORGOTTEN))).rowcount
