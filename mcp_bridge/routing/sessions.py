"""Keeps what outlives a request of the older era: sessions of clients, ours at servers, and the
events that a client may read on from. All in Redis, keyed by tenant, so that any worker goes on
with it.

A session is its principal's alone: to everybody else there is none. Each request reads its session
once; an idle one is forgotten.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import cached_property
from typing import Any

import msgspec
from redis.asyncio import Redis

from mcp_bridge.caller import Caller
from mcp_bridge.protocol.allowed_fields import client_capabilities
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.rpc import INVALID_REQUEST, RequestId, RpcError
from mcp_bridge.routing.shared_streams import MessageQueue, SharedStreams
from mcp_bridge.upstream.upstream import SessionEnded, Upstream, UpstreamSession

log = logging.getLogger(__name__)

SESSION_TTL_S = 1800
"""Time since the last use, which is stored every TOUCH_S at most."""
TOUCH_S = 60.0
"""How often a worker records that a session is used."""
MAX_TOUCHED = 10_000
MAX_SESSIONS = 1000  # per tenant
MAX_SUBSCRIPTIONS = 256  # per session
MAX_URI_LEN = 8_192  # in characters
EVENTS_TTL_S = 600
MAX_EVENTS = 1000  # per stream
MAX_KEPT_BYTES = 4 * 1024 * 1024  # per stream; what is beyond cannot be resumed
MAX_KEPT_BYTES_OF_ORG = 64 * 1024 * 1024
"""Bounds all streams of a tenant; beyond it the ones that were silent longest are dropped."""
ENTRY_BYTES = 512
"""The approximate overhead of an event in Redis."""
MAX_SWEPT = 100
"""The most expired streams that one event removes."""
PAGE = 64
Entries = Any
"""The entries of a stream as redis-py returns them: `[(id, {field: value})]`, all of bytes."""
FIRST = 1

OPEN = """
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[2])
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 0 end
redis.call('ZADD', KEYS[2], ARGV[3], KEYS[1])
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('HSET', KEYS[1], 'about', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return 1
"""
SWAP = """
if ARGV[4] == '0' and redis.call('EXISTS', KEYS[1]) == 0 then return '' end
local now = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if now ~= ARGV[2] then return now end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return ARGV[3]
"""

KEEP = f"""
local key, order, sizes = KEYS[1], KEYS[2], KEYS[3]
local ttl, most, size = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local function forget(name)
  local freed = tonumber(redis.call('HGET', sizes, name) or 0)
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', order, name)
  return redis.call('HINCRBY', sizes, 'total', -freed)
end
local over = redis.call('ZRANGEBYSCORE', order, '-inf', now - ttl, 'LIMIT', 0, {MAX_SWEPT})
for _, name in ipairs(over) do forget(name) end
if ARGV[5] ~= ARGV[6] and redis.call('EXISTS', key) == 0 then return 0 end
for at = 9, #ARGV, 2 do
  local fields = {{'owner', ARGV[7], 'request', ARGV[8]}}
  if ARGV[at + 1] ~= '' then fields[5], fields[6] = 'data', ARGV[at + 1] end
  redis.call('XADD', key, 'MAXLEN', '~', ARGV[4], ARGV[at] .. '-0', unpack(fields))
end
redis.call('EXPIRE', key, ttl)
redis.call('ZADD', order, string.format('%.6f', now), key)
redis.call('HINCRBY', sizes, key, size)
local total = redis.call('HINCRBY', sizes, 'total', size)
while total > most do
  local oldest = redis.call('ZRANGE', order, 0, 0)[1]
  if not oldest then
    redis.call('DEL', sizes)
    break
  end
  redis.call('DEL', oldest)
  total = forget(oldest)
end
redis.call('EXPIRE', order, ttl)
redis.call('EXPIRE', sizes, ttl)
return redis.call('EXISTS', key)
"""
"""It adds events of one stream, given as pairs of a number and the data. All keys are of one org,
so of one slot."""


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that stay the same for as long as a session is there."""

    principal: str
    endpoint: str
    version: str
    capabilities: dict[str, Any]
    info: dict[str, Any] | None = None
    keeps_nothing: bool = False


class StreamHead(msgspec.Struct, frozen=True):
    """The head of a stream: who writes it, and which request it answers; None: it is the session's
    own."""

    owner: str
    request_id: RequestId | None


class Session(msgspec.Struct, kw_only=True):
    """A client's session, as it was when a request began."""

    id: str
    org_id: str
    about: SessionFacts
    level: str | None = None
    uris: Mapping[str, str] = {}
    """The server of each URI that it subscribes to."""
    listens: bool = False
    """True while its client has the session's own stream open, and is asked there."""
    upstreams: dict[str, UpstreamSession] = {}

    def uris_of(self, server: str) -> tuple[str, ...]:
        """Return the URIs that it subscribes to there, sorted."""
        return tuple(sorted(uri for uri, name in self.uris.items() if name == server))

    @property
    def envelope(self) -> Envelope:
        """Return what its client would say of itself with each request of the newer era."""
        return Envelope(
            version=self.about.version,
            capabilities=self.about.capabilities,
            info=self.about.info,
            level=self.level,
        )


class TooManySessions(Exception):
    pass


class Sessions:
    """The sessions of clients and of ours at servers, in Redis.

    `streams`: what servers ask outside of requests.
    """

    def __init__(self, redis: Redis, streams: SharedStreams) -> None:
        self._redis, self.streams = redis, streams
        self._touched: OrderedDict[str, float] = OrderedDict()
        """When the use of each session was recorded last, by the clock of this worker."""
        self._open = redis.register_script(OPEN)
        self._swap = redis.register_script(SWAP)
        self._keep = redis.register_script(KEEP)

    async def open(self, caller: Caller, about: SessionFacts) -> Session:
        """Raises: TooManySessions."""
        id_ = secrets.token_urlsafe(24)
        now = int(time.time())
        keys = [session_key(caller.org_id, id_), sessions_key(caller.org_id)]
        encoded = msgspec.json.encode(about)
        arguments: list[Any] = [encoded, now, now + SESSION_TTL_S, MAX_SESSIONS, SESSION_TTL_S]
        if not await self._open(keys=keys, args=arguments):
            raise TooManySessions
        return Session(id=id_, org_id=caller.org_id, about=about)

    async def load(self, caller: Caller, endpoint: str, id_: str) -> Session | None:
        """Return a session; None: there is none, or it is somebody else's."""
        key = session_key(caller.org_id, id_)
        fields: Any = await self._redis.hgetall(key)
        session = read_session(caller.org_id, id_, fields)
        if session is None or session.about.principal != caller.principal:
            return None
        if session.about.endpoint != endpoint:
            return None
        await self._touch(caller.org_id, key)
        return session

    async def _touch(self, org_id: str, key: str) -> None:
        now = time.monotonic()
        if self._touched.get(key, -math.inf) + TOUCH_S > now:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.expire(key, SESSION_TTL_S)
            pipe.zadd(sessions_key(org_id), {key: int(time.time()) + SESSION_TTL_S}, xx=True)
            pipe.expire(sessions_key(org_id), SESSION_TTL_S)
            await pipe.execute()
        self._touched.pop(key, None)
        self._touched[key] = now
        while len(self._touched) > MAX_TOUCHED:
            self._touched.popitem(last=False)

    async def reload(self, session: Session) -> Session | None:
        """Return the session as it is by now; None: it has ended."""
        fields: Any = await self._redis.hgetall(session_key(session.org_id, session.id))
        return read_session(session.org_id, session.id, fields)

    async def end(self, session: Session) -> None:
        key = session_key(session.org_id, session.id)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.delete(key)
            pipe.zrem(sessions_key(session.org_id), key)
            await pipe.execute()

    async def set_level(self, session: Session, level: str) -> None:
        await self._set(session, "level", level)
        session.level = level

    async def set_listens(self, session: Session, listens: bool) -> None:
        if listens:
            await self._set(session, "listens", "1")
        else:
            await self._redis.hdel(session_key(session.org_id, session.id), "listens")
        session.listens = listens

    async def subscribe(self, session: Session, uri: str, server: str) -> None:
        await self._set(session, f"uri:{uri}", server)
        session.uris = {**session.uris, uri: server}

    async def unsubscribe(self, session: Session, uri: str) -> None:
        await self._redis.hdel(session_key(session.org_id, session.id), f"uri:{uri}")
        session.uris = {name: each for name, each in session.uris.items() if name != uri}

    async def server_of(self, session: Session, uri: str) -> str | None:
        """Return the server where the session subscribes to a URI by now."""
        found: Any = await self._redis.hget(session_key(session.org_id, session.id), f"uri:{uri}")
        return None if found is None else found.decode()

    async def _set(self, session: Session, field: str, value: str) -> None:
        """Set a field of a session that has not ended meanwhile."""
        key = session_key(session.org_id, session.id)
        old = await self._redis.hget(key, field)
        await self._swap(keys=[key], args=[field, old or b"", value, "0", SESSION_TTL_S])

    async def put_upstream(
        self,
        key: str,
        field: str,
        old: UpstreamSession | None,
        new: UpstreamSession,
        *,
        create: bool,
    ) -> UpstreamSession | None:
        """Store `new` in the place of `old`, and return what is stored then: another worker may
        have been faster. None: the client's session has ended."""
        before = b"" if old is None else msgspec.json.encode(old)
        arguments: list[Any] = [
            field,
            before,
            msgspec.json.encode(new),
            "1" if create else "0",
            SESSION_TTL_S,
        ]
        found = await self._swap(keys=[key], args=arguments)
        return msgspec.json.decode(found, type=UpstreamSession) if found else None

    async def get_upstream(self, key: str, field: str) -> UpstreamSession | None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(key, field)
            pipe.expire(key, SESSION_TTL_S)
            found, _ = await pipe.execute()
        return msgspec.json.decode(found, type=UpstreamSession) if found else None

    # Events of a stream that a client may read on from.

    async def begin_stream(self, session: Session, stream: str, head: StreamHead) -> None:
        await self.keep(session, stream, head, {FIRST: b""})

    async def keep(
        self, session: Session, stream: str, head: StreamHead, events: Mapping[int, bytes]
    ) -> bool:
        """Keep some events of a stream, by their numbers, in one trip. False: nothing is kept of it
        any more, so that its tenant's newer streams have room."""
        # The head is in each of them: the oldest go, where there are many.
        fields = [head.owner, msgspec.json.encode(head.request_id)]
        keys = [events_key(session, stream), *kept_keys(session.org_id)]
        size = sum(map(len, events.values())) + len(events) * (ENTRY_BYTES + sum(map(len, fields)))
        bounds = [EVENTS_TTL_S, MAX_KEPT_BYTES_OF_ORG, size, MAX_EVENTS]
        args: list[Any] = [*bounds, min(events), FIRST, *fields]
        for event in events.items():
            args += event
        return bool(await self._keep(keys=keys, args=args))

    async def head_of(self, session: Session, stream: str) -> StreamHead | None:
        """Return the head of a stream; None: nothing is kept of such a stream."""
        found: Entries = await self._redis.xrange(events_key(session, stream), count=1)
        if not found:
            return None
        fields = found[0][1]
        return StreamHead(fields[b"owner"].decode(), msgspec.json.decode(fields[b"request"]))

    async def read_on(self, session: Session, stream: str, after: int) -> list[tuple[int, bytes]]:
        found: Entries = await self._redis.xrange(
            events_key(session, stream), f"({after}-0", "+", count=PAGE
        )
        return [
            (int(id_.partition(b"-")[0]), fields[b"data"])
            for id_, fields in found
            if b"data" in fields
        ]


def read_session(org_id: str, id_: str, fields: dict[bytes, bytes]) -> Session | None:
    if b"about" not in fields:
        return None
    session = Session(
        id=id_, org_id=org_id, about=msgspec.json.decode(fields[b"about"], type=SessionFacts)
    )
    uris = {}
    for name, value in fields.items():
        kind, _, what = name.decode().partition(":")
        if kind == "up":
            session.upstreams[what] = msgspec.json.decode(value, type=UpstreamSession)
        elif kind == "uri":
            uris[what] = value.decode()
        elif kind == "level":
            session.level = value.decode()
        elif kind == "listens":
            session.listens = True
    session.uris = uris
    return session


def session_key(org_id: str, id_: str) -> str:
    return f"mcp:{{{org_id}}}:session:{id_}"


def sessions_key(org_id: str) -> str:
    return f"mcp:{{{org_id}}}:sessions"


def events_key(session: Session, stream: str) -> str:
    return f"mcp:{{{session.org_id}}}:events:{session.id}:{stream}"


def kept_keys(org_id: str) -> tuple[str, str]:
    """Return the keys of a tenant's streams by the time of their last event, and of their sizes
    with `total`."""
    return f"mcp:{{{org_id}}}:kept:order", f"mcp:{{{org_id}}}:kept:sizes"


class ClientSessionSource:
    """Our sessions at servers, for one session of a client: each server sees as many clients as
    there are."""

    def __init__(self, sessions: Sessions, session: Session) -> None:
        self._sessions, self._session = sessions, session
        self._key = session_key(session.org_id, session.id)

    async def get(self, upstream: Upstream) -> UpstreamSession:
        found = self._session.upstreams.get(upstream.name)
        return found or await self.replace(upstream, None)

    async def replace(self, upstream: Upstream, ended: UpstreamSession | None) -> UpstreamSession:
        fresh, described = await upstream.initialize(self._session.envelope)
        field = f"up:{upstream.name}"
        stands = await self._sessions.put_upstream(self._key, field, ended, fresh, create=False)
        if stands != fresh:
            await upstream.end(fresh)
        if stands is None:
            raise RpcError(INVALID_REQUEST, "The session has ended", status=404)
        self._session.upstreams[upstream.name] = stands
        if stands == fresh:
            await self._tell(upstream, stands, "logging" in described.capabilities)
        return stands

    def hearing(
        self, upstream: Upstream, session: UpstreamSession
    ) -> AbstractAsyncContextManager[MessageQueue | None]:
        """Listen to what is asked outside of requests, where its client does not listen to that
        itself."""
        if self._session.listens:
            return nullcontext()
        return self._sessions.streams.joined(self._session.id, upstream, session)

    async def _tell(self, upstream: Upstream, fresh: UpstreamSession, logs: bool) -> None:
        """Tell a server what the client had said by now, to any worker, and it does not know: it
        forgot the session before, or gave no answer then."""
        now = await self._sessions.reload(self._session) or self._session
        told = [("resources/subscribe", {"uri": uri}) for uri in now.uris_of(upstream.name)]
        if now.level is not None and logs:
            told.append(("logging/setLevel", {"level": now.level}))
        for method, params in told:
            try:
                await upstream.request(fresh, method, params)
            except (RpcError, SessionEnded) as error:
                log.info("mcp: %s: %s is not told: %s", upstream.name, method, type(error).__name__)


class PrincipalSessionSource:
    """Our sessions at servers for requests of the newer era, which have none: one for each
    principal, and what it can."""

    def __init__(self, sessions: Sessions, caller: Caller, envelope: Envelope) -> None:
        self._sessions, self._caller, self._envelope = sessions, caller, envelope

    @cached_property
    def _key(self) -> str:
        can = client_capabilities(self._envelope.capabilities)
        said = msgspec.json.encode([self._caller.principal, can], order="sorted")
        digest = hashlib.sha256(said).hexdigest()
        return f"mcp:{{{self._caller.org_id}}}:shared:{digest}"

    async def get(self, upstream: Upstream) -> UpstreamSession:
        found = await self._sessions.get_upstream(self._key, upstream.name)
        return found or await self.replace(upstream, None)

    async def replace(self, upstream: Upstream, ended: UpstreamSession | None) -> UpstreamSession:
        fresh, _ = await upstream.initialize(self._envelope)
        stands = await self._sessions.put_upstream(
            self._key, upstream.name, ended, fresh, create=True
        )
        if stands != fresh:
            await upstream.end(fresh)
        return stands or fresh

    def hearing(
        self, upstream: Upstream, session: UpstreamSession
    ) -> AbstractAsyncContextManager[MessageQueue | None]:
        return self._sessions.streams.joined(self._key, upstream, session)
