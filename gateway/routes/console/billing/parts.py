"""Holds what the pages of billing share: tabs, the organization that an operator looks at, and
forms read as the bodies of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from billing.queries import Query
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.orgs import select_orgs
from gateway.tenancy.tables import orgs
from gateway.wire.shared.resource import read_body

S = TypeVar("S", bound=msgspec.Struct)

OPERATOR = "operator:orgs"
MAX_ORGS = 500
"""The most organizations that an operator is offered; others are named in the address."""
TABS = (
    ("/console/billing", "Invoices"),
    ("/console/billing/credits", "Credits"),
    ("/console/billing/prices", "Prices"),
    ("/console/billing/reratings", "Re-ratings"),
)


def shared(request: ConsoleRequest, orgs: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what all templates here want. `tabs`: address, title, whether it is this page's;
    `org_name`: the organization that is shown."""
    here = request.page.path
    return {
        "tabs": [(request.address(path), title, path == here) for path, title in TABS],
        "orgs": orgs,
        "org_name": dict(orgs).get(request.org_id, request.session.org_name),
    }


def orgs_query(request: ConsoleRequest) -> Query[list[tuple[str, str]]]:
    """Return the query of the organizations whose billing an operator may see, by name; for others
    of none."""
    most = MAX_ORGS if request.can(OPERATOR) else 0
    found = select_orgs().with_only_columns(orgs.c.id, orgs.c.name)
    found = found.order_by(orgs.c.name).limit(most)
    return Query(found, lambda rows: [(row.id, row.name) for row in rows])


def read_form(kind: type[S], values: Mapping[str, Any]) -> S:
    """Read what a form says as the API reads a body. Raises: BadField."""
    return read_body(msgspec.json.encode(dict(values)), kind)
