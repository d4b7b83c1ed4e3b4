"""The one client for a stranger's URLs, against servers that mean harm: real sockets on loopback,
which is allowed here; only names are made up."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.net.egress import (
    MAX_BODY_BYTES,
    MAX_CONCURRENT,
    MAX_WAITING,
    BodyTooLarge,
    Egress,
    EgressBusy,
    EgressFailed,
    EgressTimeout,
    FetchResponse,
    ForbiddenTarget,
)
from gateway.net.egress_targets import Near
from tests.pace import skip

Handle = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
HOST = "issuer.example.com"


@asynccontextmanager
async def serving(handle: Handle, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server that hands each request's head to `handle`; its port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await handle(head, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def answer(
    body: bytes = b"{}", *headers: str, status: str = "200 OK", media: str = "application/json"
) -> bytes:
    lines = [
        f"HTTP/1.1 {status}",
        f"content-type: {media}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def always(content: bytes, seen: list[bytes] | None = None) -> Handle:
    async def handle(head: bytes, writer: asyncio.StreamWriter) -> None:
        if seen is not None:
            seen.append(head)
        writer.write(content)

    return handle


@pytest.fixture
async def egress() -> AsyncIterator[Egress]:
    client = Egress(allow_loopback=True, timeout_s=1.0)
    yield client
    client.close()


def at(*addresses: str) -> Callable[[str, int], Awaitable[list[str]]]:
    """A resolver that answers with each in turn, and with the last from then on."""
    left = list(addresses)

    async def resolve(host: str, port: int) -> list[str]:
        return [left.pop(0) if len(left) > 1 else left[0]]

    return resolve


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were to be reached; none of them is."""
    addresses: list[str] = []

    async def dial(_loop: Any, _protocol: Any, host: str, *_: Any, **_options: Any) -> None:
        addresses.append(host)
        raise OSError("unreachable")

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", dial)
    return addresses


async def test_it_asks_plainly_and_gives_the_answer_whole(egress: Egress) -> None:
    seen: list[bytes] = []
    async with serving(always(answer(b'{"a":1}', "X-More: yes"), seen)) as port:
        found = await egress.get(f"http://127.0.0.1:{port}/x?y=z")
    assert (found.status, found.json_object(), found.headers["x-more"]) == (200, {"a": 1}, "yes")
    head = seen[0].decode().lower()
    assert head.startswith("get /x?y=z http/1.1\r\n")
    assert f"host: 127.0.0.1:{port}\r\n" in head
    assert "accept-encoding: identity\r\n" in head
    assert "cookie" not in head and "authorization" not in head


async def test_a_token_is_shown_to_the_host_that_it_is_for(egress: Egress) -> None:
    seen: list[bytes] = []
    moved = answer(b"", "location: http://localhost:1/again", status="307 Moved")
    async with serving(always(moved, seen)) as port:
        found = await egress.get(f"http://localhost:{port}/userinfo", bearer="t0ken")
    assert found.status == 307, "not followed"
    assert b"authorization: Bearer t0ken\r\n" in seen[0]


async def test_a_form_is_posted_with_the_headers_of_this_call(egress: Egress) -> None:
    seen: list[bytes] = []
    async with serving(always(answer(b"", "location: /again", status="307 Moved"), seen)) as port:
        found = await egress.post_form(
            f"http://localhost:{port}/token", {"code": "a b"}, headers={"authorization": "Basic x"}
        )
    assert found.status == 307, "not followed"
    assert len(seen) == 1
    head = seen[0].decode().lower()
    assert "authorization: basic x\r\n" in head and "content-length: 8\r\n" in head
    assert "content-type: application/x-www-form-urlencoded\r\n" in head


async def test_no_proxy_of_the_environment_is_used(
    egress: Egress, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(always(answer())) as port:
        assert (await egress.get(f"http://127.0.0.1:{port}/")).status == 200


async def test_a_cookie_is_not_kept(egress: Egress) -> None:
    seen: list[bytes] = []
    async with serving(always(answer(b"{}", "set-cookie: a=b; Path=/"), seen)) as port:
        await egress.get(f"http://127.0.0.1:{port}/")
        await egress.get(f"http://127.0.0.1:{port}/")
    assert b"cookie" not in seen[1].lower()


async def test_rebinding_a_name_finds_the_checked_address_dialled(dialled: list[str]) -> None:
    egress = Egress(resolve=at("93.184.216.34", "127.0.0.1"))
    with pytest.raises(EgressFailed):
        await egress.get(f"https://{HOST}/")
    assert dialled == ["93.184.216.34"]
    with pytest.raises(ForbiddenTarget):
        await egress.get(f"https://{HOST}/")
    assert dialled == ["93.184.216.34"], "what the name means now was not dialled"
    egress.close()


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "169.254.169.254", "100.64.0.1"]
)
async def test_a_name_of_an_inner_address_is_not_dialled(address: str, dialled: list[str]) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", address]

    egress = Egress(resolve=resolve)
    with pytest.raises(ForbiddenTarget):
        await egress.get(f"https://{HOST}/")
    assert dialled == []
    egress.close()


