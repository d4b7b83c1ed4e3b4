"""Double entry: accounts, transfers between two of them, and the proof that the books balance.

    usage       debit receivable:{org}            credit revenue:{model}
    waste       debit house:waste                 credit house:production      (never the org)
    suspense    debit receivable:{org} or waste   credit suspense              (0, until a price is)
    repriced    as usage or waste: what it costs after all; corrects the suspense transfer, if any
    credit      debit house:cash                  credit grant:{id}            (paid in advance)
    lease       debit grant:{id}                  credit receivable:{org}      (pending, then post)
    burn        as lease, at once                                              (beyond a lease)
    expired     debit grant:{id}                  credit house:breakage
    revoked     debit grant:{id}                  credit house:cash
    returned    debit receivable:{org}            credit grant:{id}            (paid too much)
    reversed    the other way round; corrects waste that an event made its org's after all, or what
                an event cost until it was rated anew

Knows no price. What is posted one by one, or held first, is `transfers`'; both keep balances in the
same statement, and change them in the order of account ids, so that two batches never wait for each
other.
"""

from __future__ import annotations

from collections.abc import Mapping

from billing.events import COMPONENTS
from billing.tables import AMOUNTS, REQUESTS

SUSPENSE = "suspense"
WASTE = "house:waste"
PRODUCTION = "house:production"
CASH = "house:cash"

DEBIT = f"CASE kind WHEN 'usage' THEN 'receivable:' || org ELSE '{WASTE}' END"
CREDIT = f"CASE kind WHEN 'usage' THEN 'revenue:' || model ELSE '{PRODUCTION}' END"
"""SQL, over a row of usage_events."""


def account_of(org: str) -> str:
    """Return the account of what an org owes."""
    return f"receivable:{org}"


def transfers_of(event: str) -> str:
    """SQL: that a transfer `t` is about the event of this id. An event's own has its id, so that
    only the others need an index of events."""
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
    """CTEs that post the rows of a CTE `legs` (the columns of transfers, without posted_at). What
    an org with credit owes for events is paid later (`credits.lines`).

    `shared`: CTEs that change rows which all batches change. Postgres runs the parts of a statement
    that change rows from the last to the first: so what nobody waits for comes first, then
    `shared`, then the balances, then the commit.
    """
    return ", ".join((_BALANCED, *shared, _POSTED))


POST_LEGS = post_legs()

_KEY = "project, key, model, tier, batch"
_HOUR_KEY = f"org, hour, {_KEY}"
_DAY_KEY = f"org, day, {_KEY}"
_NUMBERS = ("num_requests", "num_embeddings")
_COUNTED = (*COMPONENTS, *AMOUNTS, *_NUMBERS)
_CHARGE_KEY = "org, hour, project, model, tier, price_set, band"
_CHARGES = (*COMPONENTS, *AMOUNTS, *REQUESTS)
USES = ", ".join(
    f"count(*) FILTER (WHERE {name} > 0) AS {requests}"
    for name, requests in zip(COMPONENTS, REQUESTS, strict=True)
)
"""SQL: of rows of usage_events, how many have used any of each component."""


def _sums(names: tuple[str, ...]) -> str:
    return ", ".join(f"sum({name}) AS {name}" for name in names)


def _growing(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} = r.{name} + EXCLUDED.{name}" for name in names)


def _grown(table: str, unit: str, source: str) -> str:
    key = f"org, {unit}, {_KEY}"
    return f"""
    {table}_grown AS (
        INSERT INTO {table} AS r ({key}, {", ".join(_COUNTED)})
        SELECT org, date_trunc('{unit}', admitted_at, 'UTC') AS {unit}, project, key, model, tier,
            lane = 'batch' AS batch, {_sums(_COUNTED)}
        FROM {source} WHERE kind = 'usage'
        GROUP BY {key} ORDER BY {key}
        ON CONFLICT ({key}) DO UPDATE SET {_growing(_COUNTED)}
    )
    """


def roll_up(source: str) -> str:
    """CTEs that add the rows of `source` to usage_hourly and usage_daily.

    `source` has the columns of usage_events, and how many of them each row is the sum of:
    `num_requests`, and `num_embeddings` of these.
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
        ) c WHERE ({", ".join(f"r.{name.strip()}" for name in key.split(","))})
            = ({", ".join(f"c.{name.strip()}" for name in key.split(","))})
    )
    """


def charge(source: str) -> str:
    """A CTE that adds rows of `source`, each the sums of an hour (`admitted_at`), to usage_charges:
    what was booked with events, by their prices. What is late an invoice reads by itself."""
    return f"""
    charged AS (
        INSERT INTO usage_charges AS r ({_CHARGE_KEY}, {", ".join(_CHARGES)})
        SELECT org, admitted_at AS hour, project, model, tier, price_set, band, {_sums(_CHARGES)}
        FROM {source} WHERE kind = 'usage' AND NOT late
        GROUP BY {_CHARGE_KEY} ORDER BY {_CHARGE_KEY}
        ON CONFLICT ({_CHARGE_KEY}) DO UPDATE SET {_growing(_CHARGES)}
    )
    """


