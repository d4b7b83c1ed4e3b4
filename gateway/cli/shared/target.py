"""Finds the gateway that a command is for, and asks it over HTTP.

All commands that need a running gateway decide alike: `--url`; else the address that the home's
credentials name, which follows each start of its `tollgate up` (with `--port`: that port of the
same host); else the host and port of the settings. The key is `--key`, TOLLGATE_ADMIN_KEY, or the
home's admin key, which goes to the home's own address only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import click
import msgspec

from gateway.cli.shared.command import STATE, refuse
from gateway.home import Home
from gateway.net.listener import is_loopback, origin
from gateway.processes.credentials_file import read
from gateway.settings.load import Settings, load

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""The bound on one answer that is kept in memory; documents go to a file piece by piece."""
PAGE = 100
PROJECTS, KEYS = "/v1/admin/projects", "/v1/admin/keys"
DEFAULT_ROWS = 100
ELSEWHERE = "--url, --port or --home names another"
UNKNOWN_URL = "unknown_url"
"""The code of an answer of a gateway that has no such path."""
TARGET = (
    *STATE,
    click.option("--url", help="The address of the gateway. Default: that of the home."),
    click.option("--port", type=int, help="The gateway's port, where it is not that of the home."),
    click.option(
        "--key",
        envvar="TOLLGATE_ADMIN_KEY",
        help="An admin key. Default: TOLLGATE_ADMIN_KEY, or that of the home.",
    ),
)
OTHER_ORG = click.option(
    "--org", metavar="NAME|ID", help="For operators: another organization than that of the key."
)
ROWS = click.option(
    "--limit",
    "rows",
    type=click.IntRange(1, 100_000),
    default=DEFAULT_ROWS,
    show_default=True,
    help="List so many at most.",
)


class GatewayError(Exception):
    """One line. `status`: the exit code of the command. `http_status`, `code`: of the answer that
    came."""

    def __init__(
        self,
        line: str,
        *,
        status: int,
        is_unreachable: bool = False,
        http_status: int | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(line)
        self.status, self.http_status, self.code = status, http_status, code
        self.is_unreachable = is_unreachable

    @property
    def is_of_other_version(self) -> bool:
        """Tell whether the gateway has no such path, or none for this method."""
        return self.code == UNKNOWN_URL or self.http_status == HTTPStatus.METHOD_NOT_ALLOWED


class GatewayTarget(msgspec.Struct, frozen=True):
    """The gateway that a command is for. `base`: scheme, host and port; `why`: what named it."""

    base: str
    why: str
    key: str | None
    """None: there is no key for it."""
    api_key: str | None = None
    """The home's first key, for the same addresses as its admin key."""

    def __repr__(self) -> str:
        return f"GatewayTarget(base={self.base!r})"


def find_target(
    settings: Settings, *, url: str | None, port: int | None, key: str | None
) -> GatewayTarget:
    """Decide which gateway is meant, and by which key. Raises: GatewayError, OSError."""
    path = Home(settings.home).credentials
    try:
        known = read(path)
    except msgspec.DecodeError as error:
        raise GatewayError(f"{path}: {error}", status=2) from None
    own = None if known is None else origin_of(known.base_url)
    if url is not None:
        base, why = checked(url), "--url"
    elif own is None:
        base, why = origin(settings.host, settings.port), "the settings: nothing was started here"
    elif port is not None:
        base, why = with_port(own, port), "--port"
    else:
        base, why = own, str(path)
    if known is None or own is None or not is_for(base, own):
        return GatewayTarget(base, why, key)
    return GatewayTarget(base, why, key or known.admin_key, known.api_key)


def is_for(base: str, own: str) -> bool:
    """Tell whether the home's keys may be sent there: to the home's own address, or another port of
    this machine; whoever else is named has no business with them."""
    theirs, ours = urlsplit(base), urlsplit(own)
    same_host = theirs.hostname == ours.hostname and is_loopback(ours.hostname or "")
    return base == own or same_host


def origin_of(url: str) -> str:
    """Return scheme, host and port of an SDK's base URL."""
    return url.rstrip("/").removesuffix("/v1")


def checked(url: str) -> str:
    """Raises: GatewayError if it is no URL of a gateway."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or "@" in url or "?" in url or "#" in url:
        raise GatewayError("--url: give a URL such as http://127.0.0.1:8000", status=2)
    return origin_of(url)


def with_port(base: str, port: int) -> str:
    parts = urlsplit(base)
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class Gateway:
    """A running gateway, asked with an admin key."""

    def __init__(self, http: httpx.AsyncClient, target: GatewayTarget) -> None:
        self._http = http
        self.target = target
        self.last_etag: str | None = None
        """The version of what was answered last."""

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Raises: GatewayError."""
        return await self.send("GET", path, query=query)

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        *,
        if_match: str | None = None,
    ) -> dict[str, Any]:
        """Return the object that is answered; its numbers are exact. `if_match`: the version that
        it has to be of. Raises: GatewayError."""
        answer = await self.fetch(method, path, body, query, if_match=if_match)
        try:
            found = json.loads(answer, parse_float=Decimal)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self.strange(path)
        return found

    async def fetch(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        *,
        if_match: str | None = None,
    ) -> bytes:
        """Return the bytes that are answered. Raises: GatewayError."""
        import httpx

        if self.target.key is None:
            raise GatewayError(
                f"there is no admin key for {self.target.base} ({self.target.why}): give --key, or "
                "set TOLLGATE_ADMIN_KEY",
                status=2,
            )
        given = {name: value for name, value in (query or {}).items() if value is not None}
        headers = {"authorization": f"Bearer {self.target.key}"}
        if if_match is not None:
            headers["if-match"] = if_match
        content = None if body is None else msgspec.json.encode(body)
        if content is not None:
            headers["content-type"] = "application/json"
        try:
            async with self._http.stream(
                method, path, params=given, content=content, headers=headers
            ) as answer:
                found = bytearray()
                async for piece in answer.aiter_bytes():
                    found += piece
                    if len(found) > MAX_ANSWER_BYTES:
                        raise self.strange(path)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise unreachable(self.target, error) from None
        self.last_etag = answer.headers.get("etag")
        if answer.status_code >= 400:
            raise self._refused(f"{method} {path}", answer.status_code, bytes(found))
        return bytes(found)

    def _refused(self, what: str, status: int, content: bytes) -> GatewayError:
        line, code = refusal(self.target, status, content)
        error = GatewayError(line, status=2 if status < 500 else 1, http_status=status, code=code)
        return self.too_old(what, error) if error.is_of_other_version else error

    async def rows(self, path: str, limit: int, **query: Any) -> list[dict[str, Any]]:
        """Return the first `limit` rows of a list. Says so where there are more."""
        found: list[dict[str, Any]] = []
        after = None
        while True:
            page = await self.get(path, **query, after=after, limit=min(PAGE, limit - len(found)))
            data = page.get("data")
            if not isinstance(data, list):
                raise self.strange(path)
            found += data
            if not page.get("has_more") or not data:
                return found
            if len(found) >= limit:
                click.echo(f"There are more than {limit}: --limit lists them.", err=True)
                return found
            after = page.get("last_id")

    async def org_id(self, name: str | None) -> str | None:
        """Return the id of an organization by its name or id; None for that of the key.

        Raises: GatewayError.
        """
        problem = f"org: no organization {name!r}"
        return await self._id_of(name, "org_", "/v1/admin/orgs", problem)

    async def project_id(self, name: str | None, org_id: str | None = None) -> str | None:
        """Return the id of a project by its name or id, of the key's organization or of another;
        None for none.

        Raises: GatewayError.
        """
        problem = f"project: the organization has no project {name!r}"
        hint = "; --org names another organization" if org_id is None else ""
        return await self._id_of(name, "proj_", PROJECTS, problem + hint, org_id=org_id)

    async def _id_of(
        self, name: str | None, prefix: str, path: str, problem: str, **query: Any
    ) -> str | None:
        if name is None or name.startswith(prefix):
            return name
        for row in await self.rows(path, 100_000, **query):
            if row.get("name") == name:
                return str(row["id"])
        raise GatewayError(problem, status=2)

    async def names(self, path: str, *fields: str, **query: Any) -> dict[str, str]:
        """Return the names of a list's rows by their ids; none where the key may not read it.

        Raises: GatewayError.
        """
        try:
            found = await self.rows(path, 100_000, **query)
        except GatewayError as error:
            if error.http_status != 403:
                raise
            return {}
        return {row["id"]: next(filter(None, map(row.get, fields)), row["id"]) for row in found}

    def too_old(self, what: str, refused: GatewayError | None = None) -> GatewayError:
        """Return what to say where the gateway does not know what is asked, as `refused` has it."""
        return GatewayError(
            f"the gateway at {self.target.base} has no {what}, which this command needs: it runs "
            "another version of Tollgate",
            status=2,
            http_status=None if refused is None else refused.http_status,
            code=None if refused is None else refused.code,
        )

    def strange(self, path: str) -> GatewayError:
        return GatewayError(f"{self.target.base}{path}: the answer is none of Tollgate", status=1)


