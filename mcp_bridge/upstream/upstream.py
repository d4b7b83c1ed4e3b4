"""An MCP server as one tenant talks to it, in either era, by the words of Streamable HTTP.

Knows nothing of who calls us. What the owner of a server keeps apart (tenants, credentials) has an
`Upstream` each, with its own connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal, Protocol

import httpcore
import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.names import ShortenedNames
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.envelope import Envelope, modern_headers
from mcp_bridge.protocol.eras import (
    LAST_EVENT_HEADER,
    LEGACY,
    LEGACY_VERSIONS,
    MODERN,
    SAMPLING_BY,
    SESSION_HEADER,
    VERSION_HEADER,
    SampledBy,
)
from mcp_bridge.protocol.header_schemas import HeaderSchemas
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, UNSUPPORTED_VERSION, Message, RpcError
from mcp_bridge.protocol.translation import to_legacy_capabilities, to_modern_params
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
PLACE_TIMEOUT_S = 5.0
"""For one of our connections to be free."""
READ_TIMEOUT_S = 300.0
"""Between two pieces of an answer; those who keep a stream open say so more often."""
WRITE_TIMEOUT_S = 10.0
SETUP_TIMEOUT_S = 15.0
"""For a handshake, or a look at what a server is."""
MAX_CONNECTIONS = 64
"""For requests; streams that wait for changes have their own."""
MAX_STREAMS = 64
MAX_IDLE_CONNECTIONS = 16
IDLE_S = 30.0
MAX_RECONNECTS = 5
"""In a row that brought nothing."""
DEFAULT_RETRY_MS = 1000
MAX_SESSION_ID_LENGTH = 1024
MAX_DISCOVERS = 2
DESCRIBED_S = 300.0
"""How long a server is what it said it was."""

ACCEPT = "application/json, text/event-stream"
FAILURES = (
    TransportFailed,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
)

Trusted = Literal["pinned", "all"]
TransportKind = Literal["http", "sse", "stdio", "openapi"]
"""`sse`: HTTP with server-sent events, of 2024-11-05. `stdio`: a process, of `launch`.
`openapi`: an HTTP API, of `document`."""
Addresses = Literal["public", "private", "loopback"]
"""Where a server may be dialled, besides the public internet: in the operator's own networks, or on
this machine."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a server.

    `namespace`: the part of an endpoint's path that it is found under; in "identity" it keeps its
    tools' names. `headers`: its own credentials. `trust`: whether what it offers has to be approved
    ("pinned") or the operator vouches for all of it. `taints`: after a result of it, tools with
    side effects ask a person first. `credential`: whose it is shown besides. `audience`: for all
    others there is no such server.
    """

    name: str
    url: str = ""
    namespace: str | None = None
    audience: Audience = EVERYBODY
    headers: Mapping[str, str] = {}
    trust: Trusted = "pinned"
    taints: bool = False
    network: Addresses = "public"
    credential: CredentialOf = "none"
    transport: TransportKind = "http"
    launch: LaunchSpec | None = None
    document: str = ""
    """An absolute path or a URL; `url` is where the API is, whatever it says."""
    query_credentials: tuple[str, ...] = ()
    """Names of what is shown in the query of an API's URL; all else is headers."""
    sampling: SampledBy = "caller"
    max_samples: int = 8
    """Of one call, by a model of ours."""

    @property
    def place(self) -> str:
        """Return where it is, for people."""
        return self.url if self.launch is None else self.launch.command


class Sampler(Protocol):
    """A model of ours, and who pays for what it writes."""

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
    """A session at a server of the older era. `id` None: it keeps none."""

    id: str | None
    version: str


class SessionEnded(Exception):
    """The server does not know the session (any more), and has done nothing."""


class SpeaksModern(Exception):
    """It refuses our revision and names the same one: it may take it the next time."""


class Unreachable(RpcError):
    """It gave no answer, or none that is one. A request may or may not have been carried out."""

    def __init__(self, server: str, reason: str, sign_in_url: str | None = None) -> None:
        said = {"server": server, "reason": reason}
        message = f"The server {server!r} gave no usable answer"
        if sign_in_url is not None:
            said["url"] = sign_in_url
            message = f"Somebody has to sign in at the server {server!r} first: {sign_in_url}"
        super().__init__(INTERNAL_ERROR, message, said)
        self.server, self.sign_in_url = server, sign_in_url


