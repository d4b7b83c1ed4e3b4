"""By which list a request is priced, and who may see which."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Attempt
from billing.pricing.price_book import PriceBook
from gateway.generate_request import GenerateRequest
from gateway.generation_events import MeteredUsage
from gateway.inference.calls import GenerationCall
from gateway.inference.metering import new_attempt, to_quantities
from gateway.lanes import Priority
from gateway.principal import Plan, Principal
from gateway.routes.admin.billing.prices import lists_of, to_list_view, to_rule
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.money.plans import check_price_lists
from tests.gateway.office import PlainEncoder

BOOK = """
[[price]]
model = "m"
valid_from = "2020-01-01"
output = "2"
batch_queue = "0.001"
[[discount]]
price_list = "acme"
percent = "25"
valid_from = "2020-01-01"
[[tiered_price]]
price_list = "acme"
kind = "volume"
component = "tool_call"
steps = [{ up_to = 10, price = "1" }, { price = "0.5" }]
valid_from = "2020-01-01"
[[commitment]]
price_list = "zeta"
amount = 5
valid_from = "2020-01-01"
"""
WHO = Principal(org_id="o", project_id="p", key_id="k", key_hint="", scopes=frozenset())
OF_ACME = msgspec.structs.replace(WHO, org_plan=Plan(name="gold", price_list="acme"))
OPERATOR = msgspec.structs.replace(WHO, is_operator=True)


@pytest.fixture
def book(tmp_path: Path) -> PriceBook:
    (tmp_path / "book.toml").write_text(BOOK)
    return PriceBook.load([tmp_path])


def call_of(who: Principal, priority: Priority) -> GenerationCall:
    return GenerationCall(
        request_id="req_1",
        principal=who,
        request=GenerateRequest(model="m", stream=False, include_usage=False),
        priority=priority,
        encoder=PlainEncoder(),
        meter=RequestMeter(Telemetry(models=["m"]), "m"),
    )


def test_an_org_pays_by_the_list_of_its_plan(book: PriceBook) -> None:
    def attempt(who: Principal, priority: Priority = Priority()) -> Attempt:  # noqa: B008
        return new_attempt(call_of(who, priority), book)

    assert attempt(WHO).prices["output"].pico_per_token == 2_000_000
    assert attempt(OF_ACME).prices["output"].pico_per_token == 1_500_000
    keys_own = msgspec.structs.replace(WHO, key_plan=Plan(name="gold", price_list="acme"))
    assert attempt(keys_own).prices == attempt(WHO).prices, "who pays is the org"
    used = MeteredUsage(output=1)
    assert to_quantities(used, attempt(WHO)).batch_queue == 0
    assert to_quantities(used, attempt(WHO, Priority(lane="batch"))).batch_queue == 1


def test_an_org_sees_the_lists_that_it_pays_by(book: PriceBook) -> None:
    assert lists_of(WHO, book) == {"default"}
    assert lists_of(OF_ACME, book) == {"default", "acme"}
    assert lists_of(OPERATOR, book) == {"default", "acme", "zeta"}


def test_a_list_says_its_rules(book: PriceBook) -> None:
    shown = {rule.slot: to_rule(rule) for rule in book.lists.rules}
    views = msgspec.json.decode(msgspec.json.encode(shown))
    common = {
        "object": "price_rule", "model": None, "tier": None, "component": None,
        "valid_from": 1_577_836_800, "valid_to": None,
    }  # fmt: skip
    since = "2020-01-01T00:00:00Z"
    assert views == {
        "acme:discount:*:*:*": {
            **common, "id": f"acme:discount:*:*:*:{since}", "discount_bps": 2500,
        },
        "acme:tiered_price:*:*:tool_call": {
            **common, "id": f"acme:tiered_price:*:*:tool_call:{since}", "component": "tool_call",
            "kind": "volume", "steps": [[10, 10**12], [None, 5 * 10**11]],
        },
        "zeta:commitment:*:*:*": {
            **common, "id": f"zeta:commitment:*:*:*:{since}", "amount_pico": 5 * 10**12,
        },
    }  # fmt: skip
    assert (to_list_view(book, "acme").num_models, to_list_view(book, "zeta").num_models) == (1, 0)


async def test_a_plan_names_a_list_that_is_there(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        added = "INSERT INTO plans (name, price_list, in_settings) VALUES ('gold', 'acme', false)"
        await conn.execute(sa.text(added))
        await check_price_lists(conn, {"default", "acme"})
        with pytest.raises(InvalidField, match="no price book names a price list 'acme'"):
            await check_price_lists(conn, {"default"})
