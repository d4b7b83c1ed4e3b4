"""Reads the challenge with which a server refuses us (RFC 9110, 11.6.1; RFC 6750, 3; RFC 9728).

Pure. Of several challenges the bearer's is read; what is no challenge says nothing.
"""

from __future__ import annotations

import re
from urllib.request import parse_http_list

import msgspec

MAX_LENGTH = 8_192
MAX_SCOPES = 64
SCHEME = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?: +(.*))?", re.DOTALL)
PARAMETER = re.compile(r'([!#$%&\'*+.^_`|~0-9A-Za-z-]+)\s*=\s*(?:"(.*)"|([^"\s]+))', re.DOTALL)
SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]{1,256}", re.ASCII)
"""RFC 6749, 3.3."""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    error: str | None = None
    scopes: tuple[str, ...] = ()
    resource_metadata: str | None = None


def read_challenge(header: str) -> Challenge:
    """Read a `WWW-Authenticate` header; members that it does not name are left out."""
    found: dict[str, str] = {}
    is_bearer = False
    for part in parse_http_list(header[:MAX_LENGTH]):
        parameter = PARAMETER.fullmatch(part)
        if parameter is None:
            scheme = SCHEME.fullmatch(part)
            if scheme is None:
                continue
            if is_bearer:
                break
            is_bearer = scheme[1].lower() == "bearer"
            parameter = PARAMETER.fullmatch(scheme[2] or "")
        if is_bearer and parameter is not None:
            value = parameter[3] or re.sub(r"\\(.)", r"\1", parameter[2] or "")
            found.setdefault(parameter[1].lower(), value)
    return Challenge(
        error=found.get("error"),
        scopes=split_scopes(found.get("scope", "")),
        resource_metadata=found.get("resource_metadata"),
    )


def split_scopes(text: str) -> tuple[str, ...]:
    """Return each scope once, in their order; what is none is left out."""
    found = dict.fromkeys(each for each in text.split() if SCOPE.fullmatch(each))
    return tuple(found)[:MAX_SCOPES]
