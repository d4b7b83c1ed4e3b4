"""The bytes of files on an S3-compatible store: some objects a file, each sealed before it leaves.

Knows nothing of a file but its id and whose it is; that it is wholly there says its row.

    PREFIX/ORG_ID/FILE_ID/000000, 000001, ...    each of `part_bytes` at most, and what seals it

An object is a part: a header that names the secret and says whether another part follows, and the
part sealed under a key derived from that secret, bound to organization, file, number and to whether
it is the last: no store can mix, repeat, shorten or read them. Parts are objects of their own, not
those of a multipart upload: what an upload that nobody finishes leaves behind is then listed and
swept as all else is, where a bucket keeps the parts of a multipart upload out of sight. One part of
each open upload and of each reader is in memory.

obstore's coroutines call Python from threads of Rust, which aborts a process that is about to end;
its blocking calls do not, and release the GIL.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cryptography.exceptions import InvalidTag

from gateway.files.contents import CHUNK_BYTES, Writer
from gateway.files.errors import ContentLost, FileStoreAway
from gateway.secret import Cipher, Ciphertext
from gateway.settings.file import FileStoreConfig

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Store

log = logging.getLogger(__name__)
T = TypeVar("T")
Place = tuple[str, str]
"""The ids of an organization and of a file."""

PLACE = "s3"
MAGIC = b"TGF1"
LAST, MORE = b"L", b"M"
MAX_HEADER_BYTES = len(MAGIC) + 2 + 255
MAX_THREADS = 8
"""Requests to the store that one process has under way."""
MAX_RETRIES = 3
LISTED_AT_ONCE = 1000
DELETED_AT_ONCE = 1000


class S3Contents:
    """One per process. `cipher`: for `PURPOSE`."""

    place = PLACE

    def __init__(
        self, config: FileStoreConfig, *, access_key: str, secret_key: str, cipher: Cipher
    ) -> None:
        self._store = open_store(config, access_key=access_key, secret_key=secret_key)
        self._cipher = cipher
        self._prefix = f"{config.prefix.strip('/')}/" if config.prefix.strip("/") else ""
        self._part_bytes = config.part_bytes
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="file store")

    def close(self) -> None:
        """Close the client; requests under way end by their own timeouts."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def writer(self, org_id: str, file_id: str) -> Writer:
        return S3Writer(self, org_id, file_id, self._part_bytes)

    async def read(self, org_id: str, file_id: str) -> AsyncIterator[bytes]:
        """Raises: FileStoreAway, ContentLost; UnknownSecret."""
        for number in itertools.count():
            part, is_last = await self._call(file_id, self._get, org_id, file_id, number)
            for start in range(0, len(part), CHUNK_BYTES):
                yield part[start : start + CHUNK_BYTES]
            if is_last:
                return

    async def delete(self, org_id: str, file_id: str) -> None:
        """Raises: FileStoreAway."""
        await self._call(file_id, self._delete, org_id, file_id)

    async def has(self, org_id: str, file_id: str) -> bool:
        """True if there is something of it. Raises: FileStoreAway."""
        found = await self._call(file_id, self._secret_id, org_id, file_id)
        return found is not None

    async def is_ours(self, org_id: str, file_id: str) -> bool:
        """True if what is there was sealed by this installation. Raises: FileStoreAway."""
        found = await self._call(file_id, self._secret_id, org_id, file_id)
        return found is not None and self._cipher.knows(found)

    async def listed(self, *, older_than_s: float) -> AsyncIterator[list[Place]]:
        """Yield the files of which something was there for so long already, in order, some at a
        time; one may be named twice.

        Raises: FileStoreAway.
        """
        import obstore

        before = datetime.now(UTC) - timedelta(seconds=older_than_s)
        pages = obstore.list(self._store, self._prefix or None, chunk_size=LISTED_AT_ONCE)
        while True:
            page = await self._call("", next, pages, None)
            if page is None:
                return
            paths = (each["path"] for each in page if each["last_modified"] < before)
            names = (path.removeprefix(self._prefix).split("/") for path in paths)
            yield list(dict.fromkeys((name[0], name[1]) for name in names if len(name) == 3))

    # ---- on a thread

    async def put(self, org_id: str, file_id: str, number: int, part: bytes, end: bytes) -> None:
        """Raises: FileStoreAway."""
        await self._call(file_id, self._put, org_id, file_id, number, part, end)

    def _put(self, org_id: str, file_id: str, number: int, part: bytes, end: bytes) -> None:
        import obstore

        sealed = self._cipher.seal(part, bound(org_id, file_id, number, end))
        path = self._path(org_id, file_id, number)
        obstore.put(self._store, path, to_object(sealed, end), use_multipart=False)

    def _get(self, org_id: str, file_id: str, number: int) -> tuple[bytes, bool]:
        import obstore

        try:
            content = bytes(obstore.get(self._store, self._path(org_id, file_id, number)).bytes())
        except FileNotFoundError:
            raise ContentLost(file_id, f"part {number} is not in the store") from None
        try:
            sealed, end = from_object(content)
            context = bound(org_id, file_id, number, end)
            return self._cipher.open(sealed.data, context, sealed.secret_id), end == LAST
        except (ValueError, InvalidTag) as error:
            text = f"part {number} is not what was stored ({type(error).__name__})"
            raise ContentLost(file_id, text) from None

    def _secret_id(self, org_id: str, file_id: str) -> str | None:
        """Return the secret that its first part names; None: it has none, or not one of
        Tollgate's."""
        import obstore

        path = self._path(org_id, file_id, 0)
        try:
            head = bytes(obstore.get_range(self._store, path, start=0, length=MAX_HEADER_BYTES))
            return from_object(head)[0].secret_id
        except (FileNotFoundError, ValueError):
            return None

    def _delete(self, org_id: str, file_id: str) -> None:
        import obstore

        for page in obstore.list(self._store, f"{self._prefix}{org_id}/{file_id}/"):
            paths = [each["path"] for each in page]
            for start in range(0, len(paths), DELETED_AT_ONCE):
                obstore.delete(self._store, paths[start : start + DELETED_AT_ONCE])

    def _path(self, org_id: str, file_id: str, number: int) -> str:
        return f"{self._prefix}{org_id}/{file_id}/{number:06d}"

    async def _call(self, file_id: str, work: Callable[..., T], *args: object) -> T:
        """Raises: FileStoreAway, what `work` raises of its own."""
        from obstore.exceptions import BaseError

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, partial(work, *args))
        except (BaseError, OSError) as error:
            # Its text has the URL of the object and what the store says, and no credential.
            log.warning("file store: %s", str(error).partition("\n")[0])
            raise FileStoreAway(file_id, type(error).__name__) from None


