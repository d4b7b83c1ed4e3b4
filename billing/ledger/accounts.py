"""The double-entry ledger: its accounts, the SQL that posts transfers in bulk, and the checks that
the books balance.

    usage       debit receivable:{org}            credit revenue:{model}
    waste       debit house:waste                 credit house:production
    suspense    debit receivable:{org} or waste   credit suspense              (0, without a price)
    repriced    as usage or waste, by a new rating; corrects the suspense transfer, if any
    credit      debit house:cash                  credit grant:{id}            (paid in advance)
    lease       debit grant:{id}                  credit receivable:{org}      (pending, then post)
    burn        as lease, posted at once                                       (beyond a lease)
    expired     debit grant:{id}                  credit house:breakage
    revoked     debit grant:{id}                  credit house:cash
    returned    debit receivable:{org}            credit grant:{id}            (paid too much)
    reversed    swaps the sides of the transfer that it corrects: a charge that was rated anew, or
                waste whose event came later

`transfers` posts single and pending transfers. Both change balances in the same statement and in
the order of account ids, so two batches never deadlock. Knows no price.
"""

from __future__ import annotations

from collections.abc import Mapping

from billing.events import COMPONENTS
from billing.tables import AMOUNTS, REQUESTS, TOTAL_PICO, TOTAL_QUANTITY, columns_of, sums_of

SUSPENSE = "suspense"
WASTE = "house:waste"
PRODUCTION = "house:production"
CASH = "house:cash"

DEBIT = f"CASE kind WHEN 'usage' THEN 'receivable:' || org ELSE '{WASTE}' END"
CREDIT = f"CASE kind WHEN 'usage' THEN 'revenue:' || model ELSE '{PRODUCTION}' END"
"""SQL: the accounts that a row of usage_events debits and credits."""


def account_of(org: str) -> str:
    """Return an org's receivable account."""
    return f"receivable:{org}"


def transfers_of(event: str) -> str:
    """Return SQL that is true of the transfers `t` of an event. The first one has the event's id,
    so only the others need an index by event."""
    return f"(t.id = {event} OR t.event_id = {event} AND t.event_id <> t.id)"


_BALANCED = """
    pairs AS (SELECT debit, credit, sum(amount_pico) AS amount_pico FROM legs GROUP BY 1, 2),
    sides AS (
        SELECT debit AS account, amount_pico AS debit_pico, 0 AS credit_pico FROM pairs
        UNION ALL SELECT credit, 0, amount_pico FROM pairs
    ),
    balanced AS (
        INSERT INTO balances AS b (account, debits_pico, credits_pico)
        SELECT account, sum(debit_pico), sum(credit_pico) FROM sides
        GROUP BY account ORDER BY account
        ON CONFLICT (account) DO UPDATE SET
            debits_pico = b.debits_pico + EXCLUDED.debits_pico,
            credits_pico = b.credits_pico + EXCLUDED.credits_pico
    )
"""
_POSTED = """
    unpaid AS (
        INSERT INTO unpaid_usage (transfer_id, org_id, event_id, amount_pico)
        SELECT legs.id, org_id, event_id, amount_pico
        FROM legs JOIN credit_lines ON account = debit
        WHERE amount_pico > 0 AND event_id IS NOT NULL
    ),
    posted AS (
        INSERT INTO transfers
            (id, event_id, debit, credit, amount_pico, kind, corrects, admitted_at, seq)
        SELECT id, event_id, debit, credit, amount_pico, kind, corrects, admitted_at,
            (SELECT nextval('posting_seq'))
        FROM legs
    ),
    opened AS (
        INSERT INTO accounts (id) SELECT DISTINCT account FROM sides ORDER BY account
        ON CONFLICT DO NOTHING
    )
"""


def post_legs(*shared: str) -> str:
    """Return CTEs that post the rows of a CTE `legs` (the columns of transfers, without posted_at).
    They add charges of an org with credit to unpaid_usage (`credits.lines`).

    `shared`: CTEs that change rows which all batches change. Postgres runs the data-changing parts
    of a statement from the last to the first, so rows that are locked by others come last: first
    the transfers, then `shared`, then the balances.
    """
    return ", ".join((_BALANCED, *shared, _POSTED))


