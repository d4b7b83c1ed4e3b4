"""Joins an engine to the gateway of another machine: the engine dials, so no port is open here.

One introduced connection says that the engine is there. The home asks by it for further ones, one
for each gateway process that wants the engine; each is served like one that came to a socket. All
are TLS, of which each side knows the other by the authority of the home.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, EngineUnavailable, ProtocolError
from engine.model_cache.cache import cached_listing
from engine.model_files import contents_of
from engine.options import EngineOptions
from engine.protocol import PROTOCOL_VERSION, EngineRole
from engine.transport.entrance import Refused, ServeConnection
from engine.transport.file_ranges import SentFile, files_of, serve_files
from engine.transport.frames import READ_AHEAD_BYTES, FrameReader, TcpAddress, encode_frame
from engine.transport.join_messages import (
    ADAPTER,
    HOME_NAME,
    MODEL,
    SILENT_S,
    Admission,
    AdmissionRefusal,
    Attachment,
    ConnectionRequest,
    Departure,
    EngineIdentity,
    FromHome,
    Introduction,
    ModelOffer,
    beat,
    options_of,
)
from foundation.tasks import TaskSet

if TYPE_CHECKING:  # the certificates' library, which an engine that listens does not need
    from engine.transport.join_identity import JoinIdentity

log = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0
JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""
BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 5.0
MAX_SENDING = 8
"""The connections on which other engines get files at a time."""
_CLOCK_ERRORS = {9: "is not valid yet", 10: "has ended"}
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and _HAS_EXPIRED, in words."""


