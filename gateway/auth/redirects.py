"""Which redirect URIs a client may have, and which one a request may name (RFC 6749, 3.1.2; OAuth
2.1; RFC 8252).

Above: `client_metadata`, `rfc6749_authorize`. Below: nothing; pure. Everything is read off the
string itself by one grammar that is narrower than RFC 3986: no parser stands between what is
compared and what a browser will make of it. Hosts are ASCII, so that none looks like another; no
user part, no backslash, no fragment, no wildcard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_URI_LENGTH = 2048
MAX_PORT = 65_535
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOST = rf"(?:{LABEL}(?:\.{LABEL})*\.?|\[[0-9A-Fa-f:.]{{2,45}}\])"
REST = r"(?:[/?](?:[A-Za-z0-9\-._~!$&'()+,;=:@/?]|%[0-9A-Fa-f]{2})*)?"
"""Path and query: RFC 3986's characters, without `*`, which people mean as a wildcard."""
WEB = re.compile(rf"https://{HOST}(?::(?P<port>[0-9]{{1,5}}))?{REST}", re.ASCII)
LOOPBACK = re.compile(
    rf"(?P<host>http://(?:127\.0\.0\.1|\[::1\]|localhost))"
    rf"(?::(?P<port>[0-9]{{1,5}}))?(?P<rest>{REST})",
    re.ASCII,
)
PRIVATE = re.compile(rf"[a-z][a-z0-9+-]*(?:\.[a-z0-9+-]+)+:(?:/{{0,2}}{LABEL})?{REST}", re.ASCII)
"""A private-use scheme is a domain name backwards (RFC 8252, 7.1), so has a dot: no `javascript:`,
no `data:`."""


def refusal(uri: str, *, native: bool) -> str | None:
    """Why a client may not have this redirect URI; None where it may."""
    if len(uri) > MAX_URI_LENGTH:
        return f"must have at most {MAX_URI_LENGTH} characters"
    found = WEB.fullmatch(uri) or LOOPBACK.fullmatch(uri)
    if found is not None:
        return None if _is_port(found["port"]) else "its port is none"
    if PRIVATE.fullmatch(uri):
        return None if native else "only a native client may have a scheme of its own"
    return (
        "must be an https URI, or http on a loopback address, or of a scheme like com.example.app:,"
        " in ASCII, without user, fragment or wildcard"
    )


def is_native(uri: str) -> bool:
    """Whether it leads to an application on the user's own machine, where any other could listen:
    consent to it is never remembered (RFC 8252, 8.6)."""
    return WEB.fullmatch(uri) is None


def find_registered(registered: Iterable[str], uri: str, *, native: bool) -> str | None:
    """The registered URI that `uri` is: the very same string, or for a native client on a loopback
    address one that differs in its port alone (RFC 8252, 7.3)."""
    wanted = LOOPBACK.fullmatch(uri) if native else None
    for each in registered:
        if each == uri:
            return each
        known = None if wanted is None else LOOPBACK.fullmatch(each)
        if known is None or wanted is None:
            continue
        same = known["host"] == wanted["host"] and known["rest"] == wanted["rest"]
        if same and _is_port(wanted["port"]):
            return each
    return None


def origin_of(uri: str) -> str:
    """Where it leads, for people and for a policy of the browser: scheme and host, or the scheme of
    a private one. `uri` has passed `refusal`."""
    scheme, _, rest = uri.partition(":")
    if not rest.startswith("//"):
        return f"{scheme}:"
    if is_native(uri) and LOOPBACK.fullmatch(uri) is None:
        return f"{scheme}:"
    host = re.split(r"[/?]", rest[2:], maxsplit=1)[0]
    return f"{scheme}://{host}"


def _is_port(digits: str | None) -> bool:
    return digits is None or 1 <= int(digits) <= MAX_PORT
