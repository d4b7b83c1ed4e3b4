"""The forms in which an answer can be asked for, as structs: OpenAI's `response_format`, vLLM's
`structured_outputs`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

MAX_CHOICES_OF_TEXT = 10_000
"""Alternatives of `structured_outputs.choice`."""
MAX_NAME_CHARS = 128

FormName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Alternatives = Annotated[
    list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES_OF_TEXT)
]
SchemaObject = dict[str, Any]


class StrictStruct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class TextFormat(StrictStruct, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(StrictStruct, tag_field="type", tag="json_object"):
    schema: SchemaObject | None = None
    """llama.cpp's and vLLM's: the schema that the object is of."""


class NamedJsonSchema(StrictStruct):
    name: FormName
    """OpenAI's models are shown it; ours are not, nor the description."""
    schema: SchemaObject
    description: str | None = None
    strict: bool | None = None
    """Kept to whether or not it is said."""


class JsonSchemaFormat(StrictStruct, tag_field="type", tag="json_schema"):
    json_schema: NamedJsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(StrictStruct):
    """vLLM's `structured_outputs`, of which exactly one field is set."""

    json: SchemaObject | str | None = None
    """A schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    """A regular expression that the whole answer must match."""
    choice: Alternatives | None = None
    grammar: str | None = None
    """GBNF, or llguidance's dialect of Lark."""
