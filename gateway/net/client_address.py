"""The address a request came from, as far as trusted proxies say it truly (RFC 7239).

Knows no key and no route.

A header can be written by anybody, so it is read from the right: each proxy appends the address it
saw, and only what a trusted one appended is believed. The walk begins at the connection's own peer
and ends at the first address that is no trusted proxy's. What cannot be read is nobody's address:
None, which lies in no range. A proxy that maintains one of `X-Forwarded-For` and `Forwarded` passes
the other one on as the client wrote it; nothing says here which is which, so where both came they
have to agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gateway.networks import Address, Networks, read_address

MAX_HOPS = 16
"""Trusted proxies in a row; beyond that nothing is believed."""
TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
QUOTED = r'"(?:[^"\\]|\\.)*"'
PAIR = re.compile(rf"\s*(?:({TOKEN})=({TOKEN}|{QUOTED}))?\s*([;,]|$)", re.ASCII)
PORT = r"(?::[0-9]{1,5})?"
NODE = re.compile(rf"\[([0-9A-Fa-f:.]+)\]{PORT}|([0-9.]+){PORT}|([0-9A-Fa-f:.]+)", re.ASCII)
"""`[2001:db8::1]:443`, `192.0.2.1:443`, and the bare IPv6 address that X-Forwarded-For knows."""

Headers = Iterable[tuple[bytes, bytes]]


def client_address(peer: str | None, headers: Headers, trusted: Networks) -> Address | None:
    """`peer`: the address of the connection; None where it has none. `headers`: as ASGI has them,
    names in lower case."""
    direct = None if peer is None else read_address(peer)
    if direct is None or not trusted or direct not in trusted:
        return direct
    listed: list[str] = []
    forwarded: list[str] = []
    for name, value in headers:
        if name == b"x-forwarded-for":
            listed += value.decode("latin-1").split(",")
        elif name == b"forwarded":
            forwarded += read_forwarded(value.decode("latin-1"))
    if not forwarded:
        return _walk(direct, listed, trusted)
    said = _walk(direct, forwarded, trusted)
    return said if not listed or said == _walk(direct, listed, trusted) else None


def read_forwarded(value: str) -> list[str]:
    """The `for` of each element of one `Forwarded` header line; "" where an element has none.

    A line that breaks the grammar anywhere is one hop that nobody can read.
    """
    hops: list[str] = []
    node, begun, position = "", False, 0
    while position < len(value):
        found = PAIR.match(value, position)
        if found is None:
            return [""]
        name, content, separator = found.groups()
        begun = begun or name is not None
        if name is not None and name.lower() == "for":
            if node:
                return [""]
            node = _unquote(content)
        if separator != ";" and begun:
            hops.append(node)
            node, begun = "", False
        position = found.end()
    return [*hops, node] if begun else hops


def _unquote(content: str) -> str:
    if not content.startswith('"'):
        return content
    return re.sub(r"\\(.)", r"\1", content[1:-1])


def _walk(direct: Address, hops: Sequence[str], trusted: Networks) -> Address | None:
    """Walk from the right past the trusted hops; where all of them are trusted, the leftmost is the
    client."""
    address = direct
    for hop in reversed(hops[-MAX_HOPS:]):
        before = _read_node(hop.strip())
        if before is None or before not in trusted:
            return before
        address = before
    return address if len(hops) <= MAX_HOPS else None


def _read_node(text: str) -> Address | None:
    if (plain := read_address(text)) is not None:
        return plain
    found = NODE.fullmatch(text)
    if found is None:
        return None
    return read_address(next(part for part in found.groups() if part is not None))
