"""Grants, rotation, exchange, revocation, archival and time against a model that says what has to
be good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import pytest
import redis.asyncio
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.bearer.revocations import Announcement, announcing, end_grant
from gateway.auth.errors import InvalidToken
from gateway.auth.oauth import rfc7009_revoke
from gateway.auth.oauth.clients.store import Client, archive_client
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.auth.oauth.tokens import signing_keys
from gateway.auth.oauth.tokens.grants import CODE_KEPT_S, CODE_LIFETIME_S, Grant, find_grant
from gateway.auth.oauth.tokens.refresh_tokens import GRANT_LIFETIME_S, LIFETIME_S, LOST_ANSWER_S
from gateway.db import ROLE_SYSTEM, create_engine
from tests.gateway.auth.parts import ISSUER
from tests.gateway.auth.world import (
    ACCESS_TOKEN,
    ACTOR,
    CODES,
    EXCHANGE,
    REDIRECT,
    VERIFIER,
    World,
    open_world,
)
from tests.machines import run_machine

T = TypeVar("T")
MAX_WATCHED = 8
"""Access tokens that are looked at after each step, the youngest."""
MAX_LIVING = 2
"""Grants at a time, so that much happens to each."""
MOSTLY = st.sampled_from([True, True, True, True, False])
MAX_ROTATIONS = 1
"""Signing keys are rotated this often at most, because making one takes long."""


class Holder:
    """A client."""

    def __init__(self, client: Client) -> None:
        self.client, self.archived = client, False


class Refresh:
    def __init__(self, token: str, expires_at: float) -> None:
        self.token, self.expires_at = token, expires_at
        self.used_at: float | None = None
        self.answer: bytes | None = None


class Granted:
    def __init__(self, holder: Holder, grant: Grant, code: str, issued_at: float) -> None:
        self.holder, self.id, self.code = holder, grant.id, code
        self.code_expires_at = issued_at + CODE_LIFETIME_S
        self.last = (grant.created_at + timedelta(seconds=GRANT_LIFETIME_S)).timestamp()
        self.alive, self.code_is_known = True, True
        self.chain: list[Refresh] = []


class Access:
    def __init__(
        self, token: str, grant: Granted, holder: Holder, expires_at: float, behind: list[Access]
    ) -> None:
        self.token, self.grant, self.holder = token, grant, holder
        self.expires_at, self.behind = expires_at, behind
        self.revoked = False

    def is_good(self, now: float) -> bool:
        line = [*self.behind, self]
        dead = any(each.revoked or each.holder.archived for each in line)
        return self.grant.alive and now < self.expires_at and not dead


class Machine(RuleBasedStateMachine):
    def __init__(self, runner: asyncio.Runner, world: World) -> None:
        super().__init__()
        self.runner, self.world = runner, world
        self.app, self.agent, self.stranger = (self.holder() for _ in range(3))
        self.grants: list[Granted] = []
        self.access: list[Access] = []
        self.rotations = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def holder(self) -> Holder:
        client, _ = self.run(self.world.client(grants=[*CODES, EXCHANGE]))
        return Holder(client)

    @property
    def now(self) -> float:
        return self.world.clock()

    @property
    def living(self) -> list[Granted]:
        return [each for each in self.grants if each.alive and not each.holder.archived]

    def a_grant(self, data: st.DataObject) -> Granted:
        """Mostly one that lives: those that are over give little to look at."""
        return data.draw(
            st.sampled_from(self.living if data.draw(MOSTLY) and self.living else self.grants)
        )

    def a_token(self, data: st.DataObject) -> Access:
        good = [each for each in self.access if each.is_good(self.now)]
        good = good if data.draw(MOSTLY) else []
        return data.draw(st.sampled_from(good or self.access))

    def refused(self, holder: Holder, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self.run(work)
        except OAuthError as error:
            assert error.error == ("invalid_client" if holder.archived else "invalid_grant")
        else:
            raise AssertionError("it was not refused")

    async def asked(self, holder: Holder, **sent: Any) -> bytes:
        """The answer of the token endpoint, which lets a client in first."""
        return await self.world.ask(await self.let_in(holder), **sent)

    async def let_in(self, holder: Holder) -> Client:
        found = await self.world.clients.find(holder.client.id)
        if found is None:
            raise OAuthError("invalid_client")
        return found

    def redeemed(self, holder: Holder, code: str) -> Coroutine[Any, Any, bytes]:
        sent = {"code": code, "redirect_uri": REDIRECT, "code_verifier": VERIFIER}
        return self.asked(holder, grant_type="authorization_code", **sent)

    def refreshed(self, holder: Holder, token: str) -> Coroutine[Any, Any, bytes]:
        return self.asked(holder, grant_type="refresh_token", refresh_token=token)

    async def given_back(self, holder: Holder, token: str) -> None:
        client, form = await self.let_in(holder), Form({"token": token}, {})
        await rfc7009_revoke.revoke(self.world.authority, form, client, ACTOR)

    def keep(self, grant: Granted, body: bytes) -> None:
        answer = msgspec.json.decode(body)
        expires_at = (
            min(self.now + LIFETIME_S, grant.last) if grant.chain else (self.now + LIFETIME_S)
        )
        grant.chain.append(Refresh(answer["refresh_token"], expires_at))
        until = int(self.now) + answer["expires_in"]
        self.access.append(Access(answer["access_token"], grant, grant.holder, until, []))

    @precondition(lambda self: len(self.living) < MAX_LIVING)
    @rule(times=st.sampled_from([1, 1, 1, 3]))
    def login(self, times: int) -> None:
        """times: redeemed so often at once. One wins, and is refused with the grant."""
        code, made = self.run(self.world.code(self.app.client))
        for each in self.grants:
            if each.code_expires_at < self.now - CODE_KEPT_S:
                each.code_is_known = False
        grant = Granted(self.app, made, code, self.now)
        self.grants.append(grant)
        answers = self.run(self.at_once(self.redeemed(self.app, code) for _ in range(times)))
        (won,) = [each for each in answers if isinstance(each, bytes)]
        lost = [each for each in answers if isinstance(each, OAuthError)]
        assert [each.error for each in lost] == ["invalid_grant"] * (times - 1)
        self.keep(grant, won)
        grant.alive = times == 1

    async def at_once(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        return await asyncio.gather(*work, return_exceptions=True)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def something_ends(self, data: st.DataObject) -> None:
        ways = (
            self.archive,
            self.revoke_access,
            self.replay_code,
            self.revoke_refresh,
            self.end_by_hand,
        )
        data.draw(st.sampled_from(ways))(data)

    def replay_code(self, data: st.DataObject) -> None:
        grant = self.a_grant(data)
        self.refused(grant.holder, self.redeemed(grant.holder, grant.code))
        if grant.code_is_known and not grant.holder.archived:
            grant.alive = False

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), age=st.sampled_from([0, 0, 1, 2]), times=st.integers(1, 2))
    def refresh(self, data: st.DataObject, age: int, times: int) -> None:
        """times: asked for so often at once, as where the first answer was lost."""
        grant = self.a_grant(data)
        held = grant.chain[max(0, len(grant.chain) - 1 - age)]
        asking = (self.refreshed(grant.holder, held.token) for _ in range(times))
        over = not grant.alive or held.expires_at <= self.now
        if grant.holder.archived or over:
            self.refused(grant.holder, next(asking))
        elif held.used_at is None:
            held.answer, *others = self.run(self.at_once(asking))  # type: ignore[assignment]
            assert isinstance(held.answer, bytes) and all(each == held.answer for each in others)
            held.used_at = self.now
            self.keep(grant, held.answer)
        elif held is grant.chain[-2] and self.now - held.used_at <= LOST_ANSWER_S:
            assert set(self.run(self.at_once(asking))) == {held.answer}
        else:
            self.refused(grant.holder, next(asking))
            grant.alive = False

    @precondition(lambda self: self.access)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        subject = self.a_token(data)
        sent = {"subject_token": subject.token, "subject_token_type": ACCESS_TOKEN}
        asking = self.asked(self.agent, grant_type=EXCHANGE, **sent)
        if subject.is_good(self.now) and len(subject.behind) < 4:
            answer = msgspec.json.decode(self.run(asking))
            behind = [*subject.behind, subject]
            expires_at = int(self.now) + answer["expires_in"]
            assert expires_at <= subject.expires_at
            made = Access(answer["access_token"], subject.grant, self.agent, expires_at, behind)
            self.access.append(made)
        else:
            self.refused(self.agent, asking)

    def revoke_access(self, data: st.DataObject) -> None:
        token = self.a_token(data)
        giving = self.given_back(token.holder, token.token)
        if token.holder.archived:
            self.refused(token.holder, giving)
        else:
            self.run(giving)
            token.revoked = token.revoked or token.expires_at > self.now

    def revoke_refresh(self, data: st.DataObject) -> None:
        grant = self.a_grant(data)
        held = data.draw(st.sampled_from(grant.chain))
        giving = self.given_back(grant.holder, held.token)
        if grant.holder.archived:
            self.refused(grant.holder, giving)
            return
        self.run(giving)
        if held.expires_at > self.now or grant.alive is False or held is grant.chain[-1]:
            grant.alive = False
        else:
            grant.alive = self.run(self.stands(grant))

    async def stands(self, grant: Granted) -> bool:
        """An expired token may have been swept away, or not yet: only Postgres knows."""
        async with self.world.db.connect() as conn:
            found = await find_grant(conn, org_id=self.world.org_id, grant_id=grant.id)
        return found.revoked_at is None

    @precondition(lambda self: self.access)
    @rule(data=st.data())
    def nothing_changes(self, data: st.DataObject) -> None:
        ways = (self.another_client_asks, self.rotate_signing_keys, self.another_gateway_starts)
        data.draw(st.sampled_from(ways))(data)

    def another_client_asks(self, data: st.DataObject) -> None:
        """With what it got hold of: it gets nothing, and ends nothing."""
        token = self.a_token(data)
        grant, held = token.grant, data.draw(st.sampled_from(token.grant.chain))
        self.refused(self.stranger, self.redeemed(self.stranger, grant.code))
        self.refused(self.stranger, self.refreshed(self.stranger, held.token))
        for each in (token.token, held.token):
            try:
                self.run(self.given_back(self.stranger, each))
            except OAuthError as error:
                assert error.error == "invalid_grant"
            else:
                assert not token.is_good(self.now) or held.expires_at <= self.now

    def end_by_hand(self, data: st.DataObject) -> None:
        grant = self.a_grant(data)

        async def ended(conn: AsyncConnection, announcement: Announcement) -> None:
            of = {"org_id": self.world.org_id, "grant_id": grant.id}
            await end_grant(conn, announcement, **of, because="administration", actor=ACTOR)

        self.run(self.revoking(ended))
        grant.alive = False

    def archive(self, data: st.DataObject) -> None:
        """A client goes, with all that it was given, and another one takes its place."""
        which = data.draw(st.sampled_from(["app", "agent"]))
        holder: Holder = getattr(self, which)

        async def archived(conn: AsyncConnection, announcement: Announcement) -> None:
            of = {"org_id": self.world.org_id, "client_id": holder.client.id}
            await archive_client(conn, **of, actor=ACTOR)
            subject = holder.client.id
            await announcement.revoke(
                conn, org_id=self.world.org_id, kind="client", subject=subject
            )

        self.run(self.revoking(archived))
        holder.archived = True
        setattr(self, which, self.holder())

    async def revoking(
        self, work: Callable[[AsyncConnection, Announcement], Coroutine[Any, Any, None]]
    ) -> None:
        async with announcing(self.world.redis, clock=self.world.clock) as announcement:
            async with self.world.db.begin() as conn:
                await work(conn, announcement)

    def rotate_signing_keys(self, _data: st.DataObject) -> None:
        """Changes nothing of what is good, nor of an answer that is given again."""
        self.rotations += 1
        if self.rotations > MAX_ROTATIONS:
            return

        async def rotated() -> None:
            keys = self.world.keys
            with suppress(signing_keys.TooSoon):
                async with self.world.db.begin() as conn:
                    await signing_keys.rotate(conn, keys.cipher, keys.now())
            await keys.reload()

        self.run(rotated())

    @precondition(lambda self: self.living)
    @rule(seconds=st.sampled_from([1, 5, 9, 11, 61, 300, 601, 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.world.clock.now += seconds

    def another_gateway_starts(self, _data: st.DataObject) -> None:
        self.run(self.looked_at_anew())

    async def looked_at_anew(self) -> None:
        world, forget = self.world, self.world.keys.on_withdrawn
        tokens = AccessTokens(
            db=world.db, redis=world.redis, keys=world.keys, issuer=ISSUER, wall_clock=world.clock
        )
        await tokens.start()
        await self.compare(tokens)
        await tokens.close()
        world.keys.on_withdrawn = forget

    @invariant()
    def what_is_let_in_is_what_is_good(self) -> None:
        self.run(self.heard())
        self.run(self.compare(self.world.tokens))

    async def compare(self, tokens: AccessTokens) -> None:
        for each in self.access[-MAX_WATCHED:]:
            try:
                await tokens.authenticate(each.token, feed_as_of=tokens._clock())
                let_in = True
            except InvalidToken:
                let_in = False
            assert let_in == each.is_good(self.now)

    async def heard(self) -> None:
        """All that was committed is known here. Other tests hold it to a second: nothing listens
        here between two steps."""
        async with self.world.db.connect() as conn:
            last = await conn.scalar(sa.text("SELECT coalesce(max(seq), 0) FROM revocations"))
        async with asyncio.timeout(30):
            while self.world.tokens.denylist._last_seq < last:
                await asyncio.sleep(0.001)


@pytest.mark.slow
@pytest.mark.no_cover  # a branch that only chance finds is not tested
def test_what_is_good_is_what_the_model_says(postgres_url: str, redis_url: str) -> None:
    with asyncio.Runner() as runner:

        async def opened() -> tuple[Any, ...]:
            db = create_engine(postgres_url, role=ROLE_SYSTEM)
            store = redis.asyncio.from_url(redis_url)
            opening = open_world(db, store)
            world = await opening.__aenter__()
            return db, store, opening, world

        db, store, opening, world = runner.run(opened())
        try:
            run_machine(lambda: Machine(runner, world), examples=20, steps=50)
        finally:

            async def closed() -> None:
                await opening.__aexit__(None, None, None)
                await store.aclose()
                await db.dispose()

            runner.run(closed())
