"""Finds and removes characters that a person does not see and a model reads, or a terminal obeys.

Classes: C0 and C1 controls, ANSI escapes and OSC 8 links (ECMA-48), tag characters, zero-width and
other default-ignorable characters (UAX #44), bidirectional controls (UAX #9, UTS #55), variation
selectors. Characters that a script needs pass where it needs them (UTS #51; UTS #39, 3.1.1): ZWJ
and VS16 in emoji, tags in the three flags that exist, joiners in Indic and Arabic script,
direction marks in right-to-left text, variation selectors of ideographs. Pure.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Literal

import msgspec

Hiding = Literal[
    "ansi", "osc8", "control", "tag", "zero_width", "bidi", "variation", "private_use", "surrogate"
]

SUSPECT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ud800-\udfff\ue000-\uf8ff\ufe00-\ufe0f"
    "\ufeff\uffa0\ufff0-\uffff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)
ANSI = re.compile(r"(?:\x1b[@-_]|\x9b|\x9d)")
OSC8 = re.compile("(?:\x1b\\]|\x9d)8;")
SEQUENCE = re.compile(
    "(?:\x1b\\]|\x9d)[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\\\|\x9c)"  # OSC and its text
    "|(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI
    "|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x90\x98\x9c-\x9f]*(?:\x1b\\\\|\x9c)"  # DCS and such
    "|\x1b[ -/]*[0-~]?"
)
FLAGS = re.compile(
    "\U0001f3f4\U000e0067\U000e0062(?:\U000e0065\U000e006e\U000e0067"
    "|\U000e0073\U000e0063\U000e0074|\U000e0077\U000e006c\U000e0073)\U000e007f"
)
"""England, Scotland and Wales: the only tag sequences that are recommended (emoji-sequences)."""

ZWNJ, ZWJ, VS15, VS16 = "\u200c", "\u200d", "\ufe0e", "\ufe0f"
MARKS = frozenset("\u200e\u200f\u061c")
KEYCAPS = frozenset("0123456789#*")
EMOJI_EXTRAS = frozenset("©®‼⁉™ℹ↔↕↖↗↘↙↩↪〰〽㊗㊙")
MAX_ROUNDS = 4
"""Rounds of removal; a text that still hides something then loses every suspect character."""

VIRAMA = 9
"""The combining class of viramas, after which joiners shape Indic letters."""


class HiddenCharacter(msgspec.Struct, frozen=True):
    """A hidden character: its class, its index in characters, and its code point."""

    hiding: Hiding
    index: int
    code_point: int


def hidden(text: str) -> Iterator[HiddenCharacter]:
    """Yield every hidden character of `text`, in order."""
    if SUSPECT.search(text) is None:
        return
    flags = [match.span() for match in FLAGS.finditer(text)]
    directed = any(unicodedata.bidirectional(c) in ("R", "AL", "AN") for c in text)
    for match in SUSPECT.finditer(text):
        index = match.start()
        if any(start <= index < end for start, end in flags):
            continue
        if needed(text, index, directed):
            continue
        yield HiddenCharacter(hiding_of(text, index), index, ord(text[index]))


def needed(text: str, index: int, directed: bool) -> bool:
    """True if the script itself needs this character at this place."""
    char = text[index]
    before = text[index - 1] if index else ""
    after = text[index + 1 : index + 2]
    if char in MARKS:
        return directed
    if char == ZWJ and pictured(text, index - 1) and after and emoji(after):
        return True
    if char in (ZWNJ, ZWJ):
        return bool(before) and shapes(before) and bool(after) and after.isalpha()
    if char in (VS15, VS16):
        return bool(before) and (emoji(before) or before in KEYCAPS)
    if "\ufe00" <= char <= "\ufe02" or "\U000e0100" <= char <= "\U000e01ef":
        return bool(before) and ideograph(before)
    return False


def pictured(text: str, index: int) -> bool:
    """True if an emoji ends at `index`, with or without a selector or skin tone."""
    if index >= 1 and text[index] == VS16:
        index -= 1
    if index < 0:
        return False
    return emoji(text[index]) or "\U0001f3fb" <= text[index] <= "\U0001f3ff"


def emoji(char: str) -> bool:
    return (
        "\U0001f000" <= char <= "\U0001faff" or "\u231a" <= char <= "\u2bff" or char in EMOJI_EXTRAS
    )


def shapes(char: str) -> bool:
    return unicodedata.combining(char) == VIRAMA or unicodedata.bidirectional(char) == "AL"


def ideograph(char: str) -> bool:
    return (
        "\u3400" <= char <= "\u9fff"
        or "\uf900" <= char <= "\ufaff"
        or "\U00020000" <= char <= "\U0003ffff"
    )


def hiding_of(text: str, index: int) -> Hiding:
    char = text[index]
    code = ord(char)
    if OSC8.match(text, index):
        return "osc8"
    if ANSI.match(text, index):
        return "ansi"
    if code < 0x20 or 0x7F <= code <= 0x9F:
        return "control"
    if 0xE0000 <= code <= 0xE007F:
        return "tag"
    if code in MARKS_AND_CONTROLS:
        return "bidi"
    if 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF or 0x180B <= code <= 0x180F:
        return "variation"
    if 0xD800 <= code <= 0xDFFF:
        return "surrogate"
    if 0xE000 <= code <= 0xF8FF or code >= 0xF0000:
        return "private_use"
    return "zero_width"


MARKS_AND_CONTROLS = frozenset([*map(ord, MARKS), *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


def visible(text: str) -> str:
    """Return `text` with each hidden character written as `\\u{XXXX}`: for diffs and logs."""
    shown = list(text)
    for found in hidden(text):
        shown[found.index] = f"\\u{{{found.code_point:04X}}}"
    return "".join(shown)


def visible_marks(text: str) -> str:
    """Return a text that is not in NFC (UAX #15), and looks like one that is, with each character
    by which it differs written as `visible` writes what is hidden."""
    if unicodedata.is_normalized("NFC", text):
        return text
    return "".join(f"\\u{{{ord(char):04X}}}" if differs_in_nfc(char) else char for char in text)


def differs_in_nfc(char: str) -> bool:
    return bool(unicodedata.combining(char)) or not unicodedata.is_normalized("NFC", char)


def stripped(text: str) -> str:
    """Return `text` without hidden characters and whole escape sequences, with their links.

    Removal repeats until nothing is found: what was apart may form a new sequence.
    """
    for _ in range(MAX_ROUNDS):
        text = SEQUENCE.sub("", text)
        found = {one.index for one in hidden(text)}
        if not found:
            return text
        text = "".join(char for index, char in enumerate(text) if index not in found)
    return SUSPECT.sub("", text)