POST_LEGS = post_legs()

_KEY = "project, key, model, tier, batch"
_HOUR_KEY = f"org, hour, {_KEY}"
_DAY_KEY = f"org, day, {_KEY}"
_NUMBERS = ("num_requests", "num_embeddings")
USAGE_SUMS = (*COMPONENTS, *AMOUNTS, *_NUMBERS)
"""The columns of a rollup that are sums."""
_CHARGE_KEY = "org, hour, project, model, tier, price_set, band"
_CHARGES = (*COMPONENTS, *AMOUNTS, *REQUESTS)
USES = ", ".join(
    f"count(*) FILTER (WHERE {name} > 0) AS {requests}"
    for name, requests in zip(COMPONENTS, REQUESTS, strict=True)
)
"""SQL: the number of rows of usage_events that used each component."""


def add_to(names: tuple[str, ...]) -> str:
    """Return the assignments of an upsert that add the new values to those of the row `r`."""
    return ", ".join(f"{name} = r.{name} + EXCLUDED.{name}" for name in names)


def _grown(table: str, unit: str, source: str) -> str:
    key = f"org, {unit}, {_KEY}"
    return f"""
    {table}_grown AS (
        INSERT INTO {table} AS r ({key}, {", ".join(USAGE_SUMS)})
        SELECT org, date_trunc('{unit}', admitted_at, 'UTC') AS {unit}, project, key, model, tier,
            lane = 'batch' AS batch, {sums_of(USAGE_SUMS)}
        FROM {source} WHERE kind = 'usage'
        GROUP BY {key} ORDER BY {key}
        ON CONFLICT ({key}) DO UPDATE SET {add_to(USAGE_SUMS)}
    )
    """


def roll_up(source: str) -> str:
    """Return CTEs that add the rows of `source` to usage_hourly and usage_daily.

    `source` has the columns of usage_events, added up, and the number of events in each row:
    `num_requests`, of which `num_embeddings` have embedding input.
    """
    return f"{_grown('usage_hourly', 'hour', source)}, {_grown('usage_daily', 'day', source)}"


def _changed(table: str, unit: str, source: str, changes: Mapping[str, str]) -> str:
    key = f"org, {unit}, {_KEY}"
    added = ", ".join(f"{name} = r.{name} + c.{name}" for name in changes)
    return f"""
    {table}_changed AS (
        UPDATE {table} r SET {added} FROM (
            SELECT org, date_trunc('{unit}', admitted_at, 'UTC') AS {unit}, project, key, model,
                tier, lane = 'batch' AS batch,
                {", ".join(f"sum({change}) AS {name}" for name, change in changes.items())}
            FROM {source} WHERE kind = 'usage' GROUP BY {key}
        ) c WHERE ({columns_of("r", key.split(", "))}) = ({columns_of("c", key.split(", "))})
    )
    """


def charge(source: str) -> str:
    """Return a CTE that adds the rows of `source`, each the sums of an hour (`admitted_at`) by
    prices, to usage_charges. An invoice reads late events one by one."""
    return f"""
    charged AS (
        INSERT INTO usage_charges AS r ({_CHARGE_KEY}, {", ".join(_CHARGES)})
        SELECT org, admitted_at AS hour, project, model, tier, price_set, band, {sums_of(_CHARGES)}
        FROM {source} WHERE kind = 'usage' AND NOT late
        GROUP BY {_CHARGE_KEY} ORDER BY {_CHARGE_KEY}
        ON CONFLICT ({_CHARGE_KEY}) DO UPDATE SET {add_to(_CHARGES)}
    )
    """


def change_rollups(source: str, changes: Mapping[str, str]) -> str:
    """Return CTEs that add `changes`, SQL over `source` by column, to the rollups that have the
    events of `source`. The caller holds an exclusive lock of the books."""
    hours = _changed("usage_hourly", "hour", source, changes)
    return f"{hours}, {_changed('usage_daily', 'day', source, changes)}"


