"""Every URL that a tenant or a stranger names: each field has its place, and where the gateway
would ask, what leads inward is refused as it is registered, exactly as when it is asked."""

from __future__ import annotations

import importlib
import pkgutil
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, get_type_hints

import msgspec
import pytest

import gateway
from gateway.auth.oauth import rfc7591_register
from gateway.auth.oauth.clients.metadata_documents import ClientDocumentError
from gateway.net.egress import Egress, FetchResponse, ForbiddenTarget
from tests.gateway.routes.admin.conftest import World
from tests.gateway.routes.admin.installation.test_admin_issuers import body_of

# ---- the fields

URL_LIKE = re.compile(
    r"(^|_)(ur[il]s?|endpoints?|issuers?|origins?|jwks|href|logo|avatar|link|callback|webhook"
    r"|domain|hosts?|redirects?|location|src|icons?|picture|site|images?|audio|video|resources?"
    r"|authorization_servers|source|resource_metadata)$"
)
ASKED = {
    "NewWebhookEndpoint.url",
    "WebhookEndpointPatch.url",
    "IssuerBody.issuer",
    "Rules.issuer",  # the same, as the verbs take it
    "ClientWritten.jwks_uri",
    "ClientMetadata.jwks_uri",
}
"""These are registered, and asked by the gateway: checked with a look-up (`Egress.check`)."""
SHOWN = {
    f"{kind}.{name}"
    for kind in ("ClientWritten", "ClientMetadata")
    for name in ("client_uri", "logo_uri", "tos_uri", "policy_uri")
}
"""These are registered and shown as links: checked as they are written (`Egress.target`)."""
FOUND = {
    *(f"IssuerMetadata.{name}_endpoint" for name in ("authorization", "token", "userinfo")),
    *("IssuerMetadata.issuer", "IssuerMetadata.jwks_uri"),
    *(f"Server.{name}_endpoint" for name in ("authorization", "token", "registration")),
    *("Server.issuer", "ResourceMetadata.authorization_servers", "ResourceMetadata.resource"),
    *("Challenge.resource_metadata", "KnownClient.issuer"),
    *(f"UpstreamClient.{name}" for name in ("token_endpoint", "authorization_endpoint")),
    *("UpstreamClient.issuer", "UpstreamClient.resource"),
}
"""Strangers publish these: never registered, checked each time they are asked or led to."""
BROWSED = {
    *("ClientWritten.redirect_uris", "ClientMetadata.redirect_uris"),
    *("AuthorizationQuery.redirect_uri", "TokenForm.redirect_uri"),
    *("OrganizationPatch.cors_origins", "OrgView.cors_origins"),
}
"""A browser is or is sent there: the gateway asks nobody there, and RFC 8252 has loopback."""
OURS = {
    *("OAuthClient.redirect_uris", "OAuthClient.jwks_uri", "OAuthClient.jwks"),
    *("OAuthClientOnce.redirect_uris", "OAuthClientOnce.jwks_uri", "OAuthClientOnce.jwks"),
    *("RegisteredClient.redirect_uris", "RegisteredClient.registration_client_uri"),
    *("Client.redirect_uris", "Client.jwks_uri", "Client.jwks"),
    *("IssuerView.issuer", "IssuerView.redirect_uri", "Issuer.issuer"),
    *("WebhookEndpoint.url", "WebhookEndpointOnce.url", "EndpointRecord.url", "LeasedDelivery.url"),
    *("FirstInvite.url", "CreatedInviteView.url", "PasswordReset.url", "ShownLink.url"),
    *("MessageBatchObject.results_url", "BatchObject.endpoint", "Batch.endpoint"),
    *(f"ServerMetadata.{name}" for name in ("issuer", "jwks_uri")),
    *(
        f"ServerMetadata.{name}_endpoint"
        for name in (
            *("authorization", "token", "registration", "revocation"),
            *("introspection", "userinfo"),
        )
    ),
    "OwnMetadata.redirect_uri",
    "OwnMetadata.document_url",
}
"""The gateway itself writes these, or has stored them after a check."""
NO_ADDRESS = {
    *("ClientWritten.jwks", "ClientMetadata.jwks"),  # the keys themselves
    *("AuthorizationQuery.resource", "TokenForm.resource", "OAuthGrant.resources"),  # compared
    *("AccountView.issuer", "NewTerms.issuer"),  # two letters on an invoice
    *("NewRate.source", "RateView.source"),  # a name on an invoice
    *("NewBatch.endpoint", "WrittenLine.url"),  # paths of our own
    # Names of machines, for people.
    *("JoinedEngineView.host", "FleetReplicaView.host", "FleetReplica.host", "ShownReplica.host"),
    "Snapshot.by_issuer",
}


