"""One worker for the tests of a module."""

from __future__ import annotations

from tests.gateway.routes.openapi.conftest import worker

__all__ = ["worker"]