class Upstream:
    """A server as one owner reaches it.

    `transport`: of this one alone; closed with it. `sampler`: for servers that ours answers.
    """

    def __init__(
        self,
        config: ServerConfig,
        info: dict[str, Any],
        transport: Transport,
        sampler: Sampler | None = None,
    ) -> None:
        self.config, self.sampler = config, sampler
        self.name = config.name
        self._info = info
        self._transport = transport
        self.breaker = Breaker(config.name)
        self._ids = 0
        self._described: ServerDescription | None = None
        self._describing: asyncio.Lock = asyncio.Lock()
        self.schemas = HeaderSchemas()
        self.shortened = ShortenedNames()
        self.known: KnownClaims | None = None
        """What it listed of resources, last."""
        self.listing = asyncio.Lock()
        self.generation = 0
        """Another one whenever what it offers may be another: it said so, or a session began."""
        self.mute_until = 0.0
        """Until then it is taken for one without streams outside of requests (monotonic)."""

    async def close(self) -> None:
        await self._transport.close()

    def seen(self, envelope: Envelope) -> Envelope:
        """A caller as the server is to see it: whether a model can be asked is not its alone."""
        if self.config.sampling == "caller":
            return envelope
        can = {name: each for name, each in envelope.capabilities.items() if name != "sampling"}
        ours = SAMPLING_BY[self.config.sampling]
        can |= {} if ours is None else {"sampling": ours}
        return msgspec.structs.replace(envelope, capabilities=can)

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

        `on_sent`: from now on the server may have been asked. Raises: Unreachable.
        """
        attempt, is_open = self._attempt(), True
        try:
            request = TransportRequest(method, body, headers, endless, self.changed, on_sent)
            async with self._transport.ask(request) as answer:
                failure = f"status_{answer.status}" if answer.status >= 500 else None
                self.breaker.report(attempt, failure=failure)
                is_open = False
                yield answer
        except (NotSent, httpcore.PoolTimeout) as error:
            # Our own bounds: the server has done nothing that the breaker should hear of.
            if isinstance(error, NotSent):
                raise Unreachable(self.name, error.reason, error.sign_in_url) from error
            raise Unreachable(self.name, "busy") from error
        except FAILURES as error:
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

    # What it is.

    async def describe(self, envelope: Envelope) -> ServerDescription:
        """Return what the server is, asked now and then. Raises: RpcError."""
        async with self._describing:
            now = asyncio.get_running_loop().time()
            found = self._described
            if found is None or found.at + DESCRIBED_S < now:
                async with self._setting_up():
                    found = await self._discover(envelope, now)
                    if found is None:
                        session, found = await self.initialize(envelope)
                        await self.end(session)
                self._described = found
            return found

    def changed(self) -> None:
        self.generation += 1

    def forget(self) -> None:
        """Forget what it is: it does not behave so."""
        self._described = None

    async def _discover(self, envelope: Envelope, now: float) -> ServerDescription | None:
        """Discover what a server of the newer era is; None: it is of the older era.

        Any answer but the newer era's own says so.
        """
        for _ in range(MAX_DISCOVERS):
            try:
                return await self._discover_once(envelope, now)
            except SpeaksModern:
                continue
        raise Unreachable(self.name, "version")

    async def _discover_once(self, envelope: Envelope, now: float) -> ServerDescription | None:
        params = to_modern_params({}, self.seen(envelope))
        message = rpc.request(self.next_id(), "server/discover", params)
        headers = modern_headers("server/discover", {})
        async with self.ask("POST", message, headers) as answer:
            if answer.status >= 500:
                raise Unreachable(self.name, f"status_{answer.status}")
            if answer.status == 400 and MODERN in await self._supported(answer):
                raise SpeaksModern
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

    async def _supported(self, answer: TransportAnswer) -> list[Any]:
        """Return what a server that refuses a revision says that it speaks instead."""
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
        """Begin a session, with what the caller can. Raises: RpcError."""
        params = {
            "protocolVersion": LEGACY,
            "capabilities": to_legacy_capabilities(self.seen(envelope).capabilities),
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
            await self.notify(session, rpc.notification("notifications/initialized"))
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
                    raise clean_error(rpc.from_error(found["error"]))
                return as_object(found.get("result"))
        raise Unreachable(self.name, "no_answer")

    async def request(
        self, session: UpstreamSession, method: str, params: dict[str, Any]
    ) -> dict[str, Any]:
        """The result of a request that is answered at once. Raises: RpcError, SessionEnded."""
        message = rpc.request(self.next_id(), method, params)
        async with (
            self._setting_up(),
            self.ask("POST", message, legacy_headers(session)) as answer,
        ):
            if answer.status == 404 and session.id is not None:
                raise SessionEnded
            return await self._one_result(answer)

    async def notify(self, session: UpstreamSession, message: Message) -> None:
        """Send a notification, or our answer to what it asked.

        Raises: SessionEnded, Unreachable.
        """
        async with self.ask("POST", message, legacy_headers(session)) as answer:
            if answer.status == 404:
                raise SessionEnded
            if answer.status >= 400:
                raise Unreachable(self.name, f"status_{answer.status}")
            await answer.body()  # or the connection could not be used again

    async def end(self, session: UpstreamSession) -> None:
        """End a session as far as the server lets us: one that is gone, or keeps none, has nothing
        to end."""
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