def found_fields() -> Iterator[str]:
    """Yield the fields of all structs of the gateway that are named like a URL and may hold a
    text. Settings are the operator's."""
    kinds = {}
    for module in pkgutil.walk_packages(gateway.__path__, "gateway."):
        if module.name.startswith(PLACES):
            for each in vars(importlib.import_module(module.name)).values():
                if isinstance(each, type) and issubclass(each, msgspec.Struct):
                    kinds[each.__module__, each.__qualname__] = each
    for (module_name, name), kind in kinds.items():
        if module_name.startswith(PLACES):
            hints = get_type_hints(kind)
            for field in kind.__struct_fields__:
                if URL_LIKE.search(field) and HOLDS_TEXT.search(str(hints[field])):
                    yield f"{name}.{field}"


PLACES = (
    *("gateway.wire.", "gateway.routes.", "gateway.auth.oauth.clients", "gateway.auth.federation"),
    *("gateway.vault", "gateway.webhooks"),
)
HOLDS_TEXT = re.compile(r"\bstr\b|Any|Raw|dict")


def test_every_field_that_may_hold_a_url_has_its_place() -> None:
    """A new one that is asked joins the matrix below."""
    placed = [*ASKED, *SHOWN, *FOUND, *BROWSED, *OURS, *NO_ADDRESS]
    assert len(placed) == len(set(placed))
    assert set(found_fields()) == set(placed)


# ---- the addresses

