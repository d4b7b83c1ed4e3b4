"""Login through an external OpenID provider: authorization code with PKCE, a nonce, and a state
that is bound to the browser.

Nothing is stored when a login begins: the state is encrypted and carries all that the callback
needs. Used states are stored, so that each is good once. A user is found by issuer and `sub`; at
the first login by an e-mail address that the issuer has verified.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeGuard, TypeVar
from urllib.parse import quote

import msgspec
import sqlalchemy as sa
from authlib.common.urls import add_params_to_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from cryptography.exceptions import InvalidTag
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.auth.errors import InvalidToken
from gateway.auth.federation.external_issuers import fits, role_of, verified_claims
from gateway.auth.federation.external_tokens import audiences, check_claims, read
from gateway.auth.federation.issuer_directory import IssuerDirectory, ListedIssuer
from gateway.auth.federation.issuer_keys import IssuerKeys, IssuerMetadata, LoginIssuerUnavailable
from gateway.auth.federation.issuers import Issuer
from gateway.auth.tables import (
    external_identities,
    external_login_states,
    issuers,
)
from gateway.db import delete_some, tenant
from gateway.net.egress import Egress, EgressError, ForbiddenTarget
from gateway.secret import Cipher, UnknownSecret, random_secret
from gateway.tenancy.errors import InvalidField, NotFound, TenancyError
from gateway.tenancy.member_tables import check_email, users
from gateway.tenancy.members.users import create_user, find_user
from gateway.tenancy.tables import MAX_NAME_LENGTH

STATE_PURPOSE = "external-login-state"
LOGIN_S = 600
"""The time from the redirect to the issuer to the callback."""
MAX_ID_TOKEN_LIFETIME_S = 24 * 3600
MAX_STATE_LENGTH = 6_144
MAX_CODE_LENGTH = 2_048
MAX_PURGED = 100
REQUEST = re.compile(r"[!$%&'()*+,\-./0-9:;=?@A-Z_a-z~]{0,3000}", re.ASCII)
"""The query of an authorization request, with which our own endpoint continues; may be empty."""
USERINFO = ("email", "email_verified", "name")
TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]{1,8192}=*", re.ASCII)
"""An access token's characters (RFC 6750, 2.1)."""
UNREPEATABLE = ("code", "state", "iss", "error")

_ORGS_OF_DOMAIN = sa.text("""
    SELECT org FROM unnest(CAST(:orgs AS text[])) AS with_logins (org)
    WHERE EXISTS (
        SELECT FROM users WHERE org_id = org
            AND split_part(email, '@', 2) = :domain AND archived_at IS NULL
    ) LIMIT :limit
""")
MAX_ORGS_OF_DOMAIN = 8
"""If more have users with addresses of one domain, the name is asked: it is one of the large
providers of mail."""
_ORGS_OF_EMAIL = sa.text("""
    SELECT DISTINCT org_id FROM users
    WHERE email = :email AND archived_at IS NULL AND org_id = ANY (CAST(:orgs AS text[]))
""")

T = TypeVar("T")


class LoginRefused(Exception):
    """The login failed. The text is for the log; its user reads no reason."""


class OtherOrganization(Exception):
    """The address that the issuer has verified has its account elsewhere, as far as the issuer is
    trusted there, too. `issuers`: as they are listed there, by the organization's name; none: it
    has none, and nobody can say where it should get one."""

    def __init__(self, listed: Sequence[ListedIssuer], request: str) -> None:
        super().__init__(f"{len(listed)} organizations")
        self.listed, self.request = listed, request


class LoginState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the `state` of a login that was begun."""

    issuer_id: str
    nonce: str
    code_verifier: str
    request: str
    browser: str
    """The digest of the browser's cookie."""
    finds_org: bool = False
    """It was begun by an address of a domain that several organizations know: which it is tells the
    address that the issuer has verified."""
    expires_at: float


class IssuerTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of an issuer's token response. `access_token` is used for userinfo alone."""

    id_token: str
    access_token: str | None = None


class CompletedLogin(msgspec.Struct, frozen=True, kw_only=True):
    """A finished login: the user, the authorization request it was for, and the result of
    `sign_in`."""

    org_id: str
    user_id: str
    request: str
    signed_in: Any


