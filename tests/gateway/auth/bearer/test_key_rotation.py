"""A secret is rotated: keys made before it stay good, new ones are made with the new secret."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.errors import InvalidKey, RevokedKey
from gateway.secret import Secret, SecretKey
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, CreatedKey, create_key, revoke_key
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project


def authenticator(db: AsyncEngine, store: redis.asyncio.Redis, secret: Secret) -> Authenticator:
    """As `app` makes it."""
    (pepper_id, pepper), *older = ((key.id, key.derive(PEPPER_PURPOSE)) for key in secret.keys)
    return Authenticator(db=db, redis=store, pepper=pepper, pepper_id=pepper_id, older=older)


async def make_key(db: AsyncEngine, secret: Secret) -> CreatedKey:
    async with db.begin() as conn:
        org = await create_org(conn, name=f"of {secret.current.id}", actor=COMMAND_LINE)
        project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
        return await create_key(
            conn,
            org_id=org.id,
            project_id=project.id,
            name="laptop",
            scopes=["inference"],
            pepper=secret.current.derive(PEPPER_PURPOSE),
            pepper_id=secret.current.id,
            actor=COMMAND_LINE,
        )


async def test_keys_of_every_secret_in_the_file_are_good(
    db: AsyncEngine, redis: redis.asyncio.Redis, tmp_path: Path
) -> None:
    path = tmp_path / "secret.json"
    secret = Secret.load_or_create(path)
    made = [await make_key(db, secret)]
    for name in ("second", "third"):
        fresh = SecretKey(id=name, secret=base64.b64encode(name.encode() * 8).decode())
        path.write_bytes(msgspec.json.encode(Secret(version=1, keys=(fresh, *secret.keys))))
        secret = Secret.load(path)
        made.append(await make_key(db, secret))
    workers = [authenticator(db, redis, secret) for _ in range(2)]
    for worker in workers:
        await worker.start()
        for key in made:
            assert (await worker.authenticate(key.secret)).key_id == key.row.id
            # from the cache, whose handle is the hash under the current pepper
            assert (await worker.authenticate(key.secret)).key_id == key.row.id
    await revoke_key(db, redis, made[0].row.id, org_id=made[0].row.org_id, actor=COMMAND_LINE)
    for worker in workers:
        with pytest.raises(RevokedKey):
            async with asyncio.timeout(30):
                while await worker.authenticate(made[0].secret):
                    await asyncio.sleep(0.01)
        assert (await worker.authenticate(made[1].secret)).key_id == made[1].row.id
        await worker.close()

    without_first = Secret(version=1, keys=secret.keys[:-1])
    last = authenticator(db, redis, without_first)
    await last.start()
    with pytest.raises(InvalidKey, match="^unknown$"):
        await last.authenticate(made[0].secret)
    assert (await last.authenticate(made[1].secret)).key_id == made[1].row.id
    await last.close()