WRITTEN = [
    *("127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "224.0.0.1", "0.0.0.0", "255.255.255.255", "168.63.129.16", "198.18.0.1"),
    *("[::1]", "[::]", "[fd00:ec2::254]", "[fe80::1]", "[ff02::1]", "[2002:7f00:1::]"),
    *("[64:ff9b::7f00:1]", "[64:ff9b:1::a00:1]", "[2001:0:7f00:1::]", "[::ffff:127.0.0.1]"),
    *("[::ffff:a9fe:a9fe]", "[::127.0.0.1]", "[0:0:0:0:0:0:0:1]"),
    *("2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "0x7f.0.0.1", "127.1", "127.0.1"),
    *("127.0.0.1.", "10.0.0.1.", "localhost", "LOCALHOST", "localhost.", "app.localhost."),
    *("public.example.com@127.0.0.1", "127.0.0.1%2f@public.example.com", "user:pw@10.0.0.1"),
    *("127.0.0.1:443@public.example.com", "metadata", "%31%32%37.0.0.1", "127%2e0.0.1"),
]
NAMES = {
    "loopback.example.com": ["127.0.0.1"],
    "private.example.com": ["10.1.2.3"],
    "metadata.example.com": ["169.254.169.254"],
    "cgnat.example.com": ["100.64.1.1"],
    "ula.example.com": ["fd00:ec2::254"],
    "mapped.example.com": ["::ffff:10.0.0.1"],
    "nat64.example.com": ["64:ff9b::a00:1"],
    "6to4.example.com": ["2002:a00:1::"],
    "teredo.example.com": ["2001:0:a00:1::"],
    "unspecified.example.com": ["0.0.0.0"],
    "both.example.com": ["1.1.1.1", "10.0.0.1"],
    "app.localhost": ["127.0.0.1"],
}
PUBLIC = {"public.example.com": ["1.1.1.1", "2606:4700:4700::1111"]}
URLS = [f"https://{host}/x" for host in (*WRITTEN, *NAMES)]
SHOWN_URLS = [f"https://{host}/x" for host in WRITTEN]

Names = dict[str, list[str]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Return what names mean to this process, which a test may change."""
    known: Names = {**NAMES, **PUBLIC}
    real = socket.getaddrinfo

    def look_up(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name in known:
            return [(socket.AF_INET, 1, 6, "", (address, port)) for address in known[name]]
        if isinstance(name, str) and name.endswith(".example.com"):
            raise socket.gaierror(socket.EAI_NONAME, "nobody knows it")
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


# ---- where they are registered

Refusal = tuple[int, str | None, str]
Register = Callable[[World, str], Awaitable[Refusal]]
EVENTS = ["budget.threshold_reached"]
KEYS_BY_URI = {"token_endpoint_auth_method": "private_key_jwt"}
CALLBACK = {"redirect_uris": ["https://public.example.com/cb"]}


async def told(world: World, method: str, path: str, body: dict[str, Any]) -> Refusal:
    """Return the status, the field that is named, and the text."""
    answer = await world.call(method, path, body)
    said = answer.json()
    return answer.status_code, said.get("param", said.get("field")), answer.text


async def webhook(world: World, url: str) -> Refusal:
    return await told(world, "POST", "/v1/admin/webhooks", {"url": url, "event_types": EVENTS})


async def changed_webhook(world: World, url: str) -> Refusal:
    (one, *_) = (await world.call("GET", "/v1/admin/webhooks")).json()["data"]
    path = f"/v1/admin/webhooks/{one['id']}"
    etag = (await world.call("GET", path)).headers["etag"]
    answer = await world.call("PATCH", path, {"url": url}, if_match=etag)
    return answer.status_code, answer.json().get("param"), answer.text


async def issuer(world: World, url: str) -> Refusal:
    return await told(world, "POST", "/v1/admin/issuers", await body_of(world, issuer=url))


def client(path: str, field: str) -> Register:
    async def register(world: World, url: str) -> Refusal:
        by_keys = KEYS_BY_URI if field == "jwks_uri" else {}
        body = {"client_name": "App", **CALLBACK, **by_keys, field: url}
        return await told(world, "POST", path, body)

    return register


CLIENTS = {"ClientWritten": "/v1/admin/oauth/clients", "ClientMetadata": "/oauth/register"}
REGISTERED: dict[str, Register] = {
    "NewWebhookEndpoint.url": webhook,
    "WebhookEndpointPatch.url": changed_webhook,
    "IssuerBody.issuer": issuer,
    **{
        each: client(CLIENTS[each.split(".")[0]], each.split(".")[1])
        for each in (*ASKED, *SHOWN)
        if each.split(".")[0] in CLIENTS
    },
}


@pytest.fixture
def unthrottled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EACH", "ALL"):
        limit = getattr(rfc7591_register, name)
        monkeypatch.setattr(rfc7591_register, name, msgspec.structs.replace(limit, free=10**6))


async def test_what_leads_inward_is_refused_where_it_is_registered(
    world: World, names: Names, unthrottled: None
) -> None:
    assert REGISTERED.keys() | {"Rules.issuer"} == ASKED | SHOWN
    passed = []
    for place, register in REGISTERED.items():
        good = await register(world, "https://public.example.com/x")
        assert good[0] in (200, 201), (place, good)
        field = place.split(".")[1]
        for url in SHOWN_URLS if place in SHOWN else URLS:
            status, param, text = await register(world, url)
            told_address = any(each in text for each in NAMES.get(url.split("/")[2], ()))
            if (status, param, told_address) != (400, field, False):
                passed.append((place, url, status, param))
    assert passed == []


async def test_a_name_that_nobody_knows_yet_may_be_registered(world: World, names: Names) -> None:
    for place in ("NewWebhookEndpoint.url", "IssuerBody.issuer", "ClientWritten.jwks_uri"):
        status, _, text = await REGISTERED[place](world, "https://soon.example.com/x")
        assert status == 201, text


@pytest.mark.parametrize("field", ["jwks_uri", "client_uri", "logo_uri", "tos_uri", "policy_uri"])
async def test_a_client_document_names_nothing_that_leads_inward(
    world: World, names: Names, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    place, named = "https://public.example.com/client", ["https://public.example.com/x"]

    async def get(_self: Egress, asked: str, **_: Any) -> FetchResponse:
        by_keys = KEYS_BY_URI if field == "jwks_uri" else {}
        body = msgspec.json.encode({"client_id": asked, **CALLBACK, **by_keys, field: named[-1]})
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        return FetchResponse(url=asked, status=200, headers=headers, body=body)

    documents = world.services.federation.documents
    monkeypatch.setattr(Egress, "get", get)
    monkeypatch.setattr("gateway.auth.oauth.clients.metadata_documents.MAX_FETCHES_PER_MINUTE", 999)
    assert getattr(await documents.fetch_metadata(place), field) == named[-1]
    for url in URLS if field == "jwks_uri" else SHOWN_URLS:
        named.append(url)
        with pytest.raises(ClientDocumentError, match=field):
            await documents.fetch_metadata(place)


async def test_a_client_whose_id_leads_inward_is_not_asked(world: World, names: Names) -> None:
    for url in URLS:
        assert await world.services.federation.documents.find_client(url) is None, url


# ---- where they are asked


async def test_what_is_refused_at_registration_is_what_is_refused_when_it_is_asked(
    names: Names,
) -> None:
    """Nothing is dialled: a connection would be another error."""
    egress = Egress(timeout_s=1.0)
    try:
        for url in URLS:
            with pytest.raises(ForbiddenTarget):
                await egress.check(url)
            for ask in (egress.get(url), egress.post_json(url, b"{}", headers={})):
                with pytest.raises(ForbiddenTarget):
                    await ask
        await egress.check("https://public.example.com/x")
    finally:
        egress.close()


async def test_a_name_that_turns_inward_after_its_registration_is_not_asked(names: Names) -> None:
    egress, url = Egress(timeout_s=1.0), "https://public.example.com/x"
    try:
        await egress.check(url)
        names["public.example.com"] = ["10.0.0.1"]
        with pytest.raises(ForbiddenTarget):
            await egress.get(url)
        with pytest.raises(ForbiddenTarget):
            await egress.check(url)
    finally:
        egress.close()


async def test_this_machine_stays_allowed_where_the_operator_allows_it(names: Names) -> None:
    egress = Egress(allow_loopback=True, timeout_s=1.0)
    try:
        await egress.check("http://localhost:1/x")
        await egress.check("https://127.0.0.1/x")
        await egress.check("https://loopback.example.com/x")
        with pytest.raises(ForbiddenTarget):
            await egress.check("https://private.example.com/x")
    finally:
        egress.close()
    near = Egress(near={"private.example.com": "private"}, timeout_s=1.0)
    try:
        await near.check("https://private.example.com/x")
        for other in ("https://metadata.example.com/x", "https://10.1.2.3/x"):
            with pytest.raises(ForbiddenTarget):
                await near.check(other)
    finally:
        near.close()
