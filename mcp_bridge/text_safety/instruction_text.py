"""Finds text in a description that gives the model instructions instead of describing a tool.

The patterns are phrases of published attacks (tool poisoning and shadowing: Invariant Labs, April
2025; line jumping: Trail of Bits; OWASP MCP Top 10, 2025). A finding is advice: a text can say the
same in other words, so pinning and policy do not depend on it; `instruction_score` finds more.
Every pattern is bounded in what it can span, since the author of the text may be hostile, and is
tried only where one of its words is. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from foundation.normal_forms import normalized
from mcp_bridge.text_safety.hidden_text import stripped

Severity = Literal["low", "medium", "high"]

MAX_TEXT_CHARS = 32 << 10
SECRET = (
    r"(?:~?/?\.ssh\b|id_(?:rsa|ed25519)|\.env\b|/etc/(?:passwd|shadow)|\.aws/|\.netrc|"
    r"\.cursor/|mcp\.json|private keys?\b|api[ _-]?keys?\b|passwords?\b|credentials?\b|"
    r"environment variables?\b|access tokens?\b)"
)
TALK = (
    r"(?:conversation|chat|message)(?: history|s so far)|(?:entire|whole|full|previous) "
    r"(?:conversation|chat|context|messages)|system prompt|user'?s (?:last|previous) messages?"
)
TAKE = r"(?:read|send|include|pass|append|provide|copy|attach|forward|upload|exfiltrate|put|list)"
NOBODY = r"(?:the |any )?(?:user|human|anyone|developer)"

PATTERNS: tuple[tuple[str, Severity, str], ...] = (
    (
        "override",
        "high",
        r"\b(?:ignore|disregard|forget|override|bypass)\b.{0,30}\b(?:previous|prior|above|earlier|"
        r"other|all|any|your|system|safety)\b.{0,30}\b(?:instructions?|rules?|prompts?|guidelines?|"
        r"directives?|constraints?)\b",
    ),
    (
        "secrecy",
        "high",
        rf"\b(?:do not|don't|never|without|must not|should not|avoid)\b.{{0,20}}\b(?:tell|mention|"
        rf"inform|notify|reveal|show|alert|ask|telling|mentioning|informing|notifying|revealing|"
        rf"showing|alerting|asking)\b(?: \w+){{0,3}} ?{NOBODY}\b|"
        rf"\b{NOBODY} (?:must|should|can|will|does) ?n[o']t (?:know|see|notice|be aware)",
    ),
    (
        "role",
        "high",
        r"< ?/? ?(?:important|system|instructions?|secret|assistant|admin|hidden|critical|"
        r"iimportant)\b[^<>]{0,40}>|\[/?inst\]|<\|[a-z_]{1,20}\|>|"
        r"\n ?#{0,4} ?(?:system|assistant|human) ?:",
    ),
    (
        "secrets",
        "high",
        rf"\b{TAKE}\b.{{0,60}}{SECRET}|\bcontents? of\b.{{0,20}}{SECRET}",
    ),
    ("conversation", "high", rf"\b{TAKE}\b.{{0,60}}(?:{TALK})"),
    (
        "redirection",
        "high",
        r"\b(?:change|replace|modify|redirect|set|send)\b.{0,40}\b(?:recipient|all (?:emails?|"
        r"messages?|payments?|requests?)|phone number|destination)\b.{0,40}(?:\bto\b|\+?\d{6,})",
    ),
    (
        "precedence",
        "medium",
        r"\b(?:before|after|when(?:ever)?) (?:using|calling|invoking|running|you (?:use|call))\b"
        r".{0,20}\b(?:any|every|all|each|other)\b.{0,20}\btools?\b|"
        r"\b(?:takes? precedence|has priority|highest priority) over\b|"
        r"\b(?:instead of|rather than|never use|do not use|don't use)\b.{0,20}\b(?:any )?other "
        r"(?:\w+ )?tools?\b",
    ),
    (
        "preference",
        "medium",
        r"\balways\b.{0,10}\b(?:use|prefer|choose|call|pick|select)\b.{0,10}\bthis tool\b|"
        r"\bthis (?:is the )?(?:best|only|most \w+) tool\b|\bmust (?:always )?be (?:called|used|"
        r"invoked) (?:first|before)\b.{0,20}\b(?:any|every|all)\b",
    ),
    ("encoded", "medium", r"[A-Za-z0-9+/]{160,4000}={0,2}"),
)
COMPILED = tuple(
    (name, severity, re.compile(pattern, re.IGNORECASE)) for name, severity, pattern in PATTERNS
)
NEEDED: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in (
        ("override", "ignore disregard forget override bypass"),
        ("secrecy", "user human anyone developer"),
        ("secrets", f"{TAKE[3:-1].replace('|', ' ')} contents content"),
        ("conversation", "history far conversation chat context messages prompt message"),
        ("redirection", "recipient all number destination"),
        ("precedence", "tool tools precedence priority"),
        ("preference", "tool first before"),
    )
}
"""The words of which every match of a pattern has one."""
WORD = re.compile(r"[^\W\d_]+")
MIN_ENCODED = 160
SPACES = re.compile(r"[^\S\n]+")
LINES = re.compile(r"\n[\n ]*")


def instructions(text: str) -> Iterator[tuple[str, Severity, str]]:
    """Yield (name of the pattern, severity, match) in `text`, each pattern once.

    The text is normalized first: no hidden characters, compatibility forms folded, single spaces.
    """
    text = text[:MAX_TEXT_CHARS]
    if not (text.isascii() and text.isprintable()):
        text = normalized("NFKC", stripped(text)).replace("\u2019", "'")
    plain = LINES.sub("\n ", SPACES.sub(" ", text))
    joined = plain.replace("\n", " ")
    words = words_of(joined)
    for name, severity, pattern in COMPILED:
        if not may_match(name, plain, words):
            continue
        found = pattern.search(plain if name == "role" else joined)
        if found:
            yield name, severity, found.group()[:120].strip()


def words_of(text: str) -> set[str]:
    """Return the words of a text, in lower case."""
    return set(WORD.findall(text.lower()))


def may_match(name: str, text: str, words: set[str]) -> bool:
    needed = NEEDED.get(name)
    if needed is not None:
        return not needed.isdisjoint(words)
    if name == "role":
        return "<" in text or "[" in text or "\n" in text
    return len(text) >= MIN_ENCODED
