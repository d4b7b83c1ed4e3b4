"""The keys of a request's state (`scope["state"]`), which layers and handlers share."""

from __future__ import annotations

REQUEST_ID = "request_id"
"""The server's own id of the request, `req_...`."""
MODEL = "model"
"""The model that was asked for, as the client wrote it."""
METER = "meter"
"""The meter of its generation."""
BY_METRICS_LISTENER = "by_metrics_listener"
"""True where it came by the listener for metrics and health."""
OUTCOME = "outcome"
"""The status to count in place of the one that was sent."""
CLIENT_LEFT = "499"
"""The outcome of a request whose client left before it was answered."""
ASKED_METHOD = "asked_method"
"""The method that the client sent, where another one was routed (HEAD as GET)."""
