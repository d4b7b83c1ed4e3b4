"""Sends ranges of files, which are named by their digests, on a connection that is encrypted and
whose other end is known. Who receives them verifies what came: nothing here is hashed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.errors import ProtocolError
from engine.model_cache.listings import ModelListing
from engine.transport.frames import FrameReader, encode_frame
from engine.transport.join_messages import FileRange, FileRefusal, FileRequest, FromEngine

READ_BYTES = 1 << 20
WRITE_BYTES = 256 * 1024
"""The bytes that are encrypted in one go: a step of the event loop, which tokens wait for, too."""
SEND_TIMEOUT_S = 60.0
"""Drop one that takes none of what it asked for in this time."""
IDLE_TIMEOUT_S = 60.0
"""Drop one that asks for nothing more in this time."""
MAX_REQUEST_BYTES = 4096

Pace = Callable[[int], Awaitable[None]]
"""Returns when so many bytes more may be sent."""


class SentFile(NamedTuple):
    """A file that may be sent, and its size when it was listed."""

    path: Path
    size: int


def files_of(listings: Iterable[tuple[Path, ModelListing]]) -> dict[str, SentFile]:
    """Return the files of folders by their digests."""
    return {
        file.sha256: SentFile(folder / name, file.size)
        for folder, listing in listings
        for name, file in listing.files.items()
    }


async def at_once(size: int) -> None:
    """Let bytes go as quickly as they are taken."""


async def send_range(
    writer: asyncio.StreamWriter, file: SentFile, asked: FileRequest, pace: Pace = at_once
) -> None:
    """Answer a request with what is asked for of a file. Raises: OSError, when the file or the
    connection breaks amid it; the connection is of no use then."""
    if asked.start + asked.size > file.size:
        refuse(writer, f"that file has {file.size} bytes", is_final=True)
        return
    try:
        fd = await asyncio.to_thread(os.open, file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        refuse(writer, f"the file cannot be read: {error.strerror}", is_final=False)
        return
    try:
        writer.write(encode_frame(FileRange(asked.size)))
        at, end = asked.start, asked.start + asked.size
        while at < end:
            read = await asyncio.to_thread(os.pread, fd, min(READ_BYTES, end - at), at)
            if not read:
                raise OSError(f"{file.path} is shorter than it was")
            await send(writer, read, pace)
            at += len(read)
    finally:
        os.close(fd)


async def send(writer: asyncio.StreamWriter, data: bytes, pace: Pace) -> None:
    """Raises: OSError, TimeoutError."""
    view = memoryview(data)
    for start in range(0, len(view), WRITE_BYTES):
        piece = view[start : start + WRITE_BYTES]
        await pace(len(piece))
        writer.write(piece)
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await writer.drain()


def refuse(writer: asyncio.StreamWriter, reason: str, *, is_final: bool) -> None:
    writer.write(encode_frame(FileRefusal(reason=reason, is_final=is_final)))


async def serve_files(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, files: Mapping[str, SentFile]
) -> None:
    """Answer requests for files until the other end leaves. Raises: OSError, ProtocolError."""
    frames: FrameReader[FromEngine] = FrameReader(reader, FromEngine, max_bytes=MAX_REQUEST_BYTES)
    while (asked := await next_request(frames)) is not None:
        file = files.get(asked.sha256)
        if file is None:
            refuse(writer, "there is no such file here", is_final=True)
        else:
            await send_range(writer, file, asked)


async def next_request(frames: FrameReader[FromEngine]) -> FileRequest | None:
    """Return the next request; None: the other end left. Raises: OSError, ProtocolError."""
    async with asyncio.timeout(IDLE_TIMEOUT_S):
        asked = await frames.read()
    if asked is not None and not isinstance(asked, FileRequest):
        raise ProtocolError("it asks for no file")
    return asked
