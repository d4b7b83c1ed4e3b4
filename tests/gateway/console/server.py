"""A worker's application behind a real socket, in a thread of its own, with people of each role who
can sign in at it: what a browser is driven against.

Two organizations are there: `little`, in which nobody has done much, and `much`, which has
hundreds of everything, at night a thousand, and names that attack whoever shows them. A page's own
rows are made by the functions of `seeds.SEEDS`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import redis.asyncio
import uvicorn
from litestar import Litestar

from bench.tools.ports import free_port
from gateway.audit.log import COMMAND_LINE
from gateway.auth.login.passwords import Passwords
from gateway.db import create_engine
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.databases import Databases
from tests.gateway.auth.browsing import hidden, live_app

PASSWORD = "correct horse battery"
ROLES = ("owner", "admin", "developer", "billing", "reader")
START_TIMEOUT_S = 60.0
PASSWORD_OF_URL = "a-password-that-nobody-is-shown"
FAR = f"http://user:{PASSWORD_OF_URL}@127.0.0.1:1/v1"
"""The upstream of the settings file."""
T = TypeVar("T")


class Organization(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    id: str
    project_id: str
    users: dict[str, str]
    """Ids by role."""

    def email(self, role: str) -> str:
        return f"{role}@{self.name}.example"


class ConsoleServer:
    """`url` is where it listens; `call` runs a coroutine on its event loop."""

    def __init__(self, url: str, app: Litestar, loop: asyncio.AbstractEventLoop) -> None:
        self.url, self.app, self._loop = url, app, loop
        self.stack = ExitStack()
        """Ends what a seed began, with the server."""
        self.little: Organization
        self.much: Organization

    @property
    def services(self) -> Any:
        return self.app.state.services

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(300)

    def organization(self, name: str) -> Organization:
        return self.much if name == self.much.name else self.little

    def session(self, organization: Organization, role: str) -> dict[str, str]:
        """Sign somebody in, and return their cookies."""
        with httpx.Client(base_url=self.url) as client:
            shown = client.get("/oauth/login")
            form = {
                **hidden(shown.text),
                "org": organization.name,
                "email": organization.email(role),
                "password": PASSWORD,
            }
            done = client.post("/oauth/login", data=form)
            assert done.status_code == 303, done.text
            return dict(client.cookies)


@contextmanager
def serving(
    databases: Databases,
    redis_url: str,
    home: Path,
    seed: Callable[[ConsoleServer], Awaitable[None]],
) -> Iterator[ConsoleServer]:
    """Serve until this ends. `seed` runs on the server's loop before the first request."""
    ready: threading.Event = threading.Event()
    made: list[Any] = []
    port = free_port()
    stopping: list[uvicorn.Server] = []
    begun: list[ExitStack] = []

    async def live() -> None:
        url = f"http://127.0.0.1:{port}"
        lent = await databases.lend()
        postgres_url = databases.url(lent.name)
        store_url = redis_url.replace("db=0", "db=3")
        store = redis.asyncio.from_url(store_url)
        await store.flushdb()
        await store.aclose()
        given = {"public_url": url, "upstream": FAR}
        async with live_app(home, postgres_url, store_url, None, **given) as app:
            server = ConsoleServer(url, app, asyncio.get_running_loop())
            await people(server, postgres_url)
            begun.append(server.stack)
            await seed(server)
            config = uvicorn.Config(
                app, host="127.0.0.1", port=port, log_level="warning", lifespan="off", ws="none"
            )
            running = uvicorn.Server(config)
            stopping.append(running)
            made.append(server)
            ready.set()
            await running.serve()
        await databases.take_back(lent)

    def run() -> None:
        try:
            asyncio.run(live())
        except BaseException as error:
            made.append(error)
            ready.set()
            raise

    thread = threading.Thread(target=run, name="console server")
    thread.start()
    try:
        assert ready.wait(300)
        if isinstance(made[0], BaseException):
            raise made[0]
        wait_for(made[0].url)
        yield made[0]
    finally:
        for each in stopping:
            each.should_exit = True
        thread.join(60)
        for stack in begun:
            stack.close()


def wait_for(url: str) -> None:
    with httpx.Client() as client:
        for _ in range(600):
            try:
                client.get(f"{url}/health/live")
                return
            except httpx.TransportError:
                threading.Event().wait(0.05)
    raise AssertionError("it does not listen")


async def people(server: ConsoleServer, postgres_url: str) -> None:
    db = create_engine(postgres_url)
    hashed = await Passwords().hash(PASSWORD)
    for name, operates in (("little", True), ("much", False)):
        async with db.begin() as conn:
            org = await create_org(conn, name=name, is_operator=operates, actor=COMMAND_LINE)
            project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
            users = {}
            for role in ROLES:
                user = await create_user(
                    conn,
                    org_id=org.id,
                    email=f"{role}@{name}.example",
                    name=f"{role.title()} of {name}",
                    role=role,
                    actor=COMMAND_LINE,
                    password_hash=hashed,
                )
                users[role] = user.id
        found = Organization(name=name, id=org.id, project_id=project.id, users=users)
        setattr(server, name, found)
    await db.dispose()
