"""Gives each test an application of its own, just installed: these are of what an installation has
once (its plans, prices and issuers, and its invoices in their order)."""

from __future__ import annotations

import pytest

from tests.gateway.routes.admin.conftest import World


@pytest.fixture
async def world(own_world: World) -> World:
    return own_world


@pytest.fixture
async def org_id(world: World) -> str:
    return (await world.services.authenticator.authenticate(world.admin_key)).org_id


@pytest.fixture
async def project_id(world: World) -> str:
    made = await world.sdk.admin.organization.projects.create(name="web")
    return made.id
