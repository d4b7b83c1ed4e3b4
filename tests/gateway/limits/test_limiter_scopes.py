"""A request is limited by its key, alone and with the model, its project's share of the model, its
OAuth client, its project, its org."""

from __future__ import annotations

import sys
import tracemalloc

from gateway.limits.outcomes import scopes_of
from gateway.principal import UNLIMITED, Plan, Principal

PLAN = Plan(name="p", requests_per_minute=6)


def test_limits_of_a_model_are_owners_of_that_models_requests_alone() -> None:
    who = Principal(
        org_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        key_hint="",
        scopes=frozenset(),
        key_plan=PLAN,
        org_plan=PLAN,
        key_model_plans={"m": PLAN, "own": PLAN},
        model_plans={"m": PLAN, "free": UNLIMITED},
        client_id="client_a",
        client_plan=PLAN,
    )
    named = {
        model: [(each.scope, each.owner_id) for each in scopes_of(who, model, "interactive")]
        for model in ("m", "own", "n", "free")
    }
    key, client, org = ("key", "key_a"), ("client", "client_a"), ("org", "org_a")
    assert named == {
        "m": [("key_model", "key_a/m"), key, ("model", "proj_a/m"), client, org],
        "own": [("key_model", "key_a/own"), key, client, org],
        "n": [key, client, org],
        "free": [key, client, org],
    }


def test_who_has_no_limit_costs_one_empty_list() -> None:
    who = Principal(
        org_id="org_a", project_id="proj_a", key_id="key_a", key_hint="", scopes=frozenset()
    )
    scopes_of(who, "m", "interactive")
    tracer = sys.gettrace()
    sys.settrace(None)  # one of coverage allocates for each call
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        found = scopes_of(who, "m", "interactive")
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        sys.settrace(tracer)
    assert found == () and after == before
    assert peak - before <= sys.getsizeof([])
