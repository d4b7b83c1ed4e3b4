"""One HTTP client for addresses that a tenant or a stranger named: client metadata documents, keys
of clients and issuers, token endpoints of issuers, receivers of webhooks.

It dials an address that it has checked, not a name that could mean another one by then; the
certificate and the Host header are still the name's. Nothing of ours travels: no proxy, no cookie,
no credential but the headers of this one call. It knows no OAuth.

    EgressError
    ├── ForbiddenTarget      this URL, or where it leads, may not be asked
    ├── EgressTimeout        the whole exchange took too long
    │   └── EgressBusy       it did not begin: others go first
    └── EgressFailed         no connection, no TLS, no HTTP, or an answer that is of no use
        └── BodyTooLarge
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any
from urllib.parse import urlencode, urljoin

import msgspec

from foundation.http1 import Connection, HttpClientError, Pool, request_head
from foundation.json_numbers import slow_number
from gateway.net.egress_targets import (
    Forbidden,
    NearHosts,
    Target,
    allowed_of,
    check_address,
    parse_target,
)

TIMEOUT_S = 5.0
"""Bounds all of a request once it has its turn: name, connection, redirects, body."""
WAIT_S = 5.0
"""Bounds the wait for that turn."""
MAX_BODY_BYTES = 256 * 1024
MAX_REDIRECTS = 3
MAX_CONCURRENT = 32
MAX_PER_HOST = 8
MAX_WAITING = 256
MAX_ADDRESSES = 16
MAX_DIALS = 3
RESOLVER_THREADS = 4
"""The resolver has threads of its own, so that slow name servers block no other work."""
REDIRECTS = frozenset({301, 302, 303, 307, 308})
USER_AGENT = "tollgate"

Resolve = Callable[[str, int], Awaitable[list[str]]]


class EgressError(Exception):
    """Its text is for the log."""


class ForbiddenTarget(EgressError):
    pass


class EgressTimeout(EgressError):
    pass


class EgressBusy(EgressTimeout):
    pass


class EgressFailed(EgressError):
    pass


class BodyTooLarge(EgressFailed):
    pass


class FetchResponse(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, whole. `headers`: names in lower case; of those that came twice, the last."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json_object(self) -> dict[str, Any]:
        """Raises: EgressFailed unless it is one, and says so."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = media_type == "application/json" or (
            media_type.startswith("application/") and media_type.endswith("+json")
        )
        if not is_json:
            raise EgressFailed("not JSON by its content type")
        if slow_number(self.body) is not None:
            raise EgressFailed("JSON with numbers that are too slow to read")
        try:
            return msgspec.json.decode(self.body, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            raise EgressFailed("not a JSON object") from None


class Turns:
    """So many at once altogether, so many to one host: who is slow holds up who waits for it."""

    def __init__(self, per_host: int) -> None:
        self._per_host = per_host
        self._all = asyncio.Semaphore(MAX_CONCURRENT)
        self._hosts: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}
        """Each host's semaphore, and a mark for each request that has or awaits a turn there. A
        host without marks is forgotten."""
        self._waiting = 0

    @asynccontextmanager
    async def take(self, host: str, wait_s: float) -> AsyncIterator[None]:
        """Raises: EgressBusy."""
        if self._waiting >= MAX_WAITING:
            raise EgressBusy("too many wait")
        own, marks = self._hosts.setdefault(host, (asyncio.Semaphore(self._per_host), []))
        marks.append(None)
        try:
            async with AsyncExitStack() as turn:
                await self._wait(turn, own, wait_s)
                yield
        finally:
            marks.pop()
            if not marks:
                del self._hosts[host]

    async def _wait(self, turn: AsyncExitStack, own: asyncio.Semaphore, wait_s: float) -> None:
        """The host's first: who waits for it takes nobody else's place."""
        self._waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await turn.enter_async_context(own)
                await turn.enter_async_context(self._all)
        except TimeoutError:
            raise EgressBusy("others go first") from None
        finally:
            self._waiting -= 1


@cache
def public_trust() -> ssl.SSLContext:
    """The system's certificates, read once: it takes tens of milliseconds."""
    return ssl.create_default_context()


