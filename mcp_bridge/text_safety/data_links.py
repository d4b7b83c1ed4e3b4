"""Finds links and images that would carry data out of a conversation when they are shown.

A client that renders Markdown loads an image without a click (EchoLeak, 2025), and a link may be
asked for with a placeholder that the model fills. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

IMAGE = re.compile(r"!\[[^\]]{0,200}\]\(\s?((?:https?:)?//[^)]{1,2048})\)")
LINK = re.compile(r"(?<!!)\[[^\]]{1,200}\]\(\s?(https?://[^)]{1,2048})\)")
TAG = re.compile(
    r"<(?:img|iframe|script|link|object)\b[^>]{0,400}\b(?:src|href|"
    r"data)\s?=\s?[\"']?(https?://[^>]{1,2048})",
    re.I,
)
BARE = re.compile(r"https?://[^\s\"'`)]{1,2048}")
PLACEHOLDER = re.compile(
    r"\{\{?[^{}]{1,60}\}?\}|\$\{?\w{1,40}|<[^<>]{2,60}>|\[[A-Z][A-Z _]{2,60}\]|%s|\bAPI_KEY\b"
)
QUERY = re.compile(r"[?&#][^=&]{1,40}=")
EMPTY_QUERY = re.compile(r"[?&#][^=&]{1,40}=(?:$|&)")
"""A query whose value is left to whoever writes the link."""
DATA_QUERY = re.compile(r"[?&#][^=&]{0,40}=\s?(?:\{|\$|<|\[|%s|API_KEY)")
FOLLOWED = re.compile(
    r"https?://[^\s\"'`]{1,300}[/=]`?'?\"? (?:followed by|plus|and then|with) ", re.I
)
PREFIXED = re.compile(r"<[^<>]{2,60}>\.[\w.-]{3,200}|\{[^{}]{2,60}\}\.[\w-]{2,60}\.[\w.-]{2,100}")
WHAT = re.compile(
    r"conversation|chat|message|history|secret|password|credential|token|session|api.?key|question|"
    r"user.?name|e-?mails?|content|prompt|context|memory|answer",
    re.I,
)

LinkSeverity = Literal["low", "medium", "high"]


def data_links(text: str) -> Iterator[tuple[str, LinkSeverity, str]]:
    """Yield (code, severity, match) of what would carry data out, each code once."""
    if "//" not in text and "<" not in text and "{" not in text:
        return
    for code, regex in (("image", IMAGE), ("image", TAG)):
        found = regex.search(text)
        if found:
            yield code, weight_of(found[1]), found.group()[:120]
            break
    for regex in (LINK, BARE):
        filled = next((one for one in regex.finditer(text) if carries(one.group())), None)
        if filled:
            yield "link", "high", filled.group()[:120]
            break
    found = FOLLOWED.search(text) or next(
        (one for one in PREFIXED.finditer(text) if WHAT.search(one.group())), None
    )
    if found:
        yield "data", "high", found.group()[:120]


def weight_of(image: str) -> LinkSeverity:
    """Return how bad an image is by what its address may carry."""
    if PLACEHOLDER.search(image) or EMPTY_QUERY.search(image):
        return "high"
    return "medium" if QUERY.search(image) else "low"


def carries(link: str) -> bool:
    """True if a link has a placeholder for what is private."""
    found = DATA_QUERY.search(link)
    return found is not None and WHAT.search(link[found.start() :]) is not None
