"""Login through an external OpenID provider: what comes back is of this browser, this login, this
issuer, once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import COMMAND_LINE, Actor
from gateway.auth.federation.external_login import (
    LOGIN_S,
    STATE_PURPOSE,
    CompletedLogin,
    ExternalLogin,
    LoginRefused,
)
from gateway.auth.federation.issuers import CIPHER_PURPOSE, Issuer, create_issuer
from gateway.db import tenant
from gateway.secret import Cipher
from gateway.tenancy.changes import changing
from gateway.tenancy.members.users import archive_user, create_user
from tests.gateway.a_secret import a_secret
from tests.gateway.auth.federation.federating import PUBLIC_URL, World, world
from tests.gateway.auth.issuing import AUDIENCE, ISSUER, NOW, ec_key, rsa_key

__all__ = ["world"]

CLIENT = "tollgate-at-example"
SECRET = "s3cret of ours"
BROWSER = "cookie-of-this-browser"
EMAIL = "ann@example.com"


def by(user_id: str) -> Actor:
    return Actor(kind="user", id=user_id)


class LoginFlow:
    def __init__(self, world: World, *secrets: str) -> None:
        self.world = world
        self.login = ExternalLogin(
            db=world.db,
            directory=world.directory,
            keys=world.keys,
            egress=world.far_end,  # type: ignore[arg-type]
            secrets=Cipher(a_secret(*(secrets or ("s1",))), CIPHER_PURPOSE),
            states=Cipher(a_secret("s1"), STATE_PURPOSE),
            public_url=PUBLIC_URL,
            wall_clock=world.wall_clock,
        )
        self.issuer: Issuer

    async def list_it(self, secret: str | None = SECRET, **more: Any) -> Issuer:
        whose = self.world.alice
        async with changing(self.world.db, self.world.redis, "*", org_id=whose.org_id) as conn:
            self.issuer = await create_issuer(
                conn,
                self.world.cipher,
                org_id=whose.org_id,
                rules=whose.rules(**({"client_id": CLIENT, "audience": AUDIENCE} | more)),
                actor=COMMAND_LINE,
                client_secret=secret,
            )
        self.world.directory._snapshot = None
        return self.issuer

    async def add_user(self, email: str = EMAIL) -> str:
        async with tenant(self.world.db, self.world.alice.org_id) as conn:
            user = await create_user(
                conn,
                org_id=self.world.alice.org_id,
                email=email,
                name="Ann",
                role="reader",
                actor=COMMAND_LINE,
            )
        return user.id

    async def start(self, request: str = "client_id=x") -> dict[str, str]:
        url = await self.login.start(self.issuer.id, request=request, browser=BROWSER)
        assert url.startswith(f"{ISSUER}/authorize?")
        return dict(parse_qsl(urlsplit(url).query))

    def answers(
        self, asked: dict[str, str], key: Any = None, alg: str = "RS256", **more: Any
    ) -> None:
        """The issuer's token endpoint, from now on."""
        claims = self.world.issuer.claims(
            **(
                {"aud": CLIENT, "nonce": asked["nonce"], "email": EMAIL, "email_verified": True}
                | more
            )
        )
        id_token = self.world.issuer.sign(claims, key=key, alg=alg)
        self.world.far_end.says(f"{ISSUER}/token", {"id_token": id_token, "access_token": "x"})

    async def finish(
        self,
        asked: dict[str, str],
        *,
        browser: str = BROWSER,
        issuer_id: str | None = None,
        answer: list[tuple[str, str]] | None = None,
    ) -> CompletedLogin:
        async def sign_in(_conn: AsyncConnection, _org_id: str, user_id: str) -> str:
            return f"session of {user_id}"

        return await self.login.finish(
            issuer_id or self.issuer.id,
            callback=answer or [("code", "c0de"), ("state", asked["state"]), ("iss", ISSUER)],
            browser=browser,
            sign_in=sign_in,
            actor=by,
            system_db=self.world.system_db,
        )

    async def refused(self, asked: dict[str, str], match: str | None = None, **more: Any) -> None:
        with pytest.raises(LoginRefused, match=match):
            await self.finish(asked, **more)


@pytest.fixture
async def desk(world: World) -> AsyncIterator[LoginFlow]:
    yield LoginFlow(world)


