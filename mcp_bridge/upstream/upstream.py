"""An MCP server as one owner (a tenant or a user) talks to it, in either era.

Each owner has an `Upstream` of its own with its own connections. Knows nothing of our callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal, Protocol

import msgspec

from foundation.http1 import HttpClientError, PoolTimeout
from mcp_bridge.caller import Caller
from mcp_bridge.names import ShortenedNames
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.allowed_fields import client_capabilities, from_server_error
from mcp_bridge.protocol.envelope import Envelope, modern_headers
from mcp_bridge.protocol.eras import (
    LAST_EVENT_HEADER,
    LEGACY,
    LEGACY_VERSIONS,
    MODERN,
    SAMPLING_BY,
    SESSION_HEADER,
    VERSION_HEADER,
    Era,
    SampledBy,
)
from mcp_bridge.protocol.header_schemas import HeaderSchemas
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, UNSUPPORTED_VERSION, Message, RpcError
from mcp_bridge.protocol.translation import to_modern_params
from mcp_bridge.provenance import clean_error
from mcp_bridge.upstream.audience import EVERYBODY, Audience
from mcp_bridge.upstream.circuit_breaker import Attempt, Breaker, UpstreamResting
from mcp_bridge.upstream.credentials import CredentialOf
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.resource_claims import KnownClaims
from mcp_bridge.upstream.transport import (
    NotSent,
    Transport,
    TransportAnswer,
    TransportFailed,
    TransportRequest,
    ignore,
)

CONNECT_TIMEOUT_S = 5.0
POOL_TIMEOUT_S = 5.0
"""How long a request waits for a free connection."""
READ_TIMEOUT_S = 300.0
"""Bounds the wait between two pieces of an answer; servers send keepalives on open streams more
often."""
WRITE_TIMEOUT_S = 10.0
SETUP_TIMEOUT_S = 15.0
"""Bounds a handshake or a discovery."""
MAX_CONNECTIONS = 64
"""The connections for requests; endless streams have MAX_STREAMS besides."""
MAX_STREAMS = 64
MAX_IDLE_CONNECTIONS = 16
IDLE_S = 30.0
MAX_RECONNECTS = 5
"""Attempts in a row without a message."""
DEFAULT_RETRY_MS = 1000
MAX_SESSION_ID_LENGTH = 1024
MAX_DISCOVERS = 2
DESCRIBED_S = 300.0
"""How long a server's description is used before it is asked for again."""

RECHECK_S = 1.0
ACCEPT = "application/json, text/event-stream"

Trusted = Literal["pinned", "all"]
TransportKind = Literal["http", "sse", "stdio", "openapi"]
"""`sse`: HTTP with server-sent events, of 2024-11-05. `stdio`: the process of `launch`.
`openapi`: the HTTP API of `document`."""
Addresses = Literal["public", "private", "loopback"]
"""Addresses that may be dialled: the public internet, also the operator's networks, or also this
machine."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a server.

    `namespace`: the part of an endpoint's path; the server in "identity" keeps its tools' names.
    `headers`: credentials of the installation. `trust`: whether its offer must be approved
    ("pinned") or the operator vouches for all of it. `taints`: after a result of this server, tools
    with side effects need a person's approval. `audience`: the server does not exist for others.
    `recheck_s`: for how long its offer is taken for what it was; 0: it is asked before each call.
    `era`: in which it is asked.
    """

    name: str
    url: str = ""
    namespace: str | None = None
    audience: Audience = EVERYBODY
    recheck_s: float = RECHECK_S
    era: Era = "auto"
    headers: Mapping[str, str] = {}
    trust: Trusted = "pinned"
    taints: bool = False
    network: Addresses = "public"
    credential: CredentialOf = "none"
    transport: TransportKind = "http"
    launch: LaunchSpec | None = None
    document: str = ""
    """An absolute path or a URL. The document's `servers` are ignored: requests go to `url`."""
    query_credentials: tuple[str, ...] = ()
    """Names of credentials that go into the query of an API's URL; all others are headers."""
    sampling: SampledBy = "caller"
    max_samples: int = 8
    """Samplings by a model of ours during one call."""

    fingerprint: str = ""
    """Tells the connections of one configuration of a server from those of another."""

    @property
    def address(self) -> str:
        """Return the URL or the command, for people."""
        return self.url if self.launch is None else self.launch.command