NEAR: dict[str, Near] = {HOST: "private", "10.0.0.7": "private", "near.example.com": "loopback"}


@pytest.mark.parametrize(
    ("host", "address", "may"),
    [
        (HOST, "10.1.2.3", True),
        (HOST, "fd00::1", True),
        ("10.0.0.7", "10.0.0.7", True),
        ("near.example.com", "127.0.0.1", True),
        ("other.example.com", "10.1.2.3", False),
        (f"sub.{HOST}", "10.1.2.3", False),
        ("near.example.com", "10.1.2.3", False),
        (HOST, "127.0.0.1", False),
        (HOST, "169.254.169.254", False),
        (HOST, "fe80::1", False),
        (HOST, "::ffff:10.1.2.3", False),
        (HOST, "0.0.0.0", False),
        ("10.0.0.8", "10.0.0.8", False),
        ("other.example.com", "127.0.0.1", False),
    ],
)
async def test_a_named_host_may_lie_near_and_no_other(
    host: str, address: str, may: bool, dialled: list[str]
) -> None:
    egress = Egress(near=NEAR, resolve=at(address))
    try:
        with pytest.raises(EgressFailed if may else ForbiddenTarget):
            await egress.get(f"https://{host}/")
    finally:
        egress.close()
    assert dialled == ([address] if may else [])


@pytest.mark.parametrize("url", [f"http://{HOST}/", "http://10.0.0.7/", "https://10.000.0.7/"])
async def test_a_named_host_is_asked_plainly_and_over_tls(url: str) -> None:
    egress = Egress(near=NEAR)
    try:
        with pytest.raises(ForbiddenTarget):
            await egress.get(url)
    finally:
        egress.close()


async def test_every_address_of_a_name_is_tried_up_to_a_bound(dialled: list[str]) -> None:
    public = [f"93.184.216.{number}" for number in range(1, 9)]

    async def resolve(host: str, port: int) -> list[str]:
        return public

    egress = Egress(resolve=resolve)
    with pytest.raises(EgressFailed):
        await egress.get(f"https://{HOST}/")
    assert dialled == public[:3]
    egress.close()


async def test_a_name_without_an_address_is_a_failure() -> None:
    async def nothing(host: str, port: int) -> list[str]:
        return []

    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    for resolve in (nothing, unknown):
        egress = Egress(resolve=resolve)
        with pytest.raises(EgressFailed):
            await egress.get(f"https://{HOST}/")
        egress.close()


@pytest.mark.parametrize("url", ["https://0177.0.0.1/", "https://[::ffff:127.0.0.1]/", "ftp://a.b"])
async def test_an_odd_url_is_refused_before_anything_is_looked_up(url: str) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise AssertionError("looked up")

    egress = Egress(resolve=resolve)
    with pytest.raises(ForbiddenTarget):
        await egress.get(url)
    egress.close()


async def test_loopback_is_refused_unless_it_is_asked_for() -> None:
    egress = Egress()
    for url in ("https://127.0.0.1/", "http://127.0.0.1/", "https://localhost/"):
        with pytest.raises(ForbiddenTarget):
            await egress.get(url)
    egress.close()


@pytest.mark.parametrize(
    "location",
    [
        *("https://169.254.169.254/", "http://169.254.169.254/", "https://10.0.0.1/x"),
        *("https://[", "//[::1", "https://a:99999/"),
    ],
)
async def test_a_redirect_to_an_inner_address_is_not_followed(
    egress: Egress, location: str
) -> None:
    moved = answer(b"", f"location: {location}", status="302 Found")
    async with serving(always(moved)) as port:
        with pytest.raises(ForbiddenTarget):
            await egress.get(f"http://127.0.0.1:{port}/", max_redirects=1)


async def test_redirects_are_followed_as_often_as_was_said(egress: Egress) -> None:
    seen: list[bytes] = []
    moved = answer(b"", "location: /again", status="301 Moved")
    async with serving(always(moved, seen)) as port:
        found = await egress.get(f"http://127.0.0.1:{port}/", max_redirects=2)
        assert (found.status, len(seen)) == (301, 3)
        assert (await egress.get(f"http://127.0.0.1:{port}/")).status == 301
    assert len(seen) == 4


