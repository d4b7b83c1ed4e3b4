"""How files are put together for one process. Above: `app`. Below: what it names. What is opened
here is pushed on the caller's stack."""

from __future__ import annotations

from contextlib import AsyncExitStack

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.files.contents import PostgresContents
from gateway.files.store import FileStore
from gateway.settings import Settings


def open_files(
    settings: Settings, stack: AsyncExitStack, db: AsyncEngine, system_db: AsyncEngine
) -> FileStore:
    files = FileStore(
        db=db,
        system_db=system_db,
        contents=PostgresContents(db),
        max_file_bytes=settings.max_file_bytes,
        max_org_bytes=settings.max_org_file_bytes,
    )
    files.start()
    stack.push_async_callback(files.close)
    return files
