"""`tollgate vault rewrap` on a real home, whose secret has changed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import sqlalchemy as sa

from gateway.audit.log import COMMAND_LINE
from gateway.db import create_engine
from gateway.secret import Secret, SecretKey
from gateway.vault.credentials import put_credential
from gateway.vault.envelope import Vault
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]


def test_after_it_the_older_secret_can_go(environ: dict[str, str]) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    path = Path(environ["TOLLGATE_HOME"]) / "secret.json"
    old = Secret.load(path)

    async def work(vault: Vault | None) -> list[str]:
        engine = create_engine(environ["TOLLGATE_DATABASE_URL"], pool_size=1)
        async with engine.begin() as conn:
            org_id = await conn.scalar(sa.text("SELECT id FROM orgs WHERE name = 'default'"))
            for number in range(3 if vault is not None else 0):
                assert vault is not None
                await put_credential(
                    conn,
                    vault,
                    org_id=org_id,
                    upstream=f"u{number}",
                    user_id=None,
                    values={"T": "x"},
                    actor=COMMAND_LINE,
                )
            ids = list(await conn.scalars(sa.text("SELECT secret_id FROM upstream_credentials")))
        await engine.dispose()
        return ids

    assert asyncio.run(work(Vault(old))) == [old.current.id] * 3
    first = SecretKey(id="newer", secret="B" * 44)
    path.write_bytes(msgspec.json.encode(Secret(version=1, keys=(first, *old.keys))))
    done = invoke(environ, "vault", "rewrap")
    assert (done.exit_code, done.stdout) == (0, "3 wrapped anew.\n")
    assert asyncio.run(work(None)) == ["newer"] * 3
    assert invoke(environ, "vault", "rewrap").stdout == "0 wrapped anew.\n"
