"""Lists every route.

A module that is new is named twice here, and nowhere else.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from gateway.routes.admin import alerts as admin_alerts
from gateway.routes.admin import issuers as admin_issuers
from gateway.routes.admin import keys as admin_keys
from gateway.routes.admin import members as admin_members
from gateway.routes.admin import models as admin_models
from gateway.routes.admin import oauth_clients as admin_oauth
from gateway.routes.admin import organization as admin_organization
from gateway.routes.admin import orgs as admin_orgs
from gateway.routes.admin import plans as admin_plans
from gateway.routes.admin import projects as admin_projects
from gateway.routes.admin import signing_keys
from gateway.routes.admin import webhooks as admin_webhooks
from gateway.routes.admin.billing import billing_account as admin_billing
from gateway.routes.admin.billing import cache_leases as admin_cache_leases
from gateway.routes.admin.billing import collection as admin_collection
from gateway.routes.admin.billing import credits as admin_credits
from gateway.routes.admin.billing import forecast as admin_forecast
from gateway.routes.admin.billing import invoices as admin_invoices
from gateway.routes.admin.billing import journal as admin_journal
from gateway.routes.admin.billing import prices as admin_prices
from gateway.routes.admin.billing import reratings as admin_reratings
from gateway.routes.admin.billing import spend_caps as admin_spend_caps
from gateway.routes.admin.billing import top_ups as admin_top_ups
from gateway.routes.anthropic import message_batches, messages
from gateway.routes.anthropic import reports as anthropic_reports
from gateway.routes.mcp import credentials as mcp_credentials
from gateway.routes.mcp import endpoint as mcp
from gateway.routes.mcp import pins as admin_mcp_pins
from gateway.routes.mcp import rules as admin_mcp
from gateway.routes.mcp import taints as admin_mcp_taints
from gateway.routes.mcp import upstream_consent
from gateway.routes.oauth import account_key as oauth_account_key
from gateway.routes.oauth import authorize as oauth_authorize
from gateway.routes.oauth import endpoints as oauth
from gateway.routes.oauth import external_login, protected_resources
from gateway.routes.oauth import invite as oauth_invite
from gateway.routes.oauth import login as oauth_login
from gateway.routes.oauth import passkeys as oauth_passkeys
from gateway.routes.oauth import password as oauth_password
from gateway.routes.oauth import register as oauth_register
from gateway.routes.openai import (
    batches,
    conversations,
    files,
    inference,
    models,
    responses,
    tokenize,
)
from gateway.routes.organization import all as organization
from gateway.routes.organization import audit_logs, model_permissions
from gateway.routes.usage import cache_report, health, own_view

MODULES = (
    health,
    models,
    inference,
    responses,
    conversations,
    messages,
    message_batches,
    tokenize,
    upstream_consent,
    files,
    batches,
    organization,
    anthropic_reports,
    cache_report,
    own_view,
    protected_resources,
    mcp,
    mcp_credentials,
    audit_logs,
    admin_orgs,
    admin_organization,
    admin_projects,
    admin_members,
    admin_plans,
    admin_spend_caps,
    admin_billing,
    admin_cache_leases,
    admin_collection,
    admin_credits,
    admin_top_ups,
    admin_invoices,
    admin_journal,
    admin_reratings,
    admin_models,
    admin_prices,
    admin_alerts,
    admin_forecast,
    admin_webhooks,
    admin_mcp,
    admin_mcp_pins,
    admin_mcp_taints,
    oauth_authorize,
    oauth_login,
    oauth_account_key,
    oauth_passkeys,
    oauth_password,
    admin_keys,
    model_permissions,
    oauth,
    signing_keys,
    external_login,
    admin_issuers,
    oauth_register,
    oauth_invite,
    admin_oauth,
)

ROUTES: list[ControllerRouterHandler] = [route for module in MODULES for route in module.routes]
