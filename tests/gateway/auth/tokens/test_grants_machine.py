"""Grants, rotation, exchange, revocation and time against a model that says what has to be good."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import redis.asyncio
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.auth import rfc7009_revoke
from gateway.auth.clients import Client
from gateway.auth.errors import InvalidToken
from gateway.auth.form import Form
from gateway.auth.grants import CODE_KEPT_S, CODE_LIFETIME_S
from gateway.auth.refresh_tokens import GRANT_LIFETIME_S, LIFETIME_S, LOST_ANSWER_S
from gateway.auth.rfc6749_errors import OAuthError
from gateway.db import ROLE_SYSTEM, create_engine
from tests.gateway.auth.world import ACCESS_TOKEN, ACTOR, EXCHANGE, World, open_world

T = TypeVar("T")
MAX_WATCHED = 8
"""Access tokens that are looked at after each step, the youngest."""


class Refresh:
    def __init__(self, token: str, expires_at: float) -> None:
        self.token, self.expires_at = token, expires_at
        self.used_at: float | None = None
        self.answer: bytes | None = None


class Granted:
    def __init__(self, code: str, issued_at: float, last: float) -> None:
        self.code, self.code_expires_at, self.last = code, issued_at + CODE_LIFETIME_S, last
        self.alive, self.code_is_known = True, True
        self.chain: list[Refresh] = []


class Access:
    def __init__(self, token: str, grant: Granted, expires_at: float, behind: list[Access]) -> None:
        self.token, self.grant, self.expires_at, self.behind = token, grant, expires_at, behind
        self.revoked = False

    def is_good(self, now: float) -> bool:
        dead = self.revoked or any(each.revoked for each in self.behind)
        return self.grant.alive and now < self.expires_at and not dead


class Machine(RuleBasedStateMachine):
    def __init__(self, runner: asyncio.Runner, world: World, client: Client, agent: Client) -> None:
        super().__init__()
        self.runner, self.world, self.client, self.agent = runner, world, client, agent
        self.grants: list[Granted] = []
        self.access: list[Access] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def now(self) -> float:
        return self.world.clock()

    def refused(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self.run(work)
        except OAuthError as error:
            assert error.error == "invalid_grant"
        else:
            raise AssertionError("it was not refused")

    def keep(self, grant: Granted, answer: dict[str, Any]) -> None:
        expires_at = (
            min(self.now + LIFETIME_S, grant.last) if grant.chain else (self.now + LIFETIME_S)
        )
        grant.chain.append(Refresh(answer["refresh_token"], expires_at))
        self.access.append(
            Access(answer["access_token"], grant, int(self.now) + answer["expires_in"], [])
        )

    @rule()
    def login(self) -> None:
        code, made = self.run(self.world.code(self.client))
        for each in self.grants:
            if each.code_expires_at < self.now - CODE_KEPT_S:
                each.code_is_known = False
        last = made.created_at + timedelta(seconds=GRANT_LIFETIME_S)
        grant = Granted(code, self.now, last.timestamp())
        self.grants.append(grant)
        self.keep(grant, self.run(self.world.redeem(self.client, code)))

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def replay_code(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        self.refused(self.world.redeem(self.client, grant.code))
        if grant.code_is_known:
            grant.alive = False

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), age=st.integers(0, 2))
    def refresh(self, data: st.DataObject, age: int) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        held = grant.chain[max(0, len(grant.chain) - 1 - age)]
        asking = self.world.ask(self.client, grant_type="refresh_token", refresh_token=held.token)
        if not grant.alive or held.expires_at <= self.now:
            self.refused(asking)
        elif held.used_at is None:
            held.answer = self.run(asking)
            held.used_at = self.now
            self.keep(grant, msgspec.json.decode(held.answer))
        elif held is grant.chain[-2] and self.now - held.used_at <= LOST_ANSWER_S:
            assert self.run(asking) == held.answer
        else:
            self.refused(asking)
            grant.alive = False

    @precondition(lambda self: self.access)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        subject = data.draw(st.sampled_from(self.access))
        sent = {"subject_token": subject.token, "subject_token_type": ACCESS_TOKEN}
        asking = self.world.tokens_of(self.agent, grant_type=EXCHANGE, **sent)
        if subject.is_good(self.now) and len(subject.behind) < 4:
            answer = self.run(asking)
            behind = [*subject.behind, subject]
            expires_at = int(self.now) + answer["expires_in"]
            assert expires_at <= subject.expires_at
            token = Access(answer["access_token"], subject.grant, expires_at, behind)
            self.access.append(token)
        else:
            self.refused(asking)

    @precondition(lambda self: self.access)
    @rule(data=st.data())
    def revoke_access(self, data: st.DataObject) -> None:
        token = data.draw(st.sampled_from(self.access))
        owner = self.agent if token.behind else self.client
        self.give_back(token.token, owner)
        token.revoked = token.revoked or token.expires_at > self.now

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def revoke_refresh(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.grants))
        held = data.draw(st.sampled_from(grant.chain))
        self.give_back(held.token, self.client)
        if held.expires_at > self.now or grant.alive is False or held is grant.chain[-1]:
            grant.alive = False
        else:
            grant.alive = self.run(self.stands(grant))

    async def stands(self, grant: Granted) -> bool:
        """An expired token may have been swept away, or not yet: only Postgres knows."""
        async with self.world.db.connect() as conn:
            found = sa.text(
                "SELECT revoked_at IS NULL FROM oauth_grants g JOIN oauth_codes c "
                "ON c.grant_id = g.id WHERE c.code_hash = :hash"
            )
            hashed = self.world.authority.codes.hash(grant.code)
            return bool(await conn.scalar(found, {"hash": hashed}))

    def give_back(self, token: str, client: Client) -> None:
        form = Form({"token": token}, {})
        self.run(rfc7009_revoke.revoke(self.world.authority, form, client, ACTOR))

    @rule(seconds=st.sampled_from([1, 5, 11, 61, 300, 601, 4000, 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.world.clock.now += seconds

    @invariant()
    def what_is_let_in_is_what_is_good(self) -> None:
        self.run(self.heard())
        for each in self.access[-MAX_WATCHED:]:
            try:
                self.run(self.world.principal(each.token))
                let_in = True
            except InvalidToken:
                let_in = False
            assert let_in == each.is_good(self.now)

    async def heard(self) -> None:
        """All that was committed is known here, which may take a second and no more."""
        async with self.world.db.connect() as conn:
            last = await conn.scalar(sa.text("SELECT coalesce(max(seq), 0) FROM revocations"))
        async with asyncio.timeout(1):
            while self.world.tokens.denylist._last_seq < last:
                await asyncio.sleep(0.001)


def test_what_is_good_is_what_the_model_says(postgres_url: str, redis_url: str) -> None:
    with asyncio.Runner() as runner:

        async def opened() -> tuple[Any, ...]:
            db = create_engine(postgres_url, role=ROLE_SYSTEM)
            store = redis.asyncio.from_url(redis_url)
            opening = open_world(db, store)
            world = await opening.__aenter__()
            client, _ = await world.client()
            agent, _ = await world.client(grants=[EXCHANGE])
            return db, store, opening, world, client, agent

        db, store, opening, world, client, agent = runner.run(opened())
        try:
            run_state_machine_as_test(
                lambda: Machine(runner, world, client, agent),
                settings=settings(
                    max_examples=20,
                    stateful_step_count=25,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:

            async def closed() -> None:
                await opening.__aexit__(None, None, None)
                await store.aclose()
                await db.dispose()

            runner.run(closed())
