"""An admin runs an organization from the API alone: from an operator's plan and the invite of the
first owner to the archive, with the official SDK where it has the call.

The only page that is looked at is the one that people accept, sign in and consent on.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.gateway.auth.browsing import (
    CALLBACK,
    VERIFIER,
    answer_of,
    authorize_url,
    consent,
    hidden,
    new_browser,
    query_of,
)
from tests.gateway.auth.pages.test_account_key import KEY, PATH
from tests.gateway.routes.admin.changing import Maker
from tests.gateway.routes.admin.conftest import World
from tests.pace import within

ADMIN = "/v1/admin"
OWNER, DEVELOPER = "ann@acme.example", "bob@acme.example"
TOLD = {
    *("organization.created", "organization.updated"),
    *("project.created", "project.updated", "project.archived"),
    *("invite.sent", "invite.accepted", "user.added", "user.updated", "user.deleted"),
    *("service_account.created", "service_account.deleted"),
    *("api_key.created", "api_key.updated", "api_key.rotated", "api_key.deleted"),
    *("rate_limit.updated", "issuer.created", "issuer.archived"),
    *("oauth_client.created", "oauth_client.secret_rotated", "oauth_client.archived"),
    *("oauth_grant.created", "oauth_grant.revoked"),
}


class Office:
    """The administrator of `acme`, with one key."""

    def __init__(self, world: World, key: str) -> None:
        self.world, self.key = world, key
        self.sdk = world.sdk_of(key).admin.organization

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        answer = await self.world.call(method, ADMIN + path, body, key=self.key, **headers)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return answer.json()

    async def refuses(self, credential: str) -> None:
        """Within a second, every worker."""
        async with within(1.0):
            while (await self.world.call("GET", "/v1/models", key=credential)).status_code != 401:
                await asyncio.sleep(0.02)


def browser_of(world: World) -> Any:
    return new_browser(world.app, base_url=world.services.authorization.issuer)


async def accept(browser: httpx.AsyncClient, url: str, name: str) -> None:
    parts = urlsplit(url)
    link = f"{parts.path}?{parts.query}"
    form = {**hidden((await browser.get(link)).text), "name": name, "password": "a long password"}
    done = await browser.post("/invites/accept", data=form)
    assert done.headers["location"] == "/console", done.text


async def test_an_admin_runs_the_organization_from_the_api_alone(world: World) -> None:
    operator = Office(world, world.admin_key)
    await operator.ask("POST", "/plans", {"name": "team", "requests_per_minute": 600})
    body = {"name": "acme", "plan": "team", "owner_email": OWNER}
    made = await operator.ask("POST", "/orgs", body)
    async with browser_of(world) as browser:
        await accept(browser, made["owner_invite"]["url"], "Ann")
        account = await browser.get("/oauth/account")
        shown = await browser.post(PATH, data={**hidden(account.text), "name": "ann's"})
        (key,) = KEY.findall(shown.text)
    office = Office(world, key)
    (owner,) = (await office.sdk.users.list()).data
    assert (owner.email, owner.role) == (OWNER, "owner")
    project_id = await projects(office)
    bob = await people(office, project_id)
    await keys(office, project_id)
    await bounds(office, project_id)
    client_id = await applications(office, project_id)
    await signing_keys(operator, Maker(world, made["organization"]["id"], project_id))
    await reports(office)
    await the_end(office, project_id, bob, client_id)
    own = (await office.sdk.admin_api_keys.list()).data
    assert [each.owner.id for each in own] == [owner.id]
    await all_is_told(office)
    org = f"/orgs/{made['organization']['id']}"
    await operator.ask("POST", f"{org}/archive")
    await office.refuses(key)
    await operator.ask("POST", "/plans/team/archive")


async def projects(office: Office) -> str:
    made = await office.sdk.projects.create(name="web")
    await office.sdk.projects.update(made.id, name="shop")
    seen = await office.world.call("GET", f"{ADMIN}/projects/{made.id}", key=office.key)
    plan, tag = {"plan": "team"}, seen.headers["etag"]
    changed = await office.ask("PATCH", f"/projects/{made.id}", plan, if_match=tag)
    assert (changed["name"], changed["plan"]) == ("shop", "team")
    return made.id


async def people(office: Office, project_id: str) -> str:
    """A second user, by invite: their role in the org, and in the project."""
    invite = {"email": DEVELOPER, "role": "reader"}
    made = await office.ask("POST", "/invites", invite, idempotency_key="bob")
    assert await office.ask("POST", "/invites", invite, idempotency_key="bob") == made
    async with browser_of(office.world) as browser:
        await accept(browser, made["url"], "Bob")
    assert (await office.sdk.invites.retrieve(made["id"])).status == "accepted"
    (bob,) = (await office.sdk.users.list(emails=[DEVELOPER])).data
    assert (await office.sdk.users.update(bob.id, role="developer")).role == "developer"
    member = await office.sdk.projects.users.create(project_id, user_id=bob.id, role="member")
    assert (member.id, member.role) == (bob.id, "member")
    await office.sdk.projects.users.update(bob.id, project_id=project_id, role="owner")
    return bob.id


async def keys(office: Office, project_id: str) -> None:
    """Try keys of a service account, and of the project: made, restricted, rotated, leaked."""
    account = await office.sdk.projects.service_accounts.create(project_id, name="ci")
    assert account.api_key is not None
    robot = account.api_key.value
    assert (await office.world.call("GET", "/v1/models", key=robot)).status_code == 200
    made = await office.ask("POST", "/keys", {"name": "k", "project_id": project_id})
    narrow = {"models": ["other"], "requests_per_minute": 5}
    changed = await office.ask("PATCH", f"/keys/{made['id']}", narrow)
    assert changed["models"] == ["other"]
    rotated = await office.ask("POST", f"/keys/{made['id']}/rotate", {"grace_s": 600})
    for each in (made["value"], rotated["value"]):
        assert (await office.world.call("GET", "/v1/models", key=each)).json()["data"] == []
    leak = f"{ADMIN}/keys/report-leak"
    told = await office.world.http.post(leak, json={"key": made["value"]})
    assert told.status_code == 204
    await office.refuses(made["value"])
    good = await office.world.call("GET", "/v1/models", key=rotated["value"])
    assert good.status_code == 200, "it was the one before that leaked"
    await office.ask("POST", f"/keys/{made['id']}/revoke")
    await office.refuses(rotated["value"])
    listed = await office.sdk.projects.api_keys.list(project_id)
    assert account.api_key.id in [each.id for each in listed.data]
    await office.sdk.projects.service_accounts.delete(account.id, project_id=project_id)
    await office.refuses(robot)


async def bounds(office: Office, project_id: str) -> None:
    """Bound what a project may use, and from where."""
    limit = await office.sdk.projects.rate_limits.update_rate_limit(
        "rl-far", project_id=project_id, max_requests_per_1_minute=60
    )
    assert limit.max_requests_per_1_minute == 60
    permissions = f"/v1/organization/projects/{project_id}/model_permissions"
    wanted = {"mode": "allow_list", "model_ids": ["far"]}
    said = await office.world.call("POST", permissions, wanted, key=office.key)
    assert said.json()["model_ids"] == ["far"]
    origins = {"cors_origins": ["https://shop.example"]}
    assert (await office.ask("PATCH", "/organization", origins))["cors_origins"]
    issuer = {
        "name": "company",
        "issuer": "https://login.acme.example",
        "audience": "api://acme",
        "default_role": "reader",
        "project_id": project_id,
    }
    made = await office.ask("POST", "/issuers", issuer)
    assert [each["id"] for each in (await office.ask("GET", "/issuers"))["data"]] == [made["id"]]
    assert (await office.ask("DELETE", f"/issuers/{made['id']}"))["deleted"]


async def applications(office: Office, project_id: str) -> str:
    """An OAuth client with its next secret; what a user allows it, seen and taken back."""
    body = {
        "client_name": "app",
        "redirect_uris": [CALLBACK],
        "token_endpoint_auth_method": "client_secret_post",
        "project_id": project_id,
    }
    made = await office.ask("POST", "/oauth/clients", body)
    fresh = await office.ask("POST", f"/oauth/clients/{made['id']}/rotate-secret", {})
    login = {"org": "acme", "email": DEVELOPER, "password": "a long password"}
    async with browser_of(office.world) as browser:
        page = await browser.get("/oauth/login")
        await browser.post("/oauth/login", data={**hidden(page.text), **login})
        asked = await browser.get(authorize_url(query_of(made["id"])))
        answer = answer_of(await consent(browser, asked))
        assert "code" in answer, answer
        form = {
            "grant_type": "authorization_code",
            "code": answer["code"],
            "redirect_uri": CALLBACK,
            "code_verifier": VERIFIER,
            "client_id": made["id"],
        }
        old = {"client_secret": made["client_secret"]}
        assert (await browser.post("/oauth/token", data=form | old)).status_code == 401
        new = {"client_secret": fresh["client_secret"]}
        token = (await browser.post("/oauth/token", data=form | new)).json()["access_token"]
    assert (await office.world.call("GET", "/v1/models", key=token)).status_code == 200
    (grant,) = (await office.ask("GET", f"/oauth/grants?client_id={made['id']}"))["data"]
    await office.ask("POST", f"/oauth/grants/{grant['id']}/revoke")
    await office.refuses(token)
    client_id: str = made["id"]
    return client_id


async def signing_keys(operator: Office, maker: Maker) -> None:
    """The operator's: the next one signs, the one before verifies for a while, or no more."""
    await maker.signing_key()
    before = (await operator.ask("GET", "/signing_keys"))["data"]
    rotated = await operator.ask("POST", "/signing_keys/rotate")
    assert rotated["id"] in [each["id"] for each in before]
    (old,) = [each["id"] for each in before if each["activated_at"] is not None]
    await operator.ask("POST", f"/signing_keys/{old}/revoke")


async def reports(office: Office) -> None:
    start = 1_700_000_000
    usage = await office.sdk.usage.completions(start_time=start, limit=3)
    costs = await office.sdk.usage.costs(start_time=start, limit=3)
    assert len(usage.data) == len(costs.data) == 3


async def the_end(office: Office, project_id: str, user_id: str, client_id: str) -> None:
    """Archived, never deleted: they are listed where that is asked for."""
    await office.ask("DELETE", f"/oauth/clients/{client_id}")
    await office.sdk.users.delete(user_id)
    await office.sdk.projects.archive(project_id)
    with pytest.raises(openai.ConflictError):
        await office.sdk.projects.update(project_id, name="x")
    everything = await office.ask("GET", "/projects?include_archived=true")
    assert project_id in [each["id"] for each in everything["data"]]
    clients = await office.ask("GET", "/oauth/clients?include_archived=true")
    assert [each["id"] for each in clients["data"]] == [client_id]


async def all_is_told(office: Office) -> None:
    told = [each async for each in office.sdk.audit_logs.list(limit=20)]
    assert {each.type for each in told} >= TOLD
