"""Files beneath HTTP: room that is held, content in rows, and what is swept; forms, cut at every
place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import obstore
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.files.contents import PostgresContents
from gateway.files.errors import FileStoreAway
from gateway.files.files import STALE_UPLOAD_S, File, delete_file, get_file
from gateway.files.s3_contents import S3Contents
from gateway.files.store import MAX_FAILURES, FileStore
from gateway.files.tables import file_chunks, files
from gateway.files.uploads import FileTooLarge, Upload
from gateway.secret import Cipher
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.wire.shared.multipart_form import MultipartForm, boundary_of, read_form
from tests.gateway.batches.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, config
from tests.gateway.responses.test_store import SECRET
from tests.gateway.whole_app import Tenant, make_tenant

CHUNK_BYTES, MAX_FILE_BYTES, MAX_ORG_BYTES = 10, 100, 250


@pytest.fixture
async def owner(postgres_url: str) -> Tenant:
    return await make_tenant(postgres_url, "acme", is_operator=True)


@pytest.fixture(params=["postgres", "s3"])
async def store(postgres_url: str, request: pytest.FixtureRequest) -> AsyncIterator[FileStore]:
    """The same of both places."""
    pools = [create_engine(postgres_url, role=role) for role in (ROLE_TENANT, ROLE_SYSTEM)]
    rows = PostgresContents(pools[0], Cipher(SECRET, "files"), chunk_bytes=CHUNK_BYTES)
    objects: S3Contents | None = None
    if request.param == "s3":
        server: ObjectStore = request.getfixturevalue("object_store")
        where = config(server.port, server.bucket(), part_bytes=CHUNK_BYTES)
        objects = S3Contents(
            where, access_key=ACCESS_KEY, secret_key=SECRET_KEY, cipher=Cipher(SECRET, "files")
        )
    yield FileStore(
        db=pools[0],
        system_db=pools[1],
        contents=objects or rows,
        cipher=Cipher(SECRET, "files"),
        max_file_bytes=MAX_FILE_BYTES,
        max_org_bytes=MAX_ORG_BYTES,
    )
    if objects is not None:
        objects.close()
    for pool in pools:
        await pool.dispose()


async def num_pieces(db: AsyncEngine, store: FileStore) -> int:
    """Rows or objects."""
    contents = store._contents
    if isinstance(contents, S3Contents):
        return len(await asyncio.to_thread(list_paths, contents))
    return await rows(db, file_chunks)


def list_paths(contents: S3Contents) -> list[str]:
    pages = obstore.list(contents._store)
    return [each["path"] for page in pages for each in page]


async def finish(db: AsyncEngine, upload: Upload, expires_after_s: int | None = None) -> File:
    await upload.close()
    async with tenant(db, upload.org_id) as conn:
        return await upload.finish(
            conn, purpose="user_data", filename="a", expires_after_s=expires_after_s
        )


async def made(db: AsyncEngine, store: FileStore, owner: Tenant, content: bytes) -> File:
    upload = await store.begin(owner.org_id, owner.project_id, most_bytes=len(content))
    await upload.write(content)
    return await finish(db, upload)


async def whole(store: FileStore, file: File) -> bytes:
    return b"".join([piece async for piece in store.read(file)])


async def test_content_is_read_as_it_was_written(
    db: AsyncEngine, store: FileStore, owner: Tenant
) -> None:
    upload = await store.begin(owner.org_id, owner.project_id)
    content = bytes(range(95))
    for start, end in ((0, 3), (3, 10), (10, 60), (60, 60), (60, 95)):
        await upload.write(content[start:end])
    file = await finish(db, upload)
    pieces = [piece async for piece in store.read(file)]
    assert b"".join(pieces) == content
    assert {len(piece) for piece in pieces[:-1]} == {CHUNK_BYTES}
    empty = await made(db, store, owner, b"")
    assert (empty.size_bytes, await whole(store, empty)) == (0, b"")


async def test_uploads_at_a_time_share_no_room(
    db: AsyncEngine, store: FileStore, owner: Tenant
) -> None:
    """Two uploads may take 100 of 250 bytes each; a third is refused until one says that it needs
    less."""
    where = (owner.org_id, owner.project_id)
    begun = await asyncio.gather(*(store.begin(*where) for _ in range(3)), return_exceptions=True)
    uploads = [each for each in begun if isinstance(each, Upload)]
    (refused,) = (each for each in begun if not isinstance(each, Upload))
    assert isinstance(refused, InvalidField) and len(uploads) == 2
    await uploads[0].write(b"ten bytes.")
    await finish(db, uploads[0])
    third = await store.begin(*where)
    await third.give_up()
    await uploads[1].give_up()
    assert await store.begin(*where)


async def test_more_than_was_said_is_refused(store: FileStore, owner: Tenant) -> None:
    where = (owner.org_id, owner.project_id)
    with pytest.raises(FileTooLarge):
        await store.begin(*where, most_bytes=MAX_FILE_BYTES + 1)
    upload = await store.begin(*where, most_bytes=5)
    await upload.write(b"12345")
    with pytest.raises(FileTooLarge):
        await upload.write(b"6")


async def test_a_key_of_the_whole_organization_has_no_files(
    store: FileStore, owner: Tenant
) -> None:
    with pytest.raises(InvalidField):
        await store.begin(owner.org_id, "")


async def rows(db: AsyncEngine, table: sa.Table) -> int:
    async with db.connect() as conn:
        return int(await conn.scalar(sa.select(sa.func.count()).select_from(table)) or 0)


@pytest.mark.parametrize(
    "values",
    [
        {"deleted_at": sa.func.now()},
        {"expires_at": sa.func.now()},
        {"uploading_since": sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, 1 + 6 * 3600)},
    ],
)
async def test_what_has_ended_is_swept_with_its_content(
    db: AsyncEngine, store: FileStore, owner: Tenant, values: dict[str, Any]
) -> None:
    assert STALE_UPLOAD_S == 6 * 3600
    ended = await made(db, store, owner, b"twelve bytes")
    kept = await made(db, store, owner, b"others")
    async with db.begin() as conn:
        await conn.execute(sa.update(files).where(files.c.id == ended.id).values(**values))
    where = {"org_id": owner.org_id, "project_id": owner.project_id}
    async with tenant(db, owner.org_id) as conn:
        with pytest.raises(NotFound):
            await get_file(conn, **where, file_id=ended.id)
    assert await store.sweep() == 1
    assert await store.sweep() == 0
    assert (await rows(db, files), await num_pieces(db, store)) == (1, 1)
    assert await whole(store, kept) == b"others"


async def test_what_cannot_be_deleted_stands_in_nobodys_way(
    db: AsyncEngine, store: FileStore, owner: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = [await made(db, store, owner, b"x") for _ in range(MAX_FAILURES + 5)]
    async with db.begin() as conn:
        await conn.execute(sa.update(files).values(deleted_at=sa.func.now()))
    contents, held = store._contents, sorted(each.id for each in ended)[:2]
    delete = contents.delete

    async def locked(org_id: str, file_id: str) -> None:
        if file_id in held:
            raise FileStoreAway(file_id, "PermissionDenied")
        await delete(org_id, file_id)

    monkeypatch.setattr(contents, "delete", locked)
    assert await store.sweep() == len(ended) - len(held)
    held = [each.id for each in ended]
    assert (await rows(db, files), await store.sweep()) == (2, 0)
    await made(db, store, owner, b"kept")
    held = []
    assert (await store.sweep(), await rows(db, files)) == (2, 1)


async def test_a_store_that_is_away_is_asked_no_more_this_time(
    db: AsyncEngine, store: FileStore, owner: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(MAX_FAILURES + 5):
        await made(db, store, owner, b"x")
    async with db.begin() as conn:
        await conn.execute(sa.update(files).values(deleted_at=sa.func.now()))
    asked: list[str] = []

    async def away(org_id: str, file_id: str) -> None:
        asked.append(file_id)
        raise FileStoreAway(file_id, "away")

    monkeypatch.setattr(store._contents, "delete", away)
    with pytest.raises(FileStoreAway):
        await store.sweep()
    assert len(asked) == MAX_FAILURES


async def test_an_upload_that_was_swept_is_no_file(
    db: AsyncEngine, store: FileStore, owner: Tenant
) -> None:
    """It would be one without its content."""
    upload = await store.begin(owner.org_id, owner.project_id)
    await upload.write(b"twelve bytes")
    old = sa.func.now() - sa.func.make_interval(0, 0, 0, 0, 0, 0, 1 + STALE_UPLOAD_S)
    async with db.begin() as conn:
        await conn.execute(sa.update(files).values(uploading_since=old))
    await store.sweep()
    with pytest.raises(NotFound):
        await finish(db, upload)


async def test_who_deletes_twice_is_told(db: AsyncEngine, store: FileStore, owner: Tenant) -> None:
    file = await made(db, store, owner, b"x")
    where = {"org_id": owner.org_id, "project_id": owner.project_id, "file_id": file.id}
    async with tenant(db, owner.org_id) as conn:
        await delete_file(conn, **where, actor=COMMAND_LINE)
        with pytest.raises(NotFound):
            await delete_file(conn, **where, actor=COMMAND_LINE)


# ---- forms

BOUNDARY = "b0undary"
FIELDS = {"purpose": "batch", "expires_after[seconds]": "3600", "leer": ""}


def written(content: bytes) -> bytes:
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in FIELDS.items()
    ]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"'
    file = head.encode() + b"\r\nContent-Type: text/plain\r\n\r\n" + content + b"\r\n"
    return b"".join([*parts[:1], file, *parts[1:], f"--{BOUNDARY}--\r\n".encode()])


async def read(pieces: list[bytes]) -> tuple[MultipartForm, bytes]:
    found: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def sink(data: bytes) -> None:
        found.append(data)

    form = await read_form(body(), boundary_of(f"multipart/form-data; boundary={BOUNDARY}"), sink)
    return form, b"".join(found)


@given(
    st.lists(st.sampled_from([b"\r\n", b"--", BOUNDARY.encode(), b"{}", b"\0", b"\r"])),
    st.lists(st.integers(0, 700)),
)
def test_a_form_says_the_same_however_it_is_cut(words: list[bytes], cuts: list[int]) -> None:
    content = b"".join(words).replace(f"\r\n--{BOUNDARY}".encode(), b"")
    whole_form = written(content)
    places = sorted({0, *(min(cut, len(whole_form)) for cut in cuts), len(whole_form)})
    pieces = [whole_form[a:b] for a, b in zip(places, places[1:], strict=False)]
    form, found = asyncio.run(read(pieces))
    assert (form.filename, form.fields, found) == ("a.jsonl", FIELDS, content)
