"""`tollgate secret reseal` on a real home, whose secret has changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from gateway.db import ROLE_TENANT, create_engine, tenant
from gateway.files.contents import PostgresContents
from gateway.files.sealing import PURPOSE
from gateway.files.store import FileStore
from gateway.secret import Cipher, Secret, SecretKey
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]


def test_after_it_the_older_secret_can_go(environ: dict[str, str]) -> None:
    assert invoke(environ, "migrate").exit_code == 0
    path = Path(environ["TOLLGATE_HOME"]) / "secret.json"
    old = Secret.load(path)
    newer = SecretKey(id="newer", secret="B" * 44)

    async def store(secret: Secret, file: Any = None) -> Any:
        """Upload a file, or read it."""
        cipher = Cipher(secret, PURPOSE)
        db = create_engine(environ["TOLLGATE_DATABASE_URL"], role=ROLE_TENANT, pool_size=2)
        limits = {"max_file_bytes": 1000, "max_org_bytes": 10_000}
        rows = PostgresContents(db, cipher)
        files = FileStore(db=db, system_db=db, contents=rows, cipher=cipher, **limits)
        try:
            if file is not None:
                return b"".join([piece async for piece in files.read(file)])
            owner = create_engine(environ["TOLLGATE_DATABASE_URL"], pool_size=1)
            async with owner.connect() as conn:
                asked = sa.text("SELECT org_id, id FROM projects WHERE name = 'default'")
                org_id, project_id = (await conn.execute(asked)).one()
            await owner.dispose()
            upload = await files.begin(org_id, project_id)
            await upload.write(b"hello")
            await upload.close()
            async with tenant(db, org_id) as conn:
                return await upload.finish(conn, purpose="user_data", filename="a.txt")
        finally:
            await db.dispose()

    file = asyncio.run(store(old))
    path.write_bytes(msgspec.json.encode(Secret(version=1, keys=(newer, *old.keys))))
    done = invoke(environ, "secret", "reseal")
    assert (done.exit_code, done.stdout) == (0, "2 rows were sealed.\n")
    alone = Secret(version=1, keys=(newer,))
    assert asyncio.run(store(alone, file)) == b"hello"
    assert invoke(environ, "secret", "reseal").stdout == "0 rows were sealed.\n"
    path.write_bytes(msgspec.json.encode(old))
    lost = invoke(environ, "secret", "reseal")
    reason = f"it was sealed under {newer.id}, which the secret's file does not have"
    assert lost.exit_code == 1 and f"files {file.id}: cannot be read: {reason}\n" in lost.stdout
    assert "2 rows were skipped: they cannot be read, see above.\n" in lost.stdout


def test_a_new_key_is_added_behind_the_others_and_then_put_first(
    environ: dict[str, str],
) -> None:
    path = Path(environ["TOLLGATE_HOME"]) / "secret.json"
    path.parent.mkdir(exist_ok=True)
    (old,) = Secret.load_or_create(path).keys
    path.chmod(0o640)
    assert invoke(environ, "secret", "rotate", "--step", "add").exit_code == 0
    added = Secret.load(path)
    assert added.current == old and len(added.keys) == 2
    used = invoke(environ, "secret", "rotate", "--step", "use")
    assert used.exit_code == 0 and added.keys[1].id in used.output
    assert Secret.load(path).keys == (added.keys[1], old)
    assert added.keys[1].secret not in used.output
    assert path.stat().st_mode & 0o777 == 0o640
    assert [each.name for each in path.parent.glob("*secret*")] == ["secret.json"]


def test_a_rotation_where_nothing_runs_says_the_steps(environ: dict[str, str]) -> None:
    path = Path(environ["TOLLGATE_HOME"]) / "secret.json"
    path.parent.mkdir(exist_ok=True)
    before = Secret.load_or_create(path)
    refused = invoke(environ, "secret", "rotate")
    assert refused.exit_code == 2 and "--step add" in refused.output
    assert Secret.load(path) == before