class Sampler(Protocol):
    """Answers sampling requests with a model of ours, on the caller's bill."""

    async def sample(self, caller: Caller, server: str, params: dict[str, Any]) -> dict[str, Any]:
        """Return the result of a `sampling/createMessage`. Raises: RpcError."""
        ...


class ServerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description of itself."""

    modern: bool
    capabilities: dict[str, Any]
    info: dict[str, Any]
    instructions: str | None
    at: float


class UpstreamSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session at a server of the older era. `id` None: the server keeps no sessions."""

    id: str | None
    version: str


class SessionEnded(Exception):
    """The server does not know the session (any more), and has done nothing."""


class ModernRefused(Exception):
    """The server refused 2026-07-28 and lists it as supported: it may accept the next request."""


class Unreachable(RpcError):
    """The server gave no usable answer. The request may or may not have been executed."""

    def __init__(self, server: str, reason: str, sign_in_url: str | None = None) -> None:
        data = {"server": server, "reason": reason}
        message = f"The server {server!r} gave no usable answer"
        if sign_in_url is not None:
            data["url"] = sign_in_url
            message = f"Somebody has to sign in at the server {server!r} first: {sign_in_url}"
        super().__init__(INTERNAL_ERROR, message, data)
        self.server, self.sign_in_url = server, sign_in_url