_HOUR = f"""
    concat_ws('/', {_HOUR_KEY}) || coalesce((
        SELECT concat(', first of it request ', request_id, ', event ', id)
        FROM usage_events WHERE id = first), '')
"""
"""SQL: the name of an hour, and the request of its `first` event."""
_CHARGED = """CASE WHEN t.debit = 'receivable:' || u.org THEN t.amount_pico
    WHEN t.credit = 'receivable:' || u.org THEN -t.amount_pico ELSE 0 END"""
"""SQL: the amount that a transfer `t` charges to the org of the event `u`."""
CHECKS: dict[str, str] = {
    "the sum of all debits differs from the sum of all credits": """
        SELECT 'all accounts' FROM balances
        HAVING sum(debits_pico) <> sum(credits_pico)
    """,
    "the balance differs from the sum of its entries": """
        SELECT account FROM balances FULL JOIN (
            SELECT account, sum(debit_pico) AS debits, sum(credit_pico) AS credits
            FROM entries GROUP BY account
        ) e USING (account)
        WHERE (debits_pico, credits_pico)
            IS DISTINCT FROM (coalesce(debits, 0), coalesce(credits, 0))
    """,
    "the pending balance differs from what is pending": """
        SELECT account FROM balances LEFT JOIN (
            SELECT account, sum(debit_pico) AS debits, sum(credit_pico) AS credits FROM (
                SELECT debit AS account, amount_pico AS debit_pico, 0 AS credit_pico, id
                FROM transfers WHERE phase = 'pending'
                UNION ALL SELECT credit, 0, amount_pico, id FROM transfers WHERE phase = 'pending'
            ) p WHERE NOT EXISTS (SELECT FROM transfers r WHERE r.resolves = p.id)
            GROUP BY account
        ) p USING (account)
        WHERE (pending_debits_pico, pending_credits_pico)
            IS DISTINCT FROM (coalesce(debits, 0), coalesce(credits, 0))
    """,
    "the transfer names an event or an account that is not there": """
        SELECT id FROM transfers t
        WHERE NOT EXISTS (SELECT FROM accounts a WHERE a.id = t.debit)
            OR NOT EXISTS (SELECT FROM accounts a WHERE a.id = t.credit)
            OR (event_id IS NOT NULL
                AND NOT EXISTS (SELECT FROM usage_events u WHERE u.id = t.event_id))
    """,
    "the event's amounts differ from its transfers": f"""
        SELECT concat('request ', request_id, ', event ', id) FROM usage_events u LEFT JOIN (
            SELECT event_id, sum(amount_pico) AS posted FROM transfers
            WHERE kind IN ('usage', 'waste') GROUP BY event_id
        ) t ON t.event_id = u.id
        WHERE {TOTAL_PICO} <> coalesce(posted, 0) ORDER BY admitted_at
    """,
    "the event's last rating differs from its transfers": f"""
        SELECT concat('request ', request_id, ', event ', u.id) FROM (
            SELECT DISTINCT ON (event_id) event_id, {TOTAL_PICO} AS rated
            FROM event_ratings ORDER BY event_id, number DESC
        ) r JOIN usage_events u ON u.id = r.event_id LEFT JOIN LATERAL (
            SELECT sum({_CHARGED}) AS posted FROM transfers t WHERE {transfers_of("u.id")}
        ) t ON true
        WHERE u.kind = 'usage' AND rated IS DISTINCT FROM posted ORDER BY u.admitted_at
    """,
    "the hour's tokens differ from its events": f"""
        SELECT {_HOUR} FROM usage_hourly h FULL JOIN (
            SELECT org, date_trunc('hour', admitted_at, 'UTC') AS hour, project, key, model, tier,
                lane = 'batch' AS batch, min(id) AS first, count(*) AS found,
                count(*) FILTER (WHERE embedding_input > 0) AS embedded, {sums_of(COMPONENTS)}
            FROM usage_events WHERE kind = 'usage' AND {TOTAL_QUANTITY} > 0
            GROUP BY {_HOUR_KEY}
        ) e USING ({_HOUR_KEY})
        WHERE (h.num_requests, h.num_embeddings, {columns_of("h", COMPONENTS)})
            IS DISTINCT FROM (e.found, e.embedded, {columns_of("e", COMPONENTS)})
    """,
    "the hour's money differs from its transfers": f"""
        SELECT {_HOUR} FROM usage_hourly FULL JOIN (
            SELECT org, date_trunc('hour', u.admitted_at, 'UTC') AS hour, project, key, model,
                tier, lane = 'batch' AS batch, min(u.id) AS first, sum({_CHARGED}) AS posted
            FROM transfers t JOIN usage_events u ON u.id = t.event_id
            WHERE u.kind = 'usage' GROUP BY {_HOUR_KEY}
        ) t USING ({_HOUR_KEY})
        WHERE {TOTAL_PICO} IS DISTINCT FROM posted
    """,
    "the hour's charges differ from its events": f"""
        SELECT concat_ws('/', {_CHARGE_KEY}) FROM usage_charges c FULL JOIN (
            SELECT org, date_trunc('hour', admitted_at, 'UTC') AS hour, project, model, tier,
                price_set, band, {sums_of((*COMPONENTS, *AMOUNTS))}, {USES}
            FROM usage_events WHERE kind = 'usage' AND NOT late AND {TOTAL_QUANTITY} > 0
            GROUP BY {_CHARGE_KEY}
        ) e USING ({_CHARGE_KEY})
        WHERE ({columns_of("c", _CHARGES)}) IS DISTINCT FROM ({columns_of("e", _CHARGES)})
    """,
    "the day differs from its hours": f"""
        SELECT concat_ws('/', {_DAY_KEY}) FROM usage_daily d FULL JOIN (
            SELECT org, date_trunc('day', hour, 'UTC') AS day, {_KEY}, {sums_of(USAGE_SUMS)}
            FROM usage_hourly GROUP BY {_DAY_KEY}
        ) h USING ({_DAY_KEY})
        WHERE ({columns_of("d", USAGE_SUMS)}) IS DISTINCT FROM ({columns_of("h", USAGE_SUMS)})
    """,
}
"""The checks of the ledger: SQL by complaint; each returns the names of what it finds wrong."""


