"""Decodes what a text hides in an encoding: base64, hexadecimal, percent and character escapes,
letters set apart, digits for letters, ROT13, text written backwards.

Only the text that a model could read without being told a key; each decoding is bounded by the
text's own length. Pure.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import html
import re
from collections.abc import Iterator
from urllib.parse import unquote

from mcp_bridge.text_safety.instruction_text import words_of

MIN_CHARS = 24
"""The length from which a text can hide an instruction."""
MAX_CHARS = 16 << 10
MIN_READABLE = 0.95
"""The share of letters, digits, spaces and punctuation from which bytes are taken for a text."""

BASE64 = re.compile(r"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_-]{20,8192}={0,2}")
BASE64_IN_PARTS = re.compile(
    r"(?:[A-Za-z0-9+/]{4,256}={0,2}[\s,|]{1,4}){2,256}[A-Za-z0-9+/]{2,256}={0,2}"
)
MIXED = re.compile(r"[a-z][A-Z]|\d[A-Za-z]|[A-Za-z]\d")
"""A change of case or of kind within a word, which ordinary words do not have."""
DIGIT = re.compile(r"\d")
HEX = re.compile(r"(?:(?:0x|\\x)?[0-9a-fA-F]{2}[\s:,-]?){16,4096}")
HEX_SEPARATORS = re.compile(r"0x|\\x|[\s:,-]")
PERCENT = re.compile(r"(?:%[0-9a-fA-F]{2}[^%]{0,24}){3}")
ENTITIES = re.compile(r"(?:&#?[0-9a-zA-Z]{1,8};[^&]{0,12}){3}")
ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4}){3}")
SPACED = re.compile(r"(?<!\w)(?:\w[ .*_|~-]{1,3}){7,2048}\w(?!\w)")
GAPS = re.compile(r"[^\w]|_")
LEET = str.maketrans("0134578@$!", "oieastbasi")
LEET_WORD = re.compile(r"\b(?=\w*[a-zA-Z])(?=\w*[0134578])[a-zA-Z0134578@$!]{3,24}\b")
MIN_LEET_WORDS = 3
TELLING = (
    "ignore disregard forget previous instructions rules user tell password passwords credentials "
    "secret "
    "private key token conversation system prompt"
).split()
ROTATED = frozenset(codecs.encode(word, "rot13") for word in TELLING)
REVERSED = frozenset(word[::-1] for word in TELLING)
"""Words of instructions as they are in ROT13, and backwards."""
SPOKEN = re.compile(
    r"(?:ignore|disregard|forget)(?:all)?(?:the|your|my)?(?:previous|prior|earlier|above)"
    r"|(?:donot|dont|never)(?:tell|inform|mention)(?:this|it)?(?:to)?(?:the|any)?user"
    r"|(?:read|send|include)(?:the|your|all)?(?:privatekey|apikey|password|credentials|env|ssh)"
    r"|(?:reveal|send|print)(?:the|your)?systemprompt"
)
"""Phrases as they are without the spaces between their words."""


def decoded(text: str) -> Iterator[tuple[str, str]]:
    """Yield (the encoding, what it says) for each encoding that a text may have."""
    if len(text) < MIN_CHARS:
        return
    text = text[:MAX_CHARS]
    for found in BASE64.finditer(text):
        yield from readable("base64", from_base64(found.group()))
    is_mixed = MIXED.search(text) is not None
    for found in BASE64_IN_PARTS.finditer(text) if is_mixed else ():
        yield from readable("base64", from_base64(re.sub(r"[\s,|=]", "", found.group())))
    for found in HEX.finditer(text) if DIGIT.search(text) else ():
        yield from readable("hex", from_hex(found.group()))
    if PERCENT.search(text):
        yield "percent", unquote(text, errors="replace")
    if ENTITIES.search(text):
        yield "entities", html.unescape(text)
    if ESCAPES.search(text):
        yield "escapes", re.sub(r"\\u([0-9a-fA-F]{4})", lambda one: chr(int(one[1], 16)), text)
    if is_mixed and len(LEET_WORD.findall(text)) >= MIN_LEET_WORDS:
        yield "leet", text.translate(LEET)
    words = words_of(text)
    if not ROTATED.isdisjoint(words):
        yield "rot13", codecs.encode(text, "rot13")
    if not REVERSED.isdisjoint(words):
        yield "reversed", text[::-1]


def spaced(text: str) -> Iterator[str]:
    """Yield phrases of SPOKEN whose letters stand apart: `i g n o r e`."""
    for found in SPACED.finditer(text[:MAX_CHARS]):
        phrase = SPOKEN.search(GAPS.sub("", found.group()).lower())
        if phrase:
            yield phrase.group()


def from_base64(token: str) -> bytes:
    bare = token.rstrip("=").replace("-", "+").replace("_", "/")
    if len(bare) % 4 == 1:
        bare = bare[:-1]
    try:
        return base64.b64decode(bare + "=" * (-len(bare) % 4), validate=True)
    except binascii.Error:
        return b""


def from_hex(digits: str) -> bytes:
    bare = HEX_SEPARATORS.sub("", digits)
    try:
        return bytes.fromhex(bare[: len(bare) // 2 * 2])
    except ValueError:
        return b""


def readable(encoding: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Yield the text that these bytes are, if they are one."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return
    good = sum(char.isprintable() or char in "\n\t" for char in text)
    if text and " " in text and good >= MIN_READABLE * len(text):
        yield encoding, text
