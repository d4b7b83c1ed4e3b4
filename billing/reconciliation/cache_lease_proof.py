"""Everything that is wrong between what was billed as written to the cache and the leases on it.

That a refund is in the ledger as the event is rated by now, `ledger` finds itself. At best nothing
is wrong.
"""

from __future__ import annotations

from functools import partial

from billing.checks import complaints

_OF_EVENT = "concat('request ', request_id, ', event ', u.id)"
CHECKS = {
    "there are leases for more than was written": f"""
        SELECT {_OF_EVENT} FROM (
            SELECT event_id, sum(num_tokens) FILTER (WHERE ttl = '5m') AS tokens_5m,
                sum(num_tokens) FILTER (WHERE ttl = '1h') AS tokens_1h
            FROM cache_leases GROUP BY event_id
        ) l JOIN usage_events u ON u.id = event_id
        WHERE tokens_5m > cache_write_5m OR tokens_1h > cache_write_1h ORDER BY u.id
    """,
    "its refund is in none of its event's ratings": """
        SELECT id FROM cache_leases l WHERE refunded_pico > 0
            AND NOT EXISTS (SELECT FROM event_ratings r WHERE r.event_id = l.event_id)
    """,
}

check = partial(complaints, CHECKS)
"""Naming request or lease."""