def change_rollups(source: str, changes: Mapping[str, str]) -> str:
    """CTEs that add `changes`, SQL over `source` by column, be they less than nothing, to where the
    events of `source` have been added before. Who runs them holds the books alone."""
    hours = _changed("usage_hourly", "hour", source, changes)
    return f"{hours}, {_changed('usage_daily', 'day', source, changes)}"


_HOUR = f"""
    concat_ws('/', {_HOUR_KEY}) || coalesce((
        SELECT concat(', first of it request ', request_id, ', event ', id)
        FROM usage_events WHERE id = first), '')
"""
"""SQL: names an hour, and by its `first` event the request that it begins with."""
_CHARGED = """CASE WHEN t.debit = 'receivable:' || u.org THEN t.amount_pico
    WHEN t.credit = 'receivable:' || u.org THEN -t.amount_pico ELSE 0 END"""
"""SQL: what a transfer of an event has its org owe."""
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
        WHERE {" + ".join(AMOUNTS)} <> coalesce(posted, 0) ORDER BY admitted_at
    """,
    "what the event costs after all differs from its transfers": f"""
        SELECT concat('request ', request_id, ', event ', u.id) FROM (
            SELECT DISTINCT ON (event_id) event_id, {" + ".join(AMOUNTS)} AS rated
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
                count(*) FILTER (WHERE embedding_input > 0) AS embedded, {_sums(COMPONENTS)}
            FROM usage_events WHERE kind = 'usage' AND {" + ".join(COMPONENTS)} > 0
            GROUP BY {_HOUR_KEY}
        ) e USING ({_HOUR_KEY})
        WHERE (h.num_requests, h.num_embeddings, {", ".join(f"h.{name}" for name in COMPONENTS)})
            IS DISTINCT FROM (e.found, e.embedded, {", ".join(f"e.{name}" for name in COMPONENTS)})
    """,
    "the hour's money differs from its transfers": f"""
        SELECT {_HOUR} FROM usage_hourly FULL JOIN (
            SELECT org, date_trunc('hour', u.admitted_at, 'UTC') AS hour, project, key, model,
                tier, lane = 'batch' AS batch, min(u.id) AS first, sum({_CHARGED}) AS posted
            FROM transfers t JOIN usage_events u ON u.id = t.event_id
            WHERE u.kind = 'usage' GROUP BY {_HOUR_KEY}
        ) t USING ({_HOUR_KEY})
        WHERE {" + ".join(AMOUNTS)} IS DISTINCT FROM posted
    """,
    "the hour's charges differ from its events": f"""
        SELECT concat_ws('/', {_CHARGE_KEY}) FROM usage_charges c FULL JOIN (
            SELECT org, date_trunc('hour', admitted_at, 'UTC') AS hour, project, model, tier,
                price_set, band, {_sums((*COMPONENTS, *AMOUNTS))}, {USES}
            FROM usage_events WHERE kind = 'usage' AND NOT late AND {" + ".join(COMPONENTS)} > 0
            GROUP BY {_CHARGE_KEY}
        ) e USING ({_CHARGE_KEY})
        WHERE ({", ".join(f"c.{name}" for name in _CHARGES)})
            IS DISTINCT FROM ({", ".join(f"e.{name}" for name in _CHARGES)})
    """,
    "the day differs from its hours": f"""
        SELECT concat_ws('/', {_DAY_KEY}) FROM usage_daily d FULL JOIN (
            SELECT org, date_trunc('day', hour, 'UTC') AS day, {_KEY}, {_sums(_COUNTED)}
            FROM usage_hourly GROUP BY {_DAY_KEY}
        ) h USING ({_DAY_KEY})
        WHERE ({", ".join(f"d.{name}" for name in _COUNTED)})
            IS DISTINCT FROM ({", ".join(f"h.{name}" for name in _COUNTED)})
    """,
}


_NUM_TAGS = "(SELECT count(*) FROM jsonb_object_keys(g.tags))"
CHECKS["the day's tags differ from its events"] = f"""
    SELECT concat_ws('/', {_DAY_KEY}) FROM (
        SELECT {_DAY_KEY}, {_sums((*COMPONENTS, *_NUMBERS))},
            sum({" + ".join(AMOUNTS)}) AS amount
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
        WHERE kind = 'usage' AND {" + ".join(COMPONENTS)} > 0
        GROUP BY u.org, day, project, key, model, tier, batch
    ) e USING ({_DAY_KEY})
    WHERE (d.num_requests, d.num_embeddings, d.amount,
            {", ".join(f"d.{name}" for name in COMPONENTS)})
        IS DISTINCT FROM (e.found, e.embedded, e.posted,
            {", ".join(f"e.{name}" for name in COMPONENTS)})
"""
