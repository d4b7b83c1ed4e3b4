"""Reads the corpus of poisoned and of ordinary definitions.

The attacks are written after public descriptions of tool poisoning, shadowing, line jumping,
full-schema poisoning, EchoLeak and others, in words of their own; the ordinary ones after what
public servers offer. What an attack hides in an encoding stands there in the clear, `{hex:...}`,
and is encoded when it is read.

The rules were made with `attacks.jsonl` and `benign.jsonl`, and their weights are fitted to these.
The files `held_out_...` were written before; no rule was changed for one of their lines. After
the second was measured, more was written into the first two for the classes of attack that were
missed, and the third was written and frozen before anything was measured with it.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec

Part = Literal["", "held_out_", "second_held_out_", "third_held_out_"]
"""Names a part by what its files begin with."""
PARTS: tuple[Part, ...] = ("", "held_out_", "second_held_out_", "third_held_out_")
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


def encoded(value: Any) -> Any:
    """Return a value in whose texts each mark is encoded."""
    if isinstance(value, str):
        return MARK.sub(lambda found: ENCODINGS[found[1]](found[2]), value)
    if isinstance(value, dict):
        return {key: encoded(each) for key, each in value.items()}
    return [encoded(each) for each in value] if isinstance(value, list) else value


def sample_of(
    kind: str,
    name: str,
    description: str,
    arguments: dict[str, str | dict[str, Any]],
    more: dict[str, Any] | None = None,
) -> Sample:
    """Make a definition. `arguments`: by name, a description or a schema. `more`: members of the
    tool that stand beside these, or in place of them."""
    properties = {
        each: said
        if isinstance(said, dict)
        else {"type": "string", **({"description": said} if said else {})}
        for each, said in arguments.items()
    }
    schema = {"type": "object", "properties": properties}
    tool = {"name": name, "description": description, "inputSchema": schema, **(more or {})}
    return Sample(kind, encoded(tool))


def attacks(part: Part) -> list[Sample]:
    return [sample_of(*one) for one in lines_of(f"{part}attacks.jsonl")]


def ordinary(part: Part) -> list[Sample]:
    return [sample_of("", *one) for one in lines_of(f"{part}benign.jsonl")]


def lines_of(name: str) -> list[Any]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]
