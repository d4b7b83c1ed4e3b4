"""The first wall, of objects: what an object that reaches Postgres does for one tenant who shows
another's ids. `test_tenant_verbs` does the same for functions.

The methods are found by looking for them, in all of the gateway: those of a class that was given an
engine, and those that take a connection. Each is tried, or says in `SYSTEM` whom it serves: a new
one fails here until it is one or the other.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

import gateway
from gateway.audit.log import Actor
from gateway.auth.login.login import Login, LoginOrigin, WrongCredentials
from gateway.auth.login.passkeys import Passkeys
from gateway.auth.login.passwords import Passwords
from gateway.auth.login.sessions import Seals, Session
from gateway.auth.login.throttle import Throttle
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.request_errors import BadField, OtherRequest, RequestInFlight
from gateway.responses.conversations import ConversationStore
from gateway.responses.kept import ResponseOwner, StoredResponse
from gateway.responses.running import RunningRows
from gateway.responses.store import ResponseStore
from gateway.responses.tables import responses
from gateway.secret import Cipher, Peppers, UnknownSecret
from gateway.tenancy.errors import NotFound
from gateway.tenancy.idempotency_keys import Answer, Claim, IdempotencyKeys
from gateway.tenancy.tables import idempotency_keys
from gateway.wire.openai_responses.answer import ResponseObject, begun
from gateway.wire.openai_responses.items import Message
from gateway.wire.openai_responses.request import ResponseRequest
from tests.budget import part_of
from tests.gateway.batches.tried import begin_file, begin_output, delete_content, read_content
from tests.gateway.processes.launching.extras import lacks_extra
from tests.gateway.responses.tried import follow_events
from tests.gateway.vault.tried import (
    delete_kept,
    find_before,
    find_kept,
    find_shown,
    find_token,
    put_kept,
    vouch,
)
from tests.gateway.walls.no_tenants_methods import SYSTEM
from tests.gateway.walls.test_tenant_verbs import FOREIGN_KEY, SECRET
from tests.gateway.walls.two_tenants import ALICE, MALLORY, id_of, populate, rows_of_alice

CONNECTIONS = ("AsyncConnection", "AsyncEngine")
NOW = datetime.now(tz=UTC)
ME = Actor(kind="user", id=id_of("users", org=MALLORY))
HERE = LoginOrigin(address=None, device_cookie=None, request_id=None)


@cache
def methods() -> frozenset[str]:
    """`module.Class.method`, without `gateway.`, of all that can be asked about something."""
    found = set()
    for each in pkgutil.walk_packages(gateway.__path__, "gateway."):
        if each.name.endswith("__main__") or lacks_extra(each.name):  # __main__ runs
            continue
        for name, kind in vars(importlib.import_module(each.name)).items():
            if not inspect.isclass(kind) or kind.__module__ != each.name:
                continue
            own = {k: f for k, f in vars(kind).items() if inspect.isfunction(f)}
            made = kind.__init__  # be it a base's
            held = takes_connection(made) if inspect.isfunction(made) else is_held(kind)
            found |= {
                f"{each.name.removeprefix('gateway.')}.{name}.{method}"
                for method, function in own.items()
                if not method.startswith("_")
                and len(inspect.signature(function).parameters) > 1
                and (held or takes_connection(function))
            }
    return frozenset(found)


def takes_connection(function: Callable[..., object]) -> bool:
    given = inspect.signature(function).parameters.values()
    return any(is_connection(each.annotation) for each in given if each.annotation != each.empty)


def is_held(kind: type) -> bool:
    return any(is_connection(each) for each in inspect.get_annotations(kind).values())


def is_connection(annotation: object) -> bool:
    """Itself, or one of a union; not what is handed to a callable."""
    if not isinstance(annotation, str):
        return False
    tree = ast.parse(annotation, mode="eval").body
    while isinstance(tree, ast.BinOp):
        if isinstance(tree.right, ast.Name) and tree.right.id in CONNECTIONS:
            return True
        tree = tree.left
    return isinstance(tree, ast.Name) and tree.id in CONNECTIONS


class Stage:
    """The services that are tried, on `pool`, for `org`, with the ids of Alice."""

    def __init__(self, pool: AsyncEngine, redis: Redis, org: str) -> None:
        self.pool, self.org, self.redis = pool, org, redis
        self.passwords = Passwords()
        sessions, seals = Peppers(SECRET, "session"), Seals(SECRET)
        self.login = Login(
            db=pool,
            system_db=pool,
            passwords=self.passwords,
            throttle=Throttle(redis),
            sessions=sessions,
            seals=seals,
            clock=lambda: NOW,
        )
        self.passkeys = Passkeys(
            db=pool,
            system_db=pool,
            redis=redis,
            seals=seals,
            login=self.login,
            public_url="http://localhost",
            clock=lambda: NOW,
        )
        self.keys = IdempotencyKeys(db=pool, system_db=pool, secret=SECRET)
        cipher = Cipher(SECRET, "test")
        self.conversations = ConversationStore(db=pool, cipher=cipher)
        kept: dict[str, Any] = {
            "db": pool,
            "system_db": pool,
            "conversations": self.conversations,
            "cipher": cipher,
            "lifetime_s": 60.0,
        }
        self.responses, self.running = ResponseStore(**kept), RunningRows(**kept)

    @classmethod
    @contextmanager
    def open(cls, pool: AsyncEngine, redis: Redis, org: str) -> Iterator[Stage]:
        stage = cls(pool, redis, org)
        try:
            yield stage
        finally:
            stage.passwords.close()

    @property
    def session(self) -> Session:
        """Return a session of Alice's user, as somebody of `org`."""
        return Session(
            id="session",
            org_id=self.org,
            user_id=id_of("users"),
            amr=["pwd"],
            auth_time=NOW,
            expires_at=NOW,
            email="a@x.example",
            name="A",
            role="owner",
            org_name="x",
            is_operator=False,
            has_password=True,
        )

    @property
    def claim(self) -> Claim:
        """Alice's, as `populate` wrote it, asked for by `org`."""
        return Claim(
            org_id=self.org,
            principal=id_of("idempotency_keys", "principal"),
            key_digest=id_of("idempotency_keys", "key_digest").encode(),
            request_digest=b"another request",
            request_id="request",
        )


