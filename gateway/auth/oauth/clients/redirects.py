"""Checks which redirect URIs a client may have, and which one a request may name (RFC 6749, 3.1.2;
OAuth 2.1; RFC 8252).

URIs are matched as strings against one grammar that is narrower than RFC 3986: so no URL parser can
read them differently than a browser does. Hosts are ASCII, so that none looks like another. User
parts, backslashes, fragments and wildcards are refused.
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
"""A private scheme without a dot, which some agents register all the same, such as
`cursor://anysphere.cursor-mcp/oauth/callback`. It is allowed for native clients without a secret,
with an authority, and with no scheme of TAKEN."""
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

    `public`: the client has no secret and no key.
    """
    if len(uri) > MAX_URI_LENGTH:
        return f"must have at most {MAX_URI_LENGTH} characters"
    found = WEB.fullmatch(uri) or LOOPBACK.fullmatch(uri)
    if found is not None:
        return None if _is_port(found["port"]) else "has an invalid port"
    if PRIVATE.fullmatch(uri):
        return None if native else "may have a private scheme only for a native client"
    short = SHORT.fullmatch(uri)
    if short is not None and not is_taken(short["scheme"]):
        if native and public:
            return None
        return "may have a scheme without a dot only for a native client without a secret"
    return (
        "must be an https URI, an http URI on a loopback address, or have a private scheme such as"
        " com.example.app: or myapp://host; in ASCII, without user, fragment or wildcard"
    )


def is_taken(scheme: str) -> bool:
    """True if a scheme without a dot has a known meaning, so cannot be an application's own."""
    return scheme in TAKEN or scheme.startswith(TAKEN_PREFIXES)


def has_own_scheme(uri: str) -> bool:
    """True if the URI has a private scheme, of an application on the user's machine."""
    return is_native(uri) and LOOPBACK.fullmatch(uri) is None


def is_native(uri: str) -> bool:
    """True if the URI leads to an application on the user's machine, where another one could listen
    too: consent to it is not remembered (RFC 8252, 8.6)."""
    return WEB.fullmatch(uri) is None


def find_registered(registered: Iterable[str], uri: str, *, native: bool) -> str | None:
    """Return the registered URI that `uri` matches: the same string, or for a native client on a
    loopback address one that differs only in the port (RFC 8252, 7.3)."""
    loopback = LOOPBACK.fullmatch(uri) if native else None
    for each in registered:
        if each == uri:
            return each
        if loopback is None or (other := LOOPBACK.fullmatch(each)) is None:
            continue
        is_same = other["host"] == loopback["host"] and other["rest"] == loopback["rest"]
        if is_same and _is_port(loopback["port"]):
            return each
    return None


def origin_of(uri: str) -> str:
    """Return the origin of a checked URI, for people and for a Content-Security-Policy: scheme and
    host, or a private scheme alone."""
    scheme, _, rest = uri.partition(":")
    if not rest.startswith("//") or has_own_scheme(uri):
        return f"{scheme}:"
    host = re.split(r"[/?]", rest[2:], maxsplit=1)[0]
    return f"{scheme}://{host}"


def _is_port(digits: str | None) -> bool:
    return digits is None or 1 <= int(digits) <= MAX_PORT
