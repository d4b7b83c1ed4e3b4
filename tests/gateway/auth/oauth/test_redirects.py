"""Redirect URIs: what may be registered, and what a request may name."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.oauth.clients.redirects import (
    MAX_URI_LENGTH,
    find_registered,
    is_native,
    is_taken,
    origin_of,
    refusal,
)

GOOD_WEB = (
    "https://client.example/cb",
    "https://client.example",
    "https://client.example:8443/cb?tenant=1&x=%20",
    "https://xn--e1afmkfd.example/cb",
    "https://[2001:db8::1]/cb",
    "http://127.0.0.1:3000/cb",
    "http://[::1]/cb",
    "http://localhost:8080/callback",
)
GOOD_NATIVE = ("com.example.app:/cb", "com.example.app://auth/cb", "com.example.app:cb")
GOOD_SHORT = (
    "cursor://anysphere.cursor-mcp/oauth/callback",
    "vscode://vscode.github-authentication/did-authenticate",
    "vscode-insiders://auth",
    "claude://claude.ai/mcp-auth-callback",
    "zed://oauth?state=1",
)
BAD = (
    "",
    "https://",
    "http://client.example/cb",
    "http://127.0.0.2/cb",
    "http://127.0.0.1.evil.example/cb",
    "http://localhost.evil.example/cb",
    "https://client.example/cb#fragment",
    "https://user@client.example/cb",
    "https://client.example@evil.example/cb",
    "https://client.example\\@evil.example/cb",
    "https://client.example/cb\r\nset-cookie: a=b",
    "https://client.example/cb\n",
    "https://client.example/ cb",
    "https://*.client.example/cb",
    "https://client.example/*",
    "https://client.example/%zz",
    "https://client.example:0/cb",
    "https://client.example:65536/cb",
    "https://client.example:/cb",
    "HTTPS://client.example/cb",
    "https:client.example/cb",
    "https:///client.example/cb",
    "//client.example/cb",
    "/cb",
    "javascript:alert(1)",
    "javascript://client.example/%0aalert(1)",
    "data://text/html,x",
    "file://etc/passwd",
    "about://blank",
    "blob://x/y",
    "ws://client.example/cb",
    "wss://client.example/cb",
    "ftp://client.example/cb",
    "httpx://client.example/cb",
    "http+unix://socket/cb",
    "view-source://client.example",
    "chrome-extension://abcdef/cb",
    "ms-msdt://x",
    "web+app://x",
    "intent://scan/cb",
    "cursor:cb",
    "cursor:/cb",
    "cursor:///cb",
    "cursor://",
    "Cursor://host/cb",
    "cursor://user@host/cb",
    "cursor://host:1/cb",
    "cursor://host/cb#x",
    "c://host/cb",
    "1app://host/cb",
    "data:text/html,x",
    "file:///etc/passwd",
    "myapp:/cb",
    "https://\u0441lient.example/cb",  # CYRILLIC SMALL LETTER ES
    "https://client\u3002example/cb",  # IDEOGRAPHIC FULL STOP, a dot to a browser
    "https://client.example\uff0fcb",  # FULLWIDTH SOLIDUS
    "https://-client.example/cb",
    "https://client..example/cb",
)


@pytest.mark.parametrize("uri", GOOD_WEB)
def test_web_clients_have_https_and_loopback(uri: str) -> None:
    assert refusal(uri, native=False) is None
    assert refusal(uri, native=True) is None


@pytest.mark.parametrize("uri", GOOD_NATIVE)
def test_only_native_clients_have_a_scheme_of_their_own(uri: str) -> None:
    assert refusal(uri, native=True) is None
    assert refusal(uri, native=False) == "may have a private scheme only for a native client"


@pytest.mark.parametrize("uri", GOOD_SHORT)
def test_a_scheme_without_a_dot_is_for_native_clients_without_a_secret(uri: str) -> None:
    assert refusal(uri, native=True, public=True) is None
    for native, public in ((True, False), (False, True), (False, False)):
        said = refusal(uri, native=native, public=public)
        assert said == "may have a scheme without a dot only for a native client without a secret"
    assert find_registered([uri], uri, native=True) == uri
    for other in (uri + "/", uri.upper(), uri.replace("://", "://x.")):
        assert find_registered([uri], other, native=True) is None
    assert is_native(uri), "consent is asked for each time"
    assert origin_of(uri) == uri.partition(":")[0] + ":"


@pytest.mark.parametrize("uri", BAD)
def test_what_is_no_redirect_uri_is_refused(uri: str) -> None:
    assert refusal(uri, native=True, public=True) is not None


def test_a_uri_has_a_longest_length() -> None:
    base = "https://client.example/"
    assert refusal(base + "a" * (MAX_URI_LENGTH - len(base)), native=False) is None
    assert refusal(base + "a" * (MAX_URI_LENGTH - len(base) + 1), native=False) is not None


def test_a_native_client_on_loopback_has_any_port() -> None:
    registered = ["https://client.example/cb", "http://127.0.0.1/cb", "http://[::1]:1/x?y=1"]
    for uri, found in {
        "http://127.0.0.1:51004/cb": registered[1],
        "http://127.0.0.1/cb": registered[1],
        "http://[::1]:9/x?y=1": registered[2],
        "https://client.example/cb": registered[0],
        "http://127.0.0.1:51004/cb/": None,
        "http://127.0.0.1:51004/CB": None,
        "http://127.0.0.1:0/cb": None,
        "http://127.0.0.1:99999/cb": None,
        "http://127.0.0.1:80@evil.example/cb": None,
        "http://localhost:51004/cb": None,
        "http://[::1]:51004/cb": None,
        "http://[::1]:9/x?y=2": None,
        "https://client.example:51004/cb": None,
    }.items():
        assert find_registered(registered, uri, native=True) == found, uri


def test_a_web_client_has_its_very_own_port() -> None:
    registered = ["http://127.0.0.1:3000/cb"]
    assert find_registered(registered, "http://127.0.0.1:3000/cb", native=False) is not None
    assert find_registered(registered, "http://127.0.0.1:3001/cb", native=False) is None


def test_where_it_leads_is_its_origin() -> None:
    assert origin_of("https://client.example:8443/cb?x=/y") == "https://client.example:8443"
    assert origin_of("https://client.example?x") == "https://client.example"
    assert origin_of("http://[::1]:5/cb") == "http://[::1]:5"
    assert origin_of("com.example.app:/cb") == "com.example.app:"
    assert origin_of("com.example.app://host/cb") == "com.example.app:"
    assert is_native("com.example.app://host/cb") and is_native("http://localhost/cb")
    assert not is_native("https://client.example/cb")


text = st.text(
    alphabet=st.sampled_from("htps:/\\@.%?#*&=-_~[]0123456789abcxZ \r\n\t\u0441\u3002\uff0f"),
    max_size=60,
)


@given(tail=text, prefix=st.sampled_from(["", "https://", "https://client.example", "http://"]))
def test_what_passes_is_where_it_seems(prefix: str, tail: str) -> None:
    """A redirect that is let in has one reading: printable ASCII, a host as written, and no more
    parts than it shows."""
    uri = prefix + tail
    if refusal(uri, native=True, public=True) is not None:
        return
    assert uri.isascii() and uri.isprintable() and " " not in uri and "\\" not in uri
    parts = urlsplit(uri)
    assert parts.fragment == "" and parts.username is None and parts.password is None
    if parts.scheme in ("http", "https"):
        assert parts.hostname and origin_of(uri) == f"{parts.scheme}://{parts.netloc}"
        if parts.scheme == "http":
            assert parts.hostname in ("127.0.0.1", "::1", "localhost")
    else:
        assert "." in parts.scheme or (parts.netloc and not is_taken(parts.scheme))


@given(text, st.sampled_from([*GOOD_WEB, *GOOD_NATIVE]), st.integers(0, 60), st.booleans())
def test_nothing_matches_but_the_same_string_or_another_port(
    edit: str, registered: str, at: int, native: bool
) -> None:
    uri = registered[:at] + edit + registered[at:]
    if find_registered([registered], uri, native=native) is None or uri == registered:
        return
    assert native
    ours, theirs = urlsplit(registered), urlsplit(uri)
    assert ours.scheme == "http" and theirs.hostname == ours.hostname
    assert (theirs.path, theirs.query) == (ours.path, ours.query)
    assert refusal(uri, native=True) is None
