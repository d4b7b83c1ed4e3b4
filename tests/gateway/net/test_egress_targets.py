"""A stranger's URL may lead nowhere but to the public internet, in plain words."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.net.egress_targets import MAX_URL_LENGTH, Forbidden, check_address, parse_target

PRIVATE = [
    ("private", "10.0.0.1"),
    ("private", "172.31.255.255"),
    ("private", "192.168.1.1"),
    ("loopback", "127.0.0.1"),
    ("all of loopback", "127.255.255.254"),
    ("this host", "0.0.0.0"),
    ("link-local", "169.254.169.254"),
    ("carrier-grade NAT", "100.64.0.1"),
    ("a cloud's own", "168.63.129.16"),
    ("protocol assignments", "192.0.0.192"),
    ("benchmarks", "198.18.0.1"),
    ("documentation", "203.0.113.7"),
    ("multicast", "224.0.0.1"),
    ("reserved", "240.0.0.1"),
    ("broadcast", "255.255.255.255"),
    ("unspecified", "::"),
    ("loopback", "::1"),
    ("link-local", "fe80::1"),
    ("link-local with a zone", "fe80::1%eth0"),
    ("a zone on a public one", "2606:4700::1111%eth0"),
    ("unique local", "fd00:ec2::254"),
    ("multicast", "ff02::1"),
    ("IPv4-mapped", "::ffff:127.0.0.1"),
    ("IPv4-mapped public", "::ffff:1.1.1.1"),
    ("IPv4-compatible", "::127.0.0.1"),
    ("NAT64", "64:ff9b::7f00:1"),
    ("local NAT64", "64:ff9b:1::a00:1"),
    ("6to4", "2002:7f00:1::"),
    ("Teredo", "2001:0:7f00:1::"),
    ("documentation", "2001:db8::1"),
]


@pytest.mark.parametrize(("kind", "address"), PRIVATE)
def test_an_address_that_is_not_public_is_refused(kind: str, address: str) -> None:
    with pytest.raises(Forbidden):
        check_address(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111"])
def test_a_public_address_is_let_through(address: str) -> None:
    assert check_address(address) == address


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_what_is_let_through_is_public_to_the_standard_library_too(
    address: IPv4Address | IPv6Address,
) -> None:
    try:
        found = check_address(str(address))
    except Forbidden:
        return
    assert ip_address(found) == address
    assert not (address.is_private or address.is_loopback or address.is_link_local)
    assert not (address.is_multicast or address.is_reserved or address.is_unspecified)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_this_machine_is_let_through_where_it_is_asked_for(address: str) -> None:
    assert check_address(address, allow_loopback=True) == address
    with pytest.raises(Forbidden):
        check_address("10.0.0.1", allow_loopback=True)


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(Forbidden, match="not an IP address"):
        check_address("localhost")


ODD = [
    ("http", "http://example.com/"),
    ("another scheme", "file:///etc/passwd"),
    ("no scheme", "//example.com/"),
    ("no host", "https:///path"),
    ("a user", "https://user@example.com/"),
    ("a user that looks like a host", "https://example.com@127.0.0.1/"),
    ("a fragment", "https://example.com/#x"),
    ("a backslash", "https://example.com\\@127.0.0.1/"),
    ("a space", "https://example.com /"),
    ("a line feed", "https://example.com/\r\nX: y"),
    ("a tab in the host", "https://exam\tple.com/"),
    ("not ASCII", "https://ex\u0430mple.com/"),
    ("a full-width digit", "https://\uff1127.0.0.1/"),
    ("an ideographic full stop", "https://127\u30020.0.1/"),
    ("percent-encoded", "https://%31%32%37.0.0.1/"),
    ("octal", "https://0177.0.0.1/"),
    ("octal, padded", "https://127.0.0.01/"),
    ("hexadecimal", "https://0x7f.0.0.1/"),
    ("one hexadecimal number", "https://0x7f000001/"),
    ("one number", "https://2130706433/"),
    ("two numbers", "https://127.1/"),
    ("a number last", "https://example.1/"),
    ("a final dot", "https://example.com./"),
    ("a single label", "https://metadata/"),
    ("localhost", "https://localhost/"),
    ("loopback", "https://127.0.0.1/"),
    ("link-local", "https://169.254.169.254/latest/meta-data/"),
    ("IPv6 loopback", "https://[::1]/"),
    ("IPv4-mapped", "https://[::ffff:127.0.0.1]/"),
    ("IPv6, spelt out", "https://[2606:4700:4700:0:0:0:0:1111]/"),
    ("an unclosed bracket", "https://[::1/"),
    ("rubbish behind the bracket", "https://[2606:4700::1]x/"),
    ("port 0", "https://example.com:0/"),
    ("a port that is none", "https://example.com:70000/"),
    ("a port in letters", "https://example.com:https/"),
    ("an empty port", "https://example.com:/"),
    ("a label too long", f"https://{'a' * 64}.com/"),
    ("too long", "https://example.com/" + "a" * MAX_URL_LENGTH),
]


@pytest.mark.parametrize(("kind", "url"), ODD)
def test_a_url_that_is_not_plain_is_refused(kind: str, url: str) -> None:
    with pytest.raises(Forbidden):
        parse_target(url)


def test_a_plain_url_is_taken_apart() -> None:
    target = parse_target("https://Issuer.Example.com:8443/.well-known/x?a=b")
    assert (target.scheme, target.host, target.port) == ("https", "issuer.example.com", 8443)
    assert target.path_and_query == "/.well-known/x?a=b"
    assert target.authority == "issuer.example.com:8443"


def test_the_defaults_of_a_url() -> None:
    target = parse_target("https://example.com")
    assert (target.port, target.path_and_query) == (443, "/")
    assert parse_target("https://[2606:4700:4700::1111]:444/").host == "2606:4700:4700::1111"
    assert parse_target("https://1.1.1.1/").host == "1.1.1.1"


def test_http_is_for_this_machine_alone_and_only_where_it_is_asked_for() -> None:
    assert parse_target("http://localhost:8000/", allow_loopback=True).port == 8000
    assert parse_target("http://127.0.0.1/", allow_loopback=True).port == 80
    with pytest.raises(Forbidden, match="only https"):
        parse_target("http://example.com/", allow_loopback=True)