_NUM_TAGS = "(SELECT count(*) FROM jsonb_object_keys(g.tags))"
CHECKS["the day's tags differ from its events"] = f"""
    SELECT concat_ws('/', {_DAY_KEY}) FROM (
        SELECT {_DAY_KEY}, {sums_of((*COMPONENTS, *_NUMBERS))}, sum({TOTAL_PICO}) AS amount
        FROM usage_tags_daily GROUP BY {_DAY_KEY}
    ) d FULL JOIN (
        SELECT u.org, date_trunc('day', u.admitted_at, 'UTC') AS day, project, key, model, tier,
            lane = 'batch' AS batch, sum({_NUM_TAGS}) AS found, sum({_NUM_TAGS} * posted) AS posted,
            coalesce(sum({_NUM_TAGS}) FILTER (WHERE embedding_input > 0), 0) AS embedded,
            {", ".join(f"sum({_NUM_TAGS} * {name}) AS {name}" for name in COMPONENTS)}
        FROM event_tags g JOIN usage_events u ON u.id = g.event_id CROSS JOIN LATERAL (
            SELECT coalesce(sum({_CHARGED}), 0) AS posted FROM transfers t
            WHERE {transfers_of("u.id")}
        ) t
        WHERE kind = 'usage' AND {TOTAL_QUANTITY} > 0
        GROUP BY u.org, day, project, key, model, tier, batch
    ) e USING ({_DAY_KEY})
    WHERE (d.num_requests, d.num_embeddings, d.amount, {columns_of("d", COMPONENTS)})
        IS DISTINCT FROM (e.found, e.embedded, e.posted, {columns_of("e", COMPONENTS)})
"""
