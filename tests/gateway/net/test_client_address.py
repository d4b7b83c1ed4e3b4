"""A trusted proxy's word about an address is taken, read from the right, and nobody else's."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.net.client_address import MAX_HOPS, client_address, read_forwarded
from gateway.networks import Networks, read_address, read_network

PROXIES = Networks.of(["10.0.0.0/8", "192.0.2.7", "fd00::/8"])
XFF = "x-forwarded-for"
FORWARDED = "forwarded"


def seen(peer: str | None, *headers: tuple[str, str]) -> str | None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    found = client_address(peer, raw, PROXIES)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("peer", "headers", "expected"),
    [
        # nobody is trusted but the proxies
        ("203.0.113.9", [(XFF, "1.1.1.1")], "203.0.113.9"),
        ("203.0.113.9", [(FORWARDED, "for=1.1.1.1")], "203.0.113.9"),
        (None, [(XFF, "1.1.1.1")], None),
        ("10.0.0.1", [], "10.0.0.1"),
        # read from the right: what the client wrote itself stands further left
        ("10.0.0.1", [(XFF, "1.1.1.1, 203.0.113.9")], "203.0.113.9"),
        ("10.0.0.1", [(XFF, "1.1.1.1"), (XFF, "203.0.113.9")], "203.0.113.9"),
        ("10.0.0.1", [(XFF, "1.1.1.1, 203.0.113.9, 10.9.9.9 ,192.0.2.7")], "203.0.113.9"),
        ("10.0.0.1", [(FORWARDED, "for=1.1.1.1, for=203.0.113.9;proto=https")], "203.0.113.9"),
        ("10.0.0.1", [(FORWARDED, "for=1.1.1.1"), (FORWARDED, "For=203.0.113.9")], "203.0.113.9"),
        ("10.0.0.1", [(FORWARDED, "by=10.0.0.1;for=203.0.113.9;")], "203.0.113.9"),
        # a trusted proxy that claims to be the client is one
        ("10.0.0.1", [(XFF, "10.2.2.2, 10.3.3.3")], "10.2.2.2"),
        # ports, brackets, IPv4 in IPv6's clothes
        ("10.0.0.1", [(XFF, "203.0.113.9:4711")], "203.0.113.9"),
        ("10.0.0.1", [(XFF, "2001:db8::1")], "2001:db8::1"),
        ("10.0.0.1", [(FORWARDED, 'for="[2001:db8::1]:4711"')], "2001:db8::1"),
        ("10.0.0.1", [(FORWARDED, r'for="\[2001:db8::1\]"')], "2001:db8::1"),
        ("::ffff:10.0.0.1", [(XFF, "::ffff:203.0.113.9")], "203.0.113.9"),
        ("fd00::1", [(XFF, "203.0.113.9")], "203.0.113.9"),
        # what cannot be read is nobody's address, whatever stands left of it
        ("10.0.0.1", [(XFF, "203.0.113.9, unknown")], None),
        ("10.0.0.1", [(XFF, "203.0.113.9,")], None),
        ("10.0.0.1", [(XFF, "")], None),
        ("10.0.0.1", [(XFF, "fe80::1%eth0")], None),
        ("10.0.0.1", [(FORWARDED, "for=_hidden")], None),
        ("10.0.0.1", [(FORWARDED, "proto=https")], None),
        ("10.0.0.1", [(FORWARDED, "for=203.0.113.9;for=1.1.1.1")], None),
        ("10.0.0.1", [(FORWARDED, "203.0.113.9")], None),
        # a quote that the client opened does not swallow what the proxy appended
        ("10.0.0.1", [(FORWARDED, 'for=1.1.1.1;x=", for=203.0.113.9')], None),
        ("10.0.0.1", [(FORWARDED, 'for=1.1.1.1;x=", for="[2001:db8::1]:1"')], None),
        ("10.0.0.1", [(FORWARDED, 'x="'), (FORWARDED, "for=203.0.113.9")], "203.0.113.9"),
        # the header that the proxy does not maintain is the client's own
        ("10.0.0.1", [(XFF, "203.0.113.9"), (FORWARDED, "for=1.1.1.1")], None),
        ("10.0.0.1", [(XFF, "1.1.1.1"), (FORWARDED, "for=203.0.113.9")], None),
        ("10.0.0.1", [(XFF, "203.0.113.9"), (FORWARDED, "for=203.0.113.9")], "203.0.113.9"),
        # a chain longer than anybody's
        ("10.0.0.1", [(XFF, "203.0.113.9" + ",10.0.0.2" * MAX_HOPS)], None),
        ("10.0.0.1", [(XFF, "203.0.113.9" + ",10.0.0.2" * (MAX_HOPS - 1))], "203.0.113.9"),
        ("10.0.0.1", [(XFF, ",".join(["1.1.1.1"] * 5000 + ["203.0.113.9"]))], "203.0.113.9"),
    ],
)  # fmt: skip
def test_the_address_of_a_client(
    peer: str | None, headers: list[tuple[str, str]], expected: str | None
) -> None:
    assert seen(peer, *headers) == expected


def test_without_trusted_proxies_headers_say_nothing() -> None:
    found = client_address("10.0.0.1", [(b"x-forwarded-for", b"1.1.1.1")], Networks())
    assert str(found) == "10.0.0.1"


@given(st.text(st.characters(max_codepoint=255), max_size=60), st.sampled_from([XFF, FORWARDED]))
def test_no_spoofed_header_moves_what_the_proxy_appended(written: str, header: str) -> None:
    """The proxy's word counts, or nobody's, whatever a client writes before it; never the
    client's."""
    appended = "for=203.0.113.9" if header == FORWARDED else "203.0.113.9"
    assert seen("10.0.0.1", (header, f"{written}, {appended}")) in ("203.0.113.9", None)
    assert seen("10.0.0.1", (header, written), (header, appended)) == "203.0.113.9"