async def list_passkeys(stage: Stage) -> object:
    return await stage.passkeys.list(stage.session)


async def offer_passkey(stage: Stage) -> object:
    """Tell whether credentials are excluded: those that the user has are."""
    options = await stage.passkeys.registration_options(stage.session, "cookie")
    return '"excludeCredentials": []' not in options


async def remove_passkey(stage: Stage) -> object:
    await stage.passkeys.remove(stage.session, id_of("passkeys"), actor=ME)
    return "removed"


async def start_session(stage: Stage) -> object:
    async with tenant(stage.pool, stage.org) as conn:
        return await stage.login.start(conn, stage.org, id_of("users"), ("pwd",), HERE)


class Believing:
    """Takes any password of who has one."""

    async def verify(self, _password: str, stored: str | None) -> bool:
        return stored is not None


async def show_password(stage: Stage) -> object:
    stage.login._passwords = Believing()  # type: ignore[assignment]
    try:
        return await stage.login.by_old_password(
            org_id=stage.org, user_id=id_of("users"), password="any", origin=HERE
        )
    except WrongCredentials:
        return None


async def claim_key(stage: Stage) -> object:
    """Claim Alice's key: whoever has such a claim is told that this is another request."""
    try:
        return await stage.keys.claim(stage.claim)
    except OtherRequest:
        return "known"


def own_claim(stage: Stage) -> Claim:
    """Return the claim of the request that holds Alice's."""
    request_id = id_of("idempotency_keys", "request_id")
    return msgspec.structs.replace(stage.claim, request_id=request_id)


async def check_claim(stage: Stage) -> object:
    try:
        async with tenant(stage.pool, stage.org) as conn:
            await own_claim(stage).check(conn)
    except RequestInFlight:
        return None
    return "may change something"


async def settle_claim(stage: Stage) -> object:
    claim = own_claim(stage)
    await stage.keys.settle(claim, Answer(status=200, headers=[], body=b"mine"))
    async with tenant(stage.pool, stage.org) as conn:
        kept = sa.select(idempotency_keys.c.response).where(claim.where)
        return await conn.scalar(kept)


