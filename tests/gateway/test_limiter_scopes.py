"""Who limits a request: its key, its project's share of the model, its project, its org."""

from __future__ import annotations

from gateway.limits.verdicts import scopes_of
from gateway.principal import UNLIMITED, Plan, Principal

PLAN = Plan(name="p", requests_per_minute=6)


def test_a_projects_limit_of_a_model_is_one_more_owner_of_that_models_requests() -> None:
    who = Principal(
        org_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        key_hint="",
        scopes=frozenset(),
        key_plan=PLAN,
        org_plan=PLAN,
        model_plans={"m": PLAN, "free": UNLIMITED},
    )
    named = {
        model: [(each.scope, each.owner_id) for each in scopes_of(who, model, "interactive")]
        for model in ("m", "n", "free")
    }
    key, org = ("key", "key_a"), ("org", "org_a")
    assert named == {"m": [key, ("model", "proj_a/m"), org], "n": [key, org], "free": [key, org]}
