"""Sends the files of models to engines that join without them: this home's own, or those that
another engine which joined has in the cache of its machine, passed on.

A file is named by its digest, and only those are sent which a model has that the engine was let in
for: no name of a place on the disk comes from outside. All together have one rate, a bounded number
of connections, and take turns by ranges.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.errors import ConfigError, ProtocolError
from engine.model_cache.cache import cached_listing
from engine.model_cache.listings import ModelListing, list_folder
from engine.transport.file_ranges import (
    SEND_TIMEOUT_S,
    SentFile,
    files_of,
    next_request,
    refuse,
    send,
    send_range,
)
from engine.transport.frames import FrameReader, encode_frame
from engine.transport.join_messages import (
    MODEL,
    FileAnswer,
    FileRange,
    FileRefusal,
    FileRequest,
    FromEngine,
    ModelOffer,
)
from gateway.fleet.joining.admission import JoinableModel

log = logging.getLogger(__name__)

ORDER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""
MAX_CONNECTIONS = 256
"""The connections of all engines that fetch."""
MAX_OF_ONE = 4
"""The connections of one of them: one that takes its bytes slowly leaves others their turn."""
MAX_SENDING = 16
"""The ranges that are sent at a time; others wait for their turn."""
PIECE_BYTES = 256 * 1024

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FileHolder(Protocol):
    """An engine that joined, and may have files to send."""

    @property
    def listings(self) -> Mapping[str, ModelListing]:
        """Return what it has, as in `EngineIdentity`."""

    async def connect(self, *, for_files: bool) -> Connection:
        """Open a connection to it. Raises: OSError."""


class FileRequester(Protocol):
    """An engine that fetches, as the home knows it at each of its requests."""

    @property
    def key(self) -> str:
        """Return what tells it from other engines."""

    def model(self) -> JoinableModel | None:
        """Return the model that it may read; None: none, or none any more."""

    def holders(self) -> Sequence[FileHolder]:
        """Return the other engines of that model."""


class ByteRate:
    """Spreads bytes over time: so many a second for all who take some. `clock`: seconds."""

    def __init__(self, bytes_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_per_s, self._clock = bytes_per_s, clock
        self._free_at = 0.0

    def delay_of(self, size: int) -> float:
        """Take `size` bytes, and return in how many seconds they may go."""
        begin = max(self._clock(), self._free_at)
        self._free_at = begin + size / self.bytes_per_s
        return begin - self._clock()

    async def take(self, size: int) -> None:
        if (delay_s := self.delay_of(size)) > 0:
            await asyncio.sleep(delay_s)


class WeightsServer:
    """Sends files. `hashes`: the file that keeps the digests of the home's own."""

    def __init__(self, hashes: Path, bytes_per_s: int) -> None:
        """`bytes_per_s`: 0: nothing is sent."""
        self._hashes = hashes
        self._rate = ByteRate(bytes_per_s)
        self._turns = asyncio.Semaphore(MAX_SENDING)
        self._listing = asyncio.Lock()
        self._connections: Counter[str] = Counter()
        self._own_files: dict[str, dict[str, SentFile]] = {}

    def take_up(self, bytes_per_s: int) -> None:
        """Take up other settings: another rate, and folders that may be others."""
        self._rate.bytes_per_s = bytes_per_s
        self._own_files = {}

    async def offer(self, model: JoinableModel, holders: Sequence[FileHolder]) -> ModelOffer:
        """Return what there is of a model. Raises: OSError, if the home's own cannot be read."""
        listings: dict[str, ModelListing] = {}
        if self._rate.bytes_per_s:
            own = await self._list_own(model)
            for name in model.folders:
                best = own.get(name)
                if best is None or not best.has_weights:
                    wanted = model.versions.get(name)
                    others = (each.listings.get(name) for each in holders)
                    best = next((one for one in others if fits(one, best, wanted)), best)
                if best is not None:
                    listings[name] = best
        return ModelOffer(model=model.name, listings=listings, sources=dict(model.sources))

    async def serve(
        self,
        asked: FileRequest | None,
        engine: FileRequester,
        frames: FrameReader[FromEngine],
        writer: asyncio.StreamWriter,
    ) -> None:
        """Answer an engine's requests, of which `asked` is the first, until it leaves. Raises:
        OSError, ProtocolError."""
        of_one = self._connections[engine.key]
        if self._connections.total() >= MAX_CONNECTIONS or of_one >= MAX_OF_ONE:
            refuse(writer, "too many connections fetch files", is_final=False)
            return
        self._connections[engine.key] += 1
        try:
            while asked is not None:
                await self._answer(asked, engine, writer)
                asked = await next_request(frames)
        finally:
            self._connections[engine.key] -= 1
            self._connections += Counter()  # forgets those of whom none is left

    async def _answer(
        self, asked: FileRequest, engine: FileRequester, writer: asyncio.StreamWriter
    ) -> None:
        model = engine.model()
        if model is None:
            refuse(writer, "this engine may not read it", is_final=True)
        elif not self._rate.bytes_per_s:
            refuse(writer, "this gateway sends no files (fleet.join_bytes_per_s)", is_final=True)
        else:
            async with self._turns:
                await self._send(asked, model, engine.holders(), writer)

    async def _send(
        self,
        asked: FileRequest,
        model: JoinableModel,
        holders: Sequence[FileHolder],
        writer: asyncio.StreamWriter,
    ) -> None:
        own = await self._find_own(asked.sha256, model)
        if own is not None:
            await send_range(writer, own, asked, self._rate.take)
            return
        having = [each for each in holders if has_file(each, asked.sha256)]
        for holder in ORDER.sample(having, len(having)):
            if await self._pass_on(holder, asked, writer):
                return
        if having:
            refuse(writer, "the engines that have it do not send it now", is_final=False)
        else:
            refuse(writer, "no machine of this gateway has it now", is_final=True)

    async def _pass_on(
        self, holder: FileHolder, asked: FileRequest, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer with what another engine sends; return whether it did. Raises: OSError, when it
        broke amid the bytes, or who asked is gone."""
        try:
            reader, theirs = await holder.connect(for_files=True)
        except OSError:
            return False
        try:
            theirs.write(encode_frame(asked))
            frames: FrameReader[FileAnswer] = FrameReader(reader, FileAnswer)
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    answer = await frames.read()
            except (OSError, ProtocolError) as error:
                log.info("an engine does not send a file: %s", error)
                return False
            if not isinstance(answer, FileRange) or answer.size != asked.size:
                if isinstance(answer, FileRefusal):
                    log.info("an engine does not send a file: %s", answer.reason)
                return False
            writer.write(encode_frame(answer))
            left = answer.size
            while left:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    piece = await reader.read(min(left, PIECE_BYTES))
                if not piece:
                    raise ConnectionResetError("the engine that sent a file left")
                await send(writer, piece, self._rate.take)
                left -= len(piece)
            return True
        finally:
            theirs.transport.abort()

    # ---- this home's own files

    async def _find_own(self, sha256: str, model: JoinableModel) -> SentFile | None:
        if model.name not in self._own_files:
            await self._list_own(model)
        return self._own_files.get(model.name, {}).get(sha256)

    async def _list_own(self, model: JoinableModel) -> dict[str, ModelListing]:
        """Raises: OSError."""
        async with self._listing:  # who comes meanwhile finds the digests that the first has made
            found = await asyncio.to_thread(list_own, model, self._hashes)
        self._own_files[model.name] = files_of(
            (model.folders[name], listing) for name, listing in found.items()
        )
        return found


def list_own(model: JoinableModel, hashes: Path) -> dict[str, ModelListing]:
    """Return what a home has of a model, by folder. Blocks while files are read. Raises:
    OSError."""
    found = {}
    for name, folder in model.folders.items():
        listing = cached_listing(folder) or list_plain(name, folder, hashes)
        wanted = model.versions.get(name)
        if listing is None or (listing.has_weights and wanted not in (None, listing.version)):
            log.warning("%s: %s is not what it has to be, and is sent to nobody", model.name, name)
        else:
            found[name] = listing
    return found


def list_plain(name: str, folder: Path, hashes: Path) -> ModelListing | None:
    """Return what a folder has that is in no cache: the texts alone where it has no weights."""
    for part in ("model", "texts") if name == MODEL else ("adapter",):
        try:
            return list_folder(folder, part, hashes)
        except ConfigError as error:
            log.debug("%s: %s", folder, error)
    return None


def fits(theirs: ModelListing | None, own: ModelListing | None, wanted: str | None) -> bool:
    """Tell whether what an engine has is a model of this home: of the version that it has to be,
    and with the same texts as the home has."""
    if theirs is None or not theirs.has_weights or wanted not in (None, theirs.version):
        return False
    try:
        theirs.check("an engine")
    except ConfigError as error:
        log.warning("%s", error)
        return False
    known = {} if own is None else own.files
    return all(theirs.files.get(name) == file for name, file in known.items())


def has_file(holder: FileHolder, sha256: str) -> bool:
    listed = (file for each in holder.listings.values() for file in each.files.values())
    return any(file.sha256 == sha256 for file in listed)