class JoinRefusal(EngineError):
    """An error of an engine that the home does not take. `is_final`: to ask again is of no use.
    `is_unknown`: the two do not know each other by the certificates that they have."""

    code = "join_refusal"

    def __init__(self, message: str, *, is_final: bool, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_final, self.is_unknown = is_final, is_unknown

    @classmethod
    def of(cls, answer: AdmissionRefusal) -> JoinRefusal:
        return cls(answer.reason, is_final=answer.is_final, is_unknown=answer.is_unknown)

    def to_error(self) -> ConfigError:
        return (UnknownIdentity if self.is_unknown else ConfigError)(self.message)


class UnknownIdentity(ConfigError):
    """An error of an engine and a home that do not know each other's certificate: only a token of
    that home helps."""


class JoinedEntrance:
    """Lets the gateway processes of the home at `home` come, for as long as that wants them.
    `joined_file`: a file that is there while the home has this engine, for whoever watches it."""

    def __init__(
        self,
        home: TcpAddress,
        identity: JoinIdentity,
        engine: EngineIdentity,
        joined_file: Path | None = None,
    ) -> None:
        """Raises: OSError, if there can be no such file."""
        if joined_file is not None:
            joined_file.touch(mode=0o600)
            joined_file.unlink()
        self._joined_file = joined_file
        self.home, self._identity, self._engine = home, identity, engine
        self._serve: ServeConnection | None = None
        self._tasks = TaskSet()
        self._writer: asyncio.StreamWriter | None = None  # of the introduced connection
        self._replica = engine.model
        self._was_admitted = self._is_leaving = False
        self._offer: ModelOffer | None = None
        self._sent_files: dict[str, SentFile] = {}
        self._num_sending = 0

    @property
    def address(self) -> str:
        return f"{self._replica} of {self.home}"

    @property
    def identity_path(self) -> Path:
        return self._identity.path

    def own_host(self) -> str:
        """Return the address of this machine on the way to the home. Raises: ConfigError."""
        try:
            found = socket.getaddrinfo(self.home.host, self.home.port, type=socket.SOCK_DGRAM)
            family, kind, number, _, address = found[0]
            with socket.socket(family, kind, number) as way:
                way.connect(address)  # sends nothing
                return str(way.getsockname()[0])
        except OSError as error:
            raise ConfigError(
                f"--peer-listen: no way to {self.home}, so say an address of this machine: {error}"
            ) from None

    async def ask(self) -> None:
        """Ask whether the home would take this engine, and get a certificate where there is none.
        Raises: ConfigError, if it never will; nothing if it cannot be reached now."""
        try:
            writer, _ = await self._introduce(is_ready=False)
            writer.transport.abort()
        except JoinRefusal as refusal:
            if refusal.is_final:
                raise ConfigError(refusal.message) from None
            log.warning("%s", refusal.message)
        except (OSError, EngineError) as error:
            log.warning("cannot ask %s yet: %s", self.home, _in_words(error))

    async def ask_for_files(self, *, waits: bool) -> ModelOffer | None:
        """Ask the home what there is of the model that this engine may join, and get a certificate
        where there is none. None: the home says nothing of it, or cannot be reached now and this
        engine has not to wait for it (`waits`). Raises: ConfigError, if it will never say."""
        backoff_s, told = BACKOFF_MIN_S, ""
        while True:
            try:
                writer, _ = await self._introduce(is_ready=False, wants_files=True)
                writer.transport.abort()
                return self._offer
            except JoinRefusal as refusal:
                if refusal.is_final:
                    raise ConfigError(refusal.message) from None
                why = refusal.message
            except (OSError, EngineError) as error:
                why = f"cannot ask {self.home} yet: {_in_words(error)}"
            if why != told:
                log.warning("%s", why)
                told = why
            if not waits:
                return None
            await asyncio.sleep(backoff_s * JITTER.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    def identify(self, engine: EngineIdentity, folders: Mapping[str, Path]) -> None:
        """Say what this engine is, once it has its files. `folders`: those of its listings."""
        self._engine = engine
        self._replica = self._replica or engine.model
        self._sent_files = files_of(
            (folders[name], listing) for name, listing in engine.listings.items()
        )

    async def open(self, serve: ServeConnection, refused: Refused) -> None:
        self._serve = serve
        self._tasks.spawn(self._stay_joined(refused), name="join")

    def shut(self) -> None:
        if not self._is_leaving and self._writer is not None:
            self._writer.write(encode_frame(Departure()))
        self._is_leaving = True

    async def close(self) -> None:
        self._is_leaving = True
        if self._writer is not None:
            self._writer.close()
        await self._tasks.close()
        self._identity.release()

    # ---- the introduced connection

    async def _stay_joined(self, refused: Refused) -> None:
        backoff_s, told = BACKOFF_MIN_S, ""
        while not self._is_leaving:
            try:
                await self._attend()
            except JoinRefusal as refusal:
                if refusal.is_final:
                    refused(refusal.to_error())
                    return
                why = refusal.message
            except (OSError, EngineError) as error:  # TimeoutError is an OSError
                why = f"{self.home}: {_in_words(error)}"
            if self._writer is not None:
                self._writer, backoff_s, told = None, BACKOFF_MIN_S, ""
            if why != told and not self._is_leaving:
                log.warning("not joined: %s", why)
                told = why
            # Jitter: the engines of a restarted home do not all come back at once.
            await asyncio.sleep(backoff_s * JITTER.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _attend(self) -> None:
        """Be a replica until the connection is lost. Raises: JoinRefusal, OSError, EngineError."""
        writer, frames = await self._introduce(is_ready=True)
        self._writer = writer
        log.info("joined %s as %s", self.home, self._replica)
        beating = asyncio.create_task(beat(writer), name="join-beat")
        try:
            if self._joined_file is not None:
                self._joined_file.touch(mode=0o600)
            while True:
                async with asyncio.timeout(SILENT_S):
                    message = await frames.read()
                if message is None:
                    raise EngineUnavailable("the home closed the connection")
                if isinstance(message, ConnectionRequest):
                    self._tasks.spawn(self._attach(message), name="join-attach")
                elif isinstance(message, AdmissionRefusal):
                    raise JoinRefusal.of(message)
        finally:
            beating.cancel()
            writer.transport.abort()
            if self._joined_file is not None:
                self._joined_file.unlink(missing_ok=True)

    async def _introduce(
        self, *, is_ready: bool, wants_files: bool = False
    ) -> tuple[asyncio.StreamWriter, FrameReader[FromHome]]:
        """Return the connection on which the home has admitted this engine by its certificate.
        Others are aborted once they have their answer: a close over TLS waits up to 30 s for the
        other side's, and would outlive its engine."""
        while True:
            by_certificate, wants = self._identity.is_admitted, self._identity.wants_certificate
            token = None if by_certificate else self._identity.token
            reader, writer = await self.dial()
            try:
                frames: FrameReader[FromHome] = FrameReader(reader, FromHome)
                said = Introduction(
                    identity=self._engine,
                    host=socket.gethostname(),
                    clock=time.time(),
                    token_id="" if token is None else token.id,
                    secret="" if token is None else token.secret,
                    request=self._identity.request() if wants else b"",
                    is_ready=is_ready,
                    wants_files=wants_files,
                )
                writer.write(encode_frame(said))
                answer = await self._answer(frames)
                if answer.certificate:
                    self._identity.keep(answer.certificate)
            except BaseException:
                writer.transport.abort()
                raise
            if by_certificate:
                self._was_admitted, self._replica = True, answer.replica or self._replica
                self._offer = answer.offer
                return writer, frames
            writer.transport.abort()

    async def _answer(self, frames: FrameReader[FromHome]) -> Admission:
        """Raises: JoinRefusal, OSError, EngineError."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await frames.read()
        except ssl.SSLError as error:
            # Of TLS 1.3 a client learns only now that its certificate is not taken.
            raise self._not_taken((error.reason or str(error)).lower()) from None
        except ConnectionError:
            answer = None
        if answer is None:  # asyncio's servers hang up in the place of an alert
            raise self._not_taken("it ended the connection")
        if isinstance(answer, AdmissionRefusal):
            raise JoinRefusal.of(answer)
        if not isinstance(answer, Admission):
            raise ProtocolError("the home did not answer")
        return answer

    async def _attach(self, asked: ConnectionRequest) -> None:
        assert self._serve is not None
        try:
            reader, writer = await self.dial()
        except (OSError, EngineError) as error:
            log.warning("a gateway process waits in vain: %s", _in_words(error))
            return
        writer.write(encode_frame(Attachment(asked.connection_id)))
        if asked.for_files:
            await self._send_files(reader, writer)
        else:
            await self._serve(reader, writer)

    async def _send_files(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send another engine what it asks for of the model's files."""
        self._num_sending += 1
        try:
            if self._num_sending <= MAX_SENDING:
                await serve_files(reader, writer, self._sent_files)
        except (OSError, ProtocolError) as error:
            log.info("files are sent no further: %s", _in_words(error))
        finally:
            self._num_sending -= 1
            writer.transport.abort()

    # ---- TLS

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises: JoinRefusal, OSError."""
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                return await asyncio.open_connection(
                    self.home.host,
                    self.home.port,
                    ssl=self._identity.context(),
                    server_hostname=HOME_NAME,
                    limit=READ_AHEAD_BYTES,
                )
        except ssl.SSLCertVerificationError as error:
            raise self._unknown_home(error) from None
        except ssl.SSLError as error:
            raise self._not_taken((error.reason or str(error)).lower()) from None

    def _unknown_home(self, error: ssl.SSLCertVerificationError) -> JoinRefusal:
        """An engine that was admitted goes on asking: somebody may be in the way for a while."""
        what = _CLOCK_ERRORS.get(error.verify_code)
        if what is not None:
            now = datetime.now(UTC).isoformat(" ", "seconds")
            reason = f"the certificate of {self.home} {what}, by the clock of this machine ({now})"
        else:
            reason = (
                f"whoever answers at {self.home} is not the home that made the token: "
                f"its certificate has another authority ({error.verify_message})"
            )
        return JoinRefusal(reason, is_final=not self._was_admitted, is_unknown=what is None)

    def _not_taken(self, why: str) -> JoinRefusal:
        return JoinRefusal(
            f"{self.home} did not answer ({why}); where it is up and does not know this engine's "
            f"certificate any more, remove {self._identity.path} and join with a fresh token",
            is_final=False,
        )


def identity_of(config: EngineConfig, hashes: Path, role: EngineRole = "both") -> EngineIdentity:
    """Return what an engine of this configuration is. `hashes`: see `contents_of`. Raises:
    ConfigError."""
    folders = folders_of(config)
    try:
        files = contents_of(folders, hashes)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    listed = {name: cached_listing(folder) for name, folder in folders.items()}
    return EngineIdentity(
        protocol_version=PROTOCOL_VERSION,
        model=config.served_name or config.model.name,
        files=files,
        options=options_of(config),
        listings={name: each for name, each in listed.items() if each is not None},
        role=role,
    )


def folders_of(config: EngineConfig) -> dict[str, Path]:
    """Return the folders of what an engine serves, by their names in `EngineIdentity.files`."""
    adapters = {f"{ADAPTER}{name}": folder for name, folder in config.adapters.items()}
    return {MODEL: config.model, **adapters}


def identity_without_files(
    options: EngineOptions, served_name: str, role: EngineRole = "both"
) -> EngineIdentity:
    """Return what an engine is that has none of its model's files yet. `served_name`: empty: as the
    home calls the model."""
    return EngineIdentity(
        protocol_version=PROTOCOL_VERSION,
        model=served_name,
        files={},
        options=options_of(options),
        role=role,
    )


def _in_words(error: Exception) -> str:
    return str(error) or type(error).__name__
