"""Lists what `test_tenant_methods` tries of files: their methods, with the ids of Alice."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.files.contents import PostgresContents
from gateway.files.store import FileStore
from gateway.secret import Cipher
from tests.gateway.a_secret import a_secret
from tests.gateway.walls.two_tenants import id_of

CIPHER = Cipher(a_secret("now"), "files")


class Stage(Protocol):
    pool: AsyncEngine
    org: str


async def read_content(stage: Stage) -> object:
    contents = PostgresContents(stage.pool, CIPHER)
    return [each async for each in contents.read(stage.org, id_of("files"))]


async def delete_content(stage: Stage) -> object:
    before = await read_content(stage)
    await PostgresContents(stage.pool, CIPHER).delete(stage.org, id_of("files"))
    return before


def file_store(stage: Stage) -> FileStore:
    return FileStore(
        db=stage.pool,
        system_db=stage.pool,
        contents=PostgresContents(stage.pool, CIPHER),
        cipher=CIPHER,
        max_file_bytes=100,
        max_org_bytes=1000,
    )


async def begin_file(stage: Stage) -> object:
    return await file_store(stage).begin(stage.org, id_of("projects"))


async def begin_output(stage: Stage) -> object:
    return await file_store(stage).begin_output(stage.org, id_of("projects"), most_bytes=1)
