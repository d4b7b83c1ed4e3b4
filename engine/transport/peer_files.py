"""Reads the files of a model from other machines of the gateway that an engine joins: through that
gateway, which the engine knows by its authority, and which knows the engine by its certificate.

Everything that comes is verified by its digest before it is used (`engine.model_cache`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine.errors import ConfigError, EngineError
from engine.model_cache.cache import ModelCache
from engine.model_cache.listings import ModelListing
from engine.model_cache.remote_files import Checksum, Part, RemoteFile, SourceAway
from engine.model_cache.sources import ModelSource, parse_source
from engine.text.hub import LineOnTerminal
from engine.transport.frames import FrameReader, TcpAddress, encode_frame
from engine.transport.join_messages import (
    ADAPTER,
    MAX_RANGE_BYTES,
    MODEL,
    FileAnswer,
    FileRange,
    FileRefusal,
    FileRequest,
    ModelOffer,
)

log = logging.getLogger(__name__)

TURN_TIMEOUT_S = 120.0
"""How long a range may wait for its turn before it is asked for again."""
PIECE_TIMEOUT_S = 60.0
PIECE_BYTES = 1 << 20

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[Connection]]


class PeerModel:
    """A model as a home lists it. `dial` opens a connection to the home."""

    def __init__(self, source: ModelSource, listing: ModelListing, dial: Dial) -> None:
        """Raises: ConfigError, if the listing is none that may be fetched."""
        listing.check(str(source))
        self.source, self.state, self._dial = source, listing.version, dial
        self.files: Mapping[str, RemoteFile] = {
            name: RemoteFile(each.size, Checksum("sha256", each.sha256))
            for name, each in listing.files.items()
        }

    def read(self, name: str, start: int) -> Iterator[bytes]:
        """Blocks the thread that it is used in, which runs no event loop. Raises: SourceAway,
        ConfigError."""
        file = self.files[name]
        assert file.checksum is not None
        with asyncio.Runner() as runner:
            try:
                connection = runner.run(self._connect())
                try:
                    while start < file.size:
                        size = min(MAX_RANGE_BYTES, file.size - start)
                        asked = FileRequest(sha256=file.checksum.digest, start=start, size=size)
                        runner.run(self._ask(connection, asked, name))
                        while size:
                            piece = runner.run(self._piece(connection, size))
                            yield piece
                            start, size = start + len(piece), size - len(piece)
                finally:
                    runner.run(self._leave(connection))
            except ConfigError:
                raise
            except (OSError, EngineError) as error:
                raise SourceAway(f"{name}: {str(error) or type(error).__name__}") from error

    async def _connect(self) -> Connection:
        return await self._dial()

    async def _leave(self, connection: Connection) -> None:
        connection[1].transport.abort()
        with contextlib.suppress(OSError):
            await connection[1].wait_closed()

    async def _ask(self, connection: Connection, asked: FileRequest, name: str) -> None:
        """Raises: ConfigError, where no machine has the file; SourceAway, OSError, EngineError."""
        reader, writer = connection
        writer.write(encode_frame(asked))
        frames: FrameReader[FileAnswer] = FrameReader(reader, FileAnswer)
        async with asyncio.timeout(TURN_TIMEOUT_S):
            answer = await frames.read()
        if isinstance(answer, FileRefusal):
            if answer.is_final:
                raise ConfigError(f"{self.source}: {name}: {answer.reason}")
            raise SourceAway(f"{name}: {answer.reason}")
        if not isinstance(answer, FileRange) or answer.size != asked.size:
            raise SourceAway(f"{name}: the gateway did not answer")

    async def _piece(self, connection: Connection, size: int) -> bytes:
        async with asyncio.timeout(PIECE_TIMEOUT_S):
            piece = await connection[0].read(min(size, PIECE_BYTES))
        if not piece:
            raise SourceAway("the machine that sent it left")
        return piece


class BroughtModel(NamedTuple):
    """A model that was fetched for an engine. `adapters`: their folders by name."""

    name: str
    folder: Path
    adapters: dict[str, Path]


class ModelFetch:
    """Fetches what a gateway offers (`ModelOffer`) into the cache of this machine; `source`: what
    the engine was given as its model, which is asked where no machine sends it, None: what the
    gateway's settings name."""

    def __init__(
        self,
        cache: ModelCache,
        home: TcpAddress,
        dial: Dial,
        offer: ModelOffer,
        source: ModelSource | None,
    ) -> None:
        self._cache, self._home, self._dial = cache, home, dial
        self._offer, self._source = offer, source

    def run(self, part: Part, version: str | None, has: Mapping[str, Path]) -> BroughtModel:
        """Fetch the model, and those of its adapters that the engine does not have. `part`: of the
        model. `version`: that it must be; None: that which the gateway has. Raises: ConfigError."""
        folder = self._fetch(MODEL, self._source, part, version)
        names = [
            name.removeprefix(ADAPTER)
            for name in sorted({*self._offer.listings, *self._offer.sources})
            if name.startswith(ADAPTER)
        ]
        adapters = {
            name: self._fetch(ADAPTER + name, None, "adapter", None)
            for name in names
            if name not in has
        }
        return BroughtModel(self._offer.model, folder, adapters)

    def _fetch(self, what: str, given: ModelSource | None, part: Part, version: str | None) -> Path:
        named = self._offer.sources.get(what)
        listing = self._offer.listings.get(what)
        if listing is not None and not self._is_wanted(listing, given, named, part, version):
            listing = None
        place = self._offer.model if what == MODEL else f"{self._offer.model} {what}"
        peer = ModelSource("peer", str(self._home).removeprefix("tcp:"), place)
        source = given or (peer if named is None else parse_source(named))
        if listing is None and source == peer:
            raise ConfigError(
                f"no machine of {self._home} has the files of {place} to send, and its settings "
                "name no source of them: give --model"
            )
        if listing is not None and part != "texts":
            version = listing.version
        found = self._cache.fetch(
            source,
            LineOnTerminal(str(source)),
            part=part,
            version=version,
            peer=None if listing is None else PeerModel(peer, listing, self._dial),
        )
        return found.folder

    def _is_wanted(
        self,
        listing: ModelListing,
        given: ModelSource | None,
        named: str | None,
        part: Part,
        version: str | None,
    ) -> bool:
        """Tell whether what is listed is what would come from the source."""
        if part != "texts" and not listing.has_weights:
            return False
        if version is not None and part != "texts":
            return listing.version == version
        return given is None or str(given) == named
