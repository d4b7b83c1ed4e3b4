"""Users, roles, members and invites in any order, against a model in this process: what a caller is
told, and who is there afterwards, is what the model says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine
from gateway.tenancy.errors import LastOwner, NameTaken, NotFound
from gateway.tenancy.member_tables import ROLES
from gateway.tenancy.members import invites, members, users
from gateway.tenancy.members.invites import ProjectGrant
from gateway.tenancy.pages import Cursor
from tests.gateway.tenancy.members.tenants import ME, NOW, SECRET, Tenant, found_tenant
from tests.machines import run_machine

T = TypeVar("T")
PEOPLE = [f"p{n}@x.example" for n in range(4)]
EXAMPLES, STEPS = 12, 25
people = st.sampled_from(PEOPLE)


class Members(RuleBasedStateMachine):
    url: str
    number = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.system = create_engine(self.url, role=ROLE_SYSTEM)
        self.pool = create_engine(self.url, role=ROLE_TENANT)
        Members.number += 1
        self.org: Tenant = self.run(found_tenant(self.system, self.pool, f"org{Members.number}"))
        self.roles: dict[str, str] = {self.org.owner.email: "owner"}
        self.ids: dict[str, str] = {self.org.owner.email: self.org.owner.id}
        self.in_project: dict[str, str] = {}
        self.open: dict[str, tuple[str, str, bool]] = {}
        """Address -> token, role, whether into the project."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.run(self.system.dispose())
        self.run(self.pool.dispose())
        self.loop.close()

    def owners(self) -> list[str]:
        return [email for email, role in self.roles.items() if role == "owner"]

    @rule(email=people, role=st.sampled_from(ROLES))
    def add(self, email: str, role: str) -> None:
        if email in self.roles:
            with pytest.raises(NameTaken):
                self.run(self.org.add(email, role))
        else:
            self.ids[email] = self.run(self.org.add(email, role)).id
            self.roles[email] = role

    @rule(email=people | st.none(), role=st.sampled_from(ROLES))
    def change_role(self, email: str | None, role: str) -> None:
        email = email or self.org.owner.email
        wanted = {"user_id": self.ids.get(email, "user_none"), "role": role}

        async def change() -> None:
            async with self.org() as conn:
                await users.change_role(conn, org_id=self.org.org_id, **wanted, **ME)

        if email not in self.roles:
            with pytest.raises(NotFound):
                self.run(change())
        elif self.owners() == [email] and role != "owner":
            with pytest.raises(LastOwner):
                self.run(change())
        else:
            self.run(change())
            self.roles[email] = role

    @rule(email=people | st.none())
    def leave(self, email: str | None) -> None:
        email = email or self.org.owner.email
        user_id = self.ids.get(email, "user_none")

        async def archive() -> None:
            async with self.org() as conn:
                await users.archive_user(conn, org_id=self.org.org_id, user_id=user_id, **ME)

        if email not in self.roles:
            with pytest.raises(NotFound):
                self.run(archive())
        elif self.owners() == [email]:
            with pytest.raises(LastOwner):
                self.run(archive())
        else:
            self.run(archive())
            del self.roles[email]
            self.in_project.pop(email, None)

    @rule(email=people, role=st.sampled_from(["owner", "member"]))
    def join(self, email: str, role: str) -> None:
        user_id = self.ids.get(email, "user_none")

        async def add() -> None:
            async with self.org() as conn:
                await members.add_member(conn, **self.org.here, user_id=user_id, role=role, **ME)

        if email not in self.roles:
            with pytest.raises(NotFound):
                self.run(add())
        elif email in self.in_project:
            with pytest.raises(NameTaken):
                self.run(add())
        else:
            self.run(add())
            self.in_project[email] = role

    @rule(email=people)
    def quit_project(self, email: str) -> None:
        user_id = self.ids.get(email, "user_none")

        async def remove() -> None:
            async with self.org() as conn:
                await members.remove_member(conn, **self.org.here, user_id=user_id, **ME)

        if email in self.in_project:
            self.run(remove())
            del self.in_project[email]
        else:
            with pytest.raises(NotFound):
                self.run(remove())

    @rule(email=people, role=st.sampled_from(["owner", "reader"]), into=st.booleans())
    def invite(self, email: str, role: str, into: bool) -> None:
        grants = [ProjectGrant(id=self.org.project_id, role="member")] if into else []

        async def make() -> str:
            async with self.org() as conn:
                made = await invites.create_invite(
                    conn,
                    org_id=self.org.org_id,
                    email=email,
                    role=role,
                    projects=grants,
                    secret=SECRET,
                    now=NOW,
                    **ME,
                )
            return made.token

        if email in self.roles or email in self.open:
            with pytest.raises(NameTaken):
                self.run(make())
        else:
            self.open[email] = (self.run(make()), role, into)

    @rule(email=people)
    def accept(self, email: str) -> None:
        if email not in self.open:
            return
        token, role, into = self.open[email]

        async def use() -> str:
            async with self.system.begin() as conn:
                made = await invites.accept_invite(conn, token, secret=SECRET, name="N", now=NOW)
            return made.id

        if email in self.roles:  # somebody added them meanwhile
            with pytest.raises(NameTaken):
                self.run(use())
            return
        self.ids[email] = self.run(use())
        self.roles[email] = role
        del self.open[email]
        if into:
            self.in_project[email] = "member"
        with pytest.raises(NotFound):
            self.run(use())

    @invariant()
    def who_is_there_is_who_should_be(self) -> None:
        async def look() -> tuple[dict[str, str], dict[str, str]]:
            async with self.org() as conn:
                found, _ = await users.list_users(
                    conn, org_id=self.org.org_id, cursor=Cursor(limit=100)
                )
                joined, _ = await members.list_members(conn, **self.org.here)
            return {u.email: u.role for u in found}, {m.email: m.role for m in joined}

        assert self.run(look()) == (self.roles, self.in_project)
        assert self.owners()


def test_members_behave_as_their_model(postgres_url: str) -> None:
    Members.url = postgres_url
    run_machine(Members, examples=EXAMPLES, steps=STEPS)
