"""The OpenAPI document at `/schema`: Litestar's view of the routes, msgspec's view of the bodies.

Bodies are read by our own decoders, so Litestar cannot see their types; they are added here as
components, straight from the structs that the decoders use (OpenAPI 3.1 is JSON Schema 2020-12).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from litestar import Litestar, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import (
    Components,
    OpenAPIMediaType,
    Operation,
    Reference,
    RequestBody,
    Schema,
    SecurityScheme,
)

from gateway.routes.access import PUBLIC
from gateway.routes.operations import TEMPLATE, JsonSchema, described
from gateway.wire.json_place import MAX_VALUES
from gateway.wire.openai import MAX_MESSAGES, MAX_PARTS, ChatCompletionRequest

VERSION = "0.1.0"


def bodies() -> dict[str, Schema]:
    _, found = msgspec.json.schema_components(
        [ChatCompletionRequest, *described()], ref_template=TEMPLATE
    )
    return {name: JsonSchema(content=content) for name, content in found.items()}


@dataclass
class ChatOperation(Operation):
    """POST /v1/chat/completions with its body."""

    def __post_init__(self) -> None:
        reference = Reference(ref=TEMPLATE.format(name=ChatCompletionRequest.__name__))
        self.request_body = RequestBody(
            required=True,
            description=(
                "As OpenAI's; a field that cannot be honoured is refused by name. At most "
                f"{MAX_VALUES:,} values in arrays and objects, of which {MAX_MESSAGES:,} messages "
                f"and {MAX_PARTS:,} parts of content; no Content-Encoding."
            ),
            content={"application/json": OpenAPIMediaType(schema=reference)},
        )


def add_bodies(app: Litestar) -> None:
    """Litestar writes the schemas of the components from what it has seen itself, over those that
    were configured."""
    components = app.openapi_schema.components
    components.schemas = {**(components.schemas or {}), **bodies()}


def openapi_config() -> OpenAPIConfig:
    bearer = SecurityScheme(
        type="http", scheme="bearer", description="An API key: `Authorization: Bearer sk-tg-...`"
    )
    return OpenAPIConfig(
        title="Tollgate",
        version=VERSION,
        components=Components(security_schemes={"bearer": bearer}),
        security=[{"bearer": []}],
        render_plugins=[JsonRenderPlugin(), YamlRenderPlugin()],
        openapi_router=Router(path="/schema", route_handlers=[], opt=PUBLIC),
    )