class ExternalLogin:
    """The external logins of one process.

    `db`: the tenants' pool. `secrets` decrypts our client secrets at issuers, `states` encrypts
    states. `wall_clock`: Unix seconds.
    """

    def __init__(
        self,
        *,
        db: AsyncEngine,
        directory: IssuerDirectory,
        keys: IssuerKeys,
        egress: Egress,
        secrets: Cipher,
        states: Cipher,
        public_url: str,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db = db
        self._directory = directory
        self._keys = keys
        self._egress = egress
        self._secrets = secrets
        self._states = states
        self._public_url = public_url
        self._wall_clock = wall_clock

    async def logins_of(self, org_id: str) -> list[Issuer]:
        """Return the issuers through which users of the org can sign in, oldest first.

        Raises: AuthUnavailable.
        """
        return [each.issuer for each in await self._logins() if each.issuer.org_id == org_id]

    async def logins_of_named(self, org: str) -> list[Issuer]:
        """Return the same for an org that somebody names, by its id or name; none where there is
        no such org or it has none. Raises: AuthUnavailable."""
        return [
            each.issuer
            for each in await self._logins()
            if org in (each.issuer.org_id, each.org_name)
        ]

    async def orgs_with_logins(self) -> list[str]:
        """Return the ids of the orgs whose users can sign in through an issuer. Raises:
        AuthUnavailable."""
        return list(dict.fromkeys(each.issuer.org_id for each in await self._logins()))

    async def logins_by_email(self, conn: AsyncConnection, email: str) -> tuple[list[Issuer], bool]:
        """Return the issuers of the orgs that have both, a user with an address of this domain and
        issuers through which they sign in; none where there are too many or no such orgs. True:
        there are several orgs, and the issuers are one of each; `finish` finds the org.

        The domain alone decides, so nothing tells whether the address itself is known. `conn` sees
        all orgs. Raises: AuthUnavailable.
        """
        try:
            domain = check_email(email).rpartition("@")[2]
        except InvalidField:
            return [], False
        of: dict[str, Any] = {"domain": domain, "orgs": await self.orgs_with_logins()}
        found = set(await conn.scalars(_ORGS_OF_DOMAIN, of | {"limit": MAX_ORGS_OF_DOMAIN + 1}))
        if len(found) > MAX_ORGS_OF_DOMAIN:
            return [], False
        listed = [each.issuer for each in await self._logins() if each.issuer.org_id in found]
        if len(found) < 2:
            return listed, False
        return [*{each.issuer: each for each in listed}.values()], True

    async def _logins(self) -> list[ListedIssuer]:
        listed = (await self._directory.snapshot()).by_id.values()
        return [each for each in listed if each.issuer.client_id is not None]

    async def start(
        self, issuer_id: str, *, request: str, browser: str, finds_org: bool = False
    ) -> str:
        """Return the URL at the issuer to redirect the browser to.

        `browser`: its cookie. `request`: the query of our own authorization request, which comes
        back with the callback; our endpoint reads it again. `finds_org`: as `LoginState` has it.

        Raises: LoginRefused, AuthUnavailable.
        """
        if REQUEST.fullmatch(request) is None:
            raise LoginRefused("not the query of a request")
        issuer = await self._issuer(issuer_id)
        discovered = await self._discover(issuer)
        place = discovered.authorization_endpoint
        try:
            self._egress.target(place or "")
        except ForbiddenTarget as error:
            raise LoginRefused(f"authorization_endpoint: {error}") from None
        begun = LoginState(
            issuer_id=issuer_id,
            nonce=random_secret(),
            code_verifier=random_secret(),
            request=request,
            browser=digest(browser),
            expires_at=self._wall_clock() + LOGIN_S,
            finds_org=finds_org,
        )
        parameters = {
            "response_type": "code",
            "client_id": issuer.client_id,
            "redirect_uri": redirect_uri_of(self._public_url, issuer_id),
            "scope": "openid email profile",
            "state": self._states.seal_text(msgspec.json.encode(begun), STATE_PURPOSE.encode()),
            "nonce": begun.nonce,
            "code_challenge": create_s256_code_challenge(begun.code_verifier),
            "code_challenge_method": "S256",
        }
        url: str = add_params_to_uri(place, list(parameters.items()))
        return url

    async def finish(
        self,
        issuer_id: str,
        *,
        callback: Sequence[tuple[str, str]],
        browser: str,
        sign_in: Callable[[AsyncConnection, str, str], Awaitable[T]],
        actor: Callable[[str], Actor],
        system_db: AsyncEngine,
    ) -> CompletedLogin:
        """Check the issuer's redirect back to us, and sign the user in.

        `callback`: its query. `sign_in` is called with org and user, in the transaction that uses
        the state up. `actor` makes the audit log's actor of a user's id. `system_db` sees all orgs.
        Raises: LoginRefused, OtherOrganization, AuthUnavailable.
        """
        if any(sum(name == each for name, _ in callback) > 1 for each in UNREPEATABLE):
            raise LoginRefused("a parameter is repeated")
        parameters = dict(callback)
        state = parameters.get("state", "")
        begun = self._open(state)
        if begun.issuer_id != issuer_id or not hmac.compare_digest(begun.browser, digest(browser)):
            raise LoginRefused("begun at another issuer or browser")
        if self._wall_clock() >= begun.expires_at:
            raise LoginRefused("begun too long ago")
        issuer = await self._issuer(issuer_id)
        discovered = await self._discover(issuer)
        needs_iss = discovered.authorization_response_iss_parameter_supported
        if parameters.get("iss", None if needs_iss else issuer.issuer) != issuer.issuer:
            raise LoginRefused("a response of another issuer")  # RFC 9207
        code = parameters.get("code", "")
        if "error" in parameters or not 1 <= len(code) <= MAX_CODE_LENGTH:
            raise LoginRefused("the issuer sent an error or no code")
        tokens = await self._redeem(issuer, discovered, code, begun)
        claims = await self._verify(issuer, tokens.id_token, begun)
        if "email" not in claims:
            claims |= await self._read_userinfo(discovered, tokens, claims["sub"])
        if begun.finds_org:
            await self._check_org(issuer, claims, begun.request, system_db)
        return await self._sign_in(issuer, claims, begun, state, sign_in, actor)

    async def _check_org(
        self, issuer: Issuer, claims: Mapping[str, Any], request: str, system_db: AsyncEngine
    ) -> None:
        """Check that the address which the issuer has verified has its account in the issuer's own
        org. Another org may let in others through its own client there: so its own is asked, and
        nobody is signed in by this one. Raises: OtherOrganization."""
        email = claims.get("email")
        if not isinstance(email, str) or claims.get("email_verified") is not True:
            return  # who is known by their subject is signed in, and nobody else
        same = [each for each in await self._logins() if each.issuer.issuer == issuer.issuer]
        async with system_db.connect() as conn:
            orgs = [each.issuer.org_id for each in same]
            named = {"email": email.strip().lower(), "orgs": orgs}
            found = set(await conn.scalars(_ORGS_OF_EMAIL, named))
        if found == {issuer.org_id} or not (found or len(set(orgs)) > 1):
            return
        theirs = {each.issuer.org_id: each for each in same if each.issuer.org_id in found}
        raise OtherOrganization(sorted(theirs.values(), key=lambda each: each.org_name), request)

    async def _issuer(self, issuer_id: str) -> Issuer:
        listed = (await self._directory.snapshot()).by_id.get(issuer_id)
        if listed is None or listed.issuer.client_id is None:
            raise LoginRefused("the issuer is not listed for logins")
        return listed.issuer

    async def _discover(self, issuer: Issuer) -> IssuerMetadata:
        try:
            found = await self._keys.discover(issuer.issuer)
        except LoginIssuerUnavailable as error:
            raise LoginRefused(str(error)) from error
        if found.authorization_endpoint is None or found.token_endpoint is None:
            raise LoginRefused("the issuer has no authorization or token endpoint")
        return found

    def _open(self, state: str) -> LoginState:
        try:
            if len(state) > MAX_STATE_LENGTH:
                raise ValueError("too long")
            plain = self._states.open_text(state, STATE_PURPOSE.encode())
        except ValueError:
            raise LoginRefused("the state is not ours") from None
        return msgspec.json.decode(plain, type=LoginState)

    async def _redeem(
        self, issuer: Issuer, discovered: IssuerMetadata, code: str, begun: LoginState
    ) -> IssuerTokens:
        assert issuer.client_id is not None and discovered.token_endpoint is not None
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri_of(self._public_url, issuer.id),
            "code_verifier": begun.code_verifier,
        }
        headers: dict[str, str] = {}
        secret = await self._client_secret(issuer)
        methods = discovered.token_endpoint_auth_methods_supported
        if secret is not None and "client_secret_basic" in methods:
            headers["authorization"] = basic(issuer.client_id, secret)
        else:
            form |= {"client_id": issuer.client_id}
            form |= {} if secret is None else {"client_secret": secret}
        try:
            found = await self._egress.post_form(discovered.token_endpoint, form, headers=headers)
            if found.status != 200:
                raise LoginRefused(f"no tokens, status {found.status}")
            return msgspec.convert(found.json_object(), IssuerTokens)
        except EgressError as error:
            raise LoginRefused(f"{type(error).__name__}: {error}") from error
        except msgspec.ValidationError as error:
            raise LoginRefused(f"no tokens: {error}") from None

    async def _read_userinfo(
        self, discovered: IssuerMetadata, tokens: IssuerTokens, subject: str
    ) -> dict[str, Any]:
        """Return the claims of USERINFO, which an ID token may leave out if an access token comes
        with it (OpenID Connect Core, 5.4). They must be of the same subject."""
        url, token = discovered.userinfo_endpoint, tokens.access_token
        if url is None or token is None or TOKEN.fullmatch(token) is None:
            return {}
        try:
            found = await self._egress.get(url, bearer=token)
            if found.status != 200:
                raise LoginRefused(f"userinfo: status {found.status}")
            claims = found.json_object()
        except EgressError as error:
            raise LoginRefused(f"userinfo: {type(error).__name__}: {error}") from error
        if claims.get("sub") != subject:  # 5.3.2
            raise LoginRefused("userinfo: another subject")
        return {name: claims.get(name) for name in USERINFO}

    async def _client_secret(self, issuer: Issuer) -> str | None:
        columns = (issuers.c.client_secret_sealed, issuers.c.client_secret_id)
        found = sa.select(*columns).where(issuers.c.id == issuer.id)
        async with tenant(self._db, issuer.org_id) as conn:
            row = (await conn.execute(found.where(issuers.c.org_id == issuer.org_id))).one()
        if row.client_secret_id is None:
            return None
        try:
            plain = self._secrets.open(
                row.client_secret_sealed, issuer.id.encode(), row.client_secret_id
            )
        except (UnknownSecret, InvalidTag):
            raise LoginRefused(
                "the client secret cannot be decrypted and must be set again"
            ) from None
        return plain.decode()

    async def _verify(self, issuer: Issuer, id_token: str, begun: LoginState) -> dict[str, Any]:
        """Verify the ID token (OpenID Connect Core, 3.1.3.7)."""
        assert issuer.client_id is not None
        try:
            claims = await verified_claims(self._keys, issuer, read(id_token))
            check_claims(
                claims,
                issuer=issuer.issuer,
                audience=issuer.client_id,
                leeway_s=issuer.leeway_s,
                now=self._wall_clock(),
                max_lifetime_s=MAX_ID_TOKEN_LIFETIME_S,
            )
        except (InvalidToken, LoginIssuerUnavailable) as error:
            raise LoginRefused(f"ID token: {error}") from error
        nonce = claims.get("nonce")
        if not isinstance(nonce, str) or not hmac.compare_digest(
            nonce.encode(), begun.nonce.encode()
        ):
            raise LoginRefused("ID token: another nonce")
        alone = len(audiences(claims)) == 1
        if claims.get("azp", issuer.client_id if alone else None) != issuer.client_id:
            raise LoginRefused("ID token: for another client")
        if not fits(issuer, claims):
            raise LoginRefused("ID token: of another tenant of the issuer")
        return claims

    async def _sign_in(
        self,
        issuer: Issuer,
        claims: Mapping[str, Any],
        begun: LoginState,
        state: str,
        sign_in: Callable[[AsyncConnection, str, str], Awaitable[T]],
        actor: Callable[[str], Actor],
    ) -> CompletedLogin:
        now = datetime.fromtimestamp(self._wall_clock(), tz=UTC)
        async with tenant(self._db, issuer.org_id) as conn:
            await use_up(conn, issuer.org_id, state, begun, now)
            try:
                user_id = await find_or_add(conn, issuer, claims, actor)
            except TenancyError as error:
                raise LoginRefused(str(error)) from error
            signed_in = await sign_in(conn, issuer.org_id, user_id)
        return CompletedLogin(
            org_id=issuer.org_id,
            user_id=user_id,
            request=begun.request,
            signed_in=signed_in,
        )