async def test_a_slow_body_ends_with_the_deadline(egress: Egress) -> None:
    async def drip(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        for _ in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with serving(drip) as port:
        with pytest.raises(EgressTimeout):  # before the body is whole
            await egress.get(f"http://127.0.0.1:{port}/")


async def test_a_name_that_is_slow_to_resolve_ends_with_the_deadline() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    egress = Egress(resolve=resolve, timeout_s=0.1)
    with pytest.raises(EgressTimeout):
        await egress.get(f"https://{HOST}/")
    egress.close()


@pytest.mark.usefixtures("dialled")
async def test_who_is_slow_holds_up_who_waits_for_it_alone() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        if host.startswith("slow"):
            await asyncio.sleep(60)
        return ["93.184.216.34"]

    egress = Egress(resolve=resolve, per_host=1, timeout_s=60.0, wait_s=0.2)
    slow = [asyncio.create_task(egress.get("https://slow.example.com/")) for _ in range(40)]
    await asyncio.sleep(0.01)
    with pytest.raises(EgressFailed):  # dialled, in spite of more of those than there are turns
        await egress.get(f"https://{HOST}/")
    done = await asyncio.gather(*slow[1:], return_exceptions=True)
    assert {type(each) for each in done} == {EgressBusy}
    hosts = [f"https://slow{number}.example.com/" for number in range(MAX_CONCURRENT)]
    slow += [asyncio.create_task(egress.get(each)) for each in hosts]
    await asyncio.sleep(0.01)
    with pytest.raises(EgressBusy):
        await egress.get(f"https://{HOST}/")
    many = [egress.get(f"https://{HOST}/") for _ in range(MAX_WAITING + 5)]
    done = await asyncio.gather(*many, return_exceptions=True)
    assert {type(each) for each in done} == {EgressBusy}
    assert sum("too many" in str(each) for each in done) >= 5
    for each in slow:
        each.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert egress._turns._hosts == {} and egress._turns._waiting == 0
    egress.close()


async def test_the_time_of_an_exchange_begins_with_its_turn() -> None:
    """Each takes a minute of the hundred seconds that it has, the last after two others."""
    asked, due = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def slowly(head: bytes, writer: asyncio.StreamWriter) -> None:
        asked.release()
        await due.acquire()
        writer.write(answer())

    egress = Egress(allow_loopback=True, per_host=1, timeout_s=100.0, wait_s=1000.0)
    async with serving(slowly) as port:
        url = f"http://127.0.0.1:{port}/"
        asking = [asyncio.create_task(egress.get(url)) for _ in range(3)]
        async with asyncio.timeout(3 * 60 + 30):
            for _ in asking:
                await asked.acquire()
                skip(60.0)
                await asyncio.sleep(0)
                due.release()
            found = await asyncio.gather(*asking)
    assert [each.status for each in found] == [200] * 3
    egress.close()


async def test_an_endless_body_costs_no_more_than_its_bound(egress: Egress) -> None:
    sent = 0

    async def pour(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 65536

    async with serving(pour) as port:
        with pytest.raises(BodyTooLarge):
            await egress.get(f"http://127.0.0.1:{port}/")
    assert sent < 100 * MAX_BODY_BYTES


async def test_an_endless_head_is_a_failure(egress: Egress) -> None:
    async def pour(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: " + b"y" * 8192 + b"\r\n")
            await writer.drain()

    async with serving(pour) as port:
        with pytest.raises(EgressFailed):
            await egress.get(f"http://127.0.0.1:{port}/")


async def test_a_gzip_bomb_stays_packed(egress: Egress) -> None:
    bomb = gzip.compress(b"0" * 10_000_000)
    async with serving(always(answer(bomb, "content-encoding: gzip"))) as port:
        with pytest.raises(EgressFailed, match="content coding"):
            await egress.get(f"http://127.0.0.1:{port}/")


async def test_what_is_no_http_is_a_failure(egress: Egress) -> None:
    async with serving(always(b"SSH-2.0-x\r\n\r\n")) as port:
        with pytest.raises(EgressFailed):
            await egress.get(f"http://127.0.0.1:{port}/")


def test_json_is_taken_where_it_says_that_it_is() -> None:
    def fetched(body: bytes, media: str) -> FetchResponse:
        return FetchResponse(url="", status=200, headers={"content-type": media}, body=body)

    assert fetched(b'{"a":2}', "application/json; charset=utf-8").json_object() == {"a": 2}
    assert fetched(b"{}", "application/jwk-set+json").json_object() == {}
    for body, media in (
        (b"{}", "text/html"),
        (b"[]", "application/json"),
        (b"{", "application/json"),
        (b'{"a":"\xff"}', "application/json"),
        (b'{"a":' + b"[" * 100_000, "application/json"),
        (b'{"a":' + b"9" * 300 + b"}", "application/json"),
    ):
        with pytest.raises(EgressFailed):
            fetched(body, media).json_object()


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext, list[str | None]]:
    """A server that is HOST, a client that trusts it, and the names that clients asked for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.now(tz=UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file = folder / "server.pem"
    file.write_bytes(private + pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    asked: list[str | None] = []
    server.sni_callback = lambda _connection, name, _context: asked.append(name)  # type: ignore[assignment]
    return server, ssl.create_default_context(cadata=pem.decode()), asked


async def test_the_name_stays_in_tls_and_host_while_the_checked_address_is_dialled(
    tmp_path: Path,
) -> None:
    server, trust, asked = certificate(tmp_path)
    seen: list[bytes] = []
    egress = Egress(allow_loopback=True, resolve=at("127.0.0.1"), trust=trust)
    async with serving(always(answer(), seen), server) as port:
        assert (await egress.get(f"https://{HOST}:{port}/")).status == 200
        with pytest.raises(EgressFailed):  # the certificate is another's
            await egress.get(f"https://other.example.com:{port}/")
    assert asked[0] == HOST
    assert f"host: {HOST}:{port}\r\n".encode() in seen[0].lower()
    egress.close()
