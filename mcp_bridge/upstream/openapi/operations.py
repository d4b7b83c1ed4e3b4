"""Reads the operations of an OpenAPI document as tools. Knows no HTTP.

An operation that cannot be a tool is left out and named; an invalid document is refused.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final, Literal

import msgspec
from mcp_types import Tool, ToolAnnotations

from mcp_bridge.upstream.openapi.document import Document, Object, joined
from mcp_bridge.upstream.openapi.errors import MAX_POINTER_CHARS, BadDocument
from mcp_bridge.upstream.openapi.schemas import Converter

MAX_OPERATIONS = 1_000
MAX_PARAMETERS = 100
MAX_NAME_CHARS = 64
MAX_DESCRIPTION_CHARS = 8_192
DIGEST_CHARS = 8
BODY = "body"
RESULT = "result"
"""The member of the structured content that holds an answer which is no object."""

METHODS: Final = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
TEMPLATE: Final = re.compile(r"\{([^{}]*)\}")
PATH: Final = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")
ILLEGAL: Final = re.compile(r"[^A-Za-z0-9_-]+")
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}", re.ASCII)
NOT_ARGUMENTS: Final = frozenset(
    "accept authorization connection content-length content-type cookie expect host keep-alive"
    " proxy-authorization proxy-connection te trailer transfer-encoding upgrade".split()
)
"""Headers that only we set. OpenAPI itself excludes `accept`, `authorization`, `content-type`."""

Place = Literal["path", "query", "header", "cookie"]
DEFAULT_STYLE: Final[dict[str, str]] = {
    "path": "simple",
    "query": "form",
    "header": "simple",
    "cookie": "form",
}
STYLES: Final[dict[str, frozenset[str]]] = {
    "path": frozenset(("simple", "label", "matrix")),
    "query": frozenset(("form", "spaceDelimited", "pipeDelimited", "deepObject")),
    "header": frozenset(("simple",)),
    "cookie": frozenset(("form",)),
}


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    argument: str
    """Its name among the tool's arguments."""
    name: str
    place: Place
    style: str
    explode: bool
    required: bool
    as_json: bool = False
    """The value is sent as JSON (`content` instead of `schema`)."""
    allow_reserved: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    media_type: str
    form: Literal["json", "form", "text"]
    required: bool


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    tool: Tool
    method: str
    path: str
    parameters: tuple[Parameter, ...]
    body: Body | None
    wraps: bool
    """The answer goes under RESULT."""


