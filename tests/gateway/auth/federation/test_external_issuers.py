"""From a token that somebody else signed to a principal of the tenant that lists its issuer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from gateway.audit.log import COMMAND_LINE
from gateway.auth.errors import AuthUnavailable, InvalidToken
from gateway.auth.federation.issuer_directory import REFRESH_S, IssuerDirectory
from gateway.auth.federation.issuer_keys import REFRESH_S as KEYS_REFRESH_S
from gateway.auth.federation.issuers import (
    MAX_ISSUERS_PER_ORG,
    Issuer,
    archive_issuer,
    find_issuer,
    list_issuers,
    update_issuer,
)
from gateway.db import create_engine, tenant
from gateway.tenancy.changes import EVERYTHING, changing
from gateway.tenancy.errors import InvalidField, NameTaken, NotFound
from gateway.tenancy.keys.model_permissions import update_model_permissions
from gateway.tenancy.pages import Cursor
from tests.gateway.auth.federation.federating import PUBLIC_URL, World, world
from tests.gateway.auth.issuing import (
    AUDIENCE,
    ISSUER,
    NOW,
    Clock,
    ec_key,
    rsa_key,
)

__all__ = ["world"]

PATIENCE_S = 30.0
"""A change is told by Redis, to a process that may be kept from running."""


async def test_a_good_token_is_somebody_of_the_tenant(world: World) -> None:
    listed = await world.list_for(world.alice)
    principal = await world.authenticate()
    assert principal.org_id == world.alice.org_id
    assert principal.project_id == world.alice.project_id
    assert (principal.kind, principal.role) == ("token", "developer")
    assert principal.key_id == principal.client_id == listed.id
    assert principal.key_hint == "Example: someone"
    assert principal.scopes == {"inference", "mcp:call", "usage:read"}
    assert f"{PUBLIC_URL}/mcp/{world.alice.org_id}" in principal.audiences
    assert f"{PUBLIC_URL}/mcp/{world.mallory.org_id}" not in principal.audiences
    assert principal.expires_at == NOW + 330
    assert not principal.is_operator


async def test_an_issuer_that_nobody_lists_is_not_asked_for_anything(world: World) -> None:
    for claims in ({}, {"iss": "https://evil.example.com"}, {"iss": 5}, {"iss": None}):
        with pytest.raises(InvalidToken):
            await world.authenticate(**claims)
    assert world.far_end.asked == []


async def test_an_issuer_is_listed_to_the_letter(world: World) -> None:
    await world.list_for(world.alice)
    for issuer in (ISSUER + "/", ISSUER.upper(), "http://issuer.example.com"):
        with pytest.raises(InvalidToken):
            await world.authenticate(iss=issuer)


async def test_the_audience_says_whose_a_token_is(world: World) -> None:
    await world.list_for(world.alice)
    await world.list_for(world.mallory, audience="api://mallory")
    assert (await world.authenticate()).org_id == world.alice.org_id
    assert (await world.authenticate(aud="api://mallory")).org_id == world.mallory.org_id
    for audience in ("api://other", None, [AUDIENCE, "api://mallory"]):
        with pytest.raises(InvalidToken):
            await world.authenticate(aud=audience)


async def test_an_audience_belongs_to_one_tenant(world: World) -> None:
    await world.list_for(world.alice)
    for whose in (world.mallory, world.alice):
        with pytest.raises(NameTaken, match="audience"):
            await world.list_for(whose)
    other = await world.list_for(world.mallory, audience="api://mallory")
    with pytest.raises(NameTaken, match="audience"):
        async with tenant(world.db, world.mallory.org_id) as conn:
            await update_issuer(
                conn,
                world.cipher,
                org_id=world.mallory.org_id,
                issuer_id=other.id,
                rules=world.mallory.rules(),
                actor=COMMAND_LINE,
            )


async def test_claims_that_are_required_choose_the_tenant_of_the_issuer(world: World) -> None:
    await world.list_for(world.alice, required_claims={"tid": "alice", "paid": True})
    await world.authenticate(tid="alice", paid=True)
    for claims in ({}, {"tid": "mallory", "paid": True}, {"tid": "alice", "paid": 1}):
        with pytest.raises(InvalidToken):
            await world.authenticate(**claims)


async def test_a_claim_gives_the_role_and_the_strongest_counts(world: World) -> None:
    roles = {"staff": "reader", "engineers": "developer", "root": "owner"}
    await world.list_for(
        world.alice,
        role_claim="groups",
        roles=roles,
        default_role=None,
        scopes=["admin:*", "inference"],
    )
    reader = await world.authenticate(groups=["staff", "unknown"])
    assert (reader.role, reader.scopes) == ("reader", frozenset())
    assert (await world.authenticate(groups="engineers")).scopes == {"inference"}
    assert (await world.authenticate(groups=["staff", "root"])).scopes == {"admin:*", "inference"}
    for groups in (None, [], ["unknown"], {"staff": 1}):
        with pytest.raises(InvalidToken, match="role"):
            await world.authenticate(groups=groups)


async def test_a_token_may_say_what_it_is_for(world: World) -> None:
    await world.list_for(world.alice, scope_claim="scope")
    assert (await world.authenticate(scope="openid inference admin:*")).scopes == {"inference"}
    assert (await world.authenticate()).scopes == frozenset()


async def test_an_algorithm_that_the_tenant_does_not_list_is_refused(world: World) -> None:
    world.issuer.keys += [ec_key("e"), rsa_key("p")]
    world.issuer.publish()
    await world.list_for(world.alice, algorithms=["ES256"])
    await world.authenticate(world.issuer.sign(key=world.issuer.keys[1], alg="ES256"))
    with pytest.raises(InvalidToken, match="algorithm"):
        await world.authenticate()


async def test_a_kid_that_nobody_knows_is_refused_and_asked_for_once(world: World) -> None:
    await world.list_for(world.alice)
    for number in range(20):
        with pytest.raises(InvalidToken, match="key"):
            await world.authenticate(world.issuer.sign(key=rsa_key(f"k{number}0")))
    assert len(world.far_end.asked) == 2


async def test_an_issuer_that_is_away_is_not_a_bad_token(world: World) -> None:
    await world.list_for(world.alice)
    world.far_end.fails(world.issuer.discovery_url)
    with pytest.raises(AuthUnavailable):
        await world.authenticate()


async def test_a_token_bound_to_a_key_is_refused(world: World) -> None:
    await world.list_for(world.alice)
    with pytest.raises(InvalidToken, match="bound"):
        await world.authenticate(cnf={"jkt": "x"})


async def test_clock_skew_of_5_minutes_is_refused(world: World) -> None:
    await world.list_for(world.alice, leeway_s=120)
    for claims in ({"exp": NOW - 300}, {"iat": NOW + 300, "exp": NOW + 900}):
        with pytest.raises(InvalidToken):
            await world.authenticate(**claims)


async def test_what_was_verified_is_not_verified_again_until_it_ends(world: World) -> None:
    await world.list_for(world.alice)
    token = world.issuer.sign()
    first = await world.authenticate(token)
    assert await world.authenticate(token) is first
    world.wall_clock.now += 61
    again = await world.authenticate(token)
    assert again is not first and again == first
    world.wall_clock.now = NOW + 330
    with pytest.raises(InvalidToken, match="expired"):
        await world.authenticate(token)


async def test_a_withdrawn_key_is_not_believed_for_long(world: World) -> None:
    await world.list_for(world.alice)
    token = world.issuer.sign()
    await world.authenticate(token)
    world.issuer.keys = [rsa_key("k2")]
    world.issuer.publish()
    world.clock.now += KEYS_REFRESH_S + 1
    world.wall_clock.now += 61
    with pytest.raises(InvalidToken, match="key"):
        await world.authenticate(token)


@pytest.mark.usefixtures("patient")
async def test_no_query_and_no_request_on_the_hot_path(world: World) -> None:
    await world.list_for(world.alice)
    token = world.issuer.sign()
    await world.authenticate(token)
    queries = 0

    def count(*_arguments: Any) -> None:
        nonlocal queries
        queries += 1

    engine = world.directory._db.sync_engine
    sa.event.listen(engine, "before_cursor_execute", count)
    asked = len(world.far_end.asked)
    for _ in range(100):
        await world.authenticate(token)
        with pytest.raises(InvalidToken):
            await world.authenticate(iss="https://unknown.example.com")
    sa.event.remove(engine, "before_cursor_execute", count)
    assert (queries, len(world.far_end.asked)) == (0, asked)


async def test_a_change_holds_within_a_second(world: World) -> None:
    listed = await world.list_for(world.alice)
    token = world.issuer.sign()
    await world.authenticate(token)
    async with changing(world.db, world.redis, listed.id, org_id=world.alice.org_id) as conn:
        changed = await update_issuer(
            conn,
            world.cipher,
            org_id=world.alice.org_id,
            issuer_id=listed.id,
            rules=world.alice.rules(default_role="reader"),
            actor=COMMAND_LINE,
        )
    assert changed.default_role == "reader"
    async with asyncio.timeout(PATIENCE_S):
        while (await world.authenticate(token)).role != "reader":
            await asyncio.sleep(0.01)
    async with changing(world.db, world.redis, listed.id, org_id=world.alice.org_id) as conn:
        gone = await archive_issuer(
            conn, org_id=world.alice.org_id, issuer_id=listed.id, actor=COMMAND_LINE
        )
    assert gone.archived_at is not None
    with pytest.raises(InvalidToken):
        async with asyncio.timeout(PATIENCE_S):
            while await world.authenticate(token):
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("patient")
async def test_a_change_of_something_else_keeps_what_was_verified(world: World) -> None:
    await world.list_for(world.alice)
    token = world.issuer.sign()
    first = await world.authenticate(token)
    async with changing(world.db, world.redis, "key_x", org_id=world.alice.org_id):
        pass
    async with changing(world.db, world.redis, EVERYTHING, org_id=world.alice.org_id):
        pass
    await asyncio.sleep(0.2)
    assert await world.authenticate(token) is first


async def test_a_project_that_is_archived_lets_nobody_in(world: World) -> None:
    await world.list_for(world.alice)
    async with tenant(world.db, world.alice.org_id) as conn:
        await conn.execute(sa.text("UPDATE projects SET archived_at = now()"))
    with pytest.raises(InvalidToken):
        await world.authenticate()


async def test_without_postgres_nobody_new_is_let_in(world: World) -> None:
    broken = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    directory = IssuerDirectory(db=broken, redis=world.redis)
    with pytest.raises(AuthUnavailable):
        await directory.snapshot()
    await directory.close()
    await broken.dispose()


async def test_a_snapshot_that_never_settles_is_no_answer(world: World) -> None:
    class Restless(IssuerDirectory):
        def _is_trusted(self, snapshot: Any) -> bool:
            return False

    directory = Restless(db=world.directory._db, redis=world.redis)
    with pytest.raises(AuthUnavailable):
        await directory.snapshot()

    def announce(*_arguments: Any) -> None:
        directory._changed(EVERYTHING)

    engine = world.directory._db.sync_engine
    sa.event.listen(engine, "before_cursor_execute", announce)
    await directory._read()
    sa.event.remove(engine, "before_cursor_execute", announce)
    assert directory._snapshot is None, "an answer that spans a change is not kept"
    await directory.close()


async def test_a_snapshot_is_read_anew_after_a_while_and_closing_ends_a_read(world: World) -> None:
    clock = Clock(0.0)
    directory = IssuerDirectory(db=world.directory._db, redis=world.redis, clock=clock)
    first, same = await asyncio.gather(directory.snapshot(), directory.snapshot())
    assert same is first and await directory.snapshot() is first
    clock.now = REFRESH_S + 1
    assert await directory.snapshot() is not first
    clock.now *= 2
    waiting = asyncio.create_task(directory.snapshot())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await directory.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_a_project_says_of_models_binds(world: World) -> None:
    await world.list_for(world.alice)
    name = {"org_id": world.alice.org_id}
    project_id = world.alice.project_id
    for mode, allowed, denied in (
        ("allow_list", frozenset({"small"}), frozenset()),
        ("deny_list", None, frozenset({"small"})),
    ):
        await update_model_permissions(
            world.db,
            world.redis,
            project_id,
            mode=mode,
            models=["small"],
            **name,
            actor=COMMAND_LINE,
        )
        async with asyncio.timeout(PATIENCE_S):
            found = await world.authenticate()
            while (found.allowed_models, found.denied_models) != (allowed, denied):
                await asyncio.sleep(0.01)
                found = await world.authenticate()
    limits = {"org": world.alice.org_id, "project": project_id}
    async with changing(world.db, world.redis, project_id, **name) as conn:
        await conn.execute(
            sa.text(
                "INSERT INTO project_rate_limits (org_id, project_id, model, tokens_per_minute)"
                " VALUES (:org, :project, 'small', 7)"
            ),
            limits,
        )
    async with asyncio.timeout(PATIENCE_S):
        while "small" not in (plans := (await world.authenticate()).model_plans):
            await asyncio.sleep(0.01)
    assert plans["small"].tokens_per_minute == 7


async def test_the_plans_of_the_tenant_bind(world: World) -> None:
    system = world.directory._db
    async with system.begin() as conn:
        await conn.execute(sa.text("INSERT INTO plans (name, tokens_per_minute) VALUES ('s', 7)"))
        await conn.execute(
            sa.text("UPDATE orgs SET plan = 's' WHERE id = :id"), {"id": world.alice.org_id}
        )
    await world.list_for(world.alice)
    principal = await world.authenticate()
    assert principal.org_plan.tokens_per_minute == 7
    assert principal.project_plan.name == "unlimited"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("name", {"name": ""}),
    ("issuer", {"issuer": "http://issuer.example.com"}),
    ("issuer", {"issuer": "https://127.0.0.1"}),
    ("issuer", {"issuer": "https://issuer.example.com?x=y"}),
    ("issuer", {"issuer": "not a URL"}),
    ("audience", {"audience": ""}),
    ("audience", {"audience": "a\nb"}),
    ("algorithms", {"algorithms": []}),
    ("algorithms", {"algorithms": ["HS256"]}),
    ("algorithms", {"algorithms": ["none"]}),
    ("scopes", {"scopes": []}),
    ("scopes", {"scopes": ["operator:orgs"]}),
    ("leeway_s", {"leeway_s": 300}),
    ("leeway_s", {"leeway_s": -1}),
    ("required_claims", {"required_claims": {str(n): 1 for n in range(17)}}),
    ("required_claims", {"required_claims": {"": 1}}),
    ("required_claims", {"required_claims": {"a": ""}}),
    ("roles", {"roles": {str(n): "owner" for n in range(65)}, "role_claim": "r"}),
    ("roles", {"roles": {"": "owner"}, "role_claim": "r"}),
    ("roles", {"roles": {"a": "owner"}}),
    ("roles", {"role_claim": "r"}),
    ("default_role", {"default_role": None}),
    ("role_claim", {"role_claim": "", "roles": {"a": "reader"}}),
    ("scope_claim", {"scope_claim": "x" * 513}),
    ("client_id", {"client_id": ""}),
    ("project_id", {"project_id": "proj_unknown"}),
]


@pytest.mark.parametrize(("field", "more"), BAD)
async def test_rules_that_break_a_rule_are_refused_by_field(
    world: World, field: str, more: dict[str, Any]
) -> None:
    with pytest.raises((InvalidField, NotFound)) as caught:
        await world.list_for(world.alice, **more)
    assert caught.value.param == field


async def test_another_tenants_project_and_issuer_are_not_there(world: World) -> None:
    with pytest.raises(NotFound, match="project_id"):
        await world.list_for(world.mallory, project_id=world.alice.project_id)
    listed = await world.list_for(world.alice)
    org_id = world.mallory.org_id
    async with tenant(world.db, org_id) as conn:
        assert (await list_issuers(conn, org_id=org_id)) == ([], False)
        for verb in (find_issuer, archive_issuer):
            more: dict[str, Any] = {} if verb is find_issuer else {"actor": COMMAND_LINE}
            with pytest.raises(NotFound):
                await verb(conn, org_id=org_id, issuer_id=listed.id, **more)
        with pytest.raises(NotFound):
            await update_issuer(
                conn,
                world.cipher,
                org_id=org_id,
                issuer_id=listed.id,
                rules=world.mallory.rules(),
                actor=COMMAND_LINE,
            )


async def test_issuers_are_listed_by_pages_and_are_few(world: World) -> None:
    for number in range(MAX_ISSUERS_PER_ORG):
        await world.list_for(world.alice, audience=f"api://{number}")
    with pytest.raises(InvalidField, match="at most"):
        await world.list_for(world.alice)
    org_id = world.alice.org_id
    async with tenant(world.db, org_id) as conn:
        page, more = await list_issuers(conn, org_id=org_id, cursor=Cursor(limit=10))
        assert (len(page), more) == (10, True)
        rest, more = await list_issuers(conn, org_id=org_id, cursor=Cursor(after=page[-1].id))
        assert (len(rest), more) == (MAX_ISSUERS_PER_ORG - 10, False)


async def change(world: World, listed: Issuer, secret: str | None = None, **more: Any) -> Issuer:
    async with tenant(world.db, world.alice.org_id) as conn:
        return await update_issuer(
            conn,
            world.cipher,
            org_id=world.alice.org_id,
            issuer_id=listed.id,
            rules=world.alice.rules(**more),
            actor=COMMAND_LINE,
            client_secret=secret,
        )


async def test_a_client_secret_stands_encrypted_and_is_kept_until_it_is_replaced(
    world: World,
) -> None:
    listed = await world.list_for(world.alice)
    with pytest.raises(InvalidField, match="client_secret"):
        await change(world, listed, "s3cret-of-ours")
    assert (await change(world, listed, "s3cret-of-ours", client_id="c")).has_client_secret
    assert (await change(world, listed, client_id="c", name="Other")).has_client_secret
    async with tenant(world.db, world.alice.org_id) as conn:
        rows = (await conn.execute(sa.text("SELECT issuers::text FROM issuers"))).scalars()
        audit = (await conn.execute(sa.text("SELECT e::text FROM audit_entries e"))).scalars()
        found = "".join([*rows, *audit])
    assert "issuer.updated" in found and "s3cret-of-ours" not in found
    assert b"s3cret-of-ours".hex() not in found
    assert not (await change(world, listed)).has_client_secret
    with pytest.raises(InvalidField, match="client_secret"):
        await change(world, listed, "", client_id="c")


async def test_the_issuer_itself_cannot_be_changed(world: World) -> None:
    listed = await world.list_for(world.alice)
    with pytest.raises(InvalidField, match="issuer"):
        await change(world, listed, issuer="https://other.example.com")


async def test_a_foreign_token_is_told_from_ours_and_is_bound_to_no_key(world: World) -> None:
    await world.list_for(world.alice)
    token = world.issuer.sign()
    assert world.external.is_foreign(token)
    ours = world.issuer.sign(world.issuer.claims(iss=PUBLIC_URL))
    for each in (ours, "", "sk-tg-x", "a.b.c", "a.\u00e9.c", world.issuer.sign({"iss": 5})):
        assert not world.external.is_foreign(each)
    with pytest.raises(InvalidToken, match="DPoP"):
        await world.external.authenticate(token, jkt="x")
