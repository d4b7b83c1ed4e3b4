"""A plan limit is added in at most three places: its entry, a migration, and where it is counted if
it counts something new. Here they are, made in a copy of the product that is then used."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

from gateway.principal import LIMIT_NAMES, PLAN_LIMITS
from tests.copied_product import copy_product, next_migration, run_copy
from tests.test_tidy import ROOMS, ROOT

ENTRIES = """\
    requests_per_day: Annotated[
        Amount | None,
        PlanLimit(
            *("q", "daily_requests", "requests per day (RPD)"),
            counts="requests",
            window_us=DAY_US,
            of_keys=True,
            openai_name="max_requests_per_1_day",
        ),
    ] = None
    weighted_tokens_per_minute: Annotated[
        Amount | None,
        PlanLimit("w", "weighted_tokens", "weighted tokens per minute", raises_alerts=True),
    ] = None
"""
COUNTED = """\
            "weighted_tokens": self.input_tokens + 4 * self.output_tokens,
"""
INSERTED = {
    "gateway/principal.py": {"    weight: Weight | None = None\n": ENTRIES},
    "gateway/limits/outcomes.py": {'            "requests": requests,\n': COUNTED},
}

MIGRATION = '''\
"""Plans: requests by the day, and tokens of which output weighs four times."""

from alembic import op

revision = "9999"
down_revision = "{head}"

STATEMENTS = (
    "ALTER TABLE plans ADD COLUMN requests_per_day bigint CHECK (requests_per_day >= 0),"
    " ADD COLUMN weighted_tokens_per_minute bigint CHECK (weighted_tokens_per_minute >= 0)",
    "ALTER TABLE api_keys ADD COLUMN requests_per_day bigint CHECK (requests_per_day >= 0)",
    "ALTER TABLE project_rate_limits ADD COLUMN requests_per_day bigint",
    "ALTER TABLE alerts DROP CONSTRAINT alerts_measure, ADD CONSTRAINT alerts_measure CHECK"
    " (measure IN ('spend', 'unusual_spend', 'credits_low', 'credits_exhausted',"
    " 'tokens_per_minute', 'input_tokens_per_minute', 'output_tokens_per_minute',"
    " 'weighted_tokens_per_minute'))",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
'''

ELSEWHERE = {
    "gateway/settings/load.py": "the default plan's values",
    "gateway/cli/installation/plans.py": "an example of its help",
    "gateway/limits/outcomes.py": "the one limit of what is open at once, which has no bucket",
    "gateway/routes/usage/own_view.py": "a vendor's field for one of them",
}
"""Files of the product that name a limit beside its entry, and why. A list of limits is no reason:
`gateway.principal.PLAN_LIMITS` is that list."""


async def test_a_limit_is_added_in_three_places(
    postgres_url: str, redis_url: str, tmp_path: Path
) -> None:
    migration = next_migration("more_limits", MIGRATION)
    assert copy_product(tmp_path, lines=INSERTED, files=migration) == 3
    program = ("-m", "tests.gateway.limits.added_limits", str(tmp_path), postgres_url, redis_url)
    used = await asyncio.to_thread(run_copy, tmp_path, program)
    assert used.returncode == 0, used.stdout + used.stderr


def test_no_other_place_of_the_product_lists_limits() -> None:
    named = re.compile(rf"\b({'|'.join(LIMIT_NAMES)})\b")
    found = {
        str(file.relative_to(ROOT))
        for room in ROOMS
        for kind in ("*.py", "*.lua")
        for file in (ROOT / room).rglob(kind)
        if named.search(file.read_text())
    }
    assert found == {"gateway/principal.py", *ELSEWHERE}


def test_no_two_limits_share_a_bucket_or_a_name() -> None:
    for names in zip(*((each.letter, each.kind, each.title) for each in PLAN_LIMITS), strict=True):
        assert Counter(names).most_common(1)[0][1] == 1, names
    letters = {each.letter for each in PLAN_LIMITS}
    assert "m" not in letters and {len(letter) for letter in letters} == {1}, "m is money's"
