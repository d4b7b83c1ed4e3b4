"""A key's own limits of one model: written by merge patches, seen by workers within a second,
enforced beside the key's others, and in the audit log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.audit.tables import entries
from gateway.limits.limiter import Limiter
from gateway.limits.outcomes import Admission, Refusal
from gateway.principal import LIMIT_NAMES
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.restrictions import MAX_MODELS, check_model_limits, merged_limits
from tests.gateway.whole_app import World, world
from tests.pace import within

KEYS = "/v1/admin/keys"
VALUES = st.integers(0, 9)
MODELS = st.sampled_from(["a", "b"])
LIMITS = st.sampled_from(LIMIT_NAMES[:3])


@pytest.fixture
async def here(postgres_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[World]:
    async with world(postgres_url, redis, tmp_path) as found:
        yield found


def rfc7396(target: Any, patch: Any) -> Any:
    """The algorithm as section 2 has it."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = rfc7396(merged.get(name), value)
    return merged


@given(
    known=st.none() | st.dictionaries(MODELS, st.dictionaries(LIMITS, VALUES, min_size=1)),
    patch=st.none()
    | st.dictionaries(MODELS, st.none() | st.dictionaries(LIMITS, st.none() | VALUES)),
)
def test_a_merge_patch_is_that_of_the_rfc(known: Any, patch: Any) -> None:
    wanted = rfc7396({"limits": known}, {"limits": patch}).get("limits") or {}
    left = {model: limits for model, limits in wanted.items() if limits}
    assert merged_limits(known or None, patch) == (left or None)


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"m": {"tokens_per_minute": -1}}, "model_limits.tokens_per_minute"),
        ({"m": {"requests_per_minute": 10**13}}, "model_limits.requests_per_minute"),
        ({"m": {"weight": 1}}, "model_limits"),
        ({"": {"tokens_per_minute": 1}}, "model_limits"),
        ({"a\n": {"tokens_per_minute": 1}}, "model_limits"),
        ({f"{n}": {"tokens_per_minute": 1} for n in range(MAX_MODELS + 1)}, "model_limits"),
    ],
)
def test_what_limits_nothing_is_refused_by_name(limits: Any, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        check_model_limits(limits)
    assert refused.value.param == field


class Caller:
    """Asks the limiter as the key `secret`, as workers know it now."""

    def __init__(self, here: World, store: Redis, secret: str) -> None:
        self.here, self.secret, self.limiter = here, secret, Limiter(store)
        self.number = 0

    async def ask(self, model: str, tokens: int) -> Admission | Refusal:
        self.number += 1
        return await self.limiter.admit(
            await self.here.services.authenticator.authenticate(self.secret),
            model,
            input_tokens=tokens,
            max_output_tokens=0,
            lease_id=f"lease-{self.number}",
        )

    async def until_limited(self, model: str, limit: int) -> None:
        """Within the promised second."""
        async with within(1.0):
            while (await self.refused(model)).limit != limit:
                await asyncio.sleep(0.01)

    async def refused(self, model: str) -> Refusal:
        """Return the refusal of what can never fit, by the tightest limit there is."""
        verdict = await self.ask(model, 10**6)
        assert isinstance(verdict, Refusal)
        return verdict


async def test_a_model_of_a_key_has_limits_of_its_own(here: World, redis: Redis) -> None:
    limits = {"penny": {"requests_per_minute": 0}, "big": {"tokens_per_minute": 600}}
    body = {"name": "k", "project_id": here.acme.project_id, "model_limits": limits}
    made = await here.call("POST", KEYS, here.acme.admin, body | {"tokens_per_minute": 60_000})
    assert made.status_code == 201, made.text
    assert list(made.json()["model_limits"].items()) == sorted(limits.items())
    path = f"{KEYS}/{made.json()['id']}"
    shown = await here.call("GET", path, here.acme.admin)
    assert shown.headers["etag"] == made.headers["etag"] and shown.json()["model_limits"] == limits

    caller = Caller(here, redis, made.json()["value"])
    refused = await caller.ask("big", 601)
    assert isinstance(refused, Refusal) and refused.scope == "key_model"
    assert (refused.limit, refused.retry_after_s) == (600, None)
    assert isinstance(await caller.ask("penny", 1), Refusal)
    assert isinstance(await caller.ask("wide", 601), Admission), "the other models have the rest"
    passed = await caller.ask("big", 100)
    assert isinstance(passed, Admission)
    assert passed.state["tokens"].limit == 600, "the tightest is shown"

    patch = {"model_limits": {"penny": None, "big": {"tokens_per_minute": 6000}}}
    precondition = {"if-match": shown.headers["etag"]}
    changed = await here.call("PATCH", path, here.acme.admin, patch, headers=precondition)
    assert changed.status_code == 200, changed.text
    assert changed.json()["model_limits"] == {"big": {"tokens_per_minute": 6000}}
    await caller.until_limited("big", 6000)
    assert (await caller.refused("penny")).scope == "key"
    gone = await here.call("PATCH", path, here.acme.admin, {"model_limits": None})
    assert gone.json()["model_limits"] is None
    found = sa.select(entries.c.before, entries.c.after).where(
        entries.c.action == "api_key.updated", entries.c.org_id == here.acme.org_id
    )
    async with here.services.system_db.connect() as conn:
        logged = (await conn.execute(found.order_by(entries.c.sequence))).all()
    assert [(json.loads(each.before), json.loads(each.after)) for each in logged] == [
        ({"model_limits": limits}, {"model_limits": {"big": {"tokens_per_minute": 6000}}}),
        ({"model_limits": {"big": {"tokens_per_minute": 6000}}}, {"model_limits": None}),
    ]