class S3Writer:
    """One file. A part goes out once something follows it, so that the last one is known."""

    def __init__(self, contents: S3Contents, org_id: str, file_id: str, part_bytes: int) -> None:
        self._contents, self._org_id, self._file_id = contents, org_id, file_id
        self._part_bytes = part_bytes
        self._buffer = bytearray()
        self._number = 0

    async def write(self, data: bytes) -> None:
        """Raises: FileStoreAway."""
        view = memoryview(data)
        while len(self._buffer) + len(view) > self._part_bytes:
            room = self._part_bytes - len(self._buffer)
            self._buffer += view[:room]
            view = view[room:]
            await self._flush(MORE)
        self._buffer += view

    async def finish(self) -> None:
        """Raises: FileStoreAway."""
        await self._flush(LAST)

    async def _flush(self, end: bytes) -> None:
        part = bytes(self._buffer)
        self._buffer.clear()
        await self._contents.put(self._org_id, self._file_id, self._number, part, end)
        self._number += 1


def open_store(config: FileStoreConfig, *, access_key: str, secret_key: str) -> S3Store:
    from obstore.store import S3Store

    timeout = timedelta(seconds=config.timeout_s)
    where: S3Config = {
        "region": config.region,
        "access_key_id": access_key,
        "secret_access_key": secret_key,
        "virtual_hosted_style_request": not config.path_style,
    }
    if config.endpoint is not None:
        where["endpoint"] = config.endpoint
    return S3Store(
        config.bucket,
        config=where,
        client_options={
            "allow_http": True,  # as the endpoint says; what crosses it is sealed
            "connect_timeout": timedelta(seconds=config.connect_timeout_s),
            "timeout": timeout,
        },
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timeout},
    )


def bound(org_id: str, file_id: str, number: int, end: bytes) -> bytes:
    return "\n".join((org_id, file_id, str(number))).encode() + b"\n" + end


def to_object(sealed: Ciphertext, end: bytes) -> bytes:
    name = sealed.secret_id.encode()
    return b"".join((MAGIC, end, bytes((len(name),)), name, sealed.data))


def from_object(content: bytes) -> tuple[Ciphertext, bytes]:
    """Split an object into its ciphertext and its end mark, which tells whether it is the last.

    Raises: ValueError, where it is none of Tollgate's.
    """
    start = len(MAGIC) + 2
    end = content[len(MAGIC) : len(MAGIC) + 1]
    if len(content) < start or not content.startswith(MAGIC) or end not in (LAST, MORE):
        raise ValueError("not an object of Tollgate's")
    data_at = start + content[start - 1]
    name = content[start:data_at].decode()
    if not name or len(content) < data_at:
        raise ValueError("shorter than its header")
    return Ciphertext(secret_id=name, data=content[data_at:]), end
