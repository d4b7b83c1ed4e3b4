"""Sign-in links in any order of making, looking, using, expiring, and changes of whom they are for:
whoever gets in is who should, and a link starts one session at most."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.login.sign_in_links import PEPPER_PURPOSE, SignInLink, _keys, make_link
from gateway.auth.tables import oauth_sessions
from gateway.db import create_engine
from gateway.ids import uuid7
from gateway.secret import Peppers
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import orgs
from tests.gateway.auth.browsing import desk_of, hidden, live_app, new_browser
from tests.gateway.auth.conftest import ACTOR, Tenant, make_tenant, make_user
from tests.machines import run_machine

T = TypeVar("T")
ROLES = ("owner", "reader")
PEOPLE = st.sampled_from((0, 1))
LINKS = st.integers(0, 5)
"""One of the last links, the newest first."""


class Person(msgspec.Struct):
    id: str
    email: str
    role: str = "owner"
    is_archived: bool = False


class Link(msgspec.Struct, eq=False):
    token: str
    whose: Person
    role: str
    is_open: bool = True
    sessions: int = 0


class World(msgspec.Struct):
    runner: asyncio.Runner
    app: Litestar
    db: AsyncEngine


class Links(RuleBasedStateMachine):
    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.desk = world, desk_of(world.app)
        self.links: list[Link] = []
        self.org_is_archived = False
        self.org: Tenant = self.run(make_tenant(world.db, f"org-{uuid7().hex}"))
        email = f"bo@{self.org.org_name}.example"
        bo = self.run(make_user(world.db, self.org.org_id, email, role="owner"))
        self.people = [Person(self.org.user_id, self.org.email), Person(bo, email)]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.world.runner.run(work)

    def link(self, back: int) -> Link:
        return self.links[-1 - back % len(self.links)]

    def is_good(self, link: Link) -> bool:
        whose = link.whose
        lives = not (whose.is_archived or self.org_is_archived)
        return link.is_open and lives and whose.role == link.role

    async def change(self, table: sa.Table, row_id: str, **values: Any) -> None:
        async with self.world.db.begin() as conn:
            await conn.execute(sa.update(table).where(table.c.id == row_id).values(**values))

    async def look(self, browser: httpx.AsyncClient, link: Link) -> dict[str, str] | None:
        """Return the form behind a link; None: there is none."""
        shown = await browser.get(f"/oauth/link?token={link.token}")
        assert shown.status_code in (200, 404), shown.text
        assert (link.whose.email in shown.text) == (shown.status_code == 200)
        return hidden(shown.text) if shown.status_code == 200 else None

    async def submit(self, browser: httpx.AsyncClient, form: dict[str, str], link: Link) -> bool:
        """Send the form; tell whether somebody is signed in then, and as who should be."""
        done = await browser.post("/oauth/link", data=form)
        assert done.status_code in (303, 404), done.text
        account = await browser.get("/oauth/account")
        if done.status_code == 303:
            assert link.whose.email in account.text
            link.sessions += 1
        else:
            assert account.status_code == 303, "to the login page"
        return done.status_code == 303

    @rule(who=PEOPLE)
    def make(self, who: int) -> None:
        whose = self.people[who]
        wanted = SignInLink(org_id=self.org.org_id, user_id=whose.id, role=whose.role)  # type: ignore[arg-type]

        async def made() -> str:
            async with self.world.db.begin() as conn:
                desk = self.desk
                return await make_link(conn, desk.redis, wanted, secret=desk.secret, actor=ACTOR)

        for each in self.links:
            each.is_open = each.is_open and each.whose is not whose
        self.links.append(Link(self.run(made()), whose, whose.role))

    @precondition(lambda self: self.links)
    @rule(back=LINKS)
    def look_only(self, back: int) -> None:
        async def looked() -> bool:
            async with new_browser(self.world.app) as browser:
                return await self.look(browser, self.link(back)) is not None

        assert self.run(looked()) == self.is_good(self.link(back))

    @precondition(lambda self: self.links)
    @rule(back=LINKS, browsers=st.integers(1, 3))
    def use(self, back: int, browsers: int) -> None:
        """In several browsers at once one gets in."""
        link = self.link(back)

        async def used() -> int:
            opened = [new_browser(self.world.app) for _ in range(browsers)]
            forms = [await self.look(each, link) for each in opened]
            found = await asyncio.gather(
                *(self.submit(*each, link) for each in zip(opened, forms, strict=True) if each[1])
            )
            for each in opened:
                await each.aclose()
            return sum(found)

        assert self.run(used()) == self.is_good(link)
        link.is_open = link.is_open and not self.is_good(link)

    @precondition(lambda self: self.links)
    @rule(back=LINKS, who=PEOPLE, change=st.sampled_from(("archive", "demote", "expire", "make")))
    def use_late(self, back: int, who: int, change: str) -> None:
        """Something happens between the look and the use."""
        link = self.link(back)

        async def opened() -> tuple[httpx.AsyncClient, dict[str, str] | None]:
            browser = new_browser(self.world.app)
            return browser, await self.look(browser, link)

        browser, form = self.run(opened())
        if change == "archive":
            self.set_archived(who, True)
        elif change == "demote":
            self.give_role(who, "reader")
        elif change == "expire":
            self.expire(back)
        else:
            self.make(who)
        if form is not None:
            assert self.run(self.submit(browser, form, link)) == self.is_good(link)
            link.is_open = link.is_open and not self.is_good(link)
        self.run(browser.aclose())

    @precondition(lambda self: self.links)
    @rule(back=LINKS)
    def expire(self, back: int) -> None:
        link, desk = self.link(back), self.desk
        [key] = _keys(Peppers(desk.secret, PEPPER_PURPOSE), link.token)
        self.run(desk.redis.pexpire(key, 0))
        link.is_open = False

    @rule(who=PEOPLE, is_archived=st.booleans())
    def set_archived(self, who: int, is_archived: bool) -> None:
        whose = self.people[who]
        moment = sa.func.now() if is_archived else None
        self.run(self.change(users, whose.id, archived_at=moment))
        whose.is_archived = is_archived

    @rule(who=PEOPLE, role=st.sampled_from(ROLES))
    def give_role(self, who: int, role: str) -> None:
        whose = self.people[who]
        self.run(self.change(users, whose.id, role=role))
        whose.role = role

    @rule(is_archived=st.booleans())
    def archive_org(self, is_archived: bool) -> None:
        moment = sa.func.now() if is_archived else None
        self.run(self.change(orgs, self.org.org_id, archived_at=moment))
        self.org_is_archived = is_archived

    @invariant()
    def a_link_has_started_one_session_at_most(self) -> None:
        assert all(each.sessions <= 1 for each in self.links)

        async def counted() -> int:
            number = sa.select(sa.func.count()).select_from(oauth_sessions)
            async with self.world.db.connect() as conn:
                own = number.where(oauth_sessions.c.org_id == self.org.org_id)
                return await conn.scalar(own) or 0

        assert self.run(counted()) == sum(each.sessions for each in self.links)


def test_links_behave_as_their_model(
    postgres_url: str, redis_url: str, tmp_path: Path, patient: None
) -> None:
    with asyncio.Runner() as runner:
        opening = live_app(tmp_path, postgres_url, redis_url, None)
        app, db = runner.run(opening.__aenter__()), create_engine(postgres_url)
        try:
            world = World(runner, app, db)
            run_machine(lambda: Links(world), examples=24, steps=15)
        finally:
            runner.run(db.dispose())
            runner.run(opening.__aexit__(None, None, None))
