"""The authorization server answers where nobody else has an answer: OAuth's JSON to clients, pages
to people, and to both only codes of the RFCs with constant texts."""

from __future__ import annotations

import httpx
import pytest

from gateway.auth.oauth.rfc6749_errors import DESCRIPTIONS
from gateway.routes.oauth.errors import TEXTS
from gateway.routes.shared.browser import MAX_FORM_BYTES
from gateway.routes.shared.media_types import FORM

MACHINES = ("token", "revoke", "introspect", "jwks.json", "register", "register/x", "userinfo")
PAGES = ("/oauth/authorize", "/oauth/login", "/oauth/account", "/invites/accept")
INVALID = {"error": "invalid_request", "error_description": DESCRIPTIONS["invalid_request"]}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def is_page(response: httpx.Response) -> bool:
    guarded = response.headers.get("x-frame-options") == "DENY"
    return guarded and response.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("name", MACHINES)
async def test_a_method_that_is_not_there(browser: httpx.AsyncClient, name: str) -> None:
    for headers in ({}, BROWSER):
        refused = await browser.put(f"/oauth/{name}", headers=headers)
        assert (refused.status_code, refused.json()) == (405, INVALID)
        assert refused.headers["allow"] and refused.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", PAGES)
async def test_a_method_that_is_not_there_on_a_page(browser: httpx.AsyncClient, path: str) -> None:
    refused = await browser.put(path)
    assert refused.status_code == 405 and is_page(refused) and TEXTS[405] in refused.text
    assert refused.headers["allow"] and "invalid_request" in refused.text


async def test_an_address_that_is_not_there(browser: httpx.AsyncClient) -> None:
    for path in ("/oauth/xyzzy", "/oauth/assets/nothing.css", "/oauth/token/x"):
        refused = await browser.get(path)
        assert (refused.status_code, refused.json()) == (404, INVALID), path
    shown = await browser.get("/oauth/xyzzy", headers=BROWSER)
    assert shown.status_code == 404 and is_page(shown) and TEXTS[404] in shown.text
    assert "xyzzy" not in shown.text


async def test_what_is_too_large(browser: httpx.AsyncClient) -> None:
    form = {"content-type": FORM}
    for path in ("/oauth/login", "/oauth/authorize", "/oauth/logout", "/invites/accept"):
        refused = await browser.post(path, content=b"a=" + b"x" * MAX_FORM_BYTES, headers=form)
        assert refused.status_code == 413 and is_page(refused), path
        assert f"more than {MAX_FORM_BYTES} bytes" in refused.text
    for path, most in (
        ("/oauth/register", 65_536),
        ("/oauth/passkeys/sign-in", MAX_FORM_BYTES),
        ("/oauth/token", 65_536),
        ("/oauth/revoke", 65_536),
        ("/oauth/introspect", 65_536),
    ):
        refused = await browser.post(
            path, content=b" " * 70_000, headers={"content-type": "application/json"}
        )
        said = f"The request body is too large: more than {most} bytes."
        expected = {"error": "invalid_request", "error_description": said}
        assert (refused.status_code, refused.json()) == (413, expected), path


async def test_userinfo_says_what_is_wrong_with_a_token(browser: httpx.AsyncClient) -> None:
    """RFC 6750, section 3."""
    for headers in ({}, {"authorization": "Bearer x"}):
        refused = await browser.get("/oauth/userinfo", headers=headers)
        assert refused.status_code == 401 and "www-authenticate" in refused.headers
        code = "invalid_token"
        assert refused.json() == {"error": code, "error_description": DESCRIPTIONS[code]}
