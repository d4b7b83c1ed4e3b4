"""Bearer tokens at the one door: those that others have signed go to who knows their issuer."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.errors import InvalidToken
from gateway.auth.federation.external_issuers import ExternalIssuers
from tests.gateway.auth.bearer.revoking import a_token
from tests.gateway.auth.federation.federating import World, world
from tests.gateway.auth.parts import ISSUER
from tests.gateway.auth.world import open_world

__all__ = ["world"]


async def test_a_token_goes_to_who_can_tell_and_ours_are_nobody_elses(
    world: World, system_db: AsyncEngine, redis: Redis
) -> None:
    await world.list_for(world.alice)
    external = ExternalIssuers(
        directory=world.directory, keys=world.keys, public_url=ISSUER, wall_clock=world.wall_clock
    )
    async with open_world(system_db, redis) as own:
        authenticator = Authenticator(
            db=system_db,
            redis=redis,
            pepper=b"p" * 32,
            pepper_id="p",
            tokens=own.tokens,
            external=external,
        )
        theirs = world.issuer.sign()
        assert (await authenticator.authenticate(theirs)).org_id == world.alice.org_id
        with pytest.raises(InvalidToken, match="cannot be used with DPoP"):
            await authenticator.authenticate(theirs, jkt="thumbprint")
        ours = await a_token(own)
        assert (await authenticator.authenticate(ours)).org_id == own.org_id
        asked = list(world.far_end.asked)
        pretended = world.issuer.sign(world.issuer.claims(iss=ISSUER))
        with pytest.raises(InvalidToken):
            await authenticator.authenticate(pretended)
        assert world.far_end.asked == asked
