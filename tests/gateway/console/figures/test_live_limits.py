"""A key's page and a plan's show what is used of their limits now, as the limiter counts."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from playwright.sync_api import expect

from gateway.auth.bearer.api_keys import principal_of
from gateway.limits.outcomes import Admission
from gateway.tenancy.tables import api_keys
from tests.gateway.console.conftest import Visit
from tests.gateway.console.seeds import PLAN
from tests.gateway.console.server import ConsoleServer


def test_what_runs_is_held_on_the_pages_of_its_key_and_its_plan(
    visit: Visit, console: ConsoleServer
) -> None:
    limiter, org = console.services.generation.limiter, console.much

    async def reserve() -> tuple[str, Any]:
        async with console.services.system_db.connect() as conn:
            newest = sa.select(sa.func.max(api_keys.c.id)).where(api_keys.c.org_id == org.id)
            key_id = str(await conn.scalar(newest))
            who = await principal_of(conn, org_id=org.id, key_id=key_id)
        tokens = {"input_tokens": 1_900_000, "max_output_tokens": 0}
        return key_id, await limiter.admit(who, "penny", **tokens, lease_id="shown")

    key_id, admission = console.call(reserve)
    assert isinstance(admission, Admission)
    try:
        for address in (f"/console/keys/{key_id}", f"/console/plans/{PLAN}"):
            tab = visit("much", "reader", address)
            row = tab.locator("#use tbody tr").filter(has_text="tokens per minute (TPM)")
            expect(row).to_have_count(1)
            cells = row.locator("td").all_inner_texts()
            assert cells[1].startswith("2.0") and cells[2] == "0", cells
            assert cells[3].endswith("M") and cells[4] == "0", "it owes a minute"
            assert cells[5].startswith("in "), cells
            assert tab.locator("#use").get_attribute("hx-trigger") == "every 5s"
        script_free = visit("much", "reader", f"/console/keys/{key_id}", script=False)
        script_free.get_by_role("link", name="Show them").click()
        assert "tokens per minute" in script_free.locator("#use").inner_text()
    finally:
        console.call(lambda: limiter.void(admission))
