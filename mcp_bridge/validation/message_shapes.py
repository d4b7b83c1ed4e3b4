"""Checks results, answers and definitions against the schema of their era of MCP.

The structs are those of the specification (schema.ts of 2025-11-25 and 2026-07-28) with what it
says in words: data is base64 (RFC 4648, section 4), an image has the media type of one, a URI has a
scheme (RFC 3986). Members that are not named here pass. Pure; problems name a place and quote no
value.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from mcp_bridge.canonical_json import pointer
from mcp_bridge.pinning import Kind
from mcp_bridge.protocol.allowed_fields import OWN_PREFIX
from mcp_bridge.protocol.repeated_keys import REFUSED
from mcp_bridge.text_safety.hidden_text import visible
from mcp_bridge.validation.arguments import Problem

MAX_URI_CHARS = 8_192
MAX_COMPLETIONS = 100
"""The specification's own bound."""

Uri = Annotated[
    str,
    Meta(
        pattern=r"(?i)\A(?!(?:javascript|vbscript):)[a-z][a-z0-9+.-]*:[^\s\x00-\x20\x7f<>\"]+\Z",
        max_length=MAX_URI_CHARS,
    ),
]
"""An absolute URI that no client runs as a script; letters beyond ASCII pass (RFC 3987)."""
Role = Literal["user", "assistant"]
Object = dict[str, Any]


class Annotations(Struct):
    audience: list[Role] | UnsetType = UNSET
    priority: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    modified: str | UnsetType = field(default=UNSET, name="lastModified")


class Part(Struct, tag_field="type", kw_only=True):
    """A part of content, told apart by its `type`."""

    annotations: Annotations | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")


class Text(Part, tag="text"):
    text: str


class Image(Part, tag="image"):
    data: str
    media: Annotated[str, Meta(pattern=r"(?i)\Aimage/[a-z0-9!#$&^_.+-]+\Z")] = field(
        name="mimeType"
    )


class Audio(Part, tag="audio"):
    data: str
    media: Annotated[str, Meta(pattern=r"(?i)\Aaudio/[a-z0-9!#$&^_.+-]+(?:;[ -~]*)?\Z")] = field(
        name="mimeType"
    )


class Icon(Struct):
    src: str
    media: str | UnsetType = field(default=UNSET, name="mimeType")


class ResourceLink(Part, tag="resource_link"):
    uri: Uri
    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    media: str | UnsetType = field(default=UNSET, name="mimeType")
    size: int | UnsetType = UNSET
    icons: list[Icon] | UnsetType = UNSET


class Contents(Struct, kw_only=True):
    """The contents of a resource: either text or base64."""

    uri: Uri
    media: str | UnsetType = field(default=UNSET, name="mimeType")
    text: str | UnsetType = UNSET
    blob: str | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")


class EmbeddedResource(Part, tag="resource"):
    resource: Contents


Block = Text | Image | Audio | ResourceLink | EmbeddedResource


class ToolUse(Part, tag="tool_use"):
    id: str
    name: str
    input: Object


class ToolOutcome(Part, tag="tool_result"):
    of: str = field(name="toolUseId")
    content: list[Block]
    is_error: bool | UnsetType = field(default=UNSET, name="isError")


SampledBlock = Text | Image | Audio | ToolUse | ToolOutcome


class Result(Struct, kw_only=True):
    meta: Object | UnsetType = field(default=UNSET, name="_meta")


class CallResult(Result):
    content: list[Block]
    is_error: bool | UnsetType = field(default=UNSET, name="isError")


class LegacyCallResult(CallResult):
    structured: Object | UnsetType = field(default=UNSET, name="structuredContent")


class PromptMessage(Struct):
    role: Role
    content: Block


class PromptResult(Result):
    messages: list[PromptMessage]
    description: str | UnsetType = UNSET


class ReadResult(Result):
    contents: list[Contents]


class Completion(Struct):
    values: Annotated[list[str], Meta(max_length=MAX_COMPLETIONS)]
    total: int | UnsetType = UNSET
    more: bool | UnsetType = field(default=UNSET, name="hasMore")


class CompletionResult(Result):
    completion: Completion


class SampledMessage(Result):
    role: Role
    content: SampledBlock | list[SampledBlock]
    model: str
    stop: str | UnsetType = field(default=UNSET, name="stopReason")


class ElicitationAnswer(Result):
    action: Literal["accept", "cancel", "decline"]
    content: dict[str, str | int | float | bool | list[str] | None] | UnsetType = UNSET


class Root(Struct):
    uri: Uri
    name: str | UnsetType = UNSET


class Roots(Result):
    roots: list[Root]


class Definition(Struct, kw_only=True):
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    icons: list[Icon] | UnsetType = UNSET
    meta: Object | UnsetType = field(default=UNSET, name="_meta")


class ToolHints(Struct):
    title: str | UnsetType = UNSET
    read_only: bool | UnsetType = field(default=UNSET, name="readOnlyHint")
    destructive: bool | UnsetType = field(default=UNSET, name="destructiveHint")
    idempotent: bool | UnsetType = field(default=UNSET, name="idempotentHint")
    open_world: bool | UnsetType = field(default=UNSET, name="openWorldHint")


class ToolDefinition(Definition):
    """A tool; its schemas are compiled when they are used (`validation.arguments`)."""

    annotations: ToolHints | UnsetType = UNSET
    input: Object | bool | UnsetType = field(default=UNSET, name="inputSchema")
    output: Object | bool | UnsetType = field(default=UNSET, name="outputSchema")


