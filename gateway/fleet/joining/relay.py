"""Brings together engines of other machines, which dial in, and the processes of this home, which
find each of them at a unix socket, as they find an engine that was started here.

An engine has one introduced connection, on which it is asked for others: one for each process that
connects to its socket. From then on bytes go both ways, and nobody here reads them. The socket is
there for as long as the engine is. What dies here is started again: engines come back by
themselves, and their streams go on as after the death of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from engine.errors import ConfigError, ProtocolError
from engine.model_cache.listings import ModelListing
from engine.transport.entrance import ListeningEntrance
from engine.transport.frames import FrameReader, encode_frame, keep_alive
from engine.transport.join_messages import (
    SILENT_S,
    Admission,
    AdmissionRefusal,
    Attachment,
    Beat,
    ConnectionRequest,
    Departure,
    EngineIdentity,
    FileRequest,
    FromEngine,
    Introduction,
    ModelOffer,
    beat,
)
from foundation.tasks import TaskSet
from gateway.fleet.joining.admission import (
    HomeFiles,
    JoinableModel,
    JoinConfig,
    JoinPlace,
    refusal_by_model,
    refusal_by_role,
    refusal_by_token,
    refusal_by_version,
)
from gateway.fleet.joining.authority import BadRequest, JoinAuthority, SignedCertificate, serial_of
from gateway.fleet.joining.joined_engines import RECORDS, JoinRecord, JoinRecords
from gateway.fleet.joining.round_trips import RoundTrips, round_trip_s
from gateway.fleet.joining.tokens import JoinTokens
from gateway.fleet.joining.weights import WeightsServer
from gateway.home import engine_number

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
ATTACH_TIMEOUT_S = 10.0
MAX_STRANGERS = 64
"""Connections that have not been admitted yet."""
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""The bound on what an engine says of itself: the hashes of its files are the most of it."""
LOOK_S = 1.0
"""How often it is looked whether tokens were revoked."""
_GONE = AdmissionRefusal(
    reason="the engine's certificate is not known here, or its token was revoked",
    is_final=True,
    is_unknown=True,
)


