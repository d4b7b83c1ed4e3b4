"""From a template to a response that a browser handles with care.

Every page is unframeable, keeps no copy, tells no other site where it was, and runs no script but
ours from a file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from litestar import Response

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
HTML = "text/html"
"""The response adds the charset to it, and to those below."""
ASSETS = {
    "auth.css": "text/css",
    "passkeys.js": "text/javascript",
}


@cache
def templates() -> Environment:
    """Jinja is loaded with the first page: many a gateway never shows one."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def policy_of(*destinations: str) -> str:
    """Content-Security-Policy. `destinations`: origins to which a form's answer may lead, for some
    browsers apply `form-action` to redirects too."""
    leads_to = " ".join(["'self'", *map(to_source, destinations)])
    return "; ".join(
        (
            "default-src 'none'",
            "style-src 'self'",
            "script-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            f"form-action {leads_to}",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        )
    )


def to_source(origin: str) -> str:
    """A policy has no word for an IPv6 address, so there it names the scheme."""
    return f"{origin.partition(':')[0]}:" if "[" in origin else origin


def guarded(*destinations: str) -> dict[str, str]:
    """The headers of everything that people see here."""
    return {
        "content-security-policy": policy_of(*destinations),
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
        "pragma": "no-cache",
    }


def page(
    template: str,
    *,
    status: int = 200,
    destinations: tuple[str, ...] = (),
    headers: dict[str, str] | None = None,
    **values: Any,
) -> Response[bytes]:
    text = templates().get_template(f"{template}.html.jinja").render(**values)
    return Response(
        text.encode(),
        status_code=status,
        media_type=HTML,
        headers={**guarded(*destinations), **(headers or {})},
    )


def redirect(location: str) -> Response[bytes]:
    """303: the answer to a form is fetched, never posted on (RFC 9700, 4.12)."""
    return Response(b"", status_code=303, headers={**guarded(), "location": location})


def asset(name: str) -> Response[bytes] | None:
    if name not in ASSETS:
        return None
    content = (FOLDER / "static" / name).read_bytes()
    headers = {"cache-control": "public, max-age=3600", "x-content-type-options": "nosniff"}
    return Response(content, media_type=ASSETS[name], headers=headers)
