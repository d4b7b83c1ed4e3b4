"""/v1/organization: who belongs to an org, what it owns, what it used. OpenAI's shapes."""

from __future__ import annotations

from gateway.routes.organization import keys as organization_keys
from gateway.routes.organization import projects as organization_projects
from gateway.routes.organization import rate_limits as organization_rate_limits
from gateway.routes.organization import service_accounts as organization_service_accounts
from gateway.routes.organization import usage as organization_usage
from gateway.routes.organization import users as organization_users

routes = [
    *organization_usage.routes,
    *organization_projects.routes,
    *organization_rate_limits.routes,
    *organization_service_accounts.routes,
    *organization_keys.routes,
    *organization_users.routes,
]
