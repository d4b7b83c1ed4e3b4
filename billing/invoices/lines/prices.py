"""SQL that splits rated events into parts, each of which costs its price times its quantity.

Every component of an event has one price, except cache writes: tokens that were not kept cost the
price of uncached input. Their number follows from the amount, which is so much less than price
times quantity. So an event has two parts: the kept tokens with everything else, and the unkept
tokens at the price of uncached input. Sums of parts with the same prices cost price times quantity
as well.
"""

from __future__ import annotations

from billing.cache_contracts import WRITES
from billing.events import COMPONENTS, INPUTS
from billing.pricing.rating import PRICED_AS
from billing.tables import AMOUNTS, amount_column

WRITTEN = tuple(WRITES.values())
_PRICED_AS: dict[str, str] = dict(PRICED_AS.items())


def _chosen(component: str, field: str) -> str:
    """Return SQL of a field of a component's price, for a row with `prices` and `total_input`: the
    price that `rating.price_of` and `Price.of` choose."""
    also = _PRICED_AS.get(component, component)
    price = f"coalesce(prices -> '{component}', prices -> '{also}')"
    band = "CAST(b ->> 'min_total_input' AS bigint)"
    return f"""coalesce((
        SELECT b ->> '{field}' FROM jsonb_array_elements({price} -> 'bands') b
        WHERE {band} <= total_input ORDER BY {band} DESC LIMIT 1
    ), {price} ->> '{field}')"""


def price_id(component: str) -> str:
    """Return SQL of the id of a component's price in a row of `parts`, or an empty text."""
    return f"coalesce({_chosen(component, 'price_id')}, '')"


def parts(rows: str, *names: str) -> str:
    """Return SQL that splits `rows`, which have the columns `names`, `prices` and all quantities
    and amounts. `total_input` is the whole request's. A cache write whose amount does not follow
    from its price has none."""
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
    """Return SQL of a component's price in an event with cache writes, else null."""
    pico = f"CAST({_chosen(component, 'pico_per_token')} AS numeric)"
    return f"CASE WHEN {' + '.join(WRITTEN)} > 0 THEN {pico} END"


def _unkept(component: str) -> str:
    """Return SQL of the tokens whose premium is missing in the amount (`rating.rate_unkept`)."""
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
    """Return SQL that removes a component's price if its kept tokens cost something else."""
    quantity, amount = (_PARTS[name][0] for name in (component, amount_column(component)))
    is_other = f"{component}_each * ({quantity}) <> {amount}"
    return f" - CASE WHEN {is_other} THEN '{component}' ELSE '' END"
