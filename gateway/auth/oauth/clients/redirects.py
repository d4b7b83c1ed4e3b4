"""Checks which redirect URIs a client may have, and which one a request may name (RFC 6749, 3.1.2;
OAuth 2.1; RFC 8252).

Everything is read off the string itself by one grammar that is narrower than RFC 3986: no parser
stands between what is compared and what a browser will make of it. Hosts are ASCII, so that none
looks like another; no user part, no backslash, no fragment, no wildcard.
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
"""A private-use scheme should be a domain name backwards (RFC 8252, 7.1), so has a dot: no
`javascript:`, no `data:`."""
SHORT = re.compile(rf"(?P<scheme>[a-z][a-z0-9+-]{{1,31}})://{LABEL}(?:\.{LABEL})*{REST}", re.ASCII)
"""What agents register all the same: `cursor://anysphere.cursor-mcp/oauth/callback`. Only for a
native client without a secret, only with an authority, and of no scheme that means something to
browsers or systems already."""
TAKEN = frozenset(
    """
    about acap acct afp android-app app attachment bitcoin blob brave cap cast cid coap coaps
    content crid data dav dict dns dweb ed2k edge ethereum example facetime facetime-audio feed
    file filesystem finger firefox fish fm ftp ftps geo gg git go gopher gtalk h323 hcp hdl help
    iax icap im imap imaps info intent intents ios-app ipfs ipn ipns ipp ipps irc irc6 ircs iris
    itms itms-apps itms-services jabber jar javascript jdbc jms ldap ldaps livescript lvlt
    magnet mailserver mailto maps market message mid mms mmst mocha moz-extension msrp mtqp
    mumble mupdate mvn news nfs ni nih nntp oid opera pkcs11 pop pop3 pres prospero redis rediss
    res resource rlogin rmi rsync rtmfp rtmp rtmps rtsp rtsps rtspu s3 secondlife service
    session sftp shell shortcuts shttp sieve sip sips skype smb sms smsto smtp smtps snmp soap
    ssh steam stun stuns svn tag tel telnet tftp tip turn turns tv udp unreal urn ut2004 vbs
    vbscript vemmi view-source vivaldi vnc wais webcal wpid ws wss wtai wyciwyg xcon xmlrpc xmpp
    z39
    """.split()
)
TAKEN_PREFIXES = (
    *("chrome", "devtools", "ext+", "git+", "http", "javascript", "moz-", "ms-", "safari-"),
    *("search-", "svn+", "web+", "x-apple", "x-web-"),
)
"""`chrome-extension`, `http+unix`, `ms-msdt`, `search-ms`, ..."""


def refusal(uri: str, *, native: bool, public: bool = False) -> str | None:
    """Return why a client may not have this redirect URI; None where it may.

    `public`: it has no secret and no key.
    """
    if len(uri) > MAX_URI_LENGTH:
        return f"must have at most {MAX_URI_LENGTH} characters"
    found = WEB.fullmatch(uri) or LOOPBACK.fullmatch(uri)
    if found is not None:
        return None if _is_port(found["port"]) else "its port is none"
    if PRIVATE.fullmatch(uri):
        return None if native else "only a native client may have a scheme of its own"
    short = SHORT.fullmatch(uri)
    if short is not None and not is_taken(short["scheme"]):
        if native and public:
            return None
        return "only a native client without a secret may have a scheme without a dot"
    return (
        "must be an https URI, or http on a loopback address, or of a scheme like com.example.app:"
        " or myapp://host, which nothing else has, in ASCII, without user, fragment or wildcard"
    )


def is_taken(scheme: str) -> bool:
    """True if a scheme without a dot means something already, so is no application's own."""
    return scheme in TAKEN or scheme.startswith(TAKEN_PREFIXES)


def has_own_scheme(uri: str) -> bool:
    """True if only an application on the user's machine can be meant."""
    return is_native(uri) and LOOPBACK.fullmatch(uri) is None


def is_native(uri: str) -> bool:
    """True if it leads to an application on the user's own machine, where any other could listen:
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
    """Return where the URI leads, for people and for a browser's policy: scheme and host, or a
    private scheme alone. `uri` has passed `refusal`."""
    scheme, _, rest = uri.partition(":")
    if not rest.startswith("//"):
        return f"{scheme}:"
    if has_own_scheme(uri):
        return f"{scheme}:"
    host = re.split(r"[/?]", rest[2:], maxsplit=1)[0]
    return f"{scheme}://{host}"


def _is_port(digits: str | None) -> bool:
    return digits is None or 1 <= int(digits) <= MAX_PORT
