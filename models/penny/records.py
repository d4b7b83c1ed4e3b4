"""Texts with fields in them and the JSON objects that hold these fields.

Strings and numbers of the JSON are copied from the text. Some requests name the keys, some show a
schema and some say nothing of them: the gateway enforces a schema that the model has not seen, so
penny also learns to go on behind whatever key stands there. It knows no roles and no tools.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from models.penny.talk import listing, phrased, sentence, table
from models.penny.toolbox import schema_of, value_of
from models.penny.words import MAX_TRIES, Draw, with_article


@dataclass(frozen=True)
class Field:
    """One field of a text."""

    key: str
    value: Any
    schema: dict[str, Any]
    clause: str
    """Says the value, in words that follow the subject."""


@dataclass(frozen=True)
class Extraction:
    """A request for JSON and the object to answer with."""

    system: str | None
    request: str
    answer: dict[str, Any]
    named: bool
    """The request says which keys; else nobody could know them."""


def spoken(value: Any) -> str:
    return listing(value) if isinstance(value, list) else str(value)


def field_of(draw: Draw, entry: dict[str, Any], taken: set[str]) -> Field:
    """A field with a key that no other field of the record has."""
    key = draw.pick([key for key in entry["keys"] if key not in taken] or [draw.made_up_word()])
    taken.add(key)
    value = value_of(draw, entry["kind"])
    said = spoken(value)
    article = with_article(said) if entry["kind"] in ("job", "animal") else said
    clause = draw.pick(entry["say"]).format(v=said, a=article)
    return Field(key, value, schema_of(entry["kind"]), clause)


def plain_fields(draw: Draw) -> list[Field]:
    """Fields under any keys: nouns and made-up words, with values of any kind."""
    kinds = ("phrase", "code", "int", "price", "person", "place", "date", "time", "small", "word")
    keys = draw.words("noun", draw.integer(1, 4))
    if draw.chance(0.3):
        keys[0] = draw.made_up_word()
    found = []
    for key in keys:
        kind = draw.pick(kinds)
        kind = draw.pick(["adjective", "animal", "food"]) if kind == "word" else kind
        value = value_of(draw, kind)
        if kind == "code" and value.isdigit():  # a number, for all that anybody can see
            kind, value = "int", int(value)
        found.append(Field(key, value, schema_of(kind), f"the {key} is {value}"))
    return found


def record(draw: Draw) -> tuple[str, list[Field]]:
    """A text and its fields."""
    if draw.chance(0.25):
        fields = plain_fields(draw)
        return told_text(draw, fields), fields
    subject, others, pronouns = described(draw)
    fields = [subject, *others]
    if draw.chance(0.2):
        return told_text(draw, fields), fields
    return prose(draw, subject, others, pronouns), fields


def described(draw: Draw, most: int = 4) -> tuple[Field, list[Field], list[str]]:
    """The name of a person or thing, one to `most` of its fields, and the pronouns that stand for
    it."""
    entry = draw.pick(table("records")["record"])
    taken = set[str]()
    subject = field_of(draw, entry["subject"], taken)
    count = draw.integer(1, min(most, len(entry["field"])))
    others = [field_of(draw, field, taken) for field in draw.rng.sample(entry["field"], count)]
    return subject, others, entry["pronoun"]


def told_text(draw: Draw, fields: list[Field]) -> str:
    """The fields as lines or sentences that name their keys."""
    form = draw.pick(["lines", "sentences"])
    if form == "lines":
        return "\n".join(
            f"{sentence(f.key) if draw.chance(0.3) else f.key}: {spoken(f.value)}" for f in fields
        )
    return " ".join(f"The {f.key} is {spoken(f.value)}." for f in fields)


def prose(draw: Draw, subject: Field, others: list[Field], pronouns: list[str]) -> str:
    """The fields as one sentence or several, with something else said before or behind at times."""
    if draw.chance(0.6):
        text = f"{subject.clause} {listing([field.clause for field in others])}."
    else:
        pronoun = draw.pick(pronouns)
        first, *rest = others
        text = f"{subject.clause} {first.clause}."
        text += "".join(f" {pronoun} {field.clause}." for field in rest)
    said_too = table("records")["said_too"]
    if draw.chance(0.2):
        text = f"{draw.pick(said_too)} {text}"
    return f"{text} {draw.pick(said_too)}" if draw.chance(0.2) else text


def extraction(draw: Draw) -> Extraction:
    """A text and the request for its fields, or for some of them, in any order."""
    if draw.chance(0.05):
        chosen = draw.pick(table("facts")["fact"])
        question, answer = phrased(draw, draw.pick(chosen["ask"])), chosen["answer"][0]
        key = draw.pick(["answer", "reply", "text", "message", "response"])
        request = f"{question} Answer as JSON with the key {key}."
        return Extraction(None, request, {key: answer}, named=True)
    text, fields = record(draw)
    wanted = draw.rng.sample(fields, draw.integer(1, len(fields)))
    if draw.chance(0.4):
        wanted = [field for field in fields if field in wanted]
    answer = {field.key: field.value for field in wanted}
    forms = table("records")
    how = draw.rng.choices(["keys", "system", "schema", "open"], [45, 10, 15, 30])[0]
    keys = listing([f.key for f in wanted])
    if how == "keys":
        if draw.chance(0.4):
            keys = ", ".join(f.key for f in wanted)
        return Extraction(None, draw.pick(forms["keys"]).format(t=text, k=keys), answer, named=True)
    if how == "system":
        return Extraction(draw.pick(forms["system"]).format(k=keys), text, answer, named=True)
    if how == "schema":
        schema = json.dumps(object_schema(draw, wanted))
        request = draw.pick(forms["schema"]).format(t=text, s=schema)
        return Extraction(None, request, answer, named=True)
    system = draw.pick(forms["open_system"]) if draw.chance(0.4) else None
    return Extraction(system, draw.pick(forms["open"]).format(t=text), answer, named=False)


def short_extraction(draw: Draw) -> Extraction:
    """A short text that describes a person or thing, and the request for one or two of its fields,
    each of them one word or number."""
    for _ in range(MAX_TRIES):
        subject, others, pronouns = described(draw, most=2)
        text = prose(draw, subject, others, pronouns)
        words = [f for f in [subject, *others] if not isinstance(f.value, list)]
        words = [f for f in words if " " not in str(f.value)]
        if words:
            wanted = draw.rng.sample(words, min(len(words), draw.integer(1, 2)))
            keys = listing([field.key for field in wanted])
            request = draw.pick(table("records")["keys"]).format(t=text, k=keys)
            return Extraction(None, request, {f.key: f.value for f in wanted}, named=True)
    raise AssertionError("no record with a value of one word")


def object_schema(draw: Draw, fields: list[Field]) -> dict[str, Any]:
    """The JSON Schema of the fields, plain or as pydantic writes it."""
    properties = {f.key: f.schema for f in fields}
    if draw.chance(0.5):
        properties = {
            key: {"title": key.replace("_", " ").title(), **schema}
            for key, schema in properties.items()
        }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if draw.chance(0.8):
        schema["required"] = list(properties)
    if draw.chance(0.4):
        schema["additionalProperties"] = False
    return schema