def unreachable(target: GatewayTarget, error: Exception) -> GatewayError:
    said = type(error).__name__
    line = f"no gateway answers at {target.base}: {said} (address of {target.why}; {ELSEWHERE})"
    return GatewayError(line, status=1, is_unreachable=True)


def refusal(target: GatewayTarget, status: int, content: bytes) -> tuple[str, str | None]:
    """Return one line of a problem (RFC 9457) or of an error of OpenAI's shape, and its code."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return f"{target.base}: status {status}", None
    inner = said.get("error")
    if isinstance(inner, dict):
        text, about = inner.get("message"), inner
    else:
        text, about = said.get("detail") or said.get("title"), said
    where = f"{about['param']}: " if about.get("param") else ""
    hint = f" (the key for {target.base})" if status in (401, 403) else ""
    return f"{where}{text or f'status {status}'}{hint}", about.get("code")


@asynccontextmanager
async def open_gateway(target: GatewayTarget) -> AsyncIterator[Gateway]:
    import httpx  # not for `--help`

    async with httpx.AsyncClient(base_url=target.base, timeout=TIMEOUT_S, trust_env=False) as http:
        yield Gateway(http, target)


def with_target(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a command of a coroutine function: add the options TARGET, and pass it the settings and
    the target that they name."""

    @wraps(command)
    def invoke(
        home: Path | None,
        config: Path | None,
        url: str | None,
        port: int | None,
        key: str | None,
        **own: Any,
    ) -> None:
        settings = load({"home": home, "config": config, "port": port})
        try:
            target = find_target(settings, url=url, port=port, key=key)
            asyncio.run(command(settings, target, **own))
        except GatewayError as error:
            end(error)
        except OSError as error:
            refuse(error, status=1)

    for option in reversed(TARGET):
        option(invoke)
    return invoke


def with_gateway(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a command of a coroutine function that asks the running gateway, which it is passed."""

    @wraps(command)
    async def ask(_settings: Settings, target: GatewayTarget, **own: Any) -> None:
        async with open_gateway(target) as gateway:
            await command(gateway, **own)

    return with_target(ask)


def end(error: GatewayError) -> NoReturn:
    refuse(error, status=error.status)


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: lines that can be typed as they stand."""
    return "\b\nExamples:\n" + "\n".join(f"  {each}" for each in lines)
