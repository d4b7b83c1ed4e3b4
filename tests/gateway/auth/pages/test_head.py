"""HEAD is answered as GET is, without a body; and a page says its charset once."""

from __future__ import annotations

import httpx
import pytest
from litestar import Litestar

from gateway.console.assets import address_of
from tests.gateway.auth.browsing import new_browser

CHANGING = {"x-request-id", "request-id", "openai-processing-ms", "set-cookie", "content-length"}


def lasting(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in CHANGING}


@pytest.mark.parametrize(
    "path",
    [
        "/oauth/login",
        address_of("console.css"),
        "/.well-known/openid-configuration",
        "/.well-known/oauth-protected-resource/v1",
        "/health/live",
        "/schema/openapi.json",
        "/v1/models",
        "/passwords/reset?token=x",
        "/nowhere",
    ],
)
async def test_head_says_what_get_says_without_a_body(
    browser: httpx.AsyncClient, path: str
) -> None:
    shown, asked = await browser.get(path), await browser.head(path)
    assert shown.content and asked.content == b""
    assert (asked.status_code, lasting(asked)) == (shown.status_code, lasting(shown))
    assert int(asked.headers["content-length"]) > 0


async def test_where_there_is_no_get_there_is_no_head(browser: httpx.AsyncClient) -> None:
    asked = await browser.head("/v1/chat/completions")
    assert (asked.status_code, asked.headers["allow"], asked.content) == (405, "POST", b"")
    told = await browser.delete("/v1/models")
    assert (told.status_code, told.headers["allow"]) == (405, "GET, HEAD")


async def test_head_with_a_body_changes_nothing(app: Litestar) -> None:
    async with new_browser(app) as browser:
        asked = await browser.request("HEAD", "/oauth/login", content=b"x" * 100)
    assert (asked.status_code, asked.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/oauth/login", "text/html; charset=utf-8"),
        (address_of("console.css"), "text/css; charset=utf-8"),
        (address_of("passkeys.js"), "text/javascript; charset=utf-8"),
    ],
)
async def test_what_people_see_says_its_charset_once(
    browser: httpx.AsyncClient, path: str, kind: str
) -> None:
    assert (await browser.get(path)).headers["content-type"] == kind