async def claim_is_there(stage: Stage) -> object:
    claim = own_claim(stage)
    async with tenant(stage.pool, stage.org) as conn:
        return await conn.scalar(sa.select(idempotency_keys.c.request_id).where(claim.where))


async def keep_answer(stage: Stage) -> object:
    await stage.keys.keep(own_claim(stage), Answer(status=200, headers=[], body=b"mine"))
    return await claim_is_there(stage)


async def keep_answer_within(stage: Stage) -> object:
    answer = Answer(status=200, headers=[], body=b"mine")
    try:
        async with tenant(stage.pool, stage.org) as conn:
            await stage.keys.keep_within(conn, own_claim(stage), answer)
    except RequestInFlight:
        return None
    return await claim_is_there(stage)


async def renew_claim(stage: Stage) -> object:
    await stage.keys.renew(own_claim(stage))
    return await claim_is_there(stage)


async def let_go(stage: Stage) -> object:
    before = await claim_is_there(stage)
    await stage.keys.let_go(own_claim(stage))
    return before


RESPONSE, CONVERSATION = id_of("responses"), id_of("conversations")
ITEM = id_of("conversation_items")
SAID = Message(id="msg_mine", status="completed", role="user", content=())
KEPT = StoredResponse(given=b"[]", answer=b'{"output":[]}')


def whose(stage: Stage) -> ResponseOwner:
    """Alice's project, as `org` would name it."""
    return ResponseOwner(stage.org, id_of("projects"))


Work = Callable[[Stage], Awaitable[object]]


def found(work: Work) -> Work:
    """Wrap `work`: whoever finds one of Alice's finds that it is sealed under no secret of ours."""

    async def attempt(stage: Stage) -> object:
        try:
            return await work(stage) or "done"
        except UnknownSecret:
            return "found"
        except BadField as error:
            return None if "not found" in str(error) else "found"

    return attempt


def keep_response(stage: Stage) -> Awaitable[object]:
    return stage.responses.keep(
        whose(stage), "resp_mine", KEPT, status="completed", previous_id=None
    )


def add_running(stage: Stage) -> Awaitable[object]:
    return stage.running.add(whose(stage), a_response("resp_mine"), KEPT)


async def change_running(stage: Stage) -> object:
    """Change a response that runs; Alice's, as `populate` wrote it, does."""
    await stage.running.change(whose(stage), a_response(RESPONSE), KEPT)
    async with tenant(stage.pool, stage.org) as conn:
        kept = sa.select(responses.c.status).where(
            responses.c.id == RESPONSE, responses.c.org_id == stage.org
        )
        return await conn.scalar(kept)


async def begin_conversation(stage: Stage) -> object:
    async with tenant(stage.pool, stage.org) as conn:
        return await stage.conversations.create(conn, whose(stage), {}, [])


def a_response(response_id: str) -> ResponseObject:
    request = ResponseRequest(model="penny", input="x")
    return begun(
        request, id=response_id, created_at=1, service_tier="default", status="in_progress"
    )