def redirect_uri_of(public_url: str, issuer_id: str) -> str:
    """Return the redirect URI of an issuer. Each has its own, so that none can pass for another
    (RFC 9700, 4.4.2)."""
    return f"{public_url}/oauth/external/{issuer_id}/callback"


async def use_up(
    conn: AsyncConnection, org_id: str, state: str, begun: LoginState, now: datetime
) -> None:
    """Mark a state as used, and delete some expired ones of the org. Raises: LoginRefused."""
    c = external_login_states.c
    expires_at = datetime.fromtimestamp(begun.expires_at, tz=UTC)
    used = insert(external_login_states).values(
        state_hash=digest(state), org_id=org_id, expires_at=expires_at
    )
    if (await conn.execute(used.on_conflict_do_nothing())).rowcount == 0:
        raise LoginRefused("the state was used before")
    await delete_some(conn, c.state_hash, c.org_id == org_id, c.expires_at < now, limit=MAX_PURGED)


async def find_or_add(
    conn: AsyncConnection,
    issuer: Issuer,
    claims: Mapping[str, Any],
    actor: Callable[[str], Actor],
) -> str:
    """Return the live user of the claims; create them if the issuer provisions users.

    Raises: LoginRefused, TenancyError.
    """
    org_id, subject = issuer.org_id, claims["sub"]
    c = external_identities.c
    known = sa.select(c.user_id, users.c.archived_at).select_from(
        external_identities.join(users, c.user_id == users.c.id)
    )
    known = known.where(c.org_id == org_id, c.issuer_id == issuer.id, c.subject == subject)
    row = (await conn.execute(known)).one_or_none()
    if row is not None and row.archived_at is None:
        return str(row.user_id)
    email = claims.get("email")
    if not isinstance(email, str) or claims.get("email_verified") is not True:
        raise LoginRefused("an unknown subject without a verified e-mail address")
    try:
        user = await find_user(conn, org_id=org_id, email=email)
    except NotFound:
        role = role_of(issuer, claims)
        # Only an admin can bring an archived user back.
        if row is not None or not issuer.provisions_users or role is None:
            raise
        name = claims.get("name")
        user = await create_user(
            conn,
            org_id=org_id,
            email=email,
            name=name if is_name(name) else email[:MAX_NAME_LENGTH],
            role=role,
            actor=actor(issuer.id),
        )
    given = {"org_id": org_id, "issuer_id": issuer.id, "subject": subject, "user_id": user.id}
    added = insert(external_identities).values(**given)
    await conn.execute(
        added.on_conflict_do_update(
            index_elements=["issuer_id", "subject"], set_={"user_id": user.id}
        )
    )
    await record(
        conn,
        org_id=org_id,
        actor=actor(user.id),
        action="external_identity.created",
        target=user.id,
        after={"issuer_id": issuer.id, "subject": subject},
    )
    return user.id


def is_name(value: Any) -> TypeGuard[str]:
    return (
        isinstance(value, str)
        and 1 <= len(value) <= MAX_NAME_LENGTH
        and value.isprintable()
        and value == value.strip()
    )


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def basic(client_id: str, client_secret: str) -> str:
    """Return the Basic credentials of RFC 6749, 2.3.1: each part form-encoded first."""
    pair = f"{quote(client_id, safe='')}:{quote(client_secret, safe='')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()
