"""Reads the corpus of poisoned and of ordinary definitions.

The attacks are written after public descriptions of tool poisoning, shadowing, line jumping,
full-schema poisoning, EchoLeak and others, in words of their own; the ordinary ones after what
public servers offer. What an attack hides in an encoding stands there in the clear, `{hex:...}`,
and is encoded when it is read. The files `held_out_...`
were written once the rules were there, and no rule was changed for them.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

FOLDER = Path(__file__).parent / "corpus"
MARK = re.compile(
    r"\{(b64|b64split|hex|hexsp|spaced|dotted|leet|rot13|reversed|url|html|tags):([^{}]*)\}"
)


def in_base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def percent(text: str) -> str:
    return "".join(f"%{byte:02X}" if byte in b" aeiou" else chr(byte) for byte in text.encode())


ENCODINGS: dict[str, Callable[[str], str]] = {
    "b64": in_base64,
    "b64split": lambda text: " ".join(re.findall(".{1,16}", in_base64(text))),
    "hex": lambda text: text.encode().hex(),
    "hexsp": lambda text: text.encode().hex(" "),
    "spaced": lambda text: " ".join(text.replace(" ", "")),
    "dotted": lambda text: ".".join(text.replace(" ", "")),
    "leet": lambda text: text.translate(str.maketrans("aeiost", "431057")),
    "rot13": lambda text: codecs.encode(text, "rot13"),
    "reversed": lambda text: text[::-1],
    "url": lambda text: quote(text),
    "html": lambda text: "".join(f"&#{ord(char)};" for char in text),
    "tags": lambda text: "".join(chr(0xE0000 + ord(char)) for char in text),
}


class Sample(msgspec.Struct, frozen=True):
    """A definition. `kind`: the class of its attack; empty: it is none."""

    kind: str
    tool: dict[str, Any]


def sample_of(kind: str, name: str, description: str, arguments: dict[str, str]) -> Sample:
    said = MARK.sub(lambda found: ENCODINGS[found[1]](found[2]), description)
    properties = {
        each: {"type": "string", **({"description": text} if text else {})}
        for each, text in arguments.items()
    }
    schema = {"type": "object", "properties": properties}
    tool = {"name": name, "description": said, "inputSchema": schema}
    return Sample(kind, tool)


def attacks(*, held_out: bool = False) -> list[Sample]:
    return [sample_of(*one) for one in lines_of("attacks.jsonl", held_out)]


def ordinary(*, held_out: bool = False) -> list[Sample]:
    return [sample_of("", *one) for one in lines_of("benign.jsonl", held_out)]


def lines_of(name: str, held_out: bool) -> list[Any]:
    path = FOLDER / ("held_out_" * held_out + name)
    return [json.loads(line) for line in path.read_text().splitlines()]
