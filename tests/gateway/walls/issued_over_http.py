"""Every kind of secret as people get it, over HTTP: an operator makes an org, its owner comes in by
the invite, an admin issues all that can be issued, an application gets its tokens.

Each POST of administration is sent twice under one `Idempotency-Key`: both answers tell the secret,
to this caller. Some requests fail on the way, with a secret in the wrong place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from litestar import Litestar

from engine.transport.join_messages import JoinToken
from gateway.credential_forms import CREDENTIAL
from tests.gateway.auth.browsing import (
    CALLBACK,
    VERIFIER,
    answer_of,
    authorize_url,
    consent,
    hidden,
    new_browser,
    query_of,
    sign_in,
)
from tests.gateway.walls.secret_search import Caller

ORG = "globex"
EMAIL = "hank@globex.example"
OWN_PASSWORD = "volcano lair, two bedrooms"
FOREIGN_SECRETS = ("foreign-secret-of-an-issuer-1", "foreign-secret-of-an-issuer-2")
ADMIN, ORGANIZATION = "/v1/admin", "/v1/organization"
INVITE_LINK = "x-tollgate-invite-link"
EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
SCOPES = ["openid", "inference", "offline_access"]
Find = Callable[[httpx.Response], str]


class Admin:
    """A caller that administers with one key."""

    def __init__(self, call: Caller, key: str) -> None:
        self.call, self.key = call, key
        self.issued: list[str] = []

    async def ask(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.call("POST", path, self.key, json=body, headers=named)

    async def issue(self, path: str, body: Any, find: Find) -> tuple[str, dict[str, Any]]:
        """The secret and the answer."""
        key = f"{path}-{len(self.issued)}"
        first = await self.ask(path, body, idempotency_key=key)
        assert first.is_success, first.text
        secret = find(first)
        assert self.call.search.found_in(secret), f"{path}: nobody noted it"
        again = await self.ask(path, body, idempotency_key=key)
        assert again.headers["idempotent-replayed"] == "true"
        assert again.content == first.content and find(again) == secret
        self.issued.append(secret)
        # Another request under this key is refused, and told nothing.
        assert (await self.ask(path, {"other": 1}, idempotency_key=key)).status_code == 422
        return secret, first.json()


def in_body(*names: str) -> Find:
    def find(answer: httpx.Response) -> str:
        found = answer.json()
        for name in names:
            found = found[name]
        return token_of(found)

    return find


def joining_secret(answer: httpx.Response) -> str:
    return JoinToken.of_text(answer.json()["token"]).secret


def in_header(answer: httpx.Response) -> str:
    return token_of(answer.headers[INVITE_LINK])


def token_of(found: str) -> str:
    """Return the token of an invite's link, or `found` itself."""
    return parse_qs(urlsplit(found).query)["token"][0] if "token=" in found else found


async def issue_over_http(app: Litestar, call: Caller, operator_key: str) -> None:
    call.search.signed += [OWN_PASSWORD, *FOREIGN_SECRETS]
    operator = Admin(call, operator_key)
    owner = {"name": ORG, "owner_email": EMAIL}
    token, _ = await operator.issue(f"{ADMIN}/orgs", owner, in_body("owner_invite", "url"))
    await come_in(app, token)
    first, _ = await operator.issue(
        f"{ADMIN}/orgs", {"name": "initech"}, in_body("admin_key", "value")
    )
    key, _ = await Admin(call, first).issue(
        f"{ORGANIZATION}/admin_api_keys", {"name": "second"}, in_body("value")
    )
    admin = Admin(call, key)
    # The same key of idempotency, and another caller: nothing of the first one's answer.
    other = await Admin(call, first).ask(
        f"{ORGANIZATION}/invites", {}, idempotency_key=f"{ORGANIZATION}/invites-1"
    )
    assert other.status_code == 400
    project_id = await issue_keys(admin)
    await issue_invites(admin)
    await list_issuer(admin, project_id)
    await add_webhook(admin)
    app.state.services.join_tokens.joinable = lambda: ("far",)
    await operator.issue(f"{ADMIN}/join_tokens", {"model": "far"}, joining_secret)
    await issue_to_application(app, call, operator)
    await reset_password(app, call, operator)
    await issue_to_strangers(call)
    admin.issued += operator.issued
    await mislay(call, admin, project_id)


