"""The locks that `bench.migrations` tells of are those that the server had."""

from __future__ import annotations

import asyncio

import asyncpg

from bench.migrations.lock_watch import LockWatch

WAIT_S = 30.0


async def connect(postgres_url: str, name: str) -> asyncpg.Connection:
    url = postgres_url.replace("+asyncpg", "")
    return await asyncpg.connect(url, server_settings={"application_name": name})


async def test_it_sees_who_waits_and_who_keeps_others_out(postgres_url: str) -> None:
    holder, waiter, looker = [
        await connect(postgres_url, name) for name in ("holder", "waiter", "looker")
    ]
    watch = LockWatch()
    looking = asyncio.create_task(watch.run(looker, ["orgs"]))
    async with asyncio.timeout(WAIT_S):
        async with holder.transaction():
            await holder.execute("LOCK TABLE orgs IN ACCESS EXCLUSIVE MODE")
            reading = asyncio.create_task(waiter.fetch("SELECT 1 FROM orgs"))
            while watch.longest_wait_s.get("waiter", 0.0) < 0.1:
                await asyncio.sleep(0.01)
        await reading
        async with waiter.transaction():
            await waiter.execute("LOCK TABLE orgs IN ROW EXCLUSIVE MODE")
            looks = watch.looks
            while watch.looks < looks + 3:
                await asyncio.sleep(0.01)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert watch.longest_wait_s.keys() == {"waiter"}
    held = watch.longest_hold_s.pop("holder: AccessExclusiveLock on orgs")
    assert held >= watch.longest_wait_s["waiter"] - watch.longest_pause_s
    assert watch.longest_hold_s == {}, "a lock that lets others read and write"
    for each in (holder, waiter, looker):
        await each.close()