class OmittedOperation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation that is not a tool, and the reason."""

    operation: str
    reason: str


class Operations(msgspec.Struct, frozen=True, kw_only=True):
    by_name: dict[str, Operation]
    left_out: tuple[OmittedOperation, ...]


def operations_of(document: Document) -> Operations:
    """Raises: BadDocument, for an invalid document or too many operations."""
    paths = document.root.get("paths", {})
    if not isinstance(paths, dict):
        raise BadDocument("/paths", "must be an object")
    found: list[tuple[str, str, str, Object, object]] = []
    left_out: list[OmittedOperation] = []
    for path, item in paths.items():
        pointer = joined("/paths", path)
        whole = document.resolved(item, pointer)
        found += [
            (path, method, joined(pointer, method), whole, whole[method])
            for method in METHODS
            if method in whole
        ]
    if len(found) > MAX_OPERATIONS:
        raise BadDocument("/paths", f"more than {MAX_OPERATIONS} operations")
    names = _names([(path, method, operation) for path, method, _, _, operation in found])
    by_name: dict[str, Operation] = {}
    for name, (path, method, pointer, item, operation) in zip(names, found, strict=True):
        try:
            by_name[name] = _Reader(document, pointer).read(name, method, path, item, operation)
        except BadDocument as refused:
            left_out.append(
                OmittedOperation(
                    operation=f"{method.upper()} {path}"[:MAX_POINTER_CHARS], reason=str(refused)
                )
            )
    return Operations(by_name=by_name, left_out=tuple(left_out))


def _names(found: list[tuple[str, str, Any]]) -> list[str]:
    """Return a legal and unique name for each operation. All operations with one name get a digest
    of method and path, so that names do not depend on the order."""
    plain = []
    for path, method, operation in found:
        given = operation.get("operationId") if isinstance(operation, dict) else None
        text = given if isinstance(given, str) and given.strip() else f"{method}{path}"
        plain.append(ILLEGAL.sub("_", text).strip("_") or method)
    names = []
    for text, (path, method, _) in zip(plain, found, strict=True):
        digest = hashlib.sha256(f"{method} {path}".encode()).hexdigest()[:DIGEST_CHARS]
        if len(text) > MAX_NAME_CHARS or plain.count(text) > 1:
            text = f"{text[: MAX_NAME_CHARS - DIGEST_CHARS - 1]}_{digest}"
        names.append(text)
    return names


class _Reader:
    """Reads one operation."""

    def __init__(self, document: Document, pointer: str) -> None:
        self._document = document
        self._pointer = pointer
        self._schemas = Converter(document, "request")

    def read(self, name: str, method: str, path: str, item: Object, operation: object) -> Operation:
        if not isinstance(operation, dict):
            raise BadDocument(self._pointer, "is no object")
        if method == "trace":
            # RFC 9110, 9.3.8: the answer, which the model reads, would contain our credential.
            raise BadDocument(self._pointer, "TRACE says back what it was sent")
        properties: Object = {}
        required: list[str] = []
        parameters = self._parameters(item, operation, properties)
        self._check_path(path, parameters)
        required += [each.argument for each in parameters if each.required]
        body = self._body(operation, properties)
        if body is not None and body.required:
            required.append(BODY)
        schema: Object = {"type": "object", "properties": properties, "additionalProperties": False}
        if required:
            schema["required"] = required
        summary = operation.get("summary")
        output, wraps = self._output(operation)
        tool = Tool(
            name=name,
            title=summary[:200] if isinstance(summary, str) and summary else None,
            description=_described(operation, method, path),
            input_schema=self._schemas.with_defs(schema),
            output_schema=output,
            annotations=_annotations(method),
        )
        return Operation(
            tool=tool,
            method=method.upper(),
            path=path,
            parameters=parameters,
            body=body,
            wraps=wraps,
        )

    # ---- parameters

    def _parameters(
        self, item: Object, operation: Object, properties: Object
    ) -> tuple[Parameter, ...]:
        """Return the parameters. Those of the operation replace those of its path with the same
        place and name."""
        found: dict[tuple[str, str], tuple[Object, str]] = {}
        for holder, pointer in (
            (item, self._pointer.rpartition("/")[0]),
            (operation, self._pointer),
        ):
            listed = holder.get("parameters", [])
            if not isinstance(listed, list):
                raise BadDocument(joined(pointer, "parameters"), "must be a list")
            for at, each in enumerate(listed):
                where = joined(pointer, "parameters", at)
                whole = self._document.resolved(each, where)
                found[str(whole.get("in")), str(whole.get("name"))] = (whole, where)
        if len(found) > MAX_PARAMETERS:
            raise BadDocument(self._pointer, f"more than {MAX_PARAMETERS} parameters")
        names = [name for _, name in found]
        made = []
        for (place, name), (whole, where) in found.items():
            if place not in STYLES or not name or not isinstance(whole["name"], str):
                raise BadDocument(where, "`in` or `name` is not one of OpenAPI's")
            if place == "header" and name.lower() in NOT_ARGUMENTS:
                continue
            argument = name if names.count(name) == 1 and name != BODY else f"{name}__{place}"
            parameter, schema = self._parameter(argument, whole, where)
            made.append(parameter)
            properties[argument] = _with_description(schema, whole)
        return tuple(made)

    def _parameter(self, argument: str, whole: Object, where: str) -> tuple[Parameter, Any]:
        place, name = whole["in"], whole["name"]
        if place in ("header", "cookie") and HEADER_NAME.fullmatch(name) is None:
            raise BadDocument(where, "a name that no header can have")
        style = whole.get("style", DEFAULT_STYLE[place])
        if not isinstance(style, str) or style not in STYLES[place]:
            raise BadDocument(where, f"style: not one for a {place} parameter")
        schema, inside, as_json = whole.get("schema", {}), joined(where, "schema"), False
        content = whole.get("content")
        if isinstance(content, dict):
            if len(content) != 1 or not is_json(next(iter(content))):
                raise BadDocument(where, "content: only JSON can be written there")
            media = self._document.resolved(next(iter(content.values())), where)
            schema, inside, as_json = media.get("schema", {}), joined(where, "content"), True
        explode = whole.get("explode", style == "form")
        return Parameter(
            argument=argument,
            name=name,
            place=place,
            style=style,
            explode=explode is True,
            required=place == "path" or whole.get("required") is True,
            as_json=as_json,
            allow_reserved=whole.get("allowReserved") is True,
        ), self._schemas.convert(schema, inside)

    def _check_path(self, path: str, parameters: tuple[Parameter, ...]) -> None:
        if PATH.fullmatch(TEMPLATE.sub("", path)) is None:
            raise BadDocument(self._pointer, "the path must be one, and begin with `/`")
        named = TEMPLATE.findall(path)
        given = {each.name for each in parameters if each.place == "path"}
        if len(set(named)) != len(named) or set(named) != given:
            raise BadDocument(self._pointer, "the path's variables are not its parameters")

    # ---- bodies

    def _body(self, operation: Object, properties: Object) -> Body | None:
        if "requestBody" not in operation:
            return None
        pointer = joined(self._pointer, "requestBody")
        whole = self._document.resolved(operation["requestBody"], pointer)
        content = whole.get("content")
        if not isinstance(content, dict) or not content:
            raise BadDocument(pointer, "content must say at least one media type")
        for form in ("json", "form", "text"):
            for media_type, media in content.items():
                if _form_of(media_type) == form:
                    inside = joined(pointer, "content", media_type)
                    schema = self._document.resolved(media, inside).get("schema", {})
                    made = self._schemas.convert(schema, joined(inside, "schema"))
                    properties[BODY] = _with_description(made, whole)
                    return Body(
                        media_type=media_type, form=form, required=whole.get("required") is True
                    )
        raise BadDocument(pointer, "only JSON, forms and plain text can be sent")

    def _output(self, operation: Object) -> tuple[Object | None, bool]:
        """Return the output schema if the only successful answer is JSON with a schema, and whether
        its answer goes under RESULT. A tool with an output schema must conform to it."""
        nothing = None, False
        responses = operation.get("responses", {})
        if not isinstance(responses, dict):
            raise BadDocument(joined(self._pointer, "responses"), "must be an object")
        good = [status for status in responses if status.startswith("2")]
        if len(good) != 1 or not good[0].isdigit():
            return nothing
        pointer = joined(self._pointer, "responses", good[0])
        content = self._document.resolved(responses[good[0]], pointer).get("content")
        if not isinstance(content, dict) or len(content) != 1:
            return nothing
        media_type, media = next(iter(content.items()))
        schema = self._document.resolved(media, pointer).get("schema")
        if not is_json(media_type) or not isinstance(schema, dict):
            return nothing
        inside = joined(pointer, "content", media_type, "schema")
        schemas = Converter(self._document, "response")
        made = schemas.convert(self._document.resolved(schema, inside), inside)
        if made.get("type") == "object":
            return schemas.with_defs(made), False
        wrapped = {"type": "object", "properties": {RESULT: made}, "required": [RESULT]}
        return schemas.with_defs(wrapped), True


def is_json(media_type: str) -> bool:
    plain = media_type.partition(";")[0].strip().lower()
    return plain == "application/json" or plain.endswith("+json")


def _form_of(media_type: str) -> str | None:
    if is_json(media_type):
        return "json"
    plain = media_type.partition(";")[0].strip().lower()
    if plain == "application/x-www-form-urlencoded":
        return "form"
    return "text" if plain == "text/plain" else None


def _with_description(schema: Any, holder: Object) -> Any:
    said = holder.get("description")
    if not isinstance(schema, dict) or not isinstance(said, str) or "description" in schema:
        return schema
    return {**schema, "description": said[:MAX_DESCRIPTION_CHARS]}


def _described(operation: Object, method: str, path: str) -> str:
    said = [operation.get("summary"), operation.get("description")]
    texts = [text.strip() for text in said if isinstance(text, str) and text.strip()]
    if operation.get("deprecated") is True:
        texts.append("Deprecated.")
    return "\n\n".join(texts or [f"{method.upper()} {path}"])[:MAX_DESCRIPTION_CHARS]


def _annotations(method: str) -> ToolAnnotations:
    """Return the hints that a method implies (RFC 9110, section 9.2)."""
    safe = method in ("get", "head", "options", "trace")
    return ToolAnnotations(
        read_only_hint=safe or None,
        destructive_hint=True if method == "delete" else None,
        idempotent_hint=True if method in ("put", "delete") or safe else None,
        open_world_hint=True,
    )
