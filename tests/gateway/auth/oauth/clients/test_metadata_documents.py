"""Client ID Metadata Documents: whose document it is, what it may say, how long it is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.auth.oauth.clients.metadata_documents import (
    MAX_FETCHES_PER_MINUTE,
    MAX_STALE_S,
    RETRY_S,
    ClientDocumentError,
    ClientDocuments,
    ClientDocumentUnavailable,
    check_client_id_url,
)
from gateway.net.egress import BodyTooLarge, Egress, EgressTimeout
from tests.gateway.auth.issuing import Clock, FarEnd, rsa_key
from tests.gateway.net.test_egress import answer, serving

URL = "https://app.example.com/oauth/client.json"


def document(**more: Any) -> dict[str, Any]:
    given = {
        "client_id": URL,
        "client_name": "App",
        "redirect_uris": ["https://app.example.com/callback"],
    } | more
    return {name: value for name, value in given.items() if value is not None}


@pytest.fixture
def far_end() -> FarEnd:
    return FarEnd()


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def documents(far_end: FarEnd, clock: Clock) -> ClientDocuments:
    return ClientDocuments(far_end, clock=clock)  # type: ignore[arg-type]


async def test_a_document_is_a_client(documents: ClientDocuments, far_end: FarEnd) -> None:
    far_end.says(URL, document())
    client = await documents.fetch_metadata(URL)
    assert client.client_name == "App"
    assert client.redirect_uris == ["https://app.example.com/callback"]
    assert client.token_endpoint_auth_method == "none"
    assert client.grant_types == ["authorization_code"]


async def test_it_may_sign_with_a_key_that_it_publishes(
    documents: ClientDocuments, far_end: FarEnd
) -> None:
    jwks = {"keys": [rsa_key().as_dict(private=False)]}
    far_end.says(URL, document(token_endpoint_auth_method="private_key_jwt", jwks=jwks))
    client = await documents.fetch_metadata(URL)
    assert client.token_endpoint_auth_method == "private_key_jwt"


async def test_grants_that_are_not_for_strangers_are_not_granted(
    documents: ClientDocuments, far_end: FarEnd
) -> None:
    asked = ["authorization_code", "refresh_token", "client_credentials", "urn:of:another:server"]
    far_end.says(URL, document(grant_types=asked))
    client = await documents.fetch_metadata(URL)
    assert client.grant_types == ["authorization_code", "refresh_token"]


BAD: list[tuple[str, dict[str, Any]]] = [
    ("of another URL", document(client_id="https://app.example.com/other")),
    (
        "of a URL that differs in case",
        document(client_id="https://App.example.com/oauth/client.json"),
    ),
    ("of none", document(client_id=None)),
    ("a secret", document(client_secret="s3cret")),
    ("a secret's expiry", document(client_secret_expires_at=0)),
    ("client_secret_basic", document(token_endpoint_auth_method="client_secret_basic")),
    ("client_secret_post", document(token_endpoint_auth_method="client_secret_post")),
    ("client_secret_jwt", document(token_endpoint_auth_method="client_secret_jwt")),
    ("a key that is needed", document(token_endpoint_auth_method="private_key_jwt")),
    ("no redirect", document(redirect_uris=None)),
    ("no redirect in the list", document(redirect_uris=[])),
    ("no redirect, and no code", document(redirect_uris=[], grant_types=["refresh_token"])),
    ("a redirect of a script", document(redirect_uris=["javascript:alert(1)"])),
    ("a redirect with a wildcard", document(redirect_uris=["https://*.example.com/"])),
    ("a redirect that looks alike", document(redirect_uris=["https://\u0430pp.example.com/"])),
    ("a redirect without TLS", document(redirect_uris=["http://app.example.com/"])),
    ("another flow", document(response_types=["token"])),
    ("a name that is no text", document(client_name=5)),
    ("no grants at all", document(grant_types=[])),
]


@pytest.mark.parametrize(("kind", "content"), BAD)
async def test_a_document_that_breaks_a_rule_is_refused(
    documents: ClientDocuments, far_end: FarEnd, kind: str, content: dict[str, Any]
) -> None:
    far_end.says(URL, content)
    with pytest.raises(ClientDocumentError):
        await documents.fetch_metadata(URL)


@pytest.mark.parametrize(
    "url",
    [
        "http://app.example.com/client.json",
        "https://app.example.com",
        "https://app.example.com/",
        "https://app.example.com/a/../client.json",
        "https://app.example.com/./client.json",
        "https://app.example.com/%2E%2e/client.json",
        "https://user@app.example.com/client.json",
        "https://app.example.com/client.json#x",
        "https://127.0.0.1/client.json",
        "https://localhost/client.json",
        "https://\u0430pp.example.com/client.json",
    ],
)
async def test_a_url_that_cannot_be_a_clients_id_is_not_asked(
    documents: ClientDocuments, far_end: FarEnd, url: str
) -> None:
    with pytest.raises(ClientDocumentError):
        await documents.fetch_metadata(url)
    assert far_end.asked == []


def test_loopback_is_allowed_where_it_is_configured() -> None:
    assert check_client_id_url("http://localhost:1/x", allow_loopback=True) == "localhost"


@pytest.mark.parametrize("status", [301, 302, 304, 404, 500])
async def test_only_a_200_counts_and_a_redirect_is_none(
    documents: ClientDocuments, far_end: FarEnd, status: int
) -> None:
    far_end.says(URL, document(), status=status, location="https://app.example.com/else")
    with pytest.raises(ClientDocumentError, match=str(status)):
        await documents.fetch_metadata(URL)
    assert far_end.asked == [URL]


async def test_what_is_no_json_is_refused(documents: ClientDocuments, far_end: FarEnd) -> None:
    far_end.says(URL, b"<html>")
    with pytest.raises(ClientDocumentError):
        await documents.fetch_metadata(URL)
    far_end.fails(URL, EgressTimeout("slow"))
    with pytest.raises(ClientDocumentError, match="EgressTimeout"):
        await documents.fetch_metadata(URL)


async def test_it_is_kept_for_an_hour_and_read_again(
    documents: ClientDocuments, far_end: FarEnd, clock: Clock
) -> None:
    far_end.says(URL, document())
    first = await documents.fetch_metadata(URL)
    clock.now += 3599
    assert await documents.fetch_metadata(URL) is first
    clock.now += 2
    await documents.fetch_metadata(URL)
    assert len(far_end.asked) == 2


@pytest.mark.parametrize(
    ("control", "kept_s"),
    [
        ("max-age=600", 600),
        ("public, max-age=1", 60),
        ("max-age=999999999", 86_400),
        ("no-store", 0),
        ("private, no-cache", 0),
    ],
)
async def test_it_is_kept_as_the_answer_says_within_bounds(
    documents: ClientDocuments, far_end: FarEnd, clock: Clock, control: str, kept_s: float
) -> None:
    far_end.says(URL, document(), cache_control=control)
    await documents.fetch_metadata(URL)
    if kept_s:
        clock.now += kept_s - 1
        await documents.fetch_metadata(URL)
        assert len(far_end.asked) == 1
        clock.now += 2
    await documents.fetch_metadata(URL)
    assert len(far_end.asked) == 2


async def test_a_refusal_is_not_kept(documents: ClientDocuments, far_end: FarEnd) -> None:
    far_end.says(URL, document(client_secret="x"))
    with pytest.raises(ClientDocumentError):
        await documents.fetch_metadata(URL)
    far_end.says(URL, document())
    assert (await documents.fetch_metadata(URL)).client_name == "App"


async def test_a_host_is_asked_a_bounded_number_of_times_a_minute(
    documents: ClientDocuments, far_end: FarEnd, clock: Clock
) -> None:
    clock.now = 0.0
    for number in range(MAX_FETCHES_PER_MINUTE + 5):
        with pytest.raises(ClientDocumentError):
            await documents.fetch_metadata(f"https://app.example.com/{number}")
    assert len(far_end.asked) == MAX_FETCHES_PER_MINUTE
    clock.now = 60.0
    with pytest.raises(ClientDocumentError):
        await documents.fetch_metadata("https://app.example.com/again")
    assert len(far_end.asked) == MAX_FETCHES_PER_MINUTE + 1


async def test_who_uses_a_hosts_share_up_takes_no_known_client_away(
    documents: ClientDocuments, far_end: FarEnd, clock: Clock
) -> None:
    far_end.says(URL, document())
    await documents.fetch_metadata(URL)
    clock.now += 3_661
    for number in range(MAX_FETCHES_PER_MINUTE + 5):
        far_end.says(made_up := f"https://app.example.com/{number}", {}, status=404)
        with pytest.raises(ClientDocumentError):
            await documents.fetch_metadata(made_up)
    far_end.says(URL, document(client_name="Renamed"))
    assert (await documents.fetch_metadata(URL)).client_name == "Renamed"
    with pytest.raises(ClientDocumentUnavailable):
        await documents.fetch_metadata("https://app.example.com/not-known-yet")


async def test_a_host_that_does_not_answer_takes_no_known_client_away_for_a_day(
    documents: ClientDocuments, far_end: FarEnd, clock: Clock
) -> None:
    far_end.says(URL, document())
    first = await documents.fetch_metadata(URL)
    clock.now += 3_601
    for status in (500, 503, 429):
        far_end.says(URL, b"", status=status)
        assert await documents.fetch_metadata(URL) is first
        clock.now += RETRY_S
    far_end.fails(URL, EgressTimeout("slow"))
    asked = len(far_end.asked)
    for _ in range(3):
        assert await documents.fetch_metadata(URL) is first
    assert len(far_end.asked) == asked + 1, "nor is everybody made to wait for it"
    clock.now += MAX_STALE_S
    with pytest.raises(ClientDocumentUnavailable):
        await documents.fetch_metadata(URL)
    far_end.says(URL, document())
    assert (await documents.fetch_metadata(URL)) == first


@pytest.mark.parametrize("why", ["gone", "another's", "too large", "not to be kept"])
async def test_a_host_that_says_it_is_no_more_is_believed(
    documents: ClientDocuments, far_end: FarEnd, clock: Clock, why: str
) -> None:
    far_end.says(URL, document())
    await documents.fetch_metadata(URL)
    clock.now += 3_601
    if why == "gone":
        far_end.says(URL, b"", status=404)
    elif why == "another's":
        far_end.says(URL, document(client_id="https://app.example.com/other"))
    elif why == "too large":
        far_end.fails(URL, BodyTooLarge("more than 5120 bytes"))
    else:
        far_end.says(URL, document(), cache_control="no-store")
    if why == "not to be kept":
        await documents.fetch_metadata(URL)
    else:
        with pytest.raises(ClientDocumentError) as refused:
            await documents.fetch_metadata(URL)
        assert not isinstance(refused.value, ClientDocumentUnavailable)
    far_end.fails(URL, EgressTimeout("slow"))
    with pytest.raises(ClientDocumentUnavailable):
        await documents.fetch_metadata(URL)


async def test_many_at_once_cause_one_request_and_one_who_leaves_spoils_nothing() -> None:
    seen = 0

    async def handle(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        await asyncio.sleep(0.05)
        url = f"http://127.0.0.1:{port}/c"
        body = f'{{"client_id":"{url}","redirect_uris":["http://127.0.0.1/cb"]}}'
        writer.write(answer(body.encode()))

    egress = Egress(allow_loopback=True)
    documents = ClientDocuments(egress, allow_loopback=True)
    async with serving(handle) as port:
        url = f"http://127.0.0.1:{port}/c"
        asking = [asyncio.create_task(documents.fetch_metadata(url)) for _ in range(10)]
        await asyncio.sleep(0.01)
        asking[0].cancel()
        found = await asyncio.gather(*asking[1:])
    assert seen == 1
    assert {each.client_name for each in found} == {None}
    egress.close()


async def test_closing_ends_what_is_on_its_way() -> None:
    async def silent(head: bytes, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    egress = Egress(allow_loopback=True)
    documents = ClientDocuments(egress, allow_loopback=True)
    async with serving(silent) as port:
        asking = asyncio.create_task(documents.fetch_metadata(f"http://127.0.0.1:{port}/c"))
        await asyncio.sleep(0.05)
        await documents.close()
        with pytest.raises(asyncio.CancelledError):
            await asking
    egress.close()