class Egress:
    """One for each kind of whom is asked, so that none waits behind another kind; to be closed.
    `per_host`: how many exchanges with one at once. `allow_loopback`: for tests and development
    alone, and then http too, to there alone. `near`: hosts that may lie elsewhere than on the
    public internet. `resolve` and `trust` are what tests replace."""

    def __init__(
        self,
        *,
        allow_loopback: bool = False,
        near: NearHosts | None = None,
        per_host: int = MAX_PER_HOST,
        timeout_s: float = TIMEOUT_S,
        wait_s: float = WAIT_S,
        resolve: Resolve | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._allow_loopback, self._near = allow_loopback, near or {}
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="egress-resolver")
        self._resolver = CheckedResolver(
            resolve or lookup_on(self._threads), allow_loopback=allow_loopback, near=self._near
        )
        self._trust = trust or public_trust()
        self._turns = Turns(per_host)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(
        self,
        url: str,
        *,
        accept: str = "application/json",
        bearer: str | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
        max_redirects: int = 0,
    ) -> FetchResponse:
        """The answer, whatever its status; a redirect beyond `max_redirects` is one too. bearer: a
        token, meant for this one host.

        Raises: EgressError.
        """
        assert 0 <= max_redirects <= (MAX_REDIRECTS if bearer is None else 0)
        sent = {"accept": accept} | (
            {} if bearer is None else {"authorization": f"Bearer {bearer}"}
        )
        async with self._bounded(url):
            for _ in range(max_redirects + 1):
                found = await self._ask("GET", url, sent, b"", max_body_bytes)
                location = found.headers.get("location")
                if found.status not in REDIRECTS or location is None:
                    break
                try:
                    url = urljoin(url, location)
                except ValueError:
                    raise ForbiddenTarget("a redirect to what is no URL") from None
        return found

    async def post_form(
        self,
        url: str,
        form: Mapping[str, str],
        *,
        headers: Mapping[str, str] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> FetchResponse:
        """Post a form, never redirected: what was posted is meant for this one host.

        Raises: EgressError.
        """
        sent = {
            "accept": "application/json",
            "content-type": "application/x-www-form-urlencoded",
            **(headers or {}),
        }
        async with self._bounded(url):
            return await self._ask("POST", url, sent, urlencode(form).encode(), max_body_bytes)

    async def post_json_for_json(
        self, url: str, body: bytes, *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> FetchResponse:
        """Post JSON, never redirected, and return the answer's body too.

        Raises: EgressError.
        """
        sent = {"accept": "application/json", "content-type": "application/json"}
        async with self._bounded(url):
            return await self._ask("POST", url, sent, body, max_body_bytes)

    async def post_json(
        self, url: str, body: bytes, *, headers: Mapping[str, str]
    ) -> FetchResponse:
        """Post JSON, never redirected. Only the head of the answer is read, its body is empty here.

        Raises: EgressError.
        """
        sent = {"content-type": "application/json", **headers}
        async with self._bounded(url):
            return await self._ask("POST", url, sent, body, None)

    @asynccontextmanager
    async def _bounded(self, url: str) -> AsyncIterator[None]:
        async with self._turns.take(self.target(url).host, self._wait_s):
            try:
                async with asyncio.timeout(self._timeout_s):
                    yield
            except TimeoutError:
                raise EgressTimeout("no whole answer in time") from None

    async def check(self, url: str) -> None:
        """Refuse a URL that a fetch would refuse, as it is written and by where its name leads now.
        A name that leads nowhere, or says so too slowly, passes: each fetch looks it up anew.

        Raises: ForbiddenTarget, whose text names no address that a name led to.
        """
        target = self.target(url)
        try:
            async with self._bounded(url):
                await self._checked_addresses(target)
        except ForbiddenTarget:
            raise ForbiddenTarget("its name leads to an address that is not public") from None
        except EgressError:
            return

    async def _checked_addresses(self, target: Target) -> list[str]:
        """Look a name up, once. Raises: EgressFailed, ForbiddenTarget."""
        return await self._resolver.addresses(target.host, target.port)

    def target(self, url: str) -> Target:
        """Read the URL as far as it is plainly written. Raises: ForbiddenTarget."""
        try:
            return parse_target(url, allow_loopback=self._allow_loopback, near=self._near)
        except Forbidden as error:
            raise ForbiddenTarget(str(error)) from None

    async def _ask(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes,
        max_bytes: int | None,
    ) -> FetchResponse:
        """Make one exchange on a connection of its own. `max_bytes` None: nobody wants the body."""
        target = self.target(url)
        addresses = await self._checked_addresses(target)

        async def pinned(_host: str, _port: int) -> list[str]:
            return addresses

        sent = {
            "host": target.authority,
            "user-agent": USER_AGENT,
            "accept-encoding": "identity",
            "connection": "close",
            **headers,
        }
        if method == "POST":
            sent["content-length"] = str(len(content))
        pool = Pool(
            f"{target.scheme}://{target.authority}",
            max_connections=1,
            max_idle=0,
            idle_s=0.0,
            resolve=pinned,
            trust=self._trust,
        )
        try:
            lines = [(name.encode(), value.encode()) for name, value in sent.items()]
            head = request_head(method, target.path_and_query, lines)
            connection = await pool.connect()
            connection.send(head + content)
            return await read(url, connection, max_bytes)
        except HttpClientError as error:
            raise EgressFailed(type(error).__name__) from error
        finally:
            pool.close()


def lookup_on(threads: ThreadPoolExecutor) -> Resolve:
    async def look_up(host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(each[4][0]) for each in found]

    return look_up


async def read(url: str, connection: Connection, max_bytes: int | None) -> FetchResponse:
    """Read the body as a stream: a body without end costs `max_bytes` and no more."""
    status, received = await connection.head(None)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in received}
    body = bytearray()
    if max_bytes is not None:
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise EgressFailed("a content coding that was not asked for")
        while chunk := await connection.read(None):
            body += chunk
            if len(body) > max_bytes:
                raise BodyTooLarge(f"more than {max_bytes} bytes")
    return FetchResponse(url=url, status=status, headers=headers, body=bytes(body))


class CheckedResolver:
    """Looks a name up once and finds the addresses that may be dialled. `near`: hosts for which
    more is allowed."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        allow_loopback: bool,
        allow_private: bool = False,
        near: NearHosts | None = None,
    ) -> None:
        self._resolve = resolve
        self._allow_loopback, self._allow_private = allow_loopback, allow_private
        self._near = near or {}

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return at most MAX_DIALS. One forbidden address among those of a name forbids the name.

        Raises: EgressFailed, ForbiddenTarget.
        """
        try:
            found = (await self._resolve(host, port))[:MAX_ADDRESSES]
        except (OSError, UnicodeError) as error:
            raise EgressFailed(f"no address ({type(error).__name__})") from error
        try:
            allowed = allowed_of(host, self._near, allow_loopback=self._allow_loopback)
            allowed["allow_private"] = allowed["allow_private"] or self._allow_private
            return [check_address(each, **allowed) for each in found][:MAX_DIALS]
        except Forbidden as error:
            raise ForbiddenTarget(str(error)) from None
