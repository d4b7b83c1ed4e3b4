"""A call that waits for a person: told to webhooks once, and each thing that becomes of it is in
the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from standardwebhooks.webhooks import Webhook

from gateway.audit.log import Actor
from gateway.audit.tables import entries
from gateway.mcp.approvals import PostgresApprovals
from gateway.secret import Cipher
from gateway.webhooks.outbox import fan_out
from mcp_bridge.caller import Caller
from mcp_bridge.trust.approvals import Approval, Approvals, ApprovedCall
from tests.gateway.webhooks.conftest import MakeSender, Receiver, add_endpoint, turn

ADMIN = Actor(kind="api_key", id="key_admin")
NOW_S = 2e9


class Clock:
    now_s = NOW_S


def approvals_of(tenant_db: AsyncEngine, clock: Clock) -> Approvals:
    ids = iter(f"mcpapp_{number}" for number in range(9))
    return Approvals(
        PostgresApprovals(tenant_db, ADMIN),
        now_s=lambda: clock.now_s,
        new_id=lambda: next(ids),
        new_nonce=lambda: "n",
    )


def call_of(org_id: str, arguments: str) -> ApprovedCall:
    caller = Caller(org_id=org_id, project_id="proj_1", subject="user_1", client="client_1")
    return ApprovedCall(
        org_id=org_id,
        caller=caller.principal,
        server="maps",
        pin="sha256:0",
        arguments_digest=arguments,
        policy_version="1",
    )


async def test_each_thing_that_becomes_of_it_is_recorded(
    db: AsyncEngine, tenant_db: AsyncEngine, org_id: str
) -> None:
    """Asked, decided, used, and of another one that its time was over: four events, and of each who
    did it."""
    clock = Clock()
    approvals = approvals_of(tenant_db, clock)
    first, second = (call_of(org_id, f"sha256:{number}") for number in (1, 2))
    asked = await approvals.ask(first, ttl_s=60, tool="look")
    assert await approvals.ask(first, ttl_s=60, tool="look") == asked
    late = await approvals.ask(second, ttl_s=30, tool="look")
    yes = await approvals.decide(org_id, asked.id, approve=True, by=ADMIN.id)
    assert isinstance(yes, Approval) and yes.state == "approved"
    used = await approvals.use(asked.id, first, nonce="n", call_id="call_1")
    assert isinstance(used, Approval) and used.used_by == "call_1"
    assert await approvals.use(asked.id, first, nonce="n", call_id="call_2") == "used"
    clock.now_s += 31
    assert await approvals.decide(org_id, late.id, approve=True, by=ADMIN.id) == "expired"
    found = sa.select(entries).where(entries.c.action.like("mcp.%")).order_by(entries.c.sequence)
    async with db.connect() as conn:
        written = [
            (row.action, row.target, row.actor_kind, row.actor_id)
            for row in await conn.execute(found)
        ]
    bridge, admin = ("system", "mcp"), (ADMIN.kind, ADMIN.id)
    assert written == [
        ("mcp.approval.requested", asked.id, *bridge),
        ("mcp.approval.requested", late.id, *bridge),
        ("mcp.approval.decided", asked.id, *admin),
        ("mcp.approval.used", asked.id, *bridge),
        ("mcp.approval.expired", late.id, *bridge),
    ]


async def test_webhooks_are_told_of_it_once(
    db: AsyncEngine,
    system_db: AsyncEngine,
    tenant_db: AsyncEngine,
    org_id: str,
    cipher: Cipher,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    made = await add_endpoint(db, cipher, org_id, receiver.url, "mcp.approval_requested")
    approvals = approvals_of(tenant_db, Clock())
    asked = await approvals.ask(call_of(org_id, "sha256:1"), ttl_s=60, tool="look")
    await approvals.decide(org_id, asked.id, approve=True, by=ADMIN.id)
    while await fan_out(system_db):
        continue
    sender = make_sender()
    await turn(sender)
    await turn(sender)
    [got] = receiver.received
    said = Webhook(made.secret).verify(got.body, got.headers)
    assert said["type"] == "mcp.approval_requested"
    assert said["data"] == {
        "organization_id": org_id,
        "project_id": "proj_1",
        "approval_id": asked.id,
        "server": "maps",
        "tool": "look",
        "client_id": "client_1",
        "decider": "administrator",
        "arguments_digest": "sha256:1",
        "expires_at": "2033-05-18T03:34:20Z",
    }
