"""The OpenAPI document at `/schema`: Litestar's view of the routes, msgspec's view of the bodies.

Bodies are read by our own decoders, so Litestar cannot see their types; they are added here as
components, straight from the structs that the decoders use (OpenAPI 3.1 is JSON Schema 2020-12).
How routes refuse is added by `statuses`.
"""

from __future__ import annotations

from functools import cache

import msgspec
from litestar import Litestar, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import Components, Schema, SecurityScheme

from gateway.routes.shared.access import PUBLIC
from gateway.routes.shared.operations import TEMPLATE, JsonSchema, described
from gateway.routes.shared.statuses import add_refusals

VERSION = "0.1.0"


@cache
def bodies() -> dict[str, Schema]:
    _, found = msgspec.json.schema_components(described(), ref_template=TEMPLATE)
    return {name: JsonSchema(content=content) for name, content in found.items()}


def complete(app: Litestar) -> None:
    """With the components, which Litestar writes from what it has seen itself, over those that were
    configured; and with what is refused."""
    components = app.openapi_schema.components
    components.schemas = {**(components.schemas or {}), **bodies()}
    add_refusals(app)


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
        openapi_router=Router(
            path="/schema", route_handlers=[], opt=PUBLIC, include_in_schema=False
        ),
    )