async def come_in(app: Litestar, token: str) -> None:
    """The owner of a new org by their invite, out again, and in by their password."""
    async with new_browser(app) as browser:
        link = f"/invites/accept?token={token}"
        form = {**hidden((await browser.get(link)).text), "name": "Hank", "password": OWN_PASSWORD}
        weak = await browser.post("/invites/accept", data={**form, "password": "short"})
        assert weak.status_code == 400
        done = await browser.post("/invites/accept", data=form)
        assert done.headers["location"] == "/console", done.text
        assert (await browser.get(link)).status_code == 404
        account = await browser.get("/oauth/account")
        named = {**hidden(account.text), "name": "hank's"}
        key = await browser.post("/oauth/account/admin-keys", data=named)
        assert "sk-tg-admin-" in key.text
        left = await browser.post("/oauth/logout", data=hidden(account.text))
        assert left.status_code == 200
        named = {"org": ORG, "email": EMAIL}
        wrong = await sign_in(browser, "/oauth/login", **named, password=OWN_PASSWORD + "!")
        assert wrong.status_code == 403
        back = await sign_in(browser, "/oauth/login", **named, password=OWN_PASSWORD)
        assert back.status_code == 303


async def issue_keys(admin: Admin) -> str:
    """Those of a project, which is returned."""
    made = await admin.ask(f"{ORGANIZATION}/projects", {"name": "web"})
    project = f"{ORGANIZATION}/projects/{made.json()['id']}"
    await admin.issue(f"{project}/service_accounts", {"name": "ci"}, in_body("api_key", "value"))
    accounts = await admin.call("GET", f"{project}/service_accounts", admin.key)
    account = f"{project}/service_accounts/{accounts.json()['data'][0]['id']}"
    await admin.issue(f"{account}/api_keys", {"name": "two"}, in_body("value"))
    body = {"name": "k", "project_id": made.json()["id"]}
    secret, key = await admin.issue(f"{ADMIN}/keys", body, in_body("value"))
    stale = await admin.ask(f"{ADMIN}/keys/{key['id']}/rotate", {}, if_match='"stale"')
    assert stale.status_code == 412
    fresh, _ = await admin.issue(
        f"{ADMIN}/keys/{key['id']}/rotate", {"grace_s": 60}, in_body("value")
    )
    for each in (secret, fresh):
        assert (await admin.call("GET", "/v1/models", each)).status_code == 200
    project_id: str = made.json()["id"]
    return project_id


async def issue_invites(admin: Admin) -> None:
    body = {"email": "a@initech.example", "role": "reader", "projects": []}
    await admin.issue(f"{ORGANIZATION}/invites", body, in_header)
    body = {"email": "b@initech.example", "role": "billing"}
    await admin.issue(f"{ADMIN}/invites", body, in_body("url"))


async def add_webhook(admin: Admin) -> None:
    body = {"url": "https://hooks.example/in", "event_types": ["budget.threshold_reached"]}
    secret, made = await admin.issue(f"{ADMIN}/webhooks", body, in_body("secret"))
    path = f"{ADMIN}/webhooks/{made['id']}"
    await admin.issue(f"{path}/rotate-secret", {"grace_s": 60}, in_body("secret"))
    pasted = await admin.ask(f"{ADMIN}/webhooks", {**body, "url": f"https://x.example/?s={secret}"})
    assert pasted.status_code == 400 and secret not in pasted.text
    sent = await admin.ask(f"{path}/ping", None)
    assert sent.status_code == 201, sent.text
    for seen in (path, f"{ADMIN}/webhooks", f"{path}/deliveries"):
        assert (await admin.call("GET", seen, admin.key)).status_code == 200


async def reset_password(app: Litestar, call: Caller, operator: Admin) -> None:
    """The link is a signature, so it is noted here."""
    users = await call("GET", f"{ORGANIZATION}/users", operator.key)
    path = f"{ADMIN}/users/{users.json()['data'][0]['id']}/password-reset"
    made = await operator.ask(path, None, idempotency_key="reset")
    assert made.status_code == 201, made.text
    token = token_of(made.json()["url"])
    call.search.signed.append(token)
    async with new_browser(app) as browser:
        form = hidden((await browser.get(f"/passwords/reset?token={token}")).text)
        for password in ("short", OWN_PASSWORD):
            done = await browser.post("/passwords/reset", data={**form, "password": password})
    assert done.headers["location"].startswith("/oauth/account"), done.text


async def list_issuer(admin: Admin, project_id: str) -> None:
    """Its client secret is theirs: written, and in no answer at all."""
    first, second = FOREIGN_SECRETS
    body = {
        "name": "far",
        "issuer": "https://issuer.example",
        "audience": "aud-initech",
        "default_role": "reader",
        "project_id": project_id,
        "client_id": "ours",
        "client_secret": first,
    }
    path = f"{ADMIN}/issuers"
    made = [await admin.ask(path, body, idempotency_key="issuer") for _ in range(2)]
    assert made[0].status_code == 201 and made[0].content == made[1].content
    assert first not in made[0].text and made[0].json()["has_client_secret"] is True
    one = f"{path}/{made[0].json()['id']}"
    for wrong in ({"audience": ""}, {"client_secret": [second]}, {"secret": second}):
        failed = await admin.call("PUT", one, admin.key, json={**body, **wrong})
        assert failed.status_code == 400, failed.text
    changed = {**body, "client_secret": second}
    assert (await admin.call("PUT", one, admin.key, json=changed)).status_code == 200
    assert (await admin.call("GET", path, admin.key)).json()["data"][0]["has_client_secret"]


