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
    r"|\b(?:password|credentials|secrets?|tokens?) (?:from|of)\b"
)
ORDERS = re.compile(
    r"\b(?:ignore|disregard) (?:all |the )?(?:previous|prior|earlier)\b"
    r"|\b(?:do not|dont|never) (?:tell|inform|mention|ask)\b"
)
COMMAND = re.compile(r"[;|`<>]|\$\(")
"""Characters of a command, which no name needs."""
CONTENT = frozenset("content contents value text file data dump output paste body history".split())
PRIVATE = frozenset(
    "env ssh rsa passwd shadow bash password passwords credentials clipboard cookies inbox mailbox "
    "secret secrets instructions".split()
)
"""Together with a word of CONTENT, a name asks for what is private."""


def oddity(name: str) -> str | None:
    """Return what is odd about the name of an argument; None: nothing."""
    folded = [word.lower() for word in words_of(name)]
    if ODD.search(" ".join(folded)) or (
        CONTENT.intersection(folded) and PRIVATE.intersection(folded)
    ):
        return "asks for what no argument should hold"
    return disorder(name)


def disorder(name: str) -> str | None:
    """Return what is odd about the name of an argument or a tool, whatever it is for."""
    words = words_of(name)
    if ORDERS.search(" ".join(words).lower()):
        return "instructs"
    if COMMAND.search(name):
        return "has characters of a command"
    spelled = [word for word in words if word.isascii() and word.strip(",.").isalpha()]
    if len(spelled) > MAX_WORDS:
        return f"{len(spelled)} words"
    return f"longer than {MAX_CHARS} characters" if len(name) > MAX_CHARS else None


def words_of(name: str) -> list[str]:
    return [word for word in PARTS.split(name[: 4 * MAX_CHARS]) if word]
