"""Checks every route of administration that changes something, found in the route table: it is
recorded, done once for one `Idempotency-Key`, and refused to who has seen an older state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from litestar.routes import HTTPRoute

from gateway.audit.tables import entries
from gateway.routes.shared.conditional import etag_of
from gateway.routes.shared.idempotency import PREFIXES
from gateway.tenancy.idempotency_keys import Answer, Claim
from gateway.tenancy.tables import api_keys
from gateway.tenancy.tables import idempotency_keys as table
from tests.gateway.routes.admin.changing import (
    ADMIN,
    BY_ITS_SERVER,
    RECIPES,
    UNSEEN,
    Change,
    Maker,
)
from tests.gateway.routes.admin.conftest import World

NO_CREDENTIAL = {
    (
        "POST",
        f"{ADMIN}/keys/report-leak",
    ): "whoever has the key; it is revoked once, `test_admin_keys`"
}
"""Changes that nobody is asked for a credential for: a key of idempotency would be anybody's."""
UNCONDITIONAL = {
    ("POST", f"{ADMIN}/invoices/{{invoice_id}}/finalize"): "counts it anew, whatever was seen",
    ("POST", f"{ADMIN}/invoices/{{invoice_id}}/payments"): "makes one, of what is left",
    ("POST", f"{ADMIN}/invoices/{{invoice_id}}/credit-notes"): "makes one, of what is left",
    ("POST", f"{ADMIN}/mcp/taints/{{client_id}}/lift"): "whatever taints by then",
    ("POST", f"{ADMIN}/signing_keys/rotate"): "makes the next key, of which nobody has a tag",
    ("POST", f"{ADMIN}/webhooks/{{endpoint_id}}/ping"): "makes a delivery",
    (
        "POST",
        f"{ADMIN}/webhooks/{{endpoint_id}}/deliveries/{{delivery_id}}/redeliver",
    ): "whatever became of it",
    ("DELETE", "/v1/organization/invites/{invite_id}"): "an invite never changes",
    ("POST", "/v1/organization/projects/{project_id}/model_permissions"): "OpenAI's whole list",
    ("DELETE", "/v1/organization/projects/{project_id}/model_permissions"): "OpenAI's whole list",
    ("POST", "/v1/organization/projects/{project_id}/service_accounts"): "makes one",
    (
        "POST",
        "/v1/organization/projects/{project_id}/service_accounts/{service_account_id}/api_keys",
    ): "makes one",
    ("POST", "/v1/organization/projects/{project_id}/users"): "makes one",
}
"""Changes below something that has a tag of their own no `If-Match` speaks of."""
REPEATABLE = {
    ("PATCH", f"{ADMIN}/fleet/{{replica}}"): "here of one that is not drained",
    (
        "POST",
        f"{ADMIN}/users/{{user_id}}/password-reset",
    ): "makes a link; the user stays as they were",
}
"""Conditional on what they do not change."""
CHANGING = sorted(RECIPES)
VERBS = (
    *("/archive", "/revoke", "/rotate", "/rotate-secret", "/lift-suspension", "/grant", "/fail"),
    *("/approve", "/deny", "/pause", "/resume", "/abort", "/complete"),
)
"""At the end of a path: what is done to what the rest of it names."""


def in_table(world: World) -> set[tuple[str, str]]:
    """(method, path) of administration's changes."""
    return {
        (str(method), route.path_format)
        for route in world.app.routes
        if isinstance(route, HTTPRoute) and route.path_format.startswith(PREFIXES)
        for handler in route.route_handlers
        for method in handler.http_methods
        if str(method) not in ("GET", "HEAD", "OPTIONS")
    }


def is_conditional(method: str, path: str) -> bool:
    """It is about something that is there."""
    return (method, path) not in UNCONDITIONAL and (method != "POST" or "{" in path)


async def recorded(world: World, answer: httpx.Response) -> list[Any]:
    """The entries of the request that got this answer."""
    request_id = answer.headers["x-request-id"]
    found = sa.select(entries).where(entries.c.request_id == request_id)
    async with world.db.connect() as conn:
        return list(await conn.execute(found))


async def count(world: World) -> int:
    async with world.db.connect() as conn:
        return int(await conn.scalar(sa.select(sa.func.count()).select_from(entries)) or 0)


@contextmanager
def taken_over(world: World) -> Iterator[None]:
    """As if each worker froze right behind its claim, and another one carried the request out."""
    keys = world.services.idempotency_keys
    claim = keys.claim

    async def overtaken(wanted: Claim) -> Answer | None:
        found = await claim(wanted)
        async with world.db.begin() as conn:
            await conn.execute(sa.update(table).where(wanted.where).values(request_id="req_other"))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "claim", overtaken)
        yield