class PromptArgument(Struct):
    name: str
    title: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    required: bool | UnsetType = UNSET


class PromptDefinition(Definition):
    arguments: list[PromptArgument] | UnsetType = UNSET


class ListedResource(Definition):
    uri: Uri
    name: str
    annotations: Annotations | UnsetType = UNSET
    media: str | UnsetType = field(default=UNSET, name="mimeType")
    size: int | UnsetType = UNSET


class ListedTemplate(Definition):
    template: str = field(name="uriTemplate")
    name: str
    annotations: Annotations | UnsetType = UNSET
    media: str | UnsetType = field(default=UNSET, name="mimeType")


RESULTS: Mapping[str, tuple[type[Result], type[Result]]] = {
    "tools/call": (LegacyCallResult, CallResult),
    "prompts/get": (PromptResult, PromptResult),
    "resources/read": (ReadResult, ReadResult),
    "completion/complete": (CompletionResult, CompletionResult),
}
"""The result of a request in the older and the newer era; those of lists are checked by item."""
ANSWERS: Mapping[str, type[Result]] = {
    "sampling/createMessage": SampledMessage,
    "elicitation/create": ElicitationAnswer,
    "roots/list": Roots,
}
DEFINITIONS: Mapping[Kind, type[Definition]] = {
    "tool": ToolDefinition,
    "prompt": PromptDefinition,
    "resource": ListedResource,
    "resource_template": ListedTemplate,
}
PLACE = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


def result_problem(method: str, result: object, *, modern: bool) -> Problem | None:
    """Return why this is no result of `method` in its era; None: it is one, or all is allowed."""
    shapes = RESULTS.get(method)
    return None if shapes is None else problem_of(result, shapes[modern])


def answer_problem(method: str, answer: object) -> Problem | None:
    """Return why this is no answer of a client to a request of `method`."""
    shape = ANSWERS.get(method)
    return None if shape is None else problem_of(answer, shape)


def definition_problem(kind: Kind, definition: object) -> Problem | None:
    """Return why this is no definition of its kind."""
    shape = DEFINITIONS.get(kind)
    if shape is None:
        return None
    if (found := problem_of(definition, shape)) is not None:
        return found
    meta = definition.get("_meta") if isinstance(definition, Mapping) else None
    forged = next((name for name in meta or () if name.startswith(OWN_PREFIX)), None)
    if forged is not None:  # clients are shown it as it was approved
        return Problem(visible(f"/_meta/{forged}"), "schema", "has a name that is this gateway's")
    return None


def is_definition(kind: Kind, definition: object) -> bool:
    """True if this is a definition of its kind, and was not refused when it was read."""
    is_refused = isinstance(definition, Mapping) and REFUSED in definition
    return not is_refused and definition_problem(kind, definition) is None


def method_answered(answer: object) -> str:
    """Return the request of a server that a client's answer is to, by its members."""
    members = answer if isinstance(answer, Mapping) else {}
    if "action" in members:
        return "elicitation/create"
    return "roots/list" if "roots" in members else "sampling/createMessage"


def problem_of(value: object, shape: type[Struct]) -> Problem | None:
    try:
        found = msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at ")
        return Problem(visible(place_of(place)), "schema", worded(said))
    return next(content_problems(found, ()), None)


def place_of(place: str) -> str:
    """Return the JSON pointer of a place as msgspec writes it: `$.content[0].type`."""
    return "".join(f"/{name or number}" for name, number in PLACE.findall(place.strip("`")))


def worded(said: str) -> str:
    """Return the message of msgspec without the value that it quotes."""
    if "matching regex" in said:
        return "is not of the form that the protocol wants here"
    return "has a value that the protocol does not know here" if "nvalid" in said else said


Place = tuple[str | int, ...]


def content_problems(found: Struct, at: Place) -> Iterator[Problem]:
    """Yield what a struct's types do not say: base64, and either text or a blob."""
    match found:
        case CallResult() | ToolOutcome():
            yield from all_problems(found.content, (*at, "content"))
        case PromptResult():
            for place, message in enumerate(found.messages):
                yield from content_problems(message.content, (*at, "messages", place, "content"))
        case ReadResult():
            yield from all_problems(found.contents, (*at, "contents"))
        case SampledMessage():
            if isinstance(found.content, list):
                yield from all_problems(found.content, (*at, "content"))
            else:
                yield from content_problems(found.content, (*at, "content"))
        case EmbeddedResource():
            yield from content_problems(found.resource, (*at, "resource"))
        case Image() | Audio():
            yield from base64_problems(found.data, (*at, "data"))
        case Contents():
            if (found.text is UNSET) == (found.blob is UNSET):
                yield Problem(pointer(at), "oneOf", "has either text or a blob")
            elif not isinstance(found.blob, UnsetType):
                yield from base64_problems(found.blob, (*at, "blob"))


def all_problems(parts: Iterable[Struct], at: Place) -> Iterator[Problem]:
    for place, part in enumerate(parts):
        yield from content_problems(part, (*at, place))


def base64_problems(text: str, at: Place) -> Iterator[Problem]:
    try:
        binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # letters beyond ASCII, too
        yield Problem(pointer(at), "contentEncoding", "is no base64")
