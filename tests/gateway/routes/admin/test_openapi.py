"""The document says what the routes do: answers match their schemas, references lead somewhere."""

from __future__ import annotations

from typing import Any

import jsonschema_rs

from gateway.routes.admin import alerts as admin_alerts
from gateway.routes.admin import members as admin_members
from gateway.routes.admin import organization as admin_organization
from gateway.routes.admin import orgs as admin_orgs
from gateway.routes.admin import projects as admin_projects
from gateway.routes.admin import webhooks as admin_webhooks
from gateway.routes.admin.billing import cache_leases as admin_cache_leases
from gateway.routes.admin.billing import credits as admin_credits
from gateway.routes.admin.billing import prices as admin_prices
from gateway.routes.admin.billing import spend_caps as admin_spend_caps
from gateway.routes.admin.billing import top_ups as admin_top_ups
from gateway.routes.admin.installation import models as admin_models
from gateway.routes.admin.installation import plans as admin_plans
from gateway.routes.organization import audit_logs
from tests.gateway.routes.admin.conftest import World
from tests.shared_application import on_one_loop

CAPS = "/v1/admin/spend-caps"
WEBHOOKS = "/v1/admin/webhooks"
HOOK = {"url": "https://hooks.example/x", "event_types": ["rate_limit.threshold_reached"]}
PROBLEM = "application/problem+json"
MODULES = (
    admin_alerts,
    admin_cache_leases,
    admin_credits,
    admin_members,
    admin_models,
    admin_organization,
    admin_orgs,
    admin_plans,
    admin_prices,
    admin_projects,
    admin_spend_caps,
    admin_top_ups,
    admin_webhooks,
    audit_logs,
)
DESCRIBED = [
    (path, method.lower())
    for module in MODULES
    for handler in module.routes
    for path in handler.paths
    for method in handler.http_methods
]


@on_one_loop()
async def document(world: World) -> dict[str, Any]:
    found: dict[str, Any] = (await world.http.get("/schema/openapi.json")).json()
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for({**schema, "components": document["components"]})


def operation(document: dict[str, Any], path: str, method: str) -> dict[str, Any]:
    """Litestar writes `{name:str}` as `{name}`."""
    plain = path.replace(":str", "").replace(":path", "")
    found: dict[str, Any] = document["paths"][plain][method]
    return found