@given(st.text(max_size=60))
def test_no_forwarded_header_breaks_the_reader(value: str) -> None:
    assert all(isinstance(hop, str) for hop in read_forwarded(value))


networks = st.one_of(
    st.builds(
        lambda n, bits: ip_network((n >> (32 - bits) << (32 - bits), bits)),
        st.integers(0, 2**32 - 1),
        st.integers(0, 32),
    ),
    st.builds(
        lambda n, bits: ip_network(((0x2001 << 112 | n) >> (128 - bits) << (128 - bits), bits)),
        st.integers(0, 2**100),
        st.integers(16, 128),
    ),
)


@given(st.lists(networks, max_size=6), st.data())
def test_an_address_is_inside_exactly_when_a_range_has_it(
    ranges: list[object], data: st.DataObject
) -> None:
    found = Networks.of([str(each) for each in ranges])
    assert bool(found) == bool(ranges)
    edges = [
        address
        for each in ranges
        for n in (int(each[0]) - 1, int(each[0]), int(each[-1]), int(each[-1]) + 1)  # type: ignore[index]
        if (address := _near(n, each)) is not None
    ]
    edges += [ip_address(data.draw(st.integers(0, 2**32 - 1)))]
    for address in edges:
        inside = any(address.version == each.version and address in each for each in ranges)  # type: ignore[attr-defined,operator]
        assert (address in found) == inside


@given(st.lists(networks, max_size=4), st.lists(networks, max_size=4), st.data())
def test_networks_cover_those_whose_every_address_they_have(
    ranges: list[object], more: list[object], data: st.DataObject
) -> None:
    found, other = (Networks.of([str(each) for each in all_]) for all_ in (ranges, more))
    assert Networks.of(found.ranges()) == found
    assert Networks.of([str(each) for each in (*ranges, *more)]).covers(found)
    if ranges:
        halves = [half for each in ranges for half in each.subnets()]  # type: ignore[attr-defined]
        assert found.covers(Networks.of([str(each) for each in halves]))
    edges = [address for each in more for address in (each[0], each[-1])]  # type: ignore[index]
    if found.covers(other):
        assert all(address in found for address in edges)
    elif more and all(each.prefixlen == each.max_prefixlen for each in more):  # type: ignore[attr-defined]
        assert not all(address in found for address in edges)


def _near(number: int, network: object) -> object:
    version = network.version  # type: ignore[attr-defined]
    if not 0 <= number < 2 ** (32 if version == 4 else 128):
        return None
    kind = type(network[0])  # type: ignore[index]
    return kind(number)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1/8", "10.0.0", "::ffff:10.0.0.0/104", "fe80::1%eth0", "10.0.0.0/33", "a"]
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_network(text)


@pytest.mark.parametrize("text", ["", "1.2.3", "x" * 50, "1.2.3.4/32", "fe80::1%1", "01.2.3.4"])
def test_what_is_no_address_is_nobody(text: str) -> None:
    assert read_address(text) is None