async def issue_to_application(app: Litestar, call: Caller, operator: Admin) -> None:
    """A client of the operators' org, its secret and the next one; a code, tokens, and an agent's
    that was exchanged."""
    projects = await call("GET", f"{ADMIN}/projects", operator.key)
    member = {"id": projects.json()["data"][0]["id"], "role": "member"}
    body = {"email": EMAIL, "role": "developer", "projects": [member]}
    invited, _ = await operator.issue(f"{ADMIN}/invites", body, in_body("url"))
    client = {
        "client_name": "app",
        "redirect_uris": [CALLBACK],
        "token_endpoint_auth_method": "client_secret_post",
        "grant_types": ["authorization_code", "refresh_token", EXCHANGE],
        "scopes": SCOPES,
    }
    clients = f"{ADMIN}/oauth/clients"
    _, made = await operator.issue(clients, client, in_body("client_secret"))
    path = f"{clients}/{made['id']}/rotate-secret"
    secret, _ = await operator.issue(path, {"grace_s": 60}, in_body("client_secret"))
    credentials = {"client_id": made["id"], "client_secret": secret}
    async with new_browser(app) as browser:
        link = f"/invites/accept?token={invited}"
        form = {**hidden((await browser.get(link)).text), "name": "Hank", "password": OWN_PASSWORD}
        assert (await browser.post("/invites/accept", data=form)).status_code == 303
        asked = authorize_url(query_of(made["id"], scope=" ".join(SCOPES)))
        answer = answer_of(await consent(browser, await browser.get(asked)))
        assert "code" in answer, answer
    form = {
        "grant_type": "authorization_code",
        "code": answer["code"],
        "redirect_uri": CALLBACK,
        "code_verifier": VERIFIER,
        **credentials,
    }
    tokens = await call("POST", "/oauth/token", data=form)
    assert tokens.status_code == 200, tokens.text
    refresh = {"grant_type": "refresh_token", "refresh_token": tokens.json()["refresh_token"]}
    for lost in (False, True):  # its answer was: the same one again
        renewed = await call("POST", "/oauth/token", data=refresh | credentials, told_again=lost)
        assert renewed.status_code == 200, renewed.text
    exchange = {
        "grant_type": EXCHANGE,
        "subject_token": renewed.json()["access_token"],
        "subject_token_type": ACCESS_TOKEN,
        **credentials,
    }
    exchanged = await call("POST", "/oauth/token", data=exchange)
    assert exchanged.status_code == 200, exchanged.text
    token = exchanged.json()["access_token"]
    assert (await call("GET", "/v1/models", token)).status_code == 200
    assert len(call.search.found_in(token + tokens.text)) >= 4


async def issue_to_strangers(call: Caller) -> None:
    document = {"client_name": "Stranger", "redirect_uris": [CALLBACK]}
    made = await call("POST", "/oauth/register", json=document)
    assert made.status_code == 201, made.text
    registered = made.json()
    token = registered["registration_access_token"]
    assert len(call.search.found_in(made.text)) == 2
    path = urlsplit(registered["registration_client_uri"]).path
    assert (await call("GET", path, token)).status_code == 200
    assert (await call("GET", path, token + "x")).status_code == 401
    assert (await call("DELETE", path, token)).status_code == 204


async def mislay(call: Caller, admin: Admin, project_id: str) -> None:
    """Each secret where somebody may paste it by mistake. What has the form of a credential is
    neither kept nor said back; what has none is no name of anything."""
    for secret in [*call.search.issued, *admin.issued]:
        if not secret.isascii() or len(secret) > 1000:
            continue
        told = {"user_agent": secret, "x_client_request_id": secret}
        if " " not in secret:
            told["idempotency_key"] = secret
        failed = await admin.ask(f"{ADMIN}/keys", {"name": 1}, **told)
        assert failed.status_code == 400, failed.text
        lost = await call("GET", f"{ADMIN}/keys", admin.key, params={"after": secret})
        assert lost.status_code in (200, 400, 404)
        if CREDENTIAL.search(secret) is None:
            continue
        assert (await call("GET", f"{ADMIN}/keys/{secret}", admin.key)).status_code == 404
        body = {"name": "k", "project_id": project_id}
        for wrong in ({"scopes": [secret]}, {"project_id": secret}, {"name": secret}):
            refused = await admin.ask(f"{ADMIN}/keys", {**body, **wrong})
            assert refused.status_code in (400, 404), refused.text
            assert secret not in refused.text
    assert sum(CREDENTIAL.search(each) is not None for each in admin.issued) >= 3