def answer_of(document: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Find an answer of an operation; refusals stand among the components."""
    name = said.get("$ref", "").removeprefix("#/components/responses/")
    found: dict[str, Any] = document["components"]["responses"][name] if name else said
    return found


async def test_every_route_says_what_it_takes_and_answers(document: dict[str, Any]) -> None:
    for path, method in DESCRIBED:
        said = operation(document, path, method)
        (done,) = [code for code in said["responses"] if code.startswith("2")]
        assert "$ref" in said["responses"][done]["content"]["application/json"]["schema"], path
        errors = answer_of(document, said["responses"]["403"])["content"]
        assert set(errors) == {PROBLEM if path.startswith("/v1/admin") else "application/json"}
        names = {each["name"] for each in said.get("parameters", [])}
        if method == "post":
            assert "Idempotency-Key" in names, path
        if method in ("patch",) or path.endswith("archive"):
            assert "If-Match" in names, path


def references(value: Any) -> list[str]:
    if isinstance(value, dict):
        found = [each for part in value.values() for each in references(part)]
        return [*found, value["$ref"]] if isinstance(value.get("$ref"), str) else found
    if isinstance(value, list):
        return [each for part in value for each in references(part)]
    return []


async def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    known = {
        f"#/components/{kind}/{name}"
        for kind, components in document["components"].items()
        for name in components
    }
    assert set(references(document)) <= known


async def test_answers_match_their_schemas(world: World, document: dict[str, Any]) -> None:
    calls: list[tuple[str, str, str, Any]] = [
        ("post", "/v1/admin/orgs", "/v1/admin/orgs", {"name": "acme"}),
        ("post", "/v1/admin/orgs", "/v1/admin/orgs", {"name": "b", "owner_email": "a@b.example"}),
        ("get", "/v1/admin/orgs", "/v1/admin/orgs", None),
        ("post", "/v1/admin/plans", "/v1/admin/plans", {"name": "silver", "lane": "batch"}),
        ("patch", "/v1/admin/plans/{name}", "/v1/admin/plans/silver", {"lane": None}),
        ("get", "/v1/admin/plans", "/v1/admin/plans", None),
        ("post", "/v1/admin/plans/{name}/archive", "/v1/admin/plans/silver/archive", None),
        ("post", CAPS, CAPS, {"period": "day", "amount_usd": "0.000000001"}),
        ("post", CAPS, CAPS, {"period": "day", "amount_usd": "-1"}),
        ("get", CAPS, CAPS, None),
        ("get", "/v1/admin/alerts", "/v1/admin/alerts", None),
        ("get", "/v1/admin/disputed-usage", "/v1/admin/disputed-usage", None),
        ("get", "/v1/admin/mail-deliveries", "/v1/admin/mail-deliveries", None),
        ("get", "/v1/admin/cache-leases", "/v1/admin/cache-leases", None),
        ("post", WEBHOOKS, WEBHOOKS, HOOK),
        ("post", WEBHOOKS, WEBHOOKS, {**HOOK, "url": "http://169.254.169.254/"}),
        ("get", WEBHOOKS, WEBHOOKS, None),
        ("get", "/v1/admin/balance", "/v1/admin/balance", None),
        ("get", "/v1/admin/credits", "/v1/admin/credits", None),
        ("get", "/v1/admin/models", "/v1/admin/models", None),
        ("get", "/v1/admin/price_lists", "/v1/admin/price_lists", None),
        (
            "get",
            "/v1/admin/price_lists/{price_list}/prices",
            "/v1/admin/price_lists/default/prices",
            None,
        ),
        ("get", "/v1/admin/organization", "/v1/admin/organization", None),
        ("patch", "/v1/admin/organization", "/v1/admin/organization", {"cors_origins": []}),
        ("post", "/v1/admin/projects", "/v1/admin/projects", {"name": "p", "plan": "gold"}),
        ("get", "/v1/admin/projects", "/v1/admin/projects", None),
        ("post", "/v1/admin/invites", "/v1/admin/invites", {"email": "c@d.ef", "role": "billing"}),
        ("post", "/v1/admin/invites", "/v1/admin/invites", {"email": "c@d.ef", "role": "god"}),
        ("get", "/v1/organization/audit_logs", "/v1/organization/audit_logs", None),
        ("get", "/v1/organization/audit_logs", "/v1/organization/audit_logs?limit=0", None),
        ("get", "/v1/admin/plans/{name}", "/v1/admin/plans/none", None),
        ("post", "/v1/admin/plans", "/v1/admin/plans", {}),
    ]
    for method, path, url, body in calls:
        answer = await world.call(method.upper(), url, body)
        said = operation(document, path, method)["responses"]
        found = answer_of(document, said[str(answer.status_code)])
        media_type = answer.headers["content-type"].partition(";")[0]
        validator(document, found["content"][media_type]["schema"]).validate(answer.json())


async def test_a_parameter_is_never_null(document: dict[str, Any]) -> None:
    for path, method in DESCRIBED:
        for each in operation(document, path, method).get("parameters", []):
            assert "null" not in str(each["schema"]), (path, each)


async def test_every_moment_of_administration_is_unix_seconds(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    found = 0
    for path, operations in document["paths"].items():
        left: list[Any] = [operations] if path.startswith("/v1/admin/") else []
        seen: set[str] = set()
        while left:
            part = left.pop()
            if isinstance(part, list):
                left += part
            if not isinstance(part, dict):
                continue
            left += part.values()
            name = str(part.get("$ref", "")).rpartition("/")[2]
            if name in schemas and name not in seen:
                seen.add(name)
                left.append(schemas[name])
            for field, schema in part.get("properties", {}).items():
                if field.endswith(("_at", "_until")):
                    found += 1
                    kinds = {each["type"] for each in schema.get("anyOf", [schema])}
                    assert kinds <= {"integer", "null"}, f"{path}: {field}"
    assert found > 50


NUMBERS = {
    "PlanView.weight": "a share of the engine, of no currency",
    "McpServer.recheck_s": "seconds",
    "DeadlinesView.interactive": "seconds",
    "DeadlinesView.agentic": "seconds",
    "DeadlinesView.batch": "seconds",
    "FleetReplicaView.kv_used": "a share",
    "FleetReplicaView.hit_rate": "a share",
    "FleetReplicaView.prefill_tokens_per_s": "tokens a second",
    "FleetReplicaView.predicted_ttft_s": "seconds",
    "LearntCosts.step_s": "seconds",
    "LearntCosts.prompt_token_s": "seconds",
    "LearntCosts.decode_s": "seconds",
    "RolloutView.part_of_proof": "a share",
    "PlannedModel.rate": "requests a second",
    "PlannedModel.expected_rate": "requests a second",
    "PlannedModel.work": "replicas' work a second",
    "PlannedModel.start_s": "seconds",
    "GenerationData.total_cost": "a form that others have made; `cost` is exact",
    "GenerationData.usage": "the same",
}
"""Answers in which a number may have a fraction."""


def fractions(schema: Any, where: str) -> set[str]:
    """Return where a schema says `number`, by the nearest field."""
    if isinstance(schema, list):
        return {found for each in schema for found in fractions(each, where)}
    if not isinstance(schema, dict):
        return set()
    found = {where} if schema.get("type") == "number" else set()
    for name, each in schema.get("properties", {}).items():
        found |= fractions(each, f"{where}.{name}")
    for word in ("items", "additionalProperties", "oneOf", "anyOf", "allOf"):
        found |= fractions(schema.get(word), where)
    return found


def answered(schemas: dict[str, Any], said: Any) -> set[str]:
    """The names of all schemas that an answer leads to."""
    waiting, known = [said], set[str]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            name = str(each.get("$ref", "")).rpartition("/")[2]
            if name and name not in known:
                known.add(name)
                waiting.append(schemas[name])
            waiting += each.values()
    return known


async def test_no_amount_of_ours_is_a_number_with_a_fraction(document: dict[str, Any]) -> None:
    """Money is a decimal text beside its unit, so that no reader's floats round it."""
    schemas = document["components"]["schemas"]
    answers = [
        [answer_of(document, each) for each in said["responses"].values()]
        for path, methods in document["paths"].items()
        if path.startswith(("/v1/admin", "/api/v1/requests"))
        for said in methods.values()
    ]
    names = answered(schemas, answers)
    found = {where for name in names for where in fractions(schemas[name], name)}
    assert "InvoiceView" in names and found == set(NUMBERS)