async def test_a_user_signs_in_through_the_issuer(desk: LoginFlow) -> None:
    await desk.list_it()
    user_id = await desk.add_user()
    asked = await desk.start()
    assert asked["redirect_uri"] == f"{PUBLIC_URL}/oauth/external/{desk.issuer.id}/callback"
    assert (asked["response_type"], asked["code_challenge_method"]) == ("code", "S256")
    assert asked["client_id"] == CLIENT and asked["scope"] == "openid email profile"
    desk.answers(asked)
    done = await desk.finish(asked)
    assert (done.user_id, done.signed_in) == (user_id, f"session of {user_id}")
    assert (done.org_id, done.request) == (desk.world.alice.org_id, "client_id=x")
    url, form, headers = desk.world.far_end.posted[0]
    assert url == f"{ISSUER}/token"
    assert form["code"] == "c0de" and len(form["code_verifier"]) >= 43
    assert "client_secret" not in form
    assert headers["authorization"] == "Basic dG9sbGdhdGUtYXQtZXhhbXBsZTpzM2NyZXQlMjBvZiUyMG91cnM="


async def test_who_is_known_by_subject_needs_no_address_any_more(desk: LoginFlow) -> None:
    await desk.list_it()
    user_id = await desk.add_user()
    for more in ({}, {"email": None}, {"email": "new@example.com", "email_verified": False}):
        asked = await desk.start()
        desk.answers(asked, **more)
        assert (await desk.finish(asked)).user_id == user_id


@pytest.mark.parametrize(
    "more",
    [
        {"email_verified": False},
        {"email_verified": "true"},
        {"email_verified": None},
        {"email": None},
        {"email": 5},
        {"email": "other@example.com"},
        {"email": "no address"},
    ],
)
async def test_nobody_is_known_by_an_address_that_is_not_verified(
    desk: LoginFlow, more: dict[str, Any]
) -> None:
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked, **more)
    await desk.refused(asked)


async def test_an_answer_is_used_once(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    await desk.finish(asked)
    await desk.refused(asked, "used before")


async def test_an_id_token_of_another_login_is_refused(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    first, second = await desk.start(), await desk.start()
    assert (
        len({first[name] for name in ("state", "nonce", "code_challenge")} & set(second.values()))
        == 0
    )
    desk.answers(first)
    await desk.refused(second, "another nonce")
    desk.answers(first, nonce=None)
    await desk.refused(first, "another nonce")


async def test_only_the_browser_that_began_can_come_back(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    for browser in ("", "cookie-of-another"):
        await desk.refused(asked, "another issuer or browser", browser=browser)
    await desk.finish(asked)


async def test_an_answer_is_for_the_issuer_that_was_asked(desk: LoginFlow) -> None:
    """Mix-up: RFC 9207, RFC 9700 4.4."""
    other = await desk.list_it(audience="api://other")
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    await desk.refused(asked, "another issuer or browser", issuer_id=other.id)
    said = [("code", "c"), ("state", asked["state"])]
    await desk.refused(asked, "another issuer", answer=[*said, ("iss", "https://evil.example.com")])
    desk.world.issuer.publish(authorization_response_iss_parameter_supported=True)
    desk.world.clock.now += 700
    await desk.refused(asked, "another issuer", answer=said)
    await desk.finish(asked)


async def test_an_issuer_need_not_name_itself(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    await desk.finish(asked, answer=[("code", "c"), ("state", asked["state"])])


@pytest.mark.parametrize("name", ["code", "state", "iss", "error"])
async def test_a_parameter_that_stands_there_twice_is_refused(desk: LoginFlow, name: str) -> None:
    await desk.list_it()
    asked = await desk.start()
    said = [("code", "c"), ("state", asked["state"]), ("iss", ISSUER), ("error", "x")]
    twice = [*said, *(pair for pair in said if pair[0] == name)]
    await desk.refused(asked, "repeated", answer=twice)


@pytest.mark.parametrize(
    "state", ["", "x", "s1.x", "s1.AAAA", "s1." + "A" * 40, "A" * 7000, "\u00e9."]
)
async def test_a_state_that_is_not_ours_is_refused(desk: LoginFlow, state: str) -> None:
    await desk.list_it()
    await desk.refused({}, "not ours", answer=[("code", "c"), ("state", state)])


async def test_a_login_ends_after_a_while(desk: LoginFlow) -> None:
    await desk.list_it()
    asked = await desk.start()
    desk.world.wall_clock.now += LOGIN_S
    await desk.refused(asked, "too long ago")


@pytest.mark.parametrize("more", [[("error", "access_denied")], [("code", "x" * 3000)], []])
async def test_an_issuer_that_does_not_say_yes_is_believed(
    desk: LoginFlow, more: list[tuple[str, str]]
) -> None:
    await desk.list_it()
    asked = await desk.start()
    await desk.refused(asked, "an error or no code", answer=[("state", asked["state"]), *more])
    assert desk.world.far_end.posted == []


@pytest.mark.parametrize(
    ("match", "more"),
    [
        ("another audience", {"aud": AUDIENCE}),
        ("another issuer", {"iss": "https://evil.example.com"}),
        ("expired", {"exp": NOW - 300}),
        ("future", {"iat": NOW + 300, "exp": NOW + 600}),
        ("another client", {"aud": [CLIENT, "other"]}),
        ("another client", {"aud": [CLIENT, "other"], "azp": "other"}),
        ("another client", {"azp": "other"}),
        ("another tenant", {"tid": "mallory"}),
    ],
)
async def test_an_id_token_that_is_not_for_us_is_refused(
    desk: LoginFlow, match: str, more: dict[str, Any]
) -> None:
    await desk.list_it(required_claims={"tid": "alice"})
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked, **({"tid": "alice"} | more))
    await desk.refused(asked, match)


async def test_several_audiences_need_to_say_which_is_the_client(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked, aud=[CLIENT, "other"], azp=CLIENT)
    await desk.finish(asked)


async def test_an_id_token_with_the_wrong_key_or_algorithm_is_refused(desk: LoginFlow) -> None:
    await desk.list_it(algorithms=["RS256"])
    asked = await desk.start()
    for key, alg, match in (
        (rsa_key("k1"), "RS256", "signature"),
        (rsa_key("unknown"), "RS256", "no such key"),
        (ec_key("e"), "ES256", "does not list"),
    ):
        desk.answers(asked, key=key, alg=alg)
        await desk.refused(asked, match)


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 200), ({"id_token": 5}, 200), ({"error": "invalid_grant"}, 400), (b"<html>", 200)],
)
async def test_a_token_endpoint_that_gives_nothing_is_a_refusal(
    desk: LoginFlow, body: Any, status: int
) -> None:
    await desk.list_it()
    asked = await desk.start()
    desk.world.far_end.says(f"{ISSUER}/token", body, status=status)
    await desk.refused(asked)


