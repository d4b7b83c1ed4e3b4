"""Decides where the gateway may connect when a stranger names the target: pure, over URLs and IP
addresses.

Only plainly written https URLs of plainly written hosts, and of addresses only those that are
somebody's on the public internet. What is not known to be harmless is forbidden: every address that
carries another one inside (IPv4-mapped, NAT64, 6to4, Teredo) too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address, ip_network
from typing import Literal
from urllib.parse import urlsplit

import msgspec

MAX_URL_LENGTH = 2048
PLAIN_URL = re.compile(r"[!$%&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]+", re.ASCII)
"""Matches a URL of RFC 3986 characters only, without a fragment."""
HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?",
    re.ASCII,
)
"""Two labels at least, and no number as the last: that is an address in an odd spelling."""
PORT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)
LOCALHOST = "localhost"

NOT_PUBLIC_V4 = tuple(
    IPv4Network(each)
    for each in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # a cloud's own services, inside every machine of it
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
PRIVATE = tuple(
    ip_network(each)
    for each in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)
"""Networks that an operator may use internally (RFC 1918, RFC 6598, RFC 4193). Link-local is not
among them: clouds offer the credentials of their machines there."""
GLOBAL_UNICAST_V6 = IPv6Network("2000::/3")
"""All else (loopback, mapped, NAT64, local, multicast) is outside of it."""
NOT_PUBLIC_V6 = tuple(
    IPv6Network(each)
    for each in (
        "2001::/23",  # Teredo and other protocols' own
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)


Near = Literal["private", "loopback"]
NearHosts = Mapping[str, Near]
"""Hosts that an operator named, each with where it may lie besides the public internet."""


class Forbidden(Exception):
    """Its text is constant, or holds an address; never a URL."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that may be asked, in its parts."""

    scheme: str
    host: str
    """In lower case; without the brackets of IPv6."""
    port: int
    path_and_query: str
    authority: str
    """For the Host header."""


def check_address(text: str, *, allow_loopback: bool = False, allow_private: bool = False) -> str:
    """The address, if it is somebody's on the public internet, or what is allowed besides.

    Raises: Forbidden.
    """
    try:
        address = ip_address(text)
    except ValueError:
        raise Forbidden("not an IP address") from None
    if allow_loopback and address.is_loopback:
        return str(address)
    if allow_private and any(address in each for each in PRIVATE):
        return str(address)
    if isinstance(address, IPv4Address):
        public = not any(address in each for each in NOT_PUBLIC_V4)
    else:
        public = (
            address.scope_id is None
            and address in GLOBAL_UNICAST_V6
            and not any(address in each for each in NOT_PUBLIC_V6)
        )
    if not public:
        raise Forbidden(f"{address} is not a public address")
    return str(address)


def allowed_of(host: str, near: NearHosts, *, allow_loopback: bool) -> dict[str, bool]:
    """Return the allowances of a host as arguments of `check_address`."""
    kind = near.get(host)
    return {
        "allow_loopback": allow_loopback or kind == "loopback",
        "allow_private": kind == "private",
    }


def parse_target(
    url: str, *, allow_loopback: bool = False, near: NearHosts | None = None
) -> Target:
    """Raises: Forbidden."""
    if len(url) > MAX_URL_LENGTH:
        raise Forbidden("longer than a URL may be")
    if PLAIN_URL.fullmatch(url) is None:
        raise Forbidden("a character that no URL has, or a fragment")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise Forbidden("not a URL") from None
    if "@" in parts.netloc:
        raise Forbidden("a user or a password in it")
    host, port_text = split_host(parts.netloc.lower())
    loopback = check_host(host, **allowed_of(host, near or {}, allow_loopback=allow_loopback))
    if parts.scheme != "https" and not (loopback and parts.scheme == "http"):
        raise Forbidden("only https")
    port = 443 if parts.scheme == "https" else 80
    if port_text is not None:
        if PORT.fullmatch(port_text) is None or int(port_text) > 65535:
            raise Forbidden("not a port")
        port = int(port_text)
    query = f"?{parts.query}" if parts.query else ""
    return Target(
        scheme=parts.scheme,
        host=host,
        port=port,
        path_and_query=(parts.path or "/") + query,
        authority=parts.netloc.lower(),
    )


def split_host(netloc: str) -> tuple[str, str | None]:
    """Return the host without brackets, and the port's text where there is one."""
    if netloc.startswith("["):
        host, _, rest = netloc[1:].partition("]")
        if rest and not rest.startswith(":"):
            raise Forbidden("not a host")
        return host, rest[1:] if rest else None
    host, colon, port = netloc.partition(":")
    return host, port if colon else None


def check_host(host: str, *, allow_loopback: bool, allow_private: bool = False) -> bool:
    """True where it is this machine, and may be. An address must be written as one writes it.

    Raises: Forbidden.
    """
    try:
        address = ip_address(host)
    except ValueError:
        if allow_loopback and host == LOCALHOST:
            return True
        if HOST_NAME.fullmatch(host) is None:
            raise Forbidden("not a plain host name") from None
        return False
    if str(address) != host:
        raise Forbidden("an address in an odd spelling")
    check_address(host, allow_loopback=allow_loopback, allow_private=allow_private)
    return address.is_loopback