TRIED: dict[str, Work] = {
    "responses.conversations.ConversationStore.add_items": found(
        lambda stage: stage.conversations.add_items(whose(stage), CONVERSATION, [SAID])
    ),
    "responses.conversations.ConversationStore.create": found(begin_conversation),
    "responses.conversations.ConversationStore.delete": found(
        lambda stage: stage.conversations.delete(whose(stage), CONVERSATION)
    ),
    "responses.conversations.ConversationStore.delete_item": found(
        lambda stage: stage.conversations.delete_item(whose(stage), CONVERSATION, ITEM)
    ),
    "responses.conversations.ConversationStore.find": found(
        lambda stage: stage.conversations.find(whose(stage), CONVERSATION)
    ),
    "responses.conversations.ConversationStore.item": found(
        lambda stage: stage.conversations.item(whose(stage), CONVERSATION, ITEM)
    ),
    "responses.conversations.ConversationStore.items": found(
        lambda stage: stage.conversations.items(whose(stage), CONVERSATION)
    ),
    "responses.conversations.ConversationStore.page": found(
        lambda stage: stage.conversations.page(
            whose(stage), CONVERSATION, after=None, limit=1, order="asc"
        )
    ),
    "responses.conversations.ConversationStore.update": found(
        lambda stage: stage.conversations.update(whose(stage), CONVERSATION, {})
    ),
    "responses.events.EventRows.follow": found(follow_events),
    "responses.running.RunningRows.add": found(add_running),
    "responses.running.RunningRows.cancel": found(
        lambda stage: stage.running.cancel(whose(stage), RESPONSE)
    ),
    "responses.running.RunningRows.change": change_running,
    "responses.store.ResponseStore.context": found(
        lambda stage: stage.responses.context(whose(stage), RESPONSE)
    ),
    "responses.store.ResponseStore.delete": found(
        lambda stage: stage.responses.delete(whose(stage), RESPONSE)
    ),
    "responses.store.ResponseStore.find": found(
        lambda stage: stage.responses.find(whose(stage), RESPONSE)
    ),
    "responses.store.ResponseStore.keep": found(keep_response),
    "auth.login.login.Login.by_old_password": show_password,
    "auth.login.login.Login.start": start_session,
    "auth.login.passkeys.Passkeys.list": list_passkeys,
    "auth.login.passkeys.Passkeys.registration_options": offer_passkey,
    "auth.login.passkeys.Passkeys.remove": remove_passkey,
    "files.contents.PostgresContents.delete": delete_content,
    "files.contents.PostgresContents.read": read_content,
    "files.store.FileStore.begin": begin_file,
    "files.store.FileStore.begin_output": begin_output,
    "mcp.credentials.VaultCredentials.of": find_shown,
    "mcp.admin.credentials_admin.UpstreamVault.find": find_kept,
    "mcp.exchanges.Exchanges.token": vouch,
    "mcp.sign_ins.SignIns.start": find_before,
    "mcp.admin.credentials_admin.UpstreamVault.delete": delete_kept,
    "mcp.admin.credentials_admin.UpstreamVault.put": put_kept,  # `delete` would find it
    "vault.oauth.UpstreamTokens.access_token": find_token,
    "tenancy.idempotency_keys.Claim.check": check_claim,
    "tenancy.idempotency_keys.IdempotencyKeys.keep": keep_answer,
    "tenancy.idempotency_keys.IdempotencyKeys.keep_within": keep_answer_within,
    "tenancy.idempotency_keys.IdempotencyKeys.let_go": let_go,
    "tenancy.idempotency_keys.IdempotencyKeys.renew": renew_claim,
    "tenancy.idempotency_keys.IdempotencyKeys.claim": claim_key,
    "tenancy.idempotency_keys.IdempotencyKeys.settle": settle_claim,
}


def test_every_method_is_tried_or_says_whom_it_serves() -> None:
    assert methods() - set(SYSTEM) - set(TRIED) == set(), "try these, or say whom they serve"
    assert set(SYSTEM) | set(TRIED) <= methods(), "no longer there: drop it from the list"
    assert not set(SYSTEM) & set(TRIED)


@pytest.mark.parametrize("role", [ROLE_TENANT, ROLE_SYSTEM])
async def test_methods_with_another_tenants_ids_find_nothing_and_change_nothing(
    db: AsyncEngine, postgres_url: str, redis: Redis, role: str
) -> None:
    """With row security behind them, and with their own WHERE alone."""
    columns = await populate(db)
    before = await rows_of_alice(db, columns)
    pool = create_engine(postgres_url, role=role)
    with Stage.open(pool, redis, MALLORY) as stage:
        for name, attempt in TRIED.items():
            found: object = None
            try:
                found = await attempt(stage)
            except NotFound:
                pass
            except IntegrityError as error:  # a reference names the org too
                assert getattr(error.orig, "sqlstate", None) == FOREIGN_KEY, name
            assert not found, f"{name}: with Alice's ids it found {found!r}"
            assert await rows_of_alice(db, columns) == before, f"{name} changed what is Alice's"
    await pool.dispose()


@pytest.mark.parametrize("name", part_of(sorted(TRIED)))
async def test_with_ones_own_ids_the_same_method_finds_something(
    db: AsyncEngine, redis: Redis, name: str
) -> None:
    """Or the test above would try nothing."""
    await populate(db)
    with Stage.open(db, redis, ALICE) as stage:
        assert await TRIED[name](stage)
