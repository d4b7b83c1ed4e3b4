"""Finds names of arguments and tools that instruct a model (full-schema poisoning: CyberArk, 2025).

A model fills an argument by its name; `content_of_ssh_id_rsa` needs no description. Pure.
"""

from __future__ import annotations

import re

MAX_WORDS = 6
MAX_CHARS = 64
PARTS = re.compile(r"[_\-\s.:/]+|(?<=[a-z0-9])(?=[A-Z])")
ODD = re.compile(
    r"\b(?:ssh (?:id|private|rsa)|id rsa|id ed25519|etc passwd|etc shadow|dot env|env file|private "
    r"key "
    r"(?:content|file|text)|seed phrase|keychain|aws credentials)\b"
    r"|\b(?:full|entire|whole|complete|all|previous)\b.{0,20}\b(?:conversation|chat|dialogue?|"
    r"messages|"
    r"history|prompts?)\b"
    r"|\bsystem prompt\b.{1,40}|\b(?:your|the) (?:system prompt|instructions)\b"
    r"|\b(?:ignore|disregard) (?:all |the )?(?:previous|prior|earlier)\b"
    r"|\b(?:do not|dont|never) (?:tell|inform|mention|ask)\b"
    r"|\b(?:password|credentials|secrets?|tokens?) (?:from|of)\b"
)

CONTENT = frozenset("content contents value text file data dump output paste body history".split())
PRIVATE = frozenset(
    "env ssh rsa passwd shadow bash password passwords credentials clipboard cookies inbox mailbox "
    "secret secrets instructions".split()
)
"""Together with a word of CONTENT, a name asks for what is private."""


def oddity(name: str) -> str | None:
    """Return what is odd about the name of an argument or a tool; None: nothing."""
    words = [word for word in PARTS.split(name[: 4 * MAX_CHARS]) if word]
    folded = [word.lower() for word in words]
    if ODD.search(" ".join(folded)) or (
        CONTENT.intersection(folded) and PRIVATE.intersection(folded)
    ):
        return "asks for what no argument should hold, or instructs"
    spelled = [word for word in words if word.isascii() and word.strip(",.").isalpha()]
    if len(spelled) > MAX_WORDS:
        return f"{len(spelled)} words"
    return f"longer than {MAX_CHARS} characters" if len(name) > MAX_CHARS else None