async def test_every_change_stands_here(world: World) -> None:
    assert in_table(world) == set(RECIPES) | set(NO_CREDENTIAL) | set(BY_ITS_SERVER)
    assert set(UNCONDITIONAL) | set(REPEATABLE) <= set(RECIPES)


@pytest.fixture
def maker(world: World, org_id: str, project_id: str) -> Maker:
    return Maker(world, org_id, project_id)


async def test_every_change_is_recorded_once_and_refused_to_who_saw_another_state(
    world: World, maker: Maker
) -> None:
    failed = []
    for method, path in CHANGING:
        try:
            await keeps_to_it(world, maker, method, path)
        except AssertionError as error:
            failed.append(f"{method} {path}: {error}")
    assert not failed, "\n".join(failed)


async def test_of_two_who_saw_the_same_state_the_second_is_refused(
    world: World, maker: Maker
) -> None:
    changes = {
        f"{method} {path}": ((method, path), RECIPES[method, path]) for method, path in CHANGING
    }
    failed = []
    for name, ((method, path), recipe) in (changes | UNSEEN).items():
        if is_conditional(method, path) and (method, path) not in REPEATABLE:
            try:
                await changes_once(world, method, await recipe(maker))
            except AssertionError as error:
                failed.append(f"{name}: {error}")
    assert not failed, "\n".join(failed)


async def changes_once(world: World, method: str, change: Change) -> None:
    """Raises: AssertionError."""
    tag = await shown_tag(world, change)
    async with world.db.begin() as conn:
        # That a key is used changes nothing that anybody could overwrite.
        await conn.execute(sa.update(api_keys).values(last_used_at=sa.func.now()))
    first = await world.call(method, change.path, change.body, if_match=tag)
    assert first.status_code == 200, f"with its tag: {first.status_code} {first.text}"
    before = await count(world)
    second = await world.call(method, change.path, change.body, if_match=tag)
    gone = method == "DELETE" and second.status_code == 404
    assert gone or second.status_code == 412, f"with the tag before: {second.status_code}"
    assert await count(world) == before, "refused, and recorded"


async def shown_tag(world: World, change: Change) -> str:
    """Return the tag of what `change` is about, as a GET shows it. Raises: AssertionError."""
    path = change.path
    for verb in VERBS:
        path = path.removesuffix(verb)
    place, _, name = path.rpartition("/")
    if place.endswith("/rate_limits"):  # no GET shows one alone; who sets one is told its tag
        other = await world.call("POST", path, {"max_requests_per_1_minute": 9})
        return str(other.headers["etag"])
    if place.endswith("/signing_keys"):
        listed = (await world.call("GET", place)).json()["data"]
        [found] = [each for each in listed if each["id"] == name]
        return etag_of(msgspec.json.encode(found))
    shown = await world.call("GET", path)
    assert shown.status_code == 200, f"GET {path}: {shown.status_code} {shown.text}"
    return str(shown.headers["etag"])


async def keeps_to_it(world: World, maker: Maker, method: str, path: str) -> None:
    """Raises: AssertionError."""
    actor = (await world.services.authenticator.authenticate(world.admin_key)).key_id
    change = await RECIPES[method, path](maker)
    before = await count(world)
    if is_conditional(method, path):
        stale = await world.call(method, change.path, change.body, if_match='"stale"')
        assert stale.status_code == 412, f"a stale tag: {stale.status_code} {stale.text}"
        assert await count(world) == before, "refused, and recorded"
    if method == "POST":
        with taken_over(world):
            late = await world.call(method, change.path, change.body, idempotency_key=f"t{before}")
        assert late.status_code == 409, f"taken over: {late.status_code} {late.text}"
        assert late.headers["retry-after"] and await count(world) == before, "done all the same"
    once = {"idempotency_key": f"{method}{path}"}
    done = await world.call(method, change.path, change.body, **once)
    assert done.is_success, done.text
    written = await recorded(world, done)
    assert written, "not in the audit log"
    for entry in written:
        who = (entry.actor_kind, entry.actor_id, entry.ip)
        assert who == ("api_key", actor, "127.0.0.1"), f"by {who}"
        said = entry.before is not None or entry.after is not None
        assert said, f"{entry.action} says nothing of before and after"
    if method == "POST":
        after = await count(world)
        again = await world.call(method, change.path, change.body, **once)
        assert (again.status_code, again.content) == (done.status_code, done.content), again.text
        assert again.headers["idempotent-replayed"] == "true"
        assert await count(world) == after, "done twice"
        other = await world.call(method, change.path, {"other": 1}, **once)
        assert other.status_code == 422, other.text
