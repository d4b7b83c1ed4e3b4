"""An upstream's refusals and faults, as ours: what the client may read, and what stays here.

A client sees the words of a 4xx that is about its own request, without the names and addresses in
them; `param` as far as it names what the client sent, `code` where it is one of OpenAI's for a
request. Whatever is about the gateway's account there (credentials, money, the model's name) is the
operator's to read, in the log, and for the router the same as an upstream that is down.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from foundation.json_numbers import is_index
from gateway.fleet.errors import (
    FleetError,
    ReplicaOverloaded,
    ReplicaUnauthorised,
    ReplicaUnavailable,
    UpstreamRefused,
)

log = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 1000
DEFAULT_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

CLIENTS_FAULT = frozenset({400, 409, 413, 415, 422})
REFUSES_US = frozenset({401, 402, 403, 407})
OVERLOADED = frozenset({429, 503, 529})
OUR_ACCOUNT = (
    *("api key", "api_key", "apikey"),
    *("credit balance", "insufficient balance", "insufficient_balance"),
    *("insufficient_quota", "exceeded your current quota", "billing"),
    *("your account", "your organization", "your subscription"),
)
"""Some vendors answer 400 to a bad key, or to an account without money."""

CODES = frozenset(
    {
        *("context_length_exceeded", "string_above_max_length", "string_below_min_length"),
        *("array_above_max_length", "array_below_min_length", "empty_array"),
        *("integer_above_max_value", "integer_below_min_value"),
        *("decimal_above_max_value", "decimal_below_min_value"),
        *("invalid_type", "invalid_value", "invalid_json_schema", "invalid_function_parameters"),
        *("missing_required_parameter", "unknown_parameter", "duplicate_parameter"),
        *("unsupported_parameter", "unsupported_value", "unsupported_country_region_territory"),
        *("content_filter", "content_policy_violation", "invalid_prompt"),
        *("invalid_image", "invalid_image_format", "invalid_image_url", "invalid_base64_image"),
        *("image_too_large", "image_too_small", "image_parse_error", "request_too_large"),
    }
)
"""The `code` values that are passed to clients. Others are the vendor's own and may reveal which
vendor it is."""

HIDDEN = "***"
LONG_WORD = 16
"""From so many characters on a word is nobody else's, whatever stands around it: a key."""
URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://[^\s\"'<>)]+", re.IGNORECASE)
IDENTIFIER = re.compile(
    r"\b(?:(?:org|proj|project|acct|account|user|key|sk|pk|req|workspace)[-_](?=[\w-]{0,64}\d)[\w-]{6,}"
    r"|arn:[\w:/.-]+)",
    re.IGNORECASE,
)
"""Patterns of the upstream's ids of accounts, keys and projects."""
STEP = re.compile(r"[.\[]*([^.\[\]]+)\]?")
"""One step of a path such as `messages[0].content`, `messages.[0].content` or `tools.0`."""


class UpstreamRefusal(msgspec.Struct, frozen=True):
    """The error object of a body, as far as it has one."""

    message: str
    type: str | None
    code: str | None
    param: str | None


def to_fleet_error(
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    replica: str,
    hidden: Mapping[str, str],
    sent: Mapping[str, Any],
) -> FleetError:
    """Make a fleet's error of an upstream's refusal. `hidden`: what must not reach the client in
    the upstream's words (the key, the host, the model's name over there), and what stands there
    instead. The key is never logged either. `sent`: the client's request."""
    refusal = parse_refusal(body)
    words = f"{refusal.message} {refusal.type} {refusal.code}".lower()
    ours = any(phrase in words for phrase in OUR_ACCOUNT)
    if status in CLIENTS_FAULT and not ours:
        return UpstreamRefused(
            without_names(refusal.message, hidden),
            status=status,
            error_type="invalid_request_error",
            error_code=refusal.code if refusal.code in CODES else None,
            param=None if refusal.param is None else part_that_was_sent(refusal.param, sent),
        )
    retry_after_s = parse_retry_after(headers)
    if status in OVERLOADED:
        return ReplicaOverloaded(f"{replica} answered {status}", retry_after_s=retry_after_s)
    if 300 <= status < 500 and status not in (408, 425):
        # Ours to repair. Not the body: it may repeat the key.
        log.error("upstream %s refuses this gateway with status %d", replica, status)
    refuses_us = status in REFUSES_US or (ours and 400 <= status < 500)
    kind = ReplicaUnauthorised if refuses_us else ReplicaUnavailable
    return kind(f"{replica} answered {status}", retry_after_s=retry_after_s)


def part_that_was_sent(param: str, sent: Mapping[str, Any]) -> str | None:
    """Return `param` as far as it leads through what the client sent; None where it names nothing
    of it."""
    at: Any = sent
    end = 0
    for step in STEP.finditer(param):
        name = step[1]
        if step.start() != end:
            break
        if isinstance(at, Mapping) and name in at:
            at = at[name]
        elif isinstance(at, list) and is_index(name) and int(name) < len(at):
            at = at[int(name)]
        else:
            break
        end = step.end()
    return param[:end] or None


def parse_refusal(body: bytes) -> UpstreamRefusal:
    """Read `{"error": {...}}`, or what else is seen: the object bare, in a list, `detail` or
    `message` alone."""
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
    return UpstreamRefusal(
        message=message or "The model's upstream refused the request.",
        type=text_of(found.get("type")),
        code=text_of(found.get("code")),
        param=text_of(found.get("param")),
    )


def text_of(value: Any) -> str | None:
    return value[:MAX_MESSAGE_CHARS] if isinstance(value, str) and value else None


def without_names(message: str, hidden: Mapping[str, str]) -> str:
    """Replace those in `hidden`, the short ones as whole words: a model may be called `m`."""
    for word, instead in hidden.items():
        literal = instead.replace("\\", r"\\")
        escaped = re.escape(word)
        pattern = escaped if len(word) >= LONG_WORD else rf"(?<!\w){escaped}(?!\w)"
        message = re.sub(pattern, literal, message)
    message = IDENTIFIER.sub(HIDDEN, URL.sub(HIDDEN, message))
    return message[:MAX_MESSAGE_CHARS]


def parse_retry_after(headers: Mapping[str, str]) -> float:
    """Read the seconds, between 0 and MAX_RETRY_AFTER_S; a date, which none of them sends, counts
    as absent."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            delay_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(delay_s) and delay_s >= 0:
            return min(delay_s, MAX_RETRY_AFTER_S)
    return DEFAULT_RETRY_AFTER_S