class Upstream:
    """A server as one owner reaches it. `transport` is closed with it. `on_notice`: called when the
    server says that its offer changed."""

    def __init__(
        self,
        config: ServerConfig,
        info: dict[str, Any],
        transport: Transport,
        sampler: Sampler | None = None,
        on_notice: Callable[[], None] = ignore,
    ) -> None:
        self.config, self.sampler, self._on_notice = config, sampler, on_notice
        self.name = config.name
        self._info = info
        self.transport = transport
        self.breaker = Breaker(config.name)
        self._ids = 0
        self._described: dict[bool, ServerDescription] = {}
        """The description by whether the newer era was wanted."""
        self._describing = asyncio.Lock()
        self.schemas = HeaderSchemas()
        self.shortened = ShortenedNames()
        self.known_claims: KnownClaims | None = None
        self.claims_lock = asyncio.Lock()
        self.generation = 0
        """Grows whenever the offer may have changed: on a notification or a new session."""
        self.mute_until = 0.0
        """Until this monotonic time no streams outside of requests are opened: it has none."""

    async def close(self) -> None:
        await self.transport.close()

    def to_server_envelope(self, envelope: Envelope) -> Envelope:
        """Return a caller's envelope for the server, with `sampling` as it is configured."""
        if self.config.sampling == "caller":
            return envelope
        capabilities = {k: v for k, v in envelope.capabilities.items() if k != "sampling"}
        ours = SAMPLING_BY[self.config.sampling]
        capabilities |= {} if ours is None else {"sampling": ours}
        return msgspec.structs.replace(envelope, capabilities=capabilities)

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        body: Message | None,
        headers: Mapping[str, str],
        *,
        endless: bool = False,
        on_sent: Callable[[], None] = ignore,
    ) -> AsyncIterator[TransportAnswer]:
        """Send a request and yield its answer.

        `on_sent`: called when the server may have got the request. Raises: Unreachable.
        """
        attempt, is_open = self._attempt(), True
        try:
            request = TransportRequest(method, body, headers, endless, self._noticed, on_sent)
            async with self.transport.ask(request) as answer:
                failure = f"status_{answer.status}" if answer.status >= 500 else None
                self.breaker.report(attempt, failure=failure)
                is_open = False
                yield answer
        except (NotSent, PoolTimeout) as error:
            # Our own bounds, which say nothing about the server's health.
            if isinstance(error, NotSent):
                raise Unreachable(self.name, error.reason, error.sign_in_url) from error
            raise Unreachable(self.name, "busy") from error
        except (TransportFailed, HttpClientError) as error:
            reason = error.reason if isinstance(error, TransportFailed) else type(error).__name__
            if is_open:
                self.breaker.report(attempt, failure=reason)
                is_open = False
            raise Unreachable(self.name, reason) from error
        finally:
            if is_open:
                self.breaker.give_up(attempt)

    def _attempt(self) -> Attempt:
        try:
            return self.breaker.attempt()
        except UpstreamResting as error:
            raise Unreachable(self.name, "resting") from error

    @asynccontextmanager
    async def _setting_up(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(SETUP_TIMEOUT_S):
                yield
        except TimeoutError:
            self.breaker.report(self._attempt(), failure="timeout")
            raise Unreachable(self.name, "timeout") from None

    # The server's description.

    async def describe(self, envelope: Envelope) -> ServerDescription:
        """Return the server's description, at most DESCRIBED_S old, in the era in which it is asked
        for this caller. Raises: RpcError."""
        wants_modern = self._wants_modern(envelope)
        async with self._describing:
            now = asyncio.get_running_loop().time()
            found = self._known(wants_modern, now)
            if found is None:
                first = self._newer_first if wants_modern else self._older_first
                found = await first(envelope, now)
                self._described[wants_modern] = found
                if found.modern != wants_modern:  # it speaks no other
                    self._described[not wants_modern] = found
            return found

    def _known(self, wants_modern: bool, now: float) -> ServerDescription | None:
        found = self._described.get(wants_modern)
        return None if found is None or found.at + DESCRIBED_S < now else found

    def _wants_modern(self, envelope: Envelope) -> bool:
        """True if the newer era is tried first. A connection that callers share is in one era."""
        config = self.config
        if config.era != "auto":
            return config.era == MODERN
        return envelope.version == MODERN or config.transport != "http"

    async def _newer_first(self, envelope: Envelope, now: float) -> ServerDescription:
        async with self._setting_up():
            found = await self._discover(envelope, now)
        if found is not None:
            return found
        if self.config.era == MODERN:
            raise Unreachable(self.name, "version")
        session, found = await self.initialize(envelope)
        await self.end(session)
        return found

    async def _older_first(self, envelope: Envelope, now: float) -> ServerDescription:
        """Describe the server by the older era; by the newer one if that is all that it speaks,
        however it refuses a handshake, or if it keeps no sessions in the older, where it could ask
        nothing then."""
        newer = None
        if self.config.era == "auto":
            newer = self._known(True, now)
            if newer is None or not newer.modern:
                async with self._setting_up():
                    newer = await self._discover(envelope, now)
        try:
            session, older = await self.initialize(envelope)
        except RpcError:
            if newer is None:
                raise
            return newer
        await self.end(session)
        if newer is None:
            return older
        self._described[True] = newer
        return newer if session.id is None else older

    def changed(self) -> None:
        self.generation += 1

    def _noticed(self) -> None:
        """Take the server's word that its offer changed."""
        self.changed()
        self._on_notice()

    def forget(self) -> None:
        """Forget the server's description, which its behaviour contradicts."""
        self._described.clear()

    async def _discover(self, envelope: Envelope, now: float) -> ServerDescription | None:
        """Return the description of a server of the newer era; None for any other answer, which
        means the older era."""
        for _ in range(MAX_DISCOVERS):
            try:
                return await self._discover_once(envelope, now)
            except ModernRefused:
                continue
        raise Unreachable(self.name, "version")

    async def _discover_once(self, envelope: Envelope, now: float) -> ServerDescription | None:
        params = to_modern_params({}, self.to_server_envelope(envelope))
        message = rpc.request(self.next_id(), "server/discover", params)
        headers = modern_headers("server/discover", {})
        async with self.ask("POST", message, headers) as answer:
            if answer.status >= 500:
                raise Unreachable(self.name, f"status_{answer.status}")
            if answer.status == 400 and MODERN in await self._supported_versions(answer):
                raise ModernRefused
            if answer.status != 200:
                return None
            async with aclosing(answer.messages()) as messages:
                async for found in messages:
                    if found is None or "result" not in found:
                        continue
                    result = found["result"]
                    versions = as_object(result).get("supportedVersions")
                    if not isinstance(versions, list) or MODERN not in versions:
                        return None
                    meta = rpc.meta_of(result)
                    return ServerDescription(
                        modern=True,
                        capabilities=as_object(result.get("capabilities")),
                        info=as_object(meta.get("io.modelcontextprotocol/serverInfo")),
                        instructions=as_text(result.get("instructions")),
                        at=now,
                    )
        return None

    async def _supported_versions(self, answer: TransportAnswer) -> list[Any]:
        """Return the revisions that a server supports instead of the one that it refuses."""
        if answer.kind != "application/json":
            return []
        try:
            found = rpc.decode(await answer.body())
        except RpcError:
            return []  # a server of the older era may refuse in its own words
        error = as_object(found.get("error"))
        supported = as_object(error.get("data")).get("supported")
        if error.get("code") != UNSUPPORTED_VERSION or not isinstance(supported, list):
            return []
        return supported

    # Sessions of the older era.

    async def initialize(self, envelope: Envelope) -> tuple[UpstreamSession, ServerDescription]:
        """Begin a session with the caller's capabilities. Raises: RpcError."""
        params = {
            "protocolVersion": LEGACY,
            "capabilities": client_capabilities(self.to_server_envelope(envelope).capabilities),
            "clientInfo": envelope.info or self._info,
        }
        message = rpc.request(self.next_id(), "initialize", params)
        async with self._setting_up():
            async with self.ask("POST", message, {}) as answer:
                result = await self._one_result(answer)
                id_ = answer.headers.get(SESSION_HEADER)
            version = result.get("protocolVersion")
            if version not in LEGACY_VERSIONS or len(id_ or "") > MAX_SESSION_ID_LENGTH:
                raise Unreachable(self.name, "handshake")
            session = UpstreamSession(id=id_, version=version)
            self.changed()
            try:
                await self.notify(session, rpc.notification("notifications/initialized"))
            except SessionEnded:
                raise Unreachable(self.name, "upstream_ended") from None
        described = ServerDescription(
            modern=False,
            capabilities=as_object(result.get("capabilities")),
            info=as_object(result.get("serverInfo")),
            instructions=as_text(result.get("instructions")),
            at=asyncio.get_running_loop().time(),
        )
        return session, described

    async def _one_result(self, answer: TransportAnswer) -> dict[str, Any]:
        if answer.status not in (200, 400, 404):
            raise Unreachable(self.name, f"status_{answer.status}")
        async with aclosing(answer.messages()) as messages:
            async for found in messages:
                if found is None or not rpc.is_response(found):
                    continue
                if "error" in found:
                    raise clean_error(from_server_error(found["error"], modern=False))
                return as_object(found.get("result"))
        raise Unreachable(self.name, "no_answer")

    async def request(
        self, session: UpstreamSession, method: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the result of a quick request. Raises: RpcError, SessionEnded."""
        message = rpc.request(self.next_id(), method, params)
        async with (
            self._setting_up(),
            self.ask("POST", message, legacy_headers(session)) as answer,
        ):
            if answer.status == 404 and session.id is not None:
                raise SessionEnded
            return await self._one_result(answer)

    async def notify(self, session: UpstreamSession, message: Message) -> None:
        """Send a notification or a response. Raises: SessionEnded, Unreachable."""
        async with self.ask("POST", message, legacy_headers(session)) as answer:
            if answer.status == 404:
                raise SessionEnded
            if answer.status >= 400:
                raise Unreachable(self.name, f"status_{answer.status}")
            await answer.body()  # or the connection could not be used again

    async def end(self, session: UpstreamSession) -> None:
        """End a session; an unreachable server ends it by itself."""
        if session.id is None:
            return
        try:
            async with (
                self._setting_up(),
                self.ask("DELETE", None, legacy_headers(session)) as answer,
            ):
                await answer.body()
        except Unreachable:
            return


def legacy_headers(session: UpstreamSession, last_id: str | None = None) -> dict[str, str]:
    headers = {VERSION_HEADER: session.version}
    if session.id is not None:
        headers[SESSION_HEADER] = session.id
    if last_id is not None:
        headers[LAST_EVENT_HEADER] = last_id
    return headers


def as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
