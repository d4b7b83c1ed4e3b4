"""By which prices an event was rated, as SQL: each component by one, but for what was written to be
kept in the cache and was not, which costs what it would have uncached.

How much was not kept stands in the amount: so much less than price and quantity say, and uncached
input's price is among those of every event that wrote. So an event is `parts`: what was kept with
all else, and what was not, under the price of uncached input. Each of them costs its price times
its quantity, and so does any sum of such parts that have their prices in common.
"""

from __future__ import annotations

from billing.cache_contracts import WRITES
from billing.events import COMPONENTS, INPUTS
from billing.pricing.rating import PRICED_AS
from billing.tables import AMOUNTS, amount_column

WRITTEN = tuple(WRITES.values())


def _chosen(component: str, field: str) -> str:
    """SQL: of a row with `prices` and `total_input`, as `rating.price_of` and `Price.of` choose."""
    also = PRICED_AS.get(component, component)  # type: ignore[call-overload]
    price = f"coalesce(prices -> '{component}', prices -> '{also}')"
    band = "CAST(b ->> 'min_total_input' AS bigint)"
    return f"""coalesce((
        SELECT b ->> '{field}' FROM jsonb_array_elements({price} -> 'bands') b
        WHERE {band} <= total_input ORDER BY {band} DESC LIMIT 1
    ), {price} ->> '{field}')"""


def price_id(component: str) -> str:
    """SQL: of a row of `parts`; empty where there is none."""
    return f"coalesce({_chosen(component, 'price_id')}, '')"


def parts(rows: str, *names: str) -> str:
    """SQL: `rows`, which have `names`, `prices` and all quantities and amounts, by what they cost;
    `total_input` is the whole request's. What a written component cost otherwise has no price."""
    quoted = ", ".join(f"{_pico(name)} AS {name}_each" for name in ("uncached_input", *WRITTEN))
    unkept = ", ".join(f"{_unkept(name)} AS {name}_unkept" for name in WRITTEN)
    counted = ", ".join(map(_part, (*COMPONENTS, *AMOUNTS)))
    uncached = ", ".join(f"'{name}', prices -> 'uncached_input'" for name in WRITTEN)
    return f"""
        SELECT {", ".join(names)}, total_input, {counted},
            CASE WHEN was_kept THEN prices{"".join(map(_without, WRITTEN))}
                ELSE jsonb_build_object({uncached}) END AS prices
        FROM (SELECT *, {unkept} FROM (SELECT *, {quoted} FROM (
            SELECT *, {" + ".join(INPUTS)} AS total_input FROM {rows}
        ) sized) quoted) measured CROSS JOIN (VALUES (true), (false)) AS part(was_kept)
        WHERE was_kept OR {" + ".join(f"{name}_unkept" for name in WRITTEN)} > 0
    """


def _pico(component: str) -> str:
    """SQL: the price of a component, of an event that wrote to the cache; else null."""
    pico = f"CAST({_chosen(component, 'pico_per_token')} AS numeric)"
    return f"CASE WHEN {' + '.join(WRITTEN)} > 0 THEN {pico} END"


def _unkept(component: str) -> str:
    """As many tokens as the premium is missing of (`rating.rate_unkept`)."""
    missing = f"{component}_each * {component} - {amount_column(component)}"
    premium = f"nullif(greatest({component}_each - uncached_input_each, 0), 0)"
    found = f"coalesce(div({missing}, {premium}), 0)"
    return f"CAST(greatest(0, least({component}, {found})) AS bigint)"


_PARTS = {name: (f"{name} - {name}_unkept", f"{name}_unkept") for name in WRITTEN} | {
    amount_column(name): (f"{amount_column(name)} - {cost}", cost)
    for name in WRITTEN
    for cost in [f"coalesce(uncached_input_each, 0) * {name}_unkept"]
}


def _part(column: str) -> str:
    kept, unkept = _PARTS.get(column, (column, "0"))
    return f"CASE WHEN was_kept THEN {kept} ELSE {unkept} END AS {column}"


def _without(component: str) -> str:
    """SQL: take away the price of a component whose kept tokens cost something else."""
    quantity, amount = (_PARTS[name][0] for name in (component, amount_column(component)))
    is_other = f"{component}_each * ({quantity}) <> {amount}"
    return f" - CASE WHEN {is_other} THEN '{component}' ELSE '' END"
