"""Renders all pages from templates, and names the headers that protect them.

Every page is unframeable, keeps no copy, tells no other site where it was, and runs no script but
ours from a file. Knows no HTTP framework: `gateway.routes.shared.browser` makes responses of it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.console import assets, cells, formats, hidden

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
CONSOLE = "/console"
PLACE = re.compile(r"/console(?:[/?][!-\[\]-~]*)?", re.ASCII)
"""A path and query of ours, as a browser writes them: no space, no backslash, nothing that another
site's address could hide in."""
MAX_PLACE = 2000
REFERENCE_ASSETS = {
    "reference.css": ("reference.css", "text/css"),
    "reference.js": ("reference.js", "text/javascript"),
    "swagger-ui.css": ("swagger/swagger-ui.css", "text/css"),
    "swagger-ui-bundle.js": ("swagger/swagger-ui-bundle.js", "text/javascript"),
}
"""The files of the API reference: where they are, and their media type."""


@cache
def templates() -> Environment:
    """Return the templates. Jinja is loaded with the first page: many gateways never show one."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {
        "asset": assets.address_of,
        "write_tag": cells.tag,
        "write_id": cells.copied_id,
        "write_bar": cells.bar,
    }
    made.filters |= {
        name: getattr(formats, name)
        for name in (
            *("usd", "exact_usd", "count", "percent", "ms", "size", "short_id", "duration"),
            *("coded", "spark"),
        )
    }
    made.filters |= {"visible": hidden.visible, "marked": hidden.marked}
    return made


def is_place(where: str) -> bool:
    """Tell whether it is an address below /console, to which a login may lead."""
    return len(where) <= MAX_PLACE and PLACE.fullmatch(where) is not None


def policy_of(*destinations: str, images: str = "'self'", styles: str = "'self'") -> str:
    """Return the Content-Security-Policy. `destinations`: origins to which a form's answer may
    lead, for some browsers apply `form-action` to redirects too."""
    leads_to = " ".join(["'self'", *map(to_source, destinations)])
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src {styles}",
            "script-src 'self'",
            "connect-src 'self'",
            f"img-src {images}",
            f"form-action {leads_to}",
            "frame-ancestors 'none'",
            "base-uri 'none'",
        )
    )


def to_source(origin: str) -> str:
    """Name an origin in a policy, which has no word for an IPv6 address: there, its scheme."""
    return f"{origin.partition(':')[0]}:" if "[" in origin else origin


def guarded(*destinations: str) -> dict[str, str]:
    """Return the headers that every page carries."""
    return {
        "content-security-policy": policy_of(*destinations),
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
        "pragma": "no-cache",
    }


def guard_console() -> dict[str, str]:
    """Return the headers of the console's pages. Pictures may be shown that a person chose."""
    policy = (
        "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; form-action 'self'; "
        "frame-ancestors 'none'; base-uri 'none'"
    )
    # A page may tell ours, and no other site, where it was: an expired session leads back there.
    return {
        **guarded(),
        "content-security-policy": policy,
        "referrer-policy": "same-origin",
    }


def guard_reference() -> dict[str, str]:
    """Return the headers of the API reference. Its icons are part of its style sheet."""
    return {**guarded(), "content-security-policy": policy_of(images="'self' data:")}


def render(template: str, **values: Any) -> bytes:
    text: str = templates().get_template(f"{template}.html.jinja").render(**values)
    return text.encode()


def read_file(place: str) -> bytes:
    return (FOLDER / "static" / place).read_bytes()