async def test_a_secret_is_posted_where_that_is_all_the_issuer_takes(desk: LoginFlow) -> None:
    desk.world.issuer.publish(token_endpoint_auth_methods_supported=["client_secret_post"])
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    await desk.finish(asked)
    _, form, headers = desk.world.far_end.posted[0]
    assert (form["client_id"], form["client_secret"]) == (CLIENT, SECRET)
    assert "authorization" not in headers


async def test_a_public_client_has_pkce_alone(desk: LoginFlow) -> None:
    await desk.list_it(secret=None)
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    await desk.finish(asked)
    _, form, _ = desk.world.far_end.posted[0]
    assert form["client_id"] == CLIENT and "client_secret" not in form


async def test_a_secret_under_a_key_that_is_gone_must_be_set_again(world: World) -> None:
    desk = LoginFlow(world, "s9")
    await desk.list_it()
    asked = await desk.start()
    await desk.refused(asked, "set again")


async def test_an_issuer_that_is_not_for_logins_offers_none(desk: LoginFlow) -> None:
    await desk.list_it(secret=None, client_id=None)
    with pytest.raises(LoginRefused, match="not listed"):
        await desk.start()
    with pytest.raises(LoginRefused, match="not listed"):
        await desk.login.start("issuer_unknown", request="", browser=BROWSER)
    assert await desk.login.logins_of(desk.world.alice.org_id) == []
    listed = await desk.list_it(audience="api://other")
    found = await desk.login.logins_of(desk.world.alice.org_id)
    assert [each.id for each in found] == [listed.id]
    assert await desk.login.logins_of(desk.world.mallory.org_id) == []


async def test_an_issuer_without_endpoints_or_away_is_a_refusal(desk: LoginFlow) -> None:
    await desk.list_it()
    for more in ({"token_endpoint": None}, {"authorization_endpoint": None}):
        desk.world.issuer.publish(**more)
        desk.world.clock.now += 700
        with pytest.raises(LoginRefused, match="no authorization or token endpoint"):
            await desk.start()
    desk.world.far_end.fails(desk.world.issuer.discovery_url)
    desk.world.clock.now += 5000
    with pytest.raises(LoginRefused, match="no keys"):
        await desk.start()


