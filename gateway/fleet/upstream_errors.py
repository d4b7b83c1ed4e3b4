"""An upstream's refusals and faults, as ours: what the client may read, and what stays here.

Above: `upstream`. Below: the error tree. A client sees the words of a 4xx that is about its own
request. Whatever is about the gateway's account there (credentials, money, the model's name) is
the operator's to read, in the log, and for the router the same as an upstream that is down.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.fleet.errors import FleetError, ReplicaOverloaded, ReplicaUnavailable, UpstreamRefused

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

CLIENTS_FAULT = frozenset({400, 409, 413, 415, 422})
OVERLOADED = frozenset({429, 503, 529})
KEY_WORDS = ("api key", "api_key", "apikey")
"""Some vendors answer 400 to a bad key."""


class Refusal(msgspec.Struct, frozen=True):
    """The error object of a body, as far as it has one."""

    message: str
    type: str
    code: str | None
    param: str | None


def to_fleet_error(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    replica: str,
    hidden: Mapping[str, str],
) -> FleetError:
    """`hidden`: what must not reach the client in the upstream's words (the key, the model's
    name over there), and what stands there instead. The key is never logged either.
    """
    refusal = parse_refusal(body)
    about_key = any(word in refusal.message.lower() for word in KEY_WORDS)
    if status in CLIENTS_FAULT and not about_key:
        return UpstreamRefused(
            replaced(refusal.message, hidden),
            status=status,
            error_type=refusal.type,
            error_code=refusal.code,
            param=refusal.param,
        )
    retry_after_s = parse_retry_after(headers)
    if status in OVERLOADED:
        return ReplicaOverloaded(f"{replica} answered {status}", retry_after_s=retry_after_s)
    if 300 <= status < 500 and status not in (408, 425):
        # Ours to repair. Not the body: it may repeat the key.
        log.error("upstream %s refuses this gateway with status %d", replica, status)
    return ReplicaUnavailable(f"{replica} answered {status}", retry_after_s=retry_after_s)


def parse_refusal(body: bytes) -> Refusal:
    """`{"error": {...}}`, or what else is seen: the object bare, in a list, `detail` or
    `message` alone.
    """
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if isinstance(found, list) and found:
        found = found[0]
    if isinstance(found, dict):
        found = found.get("error", found)
    if not isinstance(found, dict):
        found = {"message": found}
    message = next((found[k] for k in ("message", "detail") if isinstance(found.get(k), str)), None)
    return Refusal(
        message=message or "The model's upstream refused the request.",
        type=text_of(found.get("type")) or "invalid_request_error",
        code=text_of(found.get("code")),
        param=text_of(found.get("param")),
    )


def text_of(value: Any) -> str | None:
    return value[:MAX_MESSAGE_CHARS] if isinstance(value, str) and value else None


def replaced(message: str, hidden: Mapping[str, str]) -> str:
    """As whole words: a model may be called `m`."""
    for word, instead in hidden.items():
        literal = instead.replace("\\", r"\\")
        message = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", literal, message)
    return message[:MAX_MESSAGE_CHARS]


def parse_retry_after(headers: Mapping[str, str]) -> float:
    """Seconds, between 0 and MAX_RETRY_AFTER_S; a date, which none of them sends, counts as
    absent.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            delay_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(delay_s) and delay_s >= 0:
            return min(delay_s, MAX_RETRY_AFTER_S)
    return DEFAULT_RETRY_AFTER_S
