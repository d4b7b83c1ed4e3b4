"""/v1/organization: who belongs to an org, what it owns, what it used. OpenAI's shapes.

Above: `app`. Below: one module for each resource.
"""

from __future__ import annotations

from gateway.routes import (
    organization_keys,
    organization_projects,
    organization_rate_limits,
    organization_service_accounts,
    organization_usage,
    organization_users,
)

routes = [
    *organization_usage.routes,
    *organization_projects.routes,
    *organization_rate_limits.routes,
    *organization_service_accounts.routes,
    *organization_keys.routes,
    *organization_users.routes,
]