CHUNK_BYTES = 256 * 1024
"""The bytes that are passed on at a time."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class NotAdmitted(Exception):
    """An error of an engine that is told why it is not admitted."""

    def __init__(self, reason: str | AdmissionRefusal, *, is_final: bool = True) -> None:
        if isinstance(reason, str):
            reason = AdmissionRefusal(reason=reason, is_final=is_final)
        super().__init__(reason.reason)
        self.answer = reason


class JoinedEngine:
    """An engine that is there, by its introduced connection."""

    def __init__(
        self, writer: asyncio.StreamWriter, record: JoinRecord, identity: EngineIdentity
    ) -> None:
        self.writer, self.record, self.identity = writer, record, identity
        self.waiting: dict[str, asyncio.Future[Connection]] = {}
        """Processes of this home that wait for a connection, by its id."""

    @property
    def listings(self) -> Mapping[str, ModelListing]:
        """Return what it sends to others."""
        return self.identity.listings

    async def connect(self, *, for_files: bool) -> Connection:
        """Ask it for a connection. Raises: OSError; TimeoutError, if none comes."""
        connection_id = secrets.token_hex(16)
        came: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.waiting[connection_id] = came
        try:
            self.writer.write(encode_frame(ConnectionRequest(connection_id, for_files)))
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                return await came
        finally:
            self.waiting.pop(connection_id, None)

    def leave(self) -> None:
        for each in self.waiting.values():
            if not each.done():
                each.set_exception(ConnectionResetError("the engine left"))
        self.writer.close()


class ReplicaPlace:
    """One replica that an engine may be, and its socket for as long as one is."""

    def __init__(self, place: JoinPlace, model: str) -> None:
        self.replica, self.address, self.model = place.replica, place.address, model
        self.cell = place.cell
        self.role = place.role
        self.engine: JoinedEngine | None = None
        self._socket: ListeningEntrance | None = None
        self._tasks = TaskSet()

    def is_as(self, other: ReplicaPlace) -> bool:
        """Tell whether an engine may stay that has the other one."""
        return (self.address, self.role, self.cell) == (other.address, other.role, other.cell)

    async def take(self, engine: JoinedEngine) -> None:
        """Let an engine be this replica, in the place of one that may have been. Raises:
        ConfigError."""
        await self.empty()
        opened = ListeningEntrance(self.address)
        await opened.open(partial(self._serve, engine), lambda error: None)
        self.engine, self._socket = engine, opened

    async def shut(self) -> None:
        """Let no process connect any more; those that are connected stay."""
        opened, self._socket = self._socket, None
        if opened is not None:
            await opened.close()

    async def empty(self) -> None:
        await self.shut()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.leave()
        await self._tasks.close()

    async def _serve(
        self, engine: JoinedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a process of this home: get it a connection of its own to the engine."""
        self._tasks.spawn(self._connect(engine, reader, writer), name=f"serve {self.replica}")

    async def _connect(
        self, engine: JoinedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            there = await engine.connect(for_files=False)
            await splice((reader, writer), there)
        except TimeoutError:
            log.warning("%s did not open a connection in %s s", self.replica, ATTACH_TIMEOUT_S)
        except OSError as error:
            log.info("%s: %s", self.replica, error)
        finally:
            writer.transport.abort()


class FetchingEngine:
    """An engine that fetches the files of its model, by the connections of its certificate. One
    that another cell lends has them there, and may read none."""

    def __init__(self, relay: Relay, record: JoinRecord) -> None:
        self._relay, self._record = relay, record
        self.key = record.serials[-1]

    def model(self) -> JoinableModel | None:
        return None if self._record.cell else self._relay.model_of(self._record)

    def holders(self) -> list[JoinedEngine]:
        return self._relay.engines_of(self._record)


class Relay:
    """The engines that come to one home. `folder`: what it keeps of joining."""

    def __init__(
        self, folder: Path, config: JoinConfig, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises: OSError, ValueError."""
        self._clock = clock
        self._authority = JoinAuthority(folder)
        self._tokens = JoinTokens(folder, lambda: self._models)
        self._round_trips: RoundTrips | None = None
        self._context = self._authority.server_context()
        self._records = JoinRecords(folder / RECORDS, clock=clock)
        self._files = HomeFiles(folder / "files.json")
        self._weights = WeightsServer(folder / "sha256.json", config.bytes_per_s)
        self._models: dict[str, JoinableModel] = {}
        self._places: dict[str, ReplicaPlace] = {}
        self._config = config
        self._num_strangers = 0
        self._seating = asyncio.Lock()
        self._tasks = TaskSet()
        self._server: asyncio.Server | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called when an engine came or left."""

    @property
    def joined(self) -> dict[str, JoinRecord]:
        """Return who is there, by replica."""
        found = ((each.replica, each.engine) for each in self._places.values())
        return {replica: engine.record for replica, engine in found if engine is not None}

    async def start(self, listener: socket.socket) -> None:
        """Let engines come to a bound socket. Raises: OSError."""
        await self.take_up(self._config)
        await self._end_revoked()
        self._tasks.spawn(self._look_after_tokens(), name="tokens")
        self._server = await asyncio.start_server(
            self._serve,
            sock=listener,
            ssl=self._context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
        )

    async def take_up(self, config: JoinConfig) -> None:
        """Take up other settings: who is there stays, unless its place is gone. Raises:
        OSError."""
        if config.round_trips is not None and self._round_trips is None:
            self._round_trips = RoundTrips(config.round_trips)
        async with self._seating:
            self._models = {each.name: each for each in config.models}
            wanted = {
                place.replica: ReplicaPlace(place, model.name)
                for model in config.models
                for place in model.places
            }
            for replica, each in self._places.items():
                if replica in wanted and wanted[replica].is_as(each):
                    wanted[replica] = each
                else:
                    await each.empty()
            self._places = wanted
        self._weights.take_up(config.bytes_per_s)
        self.on_change()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for place in self._places.values():
            await place.empty()
        await self._tasks.close()
        if self._round_trips is not None:
            self._round_trips.close()

    # ---- those who come

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_strangers >= MAX_STRANGERS:
            writer.transport.abort()
            return
        self._tasks.spawn(self._receive(reader, writer), name="engine")

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames: FrameReader[FromEngine] = FrameReader(reader, FromEngine, max_bytes=MAX_FRAME_BYTES)
        self._num_strangers += 1
        try:
            keep_alive(writer)
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                first = await frames.read()
            record = self._record_of(writer)
        except (OSError, ProtocolError) as error:
            log.info("somebody came and was no engine: %s", error)
            writer.transport.abort()
            return
        finally:
            self._num_strangers -= 1
        if isinstance(first, Attachment):
            self._attach(first, record, reader, writer)
        elif isinstance(first, Introduction):
            await self._greet(first, record, frames, writer)
        elif isinstance(first, FileRequest) and record is not None:
            await self._send_files(first, record, frames, writer)
        else:
            writer.transport.abort()

    def _record_of(self, writer: asyncio.StreamWriter) -> JoinRecord | None:
        """Return who a connection's certificate is of; None: it has none, or an unknown one."""
        shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
        certificate = shown.getpeercert(binary_form=True)
        return None if certificate is None else self._records.find(serial_of(certificate))

    def _attach(
        self,
        said: Attachment,
        record: JoinRecord | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        for place in self._places.values():
            engine = place.engine
            if engine is not None and engine.record is record:
                came = engine.waiting.pop(said.connection_id, None)
                if came is not None and not came.done():
                    came.set_result((reader, writer))
                    return
        writer.transport.abort()

    async def _send_files(
        self,
        first: FileRequest,
        record: JoinRecord,
        frames: FrameReader[FromEngine],
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            await self._weights.serve(first, FetchingEngine(self, record), frames, writer)
            writer.close()
        except (OSError, ProtocolError) as error:
            log.info("files for an engine on %s are sent no further: %s", record.host, error)
            writer.transport.abort()  # half of a range is no answer

    def model_of(self, record: JoinRecord) -> JoinableModel | None:
        """Return the model that an engine joined; None: it may not any more."""
        return self._models.get(record.model) if self._records.has(record) else None

    def engines_of(self, record: JoinRecord) -> list[JoinedEngine]:
        """Return the other engines of an engine's model that are there, and of its cell."""
        wanted = record.model, record.cell
        places = self._places.values()
        there = (each.engine for each in places if (each.model, each.cell) == wanted)
        return [each for each in there if each is not None and each.record is not record]

    async def _greet(
        self,
        said: Introduction,
        record: JoinRecord | None,
        frames: FrameReader[FromEngine],
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            if record is None:
                await self._enrol(said, writer)
            else:
                await self._admit(said, record, frames, writer)
        except NotAdmitted as refusal:
            log.warning("%s (%s) is not admitted: %s", said.host, said.identity.model, refusal)
            writer.write(encode_frame(refusal.answer))
        except (OSError, ProtocolError) as error:
            log.info("an engine on %s was lost: %s", said.host, error)
            writer.transport.abort()
        finally:
            writer.close()

    async def _enrol(self, said: Introduction, writer: asyncio.StreamWriter) -> None:
        """Sign a certificate for who has a token, if all else is right. Raises: NotAdmitted."""
        if not said.token_id:
            raise NotAdmitted(_GONE)
        token = self._tokens.get(said.token_id)
        self._refuse(refusal_by_version(said, self._clock()))
        num_used = self._records.num_of(said.token_id)
        self._refuse(refusal_by_token(said, token, num_used, self._clock()))
        assert token is not None
        model = token.model or said.identity.model
        await self._check(said, model, cell=token.cell)
        self._refuse(self._refusal_by_places(model, token.cell))
        if self._records.is_full:
            raise NotAdmitted("too many engines have joined this gateway", is_final=False)
        # Meanwhile another one may have used it.
        num_used = self._records.num_of(said.token_id)
        self._refuse(refusal_by_token(said, token, num_used, self._clock()))
        signed = self._sign(said.request)
        self._records.add(signed, token_id=token.id, model=model, host=said.host, cell=token.cell)
        log.info("signed a certificate for an engine of %s on %s", model, said.host)
        writer.write(encode_frame(Admission(replica="", certificate=signed.pem)))

    async def _admit(
        self,
        said: Introduction,
        record: JoinRecord,
        frames: FrameReader[FromEngine],
        writer: asyncio.StreamWriter,
    ) -> None:
        """Let an engine be a replica for as long as it stays. Raises: NotAdmitted, OSError,
        ProtocolError."""
        self._refuse(refusal_by_version(said, self._clock()))
        await self._check(said, record.model, cell=record.cell, beside=record)
        certificate = b""
        if said.request:
            signed = self._sign(said.request)
            self._records.renew(record, signed)
            certificate = signed.pem
        if not said.is_ready:
            offer = await self._offer(record) if said.wants_files else None
            answer = Admission(replica=record.replica, certificate=certificate, offer=offer)
            writer.write(encode_frame(answer))
            return
        engine = JoinedEngine(writer, record, said.identity)
        place = await self._seat(engine, said.host)
        writer.write(encode_frame(Admission(replica=place.replica, certificate=certificate)))
        log.info("%s is an engine on %s", place.replica, said.host)
        beating = asyncio.create_task(beat(writer), name="join-beat")
        try:
            await self._stay(frames, place, engine)
        finally:
            beating.cancel()
            async with self._seating:
                if place.engine is engine:
                    await place.empty()
            log.info("%s on %s has left", place.replica, said.host)
            self.on_change()

    async def _stay(
        self, frames: FrameReader[FromEngine], place: ReplicaPlace, engine: JoinedEngine
    ) -> None:
        while True:
            async with asyncio.timeout(SILENT_S):
                message = await frames.read()
            if message is None:
                return
            if place.cell:
                self._note_round_trip(place, engine.writer)
            if isinstance(message, Departure):
                async with self._seating:
                    if place.engine is engine:
                        await place.shut()
            elif not isinstance(message, Beat):
                raise ProtocolError("an introduction was not followed by a sign of life")

    async def _offer(self, record: JoinRecord) -> ModelOffer:
        """Return what there is of an engine's model, which it may join. Raises: NotAdmitted."""
        model = self._models[record.model]
        try:
            return await self._weights.offer(model, self.engines_of(record))
        except OSError as error:
            reason = f"the gateway cannot read its own {model.name}: {error.strerror}"
            raise NotAdmitted(reason, is_final=False) from None

    def _note_round_trip(self, place: ReplicaPlace, writer: asyncio.StreamWriter) -> None:
        found = round_trip_s(writer.get_extra_info("socket"))
        if found is not None and self._round_trips is not None:
            self._round_trips.note(engine_number(place.address), found)

    def _refusal_by_places(self, model: str, cell: str) -> str | None:
        """Return why an engine that is lent by a cell can never have a place."""
        places = self._places.values()
        if not cell or any(each.model == model and each.cell == cell for each in places):
            return None
        return f"this cell borrows no engine of {model} from {cell}: see [[cell.peer]] `borrow`"

    async def _check(
        self, said: Introduction, name: str, *, cell: str, beside: JoinRecord | None = None
    ) -> None:
        """Raises: NotAdmitted."""
        model = self._models.get(name)
        has_files = model is not None and not said.wants_files
        try:
            own = await asyncio.to_thread(self._files.of, model) if model and has_files else {}
        except OSError as error:
            raise NotAdmitted(f"the gateway cannot read its own {name}: {error.strerror}") from None
        others = {
            place.replica: place.engine.identity
            for place in self._places.values()
            if place.model == name and place.engine is not None
            if place.engine.record is not beside
        }
        if cell and said.wants_files:
            raise NotAdmitted("an engine that another cell lends has its files there")
        if model is not None:
            self._refuse(refusal_by_role(said.identity.role, model, cell))
        wants_files = said.wants_files and not said.is_ready
        self._refuse(
            refusal_by_model(said.identity, name, model, own, others, wants_files=wants_files)
        )

    def _sign(self, request: bytes) -> SignedCertificate:
        """Raises: NotAdmitted."""
        try:
            return self._authority.sign(request)
        except BadRequest as error:
            raise NotAdmitted(str(error)) from None

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise NotAdmitted(reason)

    async def _seat(self, engine: JoinedEngine, host: str) -> ReplicaPlace:
        """Give an engine the place that it has or had, or a free one. Raises: NotAdmitted."""
        record = engine.record
        self._refuse(self._refusal_by_places(record.model, record.cell))
        async with self._seating:
            role = engine.identity.role
            places = [
                each
                for each in self._places.values()
                if (each.model, each.cell, each.role) == (record.model, record.cell, role)
            ]
            mine = [each for each in places if each.engine and each.engine.record is record]
            free = [each for each in places if each.engine is None]
            free.sort(key=lambda each: each.replica != record.replica)
            if not mine and not free:
                whose = f" for {record.cell}" if record.cell else ""
                whose += "" if role == "both" else f" for --role {role}"
                reason = f"all {len(places)} places of {record.model}{whose} are taken"
                raise NotAdmitted(reason, is_final=False)
            place = (mine or free)[0]
            try:
                await place.take(engine)
            except ConfigError as error:
                raise NotAdmitted(error.message, is_final=False) from None
            record.replica, record.host, record.seen_at = place.replica, host, int(self._clock())
            self._records.write()
        if place.cell:
            self._note_round_trip(place, engine.writer)
        self.on_change()
        return place

    # ---- tokens

    async def _look_after_tokens(self) -> None:
        """End what joined by a token that was revoked."""
        seen = -1
        while True:
            changed = self._tokens.changed_at()
            if changed != seen:
                seen = changed
                await self._end_revoked()
            await asyncio.sleep(LOOK_S)

    async def _end_revoked(self) -> None:
        revoked = {each.id for each in self._tokens.all() if each.revoked_at is not None}
        self._records.remove_all_of(revoked)
        async with self._seating:
            for place in self._places.values():
                engine = place.engine
                if engine is not None and engine.record.token_id in revoked:
                    with contextlib.suppress(OSError):
                        engine.writer.write(encode_frame(_GONE))
                    await place.empty()


async def splice(one: Connection, other: Connection) -> None:
    """Return when both are closed. What one end said before it ended reaches the other."""
    await asyncio.gather(_pump(one[0], other[1]), _pump(other[0], one[1]))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except OSError:  # either is lost, so the other is closed
        pass
    finally:
        writer.close()
