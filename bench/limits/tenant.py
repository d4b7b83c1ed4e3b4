"""One organization with a limit of each kind at each scope, and more demand than any of them lets
pass. Pure.
"""

from __future__ import annotations

from gateway.principal import Plan, Principal

ORG, PROJECT, CLIENT = "org_bound", "proj_bound", "client_bound"
NARROW = "narrow"
MODELS = (NARROW, "wide")
DAY_TOKENS = 86_400_000
"""A millisecond of refill each, and far more than is asked for: its bucket counts every token."""
DAY = Plan(name="day", batch_tokens_per_day=DAY_TOKENS)


def callers(scale: int, max_streams: int) -> list[Principal]:
    """Two keys, and a client that two users hold tokens of; with 64, what some 64 requests at once
    ask for is more than each limit lets pass."""
    narrow = Plan(name="narrow", output_tokens_per_minute=16 * scale, requests_per_minute=6 * scale)
    org = Plan(
        name="org",
        tokens_per_minute=2_000 * scale,
        output_tokens_per_minute=900 * scale,
        requests_per_minute=18 * scale,
        max_concurrent_streams=max_streams,
        batch_tokens_per_day=DAY_TOKENS,
    )
    shared = {
        "org_id": ORG,
        "project_id": PROJECT,
        "key_hint": "",
        "scopes": frozenset[str](),
        "org_plan": org,
        "project_plan": Plan(
            name="project",
            tokens_per_minute=1_500 * scale,
            input_tokens_per_minute=1_200 * scale,
        ),
    }
    key = {
        "key_plan": Plan(name="key", tokens_per_minute=900 * scale),
        "key_model_plans": {NARROW: narrow},
    }
    client = {
        "client_id": CLIENT,
        "client_plan": Plan(name="client", tokens_per_minute=600 * scale),
    }
    return [
        *(Principal(key_id=name, **shared, **key) for name in ("key_a", "key_b")),  # type: ignore[arg-type]
        *(Principal(key_id=CLIENT, user_id=user, **shared, **client) for user in ("ann", "ben")),  # type: ignore[arg-type]
    ]
