"""Files with their content: begun, read, and swept once they ended.

A crash between rows and bytes leaves content without a file, never a file without content: a row
goes after what it stands for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Flusher
from gateway.columns import UNREADABLE
from gateway.db import DATABASE_ERRORS
from gateway.files.contents import Contents, PostgresContents
from gateway.files.errors import FilesError, FileStoreUnknown
from gateway.files.files import SWEEP_BATCH, File, end_files, end_files_of_projects, forget_file
from gateway.files.sealing import NAMES, PURPOSE
from gateway.files.uploads import FileTooLarge, Upload, begin_upload
from gateway.secret import Cipher
from gateway.settings.load import Settings, read_secret
from gateway.worker.resources import Resources

log = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 60.0
SWEEP_TIMEOUT_S = 10.0
MAX_FAILURES = 10
"""After this many failures in a row the store itself is away, not a single object that it keeps."""


class FileStore(Flusher):
    """One per process. `db` acts as the tenant, `system_db` sees all. `contents`: of new files;
    `others`: of those that were made when something else was configured. `cipher`: for the purpose
    of files."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        system_db: AsyncEngine,
        contents: Contents,
        cipher: Cipher,
        max_file_bytes: int,
        max_org_bytes: int,
        others: Sequence[Contents] = (),
    ) -> None:
        super().__init__("sweep files", SWEEP_INTERVAL_S)
        self._db, self._system_db = db, system_db
        self._contents, self._cipher = contents, cipher
        self._by_place = {each.place: each for each in (contents, *others)}
        self.max_file_bytes, self._max_org_bytes = max_file_bytes, max_org_bytes

    async def begin(self, org_id: str, project_id: str, *, most_bytes: int | None = None) -> Upload:
        """A file of at most so many bytes; None: of as many as one may have. Raises: InvalidField,
        FileTooLarge."""
        if most_bytes is not None and most_bytes > self.max_file_bytes:
            raise FileTooLarge(self.max_file_bytes)
        return await begin_upload(
            self._db,
            self._contents,
            self._cipher,
            org_id=org_id,
            project_id=project_id,
            most_bytes=self.max_file_bytes if most_bytes is None else most_bytes,
            org_bytes=self._max_org_bytes,
        )

    async def begin_output(self, org_id: str, project_id: str, *, most_bytes: int) -> Upload:
        """Begin a file that we write for a tenant: it has room whatever else there is. Raises:
        InvalidField."""
        return await begin_upload(
            self._db,
            self._contents,
            self._cipher,
            org_id=org_id,
            project_id=project_id,
            most_bytes=most_bytes,
        )

    def opened(self, file: File) -> File:
        """Return a file with its name as its owner wrote it; by its id, where that is lost."""
        try:
            plain = NAMES.open(self._cipher, msgspec.structs.asdict(file))
        except UNREADABLE as error:
            log.error("the name of %s does not open: %r", file.id, error)
            plain = {"filename": file.id}
        return msgspec.structs.replace(file, **plain)

    def read(self, file: File) -> AsyncIterator[bytes]:
        """It raises FilesError, UnknownSecret. Raises: FileStoreUnknown."""
        found = self._by_place.get(file.stored_in)
        if found is None:
            raise FileStoreUnknown(file.id, f"its content is in {file.stored_in}")
        return found.read(file.org_id, file.id)

    async def open(self, file: File) -> AsyncIterator[bytes]:
        """Read like `read`, but return once the first bytes are there: a store that is away or a
        lost content is reported before anything is answered. Raises: FilesError, UnknownSecret."""
        pieces = self.read(file)
        return _following(await anext(pieces, b""), pieces)

    async def flush(self) -> None:
        try:
            async with self._system_db.begin() as conn:
                await end_files_of_projects(conn)
        except DATABASE_ERRORS as error:
            log.warning("files of projects are ended later (%s)", type(error).__name__)
        for place in self._by_place:
            try:
                async with asyncio.timeout(SWEEP_TIMEOUT_S):
                    await self.sweep(place)
            except (*DATABASE_ERRORS, FilesError) as error:
                log.warning("files in %s are swept later (%s)", place, type(error).__name__)

    async def sweep(self, place: str | None = None) -> int:
        """Delete what ended in a place, None: where new files go; how many. What two gateways
        delete at once is deleted once; what cannot be is passed over, and tried the next time.
        Raises: FilesError, where nothing can."""
        contents = self._contents if place is None else self._by_place[place]
        swept, failures, after = 0, 0, ""
        while True:
            async with self._system_db.begin() as conn:
                ended = await end_files(conn, contents.place, after=after)
            for each in ended:
                try:
                    await contents.delete(each.org_id, each.file_id)
                except FilesError as error:
                    failures += 1
                    if failures == MAX_FAILURES:
                        raise
                    log.warning("file %s is deleted later (%s)", each.file_id, error)
                    continue
                failures = 0
                async with self._system_db.begin() as conn:
                    await forget_file(conn, each)
                swept += 1
            if len(ended) < SWEEP_BATCH:
                return swept
            after = ended[-1].file_id


async def _following(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in pieces:
        yield piece


def open_files(settings: Settings, resources: Resources) -> FileStore:
    """Open the file store of this process, until the stack of `resources` closes it. Raises:
    SettingsError, where a credential of it is missing."""
    db, system_db = resources.db, resources.system_db
    cipher = Cipher(resources.secret, PURPOSE)
    rows = PostgresContents(db, cipher)
    elsewhere = open_s3(settings, resources)
    files = FileStore(
        db=db,
        system_db=system_db,
        contents=elsewhere or rows,
        cipher=cipher,
        others=() if elsewhere is None else (rows,),
        max_file_bytes=settings.max_file_bytes,
        max_org_bytes=settings.max_org_file_bytes,
    )
    files.start()
    resources.stack.push_async_callback(files.close)
    return files


def open_s3(settings: Settings, resources: Resources) -> Contents | None:
    stack, config = resources.stack, settings.file_store
    if config is None:
        return None
    from gateway.files.s3_contents import S3Contents  # loads obstore: who has no store,
    from gateway.files.strays import Strays  # and its bucket, needs neither

    contents = S3Contents(
        config,
        access_key=read_secret(config.access_key_env, "file_store.access_key_env"),
        secret_key=read_secret(config.secret_key_env, "file_store.secret_key_env"),
        cipher=Cipher(resources.secret, PURPOSE),
    )
    stack.callback(contents.close)
    strays = Strays(resources.system_db, contents)
    strays.start()
    stack.push_async_callback(strays.stop)
    return contents
