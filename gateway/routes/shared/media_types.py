"""Names the media types of bodies and answers, each in one place."""

from __future__ import annotations

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data"
HTML = "text/html"
CSV = "text/csv"
PDF = "application/pdf"
EVENT_STREAM = "text/event-stream"
