"""The errors between the gateway and a replica; those of the request are `gateway.request_errors`.

FleetError                  code
├── ReplicaUnavailable      replica_unavailable nothing ran; another replica may be tried
│   └── ReplicaOverloaded   replica_overloaded  its bounded queue is full
│       └── NoPlace         no_place            it did not get its turn, or not in time
├── UpstreamRefused         upstream_refused    an upstream's 4xx, for the client to read
├── DeadlinePassed          deadline_exceeded   the client's own time for it is over
└── ReplicaLost             replica_lost        after the first event; usage so far stands
"""

from __future__ import annotations

from typing import ClassVar


class FleetError(Exception):
    code: ClassVar[str] = "fleet_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ReplicaUnavailable(FleetError):
    code = "replica_unavailable"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplicaOverloaded(ReplicaUnavailable):
    code = "replica_overloaded"


class NoPlace(ReplicaOverloaded):
    """Says nothing against the replica, and another one would come no sooner."""

    code = "no_place"


class UpstreamRefused(FleetError):
    """Carries `status` and the upstream's error object (OpenAI shape), safe to hand to the
    client."""

    code = "upstream_refused"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        error_type: str,
        error_code: str | None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.error_type = error_type
        self.error_code = error_code
        self.retry_after_s = retry_after_s


class DeadlinePassed(FleetError):
    """Says that the deadline passed; what was generated until then stands."""

    code = "deadline_exceeded"


class ReplicaLost(FleetError):
    code = "replica_lost"
