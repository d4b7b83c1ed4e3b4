"""Makes rows of requests for tests."""

from __future__ import annotations

import time
from typing import Any

from gateway.ids import uuid7_hex
from gateway.request_log.rows import RequestRow

ORG, OTHER = "org_1", "org_2"


def new_row(**fields: Any) -> RequestRow:
    """Return a row of a request that was made now. `at`: Unix seconds, if it was made then."""
    digits = uuid7_hex()
    at_ms = round((fields.pop("at", None) or time.time()) * 1000)
    id_ = f"{at_ms:012x}{digits[12:]}"
    told: dict[str, Any] = {
        "org": ORG,
        "project": "proj_1",
        "key": "key_1",
        "model": "penny",
        "lane": "interactive",
        "route": "/v1/chat/completions",
        "status": 200,
        "duration_us": 1_500_000,
        "trace": id_,
    }
    return RequestRow(id=id_, at_ms=at_ms, **(told | fields))
