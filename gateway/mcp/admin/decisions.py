"""Decides calls that wait for a person, and reads them with the arguments that are to be seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor
from gateway.mcp.approvals import PostgresApprovals, to_approval
from gateway.mcp.call_arguments import CallArguments
from gateway.mcp.tables import approvals as table
from gateway.tenancy.errors import Conflict, NotAllowed, NotFound
from gateway.tenancy.pages import FIRST, Cursor, read_page
from mcp_bridge.caller import Caller
from mcp_bridge.errors import ApprovalRefused
from mcp_bridge.trust.approvals import Approval, Approvals, ApprovalState, Outcome, decided, expired


class AskedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a person was asked about. `arguments`: JSON, while it waits; None: none are kept,
    or they are not for who looks."""

    approval: Approval
    arguments: bytes | None = None

    @property
    def id(self) -> str:
        return self.approval.id

    @property
    def caller(self) -> Caller:
        return Caller.of(self.approval.call.caller)

    @property
    def waits(self) -> bool:
        return self.approval.state == "pending"


async def decide(
    db: AsyncEngine,
    *,
    org_id: str,
    approval_id: str,
    yes: bool,
    by: str,
    client: str | None,
    actor: Actor,
    check: Callable[[Approval], None] = lambda _: None,
) -> Approval:
    """Say yes or no to a call. `by`: the key or user who does; `client`: the OAuth client that they
    use. `check`: raises for a call that is not as it was seen. Raises: NotFound, NotAllowed (who
    asks does not answer), Conflict, whatever `check` raises."""
    store = PostgresApprovals(db, actor)

    def step(before: Approval, now_s: float) -> Outcome:
        check(before)
        own = Caller.of(before.call.caller).client in (by, client)
        answerer = before.call.caller if own else by
        return decided(before, approve=yes, by=answerer, now_s=now_s)

    moves = Approvals(store, now_s=time.time, new_id=str, new_nonce=str)
    try:
        found = await moves.move(org_id, approval_id, step)
    except ApprovalRefused as error:
        raise Conflict("approval_id", str(error)) from None
    if found == "unknown":
        raise NotFound("approval_id", f"no approval {approval_id}")
    if found == "own_request":
        raise NotAllowed("approval_id", "who asks for a call cannot approve it")
    if isinstance(found, str) or found.state == "expired":
        raise Conflict("approval_id", "it was answered already, or its time is over")
    return found


async def read_asked(
    conn: AsyncConnection,
    *,
    org_id: str,
    state: ApprovalState | None = None,
    cursor: Cursor = FIRST,
    shown: CallArguments | None = None,
) -> tuple[list[AskedCall], bool]:
    """Return a page of the calls that a person was asked about, and whether there are more. `state`
    pending: those alone that can still be answered. `shown`: opens arguments; None: they are not
    for who looks."""
    now_s = time.time()
    columns = (table.c.body, table.c.arguments, table.c.secret_id)
    listed = sa.select(*columns).where(table.c.org_id == org_id)
    if state is not None:
        listed = listed.where(table.c.state == state)
    if state == "pending":
        listed = listed.where(table.c.expires_at_s > now_s)
    rows, more = await read_page(conn, listed, table.c.id, cursor)
    return [to_asked(row, now_s, shown) for row in rows], more


def to_asked(row: Any, now_s: float, shown: CallArguments | None) -> AskedCall:
    found = to_approval(row.body)
    late = expired(found, now_s)
    found = found if late is None else late.approval
    is_seen = shown is not None and row.arguments is not None and found.state == "pending"
    return AskedCall(
        approval=found,
        arguments=shown.open(found, row) if is_seen and shown is not None else None,
    )


async def count_waiting(conn: AsyncConnection, *, org_id: str) -> int:
    """Return how many calls wait for a person now."""
    counted = sa.select(sa.func.count()).where(
        table.c.org_id == org_id,
        table.c.state == "pending",
        table.c.expires_at_s > time.time(),
    )
    return int(await conn.scalar(counted) or 0)
