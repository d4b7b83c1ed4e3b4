"""Ranges of IP addresses, and whether one lies in them. Pure.

An IPv4 address that arrives in IPv6's clothes (`::ffff:192.0.2.1`) is the IPv4 address.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    collapse_addresses,
    ip_address,
    ip_network,
    summarize_address_range,
)

import msgspec

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Spans = tuple[tuple[int, ...], tuple[int, ...]]
"""First and last addresses of ranges that neither touch nor overlap, in order."""
MAX_ADDRESS_LENGTH = 45
"""`ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255`"""
CACHED_ADDRESSES = 8192
"""Those of proxies and of busy clients come with every request, and to read one takes longer than
all the rest that a request pays at the door."""
MAPPED = IPv6Network("::ffff:0:0/96")


def read_address(text: str) -> Address | None:
    """Read an address; None for what is no address.

    A zone (`fe80::1%eth0`) means nothing on another host.
    """
    return None if len(text) > MAX_ADDRESS_LENGTH or "%" in text else _read(text)


@lru_cache(CACHED_ADDRESSES)
def _read(text: str) -> Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def read_network(text: str) -> Network:
    """Read `192.0.2.0/24`, `2001:db8::/32`, or one address. Raises: ValueError, saying why."""
    if "%" in text:
        raise ValueError(f"{text!r} names a zone")
    try:
        found = ip_network(text)
    except ValueError as error:
        raise ValueError(str(error)) from None
    if isinstance(found, IPv6Network) and found.subnet_of(MAPPED):
        raise ValueError(f"{text!r} is to be written as IPv4")
    return found


class Networks(msgspec.Struct, frozen=True, kw_only=True):
    v4: Spans = ((), ())
    v6: Spans = ((), ())

    @classmethod
    def of(cls, ranges: Iterable[str]) -> Networks:
        """Raises: ValueError."""
        found = [read_network(text) for text in ranges]
        v4 = collapse_addresses([each for each in found if isinstance(each, IPv4Network)])
        v6 = collapse_addresses([each for each in found if isinstance(each, IPv6Network)])
        return cls(v4=_spans(v4), v6=_spans(v6))

    def __contains__(self, address: Address) -> bool:
        number = int(address)
        return _within(number, number, self.v4 if isinstance(address, IPv4Address) else self.v6)

    def covers(self, other: Networks) -> bool:
        """True if all of `other` lies in these: each of its ranges in one of ours, for ranges that
        could be one are."""
        return all(
            _within(first, last, mine)
            for mine, theirs in ((self.v4, other.v4), (self.v6, other.v6))
            for first, last in zip(*theirs, strict=True)
        )

    def ranges(self) -> list[str]:
        """The ranges as they are written."""
        v4 = [
            summarize_address_range(IPv4Address(first), IPv4Address(last))
            for first, last in zip(*self.v4, strict=True)
        ]
        v6 = [
            summarize_address_range(IPv6Address(first), IPv6Address(last))
            for first, last in zip(*self.v6, strict=True)
        ]
        return [str(network) for found in (*v4, *v6) for network in found]

    def __bool__(self) -> bool:
        return bool(self.v4[0] or self.v6[0])


def _within(first: int, last: int, spans: Spans) -> bool:
    firsts, lasts = spans
    position = bisect_right(firsts, first) - 1
    return position >= 0 and last <= lasts[position]


def _spans(networks: Iterable[Network]) -> Spans:
    ordered = sorted((int(each[0]), int(each[-1])) for each in networks)
    return tuple(first for first, _ in ordered), tuple(last for _, last in ordered)
