"""Holds what the tests of revocations share."""

from __future__ import annotations

import asyncio
import time

from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.bearer.revocations import Kind, announcing
from gateway.auth.errors import AuthUnavailable, RevokedToken
from tests.gateway.auth.world import World
from tests.pace import pace

PROMISED_S = 1.0


async def revoke(world: World, kind: Kind, subject: str) -> None:
    async with announcing(world.redis, clock=world.clock) as announcement:
        async with world.db.begin() as conn:
            await announcement.revoke(conn, org_id=world.org_id, kind=kind, subject=subject)


async def seconds_until_refused(tokens: AccessTokens, token: str) -> float:
    """Call without pause until the token is refused; who gets no answer has not been let in."""
    async with asyncio.timeout(30), pace() as seconds:
        while True:
            try:
                await tokens.authenticate(token, feed_as_of=time.monotonic())
            except RevokedToken:
                return seconds()
            except AuthUnavailable:
                pass
            await asyncio.sleep(0.002)


async def a_token(world: World) -> str:
    client, _ = await world.client()
    return str((await world.login(client))["access_token"])
