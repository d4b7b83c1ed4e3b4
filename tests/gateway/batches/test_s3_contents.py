"""Files on an S3-compatible store: sealed and bound to their place, away and back without a loss,
and what is left behind. A real server, and a road to it that is cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import obstore
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.files.contents import PostgresContents
from gateway.files.errors import ContentLost, FileStoreAway, FileStoreUnknown
from gateway.files.s3_contents import S3Contents
from gateway.files.store import FileStore
from gateway.files.strays import Strays, SweepResult
from gateway.files.tables import files
from gateway.http_errors.table import to_http_error
from gateway.secret import Cipher, Secret, SecretKey, UnknownSecret
from tests.gateway.batches.object_store import (
    ACCESS_KEY,
    SECRET_KEY,
    ObjectStore,
    Road,
    config,
)
from tests.gateway.batches.test_file_store import finish, made, whole
from tests.gateway.whole_app import Tenant, make_tenant

PART_BYTES = 1000
OLD = SecretKey(id="old", secret="A" * 44)
NEW = SecretKey(id="new", secret="B" * 44)
CONTENT = bytes(range(250)) * 10
"""Two parts and a half."""


class World:
    def __init__(self, owner: Tenant, pools: list[AsyncEngine], road: Road, bucket: str) -> None:
        self.owner, self.pools, self.road = owner, pools, road
        self.bucket = bucket
        self.opened: list[S3Contents] = []
        self.contents = self.open(OLD)
        self.store = self.to_store(self.contents)

    def open(self, *keys: SecretKey) -> S3Contents:
        where = config(self.road.port, self.bucket, part_bytes=PART_BYTES)
        cipher = Cipher(Secret(version=1, keys=keys), "files")
        made = S3Contents(where, access_key=ACCESS_KEY, secret_key=SECRET_KEY, cipher=cipher)
        self.opened.append(made)
        return made

    def to_store(self, contents: S3Contents | None) -> FileStore:
        cipher = Cipher(Secret(version=1, keys=(OLD,)), "files")
        rows = PostgresContents(self.pools[0], cipher)
        return FileStore(
            db=self.pools[0],
            system_db=self.pools[1],
            contents=contents or rows,
            cipher=cipher,
            others=() if contents is None else (rows,),
            max_file_bytes=10 * len(CONTENT),
            max_org_bytes=100 * len(CONTENT),
        )

    async def names(self) -> list[str]:
        def listed() -> list[str]:
            pages = obstore.list(self.contents._store)
            return [each["path"] for page in pages for each in page]

        return await asyncio.to_thread(listed)

    async def object(self, name: str) -> bytes:
        def read() -> bytes:
            return bytes(obstore.get(self.contents._store, name).bytes())

        return await asyncio.to_thread(read)

    async def put(self, name: str, content: bytes) -> None:
        await asyncio.to_thread(obstore.put, self.contents._store, name, content)

    async def remove(self, name: str) -> None:
        await asyncio.to_thread(obstore.delete, self.contents._store, name)


@pytest.fixture
async def world(postgres_url: str, object_store: ObjectStore) -> AsyncIterator[World]:
    owner = await make_tenant(postgres_url, "acme", is_operator=True)
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    road = Road(object_store.port)
    await road.open()
    found = World(owner, pools, road, object_store.bucket())
    yield found
    for each in found.opened:
        each.close()
    await road.close()
    for pool in pools:
        await pool.dispose()


async def test_what_the_store_has_is_sealed_and_bound_to_its_place(
    world: World, db: AsyncEngine
) -> None:
    one = await made(db, world.store, world.owner, b"secretword" * 250)
    other = await made(db, world.store, world.owner, CONTENT)
    assert (one.stored_in, len(await world.names())) == ("s3", 6)
    assert all([b"secretword" not in await world.object(name) for name in await world.names()])
    assert await whole(world.store, other) == CONTENT
    parts = [f"some/prefix/{other.org_id}/{other.id}/{number:06d}" for number in range(3)]
    contents = [await world.object(name) for name in parts]
    for where, what in ((0, 1), (1, 0), (2, 1)):
        await world.put(parts[where], contents[what])
        with pytest.raises(ContentLost):
            await whole(world.store, other)
        await world.put(parts[where], contents[where])
    foreign = await world.object(f"some/prefix/{one.org_id}/{one.id}/000000")
    shortened = contents[1].replace(b"TGF1M", b"TGF1L", 1)
    for where, content in ((0, foreign), (0, b""), (0, b"TGF1L\xff"), (1, shortened)):
        await world.put(parts[where], content)
        with pytest.raises(ContentLost):
            await whole(world.store, other)
        await world.put(parts[where], contents[where])
    assert await whole(world.store, other) == CONTENT


async def test_an_upload_holds_one_part(world: World, db: AsyncEngine) -> None:
    upload = await world.store.begin(world.owner.org_id, world.owner.project_id)
    for start in range(0, len(CONTENT), 7):
        await upload.write(CONTENT[start : start + 7])
        assert len(upload._writer._buffer) <= PART_BYTES  # type: ignore[attr-defined]
    file = await finish(db, upload)
    assert [len(each) for each in [p async for p in world.store.read(file)]] == [1000, 1000, 500]


async def test_a_secret_is_replaced_and_then_removed(world: World, db: AsyncEngine) -> None:
    file = await made(db, world.store, world.owner, CONTENT)
    assert await whole(world.to_store(world.open(NEW, OLD)), file) == CONTENT
    with pytest.raises(UnknownSecret) as caught:
        await whole(world.to_store(world.open(NEW)), file)
    assert to_http_error(caught.value).status == 410


async def test_a_store_that_is_cut_off_in_an_upload_loses_nothing(
    world: World, db: AsyncEngine
) -> None:
    """Nothing is visible, and what there is of it is swept once the store is back."""
    kept = await made(db, world.store, world.owner, b"kept")
    upload = await world.store.begin(world.owner.org_id, world.owner.project_id)
    await upload.write(CONTENT[:1500])
    world.road.cut_after = 200
    with pytest.raises(FileStoreAway) as caught:
        await upload.write(CONTENT[1500:])
    http_error = to_http_error(caught.value)
    assert (http_error.status, http_error.headers["retry-after"]) == (503, "1")
    await upload.give_up()
    with pytest.raises(FileStoreAway):
        await whole(world.store, kept)
    assert await world.store.sweep() == 0, "it is passed over"
    await world.store.flush()
    world.road.mend()
    assert len(await world.names()) == 2
    assert await world.store.sweep() == 1
    assert len(await world.names()) == 1
    assert await whole(world.store, kept) == b"kept"
    again = await made(db, world.store, world.owner, CONTENT)
    assert await whole(world.store, again) == CONTENT
    async with db.connect() as conn:
        assert await conn.scalar(sa.select(sa.func.count()).select_from(files)) == 2


async def test_what_was_there_before_stays_readable(world: World, db: AsyncEngine) -> None:
    """And swept: of both places at once."""
    without = world.to_store(None)
    row = await made(db, without, world.owner, b"in rows")
    file = await made(db, world.store, world.owner, b"an object")
    assert await whole(world.store, row) == b"in rows"
    with pytest.raises(FileStoreUnknown) as caught:
        await whole(without, file)
    assert to_http_error(caught.value).status == 503
    async with db.begin() as conn:
        await conn.execute(sa.update(files).values(deleted_at=sa.func.now()))
    await without.flush()
    async with db.connect() as conn:
        assert set(await conn.scalars(sa.select(files.c.id))) == {file.id}
    await world.store.flush()
    assert await world.names() == []


async def test_strays_are_found(world: World, db: AsyncEngine) -> None:
    """Objects without a file go, unless they are young or somebody else's; a file without its
    objects is told."""
    there, lost, stray, theirs = [
        await made(db, world.store, world.owner, CONTENT) for _ in range(4)
    ]
    async with db.begin() as conn:
        for each in (stray, theirs):
            await conn.execute(sa.delete(files).where(files.c.id == each.id))
    for name in await world.names():
        if lost.id in name:
            await world.remove(name)
        if theirs.id in name:
            content = await world.object(name)
            await world.put(name, content.replace(b"\x03old", b"\x03xyz", 1))
    strays = Strays(world.pools[1], world.contents)
    assert await strays.look() == SweepResult(0, [])
    assert len(await world.names()) == 9, "they are young"
    assert await strays.look(stray_age_s=-10) == SweepResult(1, [lost.id])
    left = {name.split("/")[3] for name in await world.names()}
    assert left == {there.id, theirs.id}
    assert await whole(world.store, there) == CONTENT
    with pytest.raises(ContentLost) as caught:
        await whole(world.store, lost)
    assert (to_http_error(caught.value).status, to_http_error(caught.value).body.code) == (
        410,
        "content_lost",
    )


async def test_an_upload_that_was_swept_leaves_nothing(world: World, db: AsyncEngine) -> None:
    """Not even what it wrote afterwards."""
    upload = await world.store.begin(world.owner.org_id, world.owner.project_id)
    async with db.begin() as conn:
        await conn.execute(sa.delete(files))
    await upload.write(CONTENT)
    await upload.close()
    assert len(await world.names()) == 3
    found = await Strays(world.pools[1], world.contents).look(stray_age_s=-10)
    assert (found, await world.names()) == (SweepResult(1, []), [])
