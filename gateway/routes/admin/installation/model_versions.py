"""/v1/admin/models/versions and /v1/admin/models/pins: which versions a model has, and who gets
which. For operators: models are the installation's.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from gateway.db import tenant
from gateway.fleet.router import Route
from gateway.registry import changes as verbs
from gateway.registry.digests import FileDigests, digest_of
from gateway.registry.tables import pins as pins_table
from gateway.registry.tables import versions as versions_table
from gateway.registry.version_table import INSTALLATION, ModelPin, PinScope, RegisteredVersion
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource, read_rows
from gateway.settings.models import ModelConfig
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of

OPERATORS = needs("operator:models")
Named = Annotated[str, Meta(min_length=1, max_length=256)]
FILES = FileDigests()


class ModelsPageQuery(PageQuery):
    """`model`: of this one alone."""

    model: Named | None = None


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """`serves`: the served model is there, and one of its replicas takes requests."""

    object: str = "model_version"
    id: str
    model: str
    version: int
    served_by: str
    digest: str
    serves: bool
    created_at: int


class NewVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Named
    served_by: Named


class PinView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "model_pin"
    id: str
    model: str
    scope: str
    scope_id: str
    """Empty of the whole installation."""
    version: int
    created_at: int


class NewPin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Named
    version: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    scope: PinScope
    scope_id: Annotated[str, Meta(max_length=128)] = INSTALLATION


class FoundVersion(RegisteredVersion, frozen=True, kw_only=True):
    serves: bool


versions = AdminResource[FoundVersion](
    path="/v1/admin/models/versions",
    id_name="version_id",
    tag="Models",
    read=OPERATORS,
    change=OPERATORS,
    view=VersionView,
    show=lambda row: view_of(VersionView, row),
    unsteady=("serves",),
    in_system=True,
)
pins = AdminResource[ModelPin](
    path="/v1/admin/models/pins",
    id_name="pin_id",
    tag="Models",
    read=OPERATORS,
    change=OPERATORS,
    view=PinView,
    show=lambda row: view_of(PinView, row),
    in_system=True,
)


def select_pins(_org_id: str, query: ModelsPageQuery) -> sa.Select[Any]:
    listed = sa.select(pins_table)
    return listed if query.model is None else listed.where(pins_table.c.model == query.model)


@versions.page("List the versions of models, the oldest first", ModelsPageQuery)
async def list_versions(
    request: AdminRequest, query: ModelsPageQuery
) -> tuple[list[FoundVersion], bool]:
    selected = sa.select(versions_table)
    if query.model is not None:
        selected = selected.where(versions_table.c.model == query.model)
    async with request.reading() as conn:
        rows, more = await read_rows(conn, selected, query, versions_table.c.id)
    return [found_version(request, verbs.to_version(row)) for row in rows], more


@versions.get("One version of a model")
async def retrieve_version(request: AdminRequest) -> FoundVersion:
    async with request.reading() as conn:
        return found_version(request, await verbs.get_version(conn, request.id))


@versions.create("Register a served model as the next version of another", NewVersion)
async def create_version(request: AdminRequest, wanted: NewVersion) -> FoundVersion:
    asked = route_of(request, wanted.model, "model")
    serving = route_of(request, wanted.served_by, "served_by")
    if serving.kind != asked.kind:
        raise InvalidField(
            "served_by",
            f"{wanted.served_by!r} is of kind {serving.kind}, {wanted.model!r} of {asked.kind}",
        )
    digests = {name: await digest_by_name(request, name) for name in (asked.model, serving.model)}
    async with tenant(request.system_db, request.org_id) as conn:
        made = await verbs.add_version(
            conn,
            model=wanted.model,
            served_by=wanted.served_by,
            digests=digests,
            operator_org=request.org_id,
            actor=request.actor,
        )
    return found_version(request, made)


@versions.delete("Forget a version of a model", answer=VersionView)
async def delete_version(request: AdminRequest) -> VersionView:
    async with tenant(request.system_db, request.org_id) as conn:
        gone = await verbs.remove_version(
            conn,
            request.id,
            operator_org=request.org_id,
            actor=request.actor,
            check=lambda row: request.check(found_version(request, row)),
        )
    return view_of(VersionView, found_version(request, gone))


list_pins = pins.list_all(
    "List who is pinned to which version, the oldest first",
    ModelsPageQuery,
    select=select_pins,
    row=ModelPin,
    key=pins_table.c.id,
    name="list_pins",
)


@pins.get("One pin")
async def retrieve_pin(request: AdminRequest) -> ModelPin:
    async with request.reading() as conn:
        return await verbs.get_pin(conn, request.id)


@pins.create("Pin an organization, a project, a key or all to a version of a model", NewPin)
async def create_pin(request: AdminRequest, wanted: NewPin) -> ModelPin:
    async with tenant(request.system_db, request.org_id) as conn:
        version = await verbs.find_version(conn, wanted.model, wanted.version)
        if not serves(request, version.served_by):
            raise InvalidField(
                "version", f"version {version.version} of {version.model!r} does not serve now"
            )
        return await verbs.set_pin(
            conn,
            model=wanted.model,
            scope=wanted.scope,
            scope_id=wanted.scope_id,
            version=wanted.version,
            operator_org=request.org_id,
            actor=request.actor,
        )


@pins.delete("Take a pin away", answer=PinView)
async def delete_pin(request: AdminRequest) -> PinView:
    async with tenant(request.system_db, request.org_id) as conn:
        gone = await verbs.remove_pin(
            conn,
            request.id,
            operator_org=request.org_id,
            actor=request.actor,
            check=request.check,
        )
    return view_of(PinView, gone)


def found_version(request: AdminRequest, version: RegisteredVersion) -> FoundVersion:
    values = msgspec.structs.asdict(version)
    return FoundVersion(**values, serves=serves(request, version.served_by))


def serves(request: AdminRequest, served_by: str) -> bool:
    """Tell whether a served model takes requests, as far as this worker knows; one that is asleep
    is woken by them."""
    route = request.services.generation.fleet.route_of(served_by)
    if route is None or route.is_asleep:
        return route is not None
    return any(each.health().available for each in route.replicas)


def route_of(request: AdminRequest, name: str, field: str) -> Route:
    """Raises: NotFound."""
    route = request.services.generation.fleet.route_of(name)
    if route is None:
        raise NotFound(field, f"no model {name!r} is served")
    return route


async def digest_by_name(request: AdminRequest, name: str) -> str:
    """Return the digest of a served model or adapter. Raises: InvalidField."""
    model = config_of(request, name)
    adapter = "" if model.name == name else name
    try:
        return await asyncio.to_thread(digest_of, model, FILES, adapter)
    except OSError as error:
        raise InvalidField(
            "served_by", f"the files of {name!r} cannot be read: {error.strerror}"
        ) from error


def config_of(request: AdminRequest, name: str) -> ModelConfig:
    """Raises: NotFound."""
    configuration = request.services.configuration
    models = () if configuration is None else configuration.settings.models
    for model in models:
        if name in (model.name, *(each.name for each in model.adapters)):
            return model
    raise NotFound("served_by", f"no model {name!r} stands in the settings")


routes = [
    *(list_versions, retrieve_version, create_version, delete_version),
    *(list_pins, retrieve_pin, create_pin, delete_pin),
]