@pytest.mark.parametrize(
    "place",
    ["https://10.0.0.1/a", "https://127.1/a", "http://issuer.example.com/a", "javascript:alert(1)"],
)
async def test_no_browser_is_sent_inward(desk: LoginFlow, place: str) -> None:
    await desk.list_it()
    desk.world.issuer.publish(authorization_endpoint=place)
    desk.world.clock.now += 700
    with pytest.raises(LoginRefused, match="authorization_endpoint: "):
        await desk.start()


@pytest.mark.parametrize("request_", ["a b", "x#y", "\u00e9", "a\nb", "x" * 3001, "a\\b"])
async def test_what_comes_back_is_the_query_of_a_request(desk: LoginFlow, request_: str) -> None:
    await desk.list_it()
    with pytest.raises(LoginRefused, match="query"):
        await desk.start(request_)


async def test_a_newcomer_becomes_a_user_where_the_tenant_wants_it(desk: LoginFlow) -> None:
    await desk.list_it(
        provisions_users=True, role_claim="groups", roles={"eng": "developer"}, default_role=None
    )
    asked = await desk.start()
    desk.answers(asked)
    await desk.refused(asked, "no user")
    desk.answers(asked, groups=["eng"], name="Ann Example")
    user_id = (await desk.finish(asked)).user_id
    async with tenant(desk.world.db, desk.world.alice.org_id) as conn:
        found = (await conn.execute(sa.text("SELECT id, email, name, role FROM users"))).one()
        actions = await conn.scalars(sa.text("SELECT action FROM audit_entries ORDER BY sequence"))
    assert tuple(found) == (user_id, EMAIL, "Ann Example", "developer")
    assert list(actions)[-3:] == ["issuer.created", "user.added", "external_identity.created"]


@pytest.mark.parametrize("name", [None, 5, "", " x", "x" * 101, "a\nb"])
async def test_a_newcomer_without_a_name_is_known_by_address(desk: LoginFlow, name: Any) -> None:
    await desk.list_it(provisions_users=True)
    asked = await desk.start()
    desk.answers(asked, name=name)
    await desk.finish(asked)
    async with tenant(desk.world.db, desk.world.alice.org_id) as conn:
        assert await conn.scalar(sa.text("SELECT name FROM users")) == EMAIL


async def test_who_was_archived_comes_back_by_an_admins_hand_alone(desk: LoginFlow) -> None:
    await desk.list_it(provisions_users=True)
    user_id = await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)
    await desk.finish(asked)
    org_id = desk.world.alice.org_id
    async with tenant(desk.world.db, org_id) as conn:
        await archive_user(conn, org_id=org_id, user_id=user_id, actor=COMMAND_LINE)
    asked = await desk.start()
    desk.answers(asked)
    await desk.refused(asked, "no user")
    again = await desk.add_user()
    assert (await desk.finish(asked)).user_id == again != user_id


async def test_used_states_are_swept_away_when_they_are_over(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    for _ in range(2):
        asked = await desk.start()
        desk.answers(asked, exp=desk.world.wall_clock.now + 60)
        await desk.finish(asked)
        desk.world.wall_clock.now += LOGIN_S + 1
    async with tenant(desk.world.db, desk.world.alice.org_id) as conn:
        count = await conn.scalar(sa.text("SELECT count(*) FROM external_login_states"))
    assert count == 1


async def test_a_session_that_cannot_begin_leaves_the_answer_unused(desk: LoginFlow) -> None:
    await desk.list_it()
    await desk.add_user()
    asked = await desk.start()
    desk.answers(asked)

    async def fail(*_: Any) -> None:
        raise RuntimeError("no session")

    broken: Callable[..., Awaitable[None]] = fail
    with pytest.raises(RuntimeError):
        await desk.login.finish(
            desk.issuer.id,
            callback=[("code", "c"), ("state", asked["state"])],
            browser=BROWSER,
            sign_in=broken,
            actor=by,
            system_db=desk.world.system_db,
        )
    assert (await desk.finish(asked)).request == "client_id=x"


def test_a_state_tells_the_browser_nothing() -> None:
    cipher = Cipher(a_secret("s1"), STATE_PURPOSE)
    sealed = cipher.seal(msgspec.json.encode({"nonce": "visible"}), STATE_PURPOSE.encode())
    assert b"visible" not in sealed.data
