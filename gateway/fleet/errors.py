"""The errors between the gateway and a replica; those of the request are `gateway.request_errors`.

FleetError                  code for clients
├── ReplicaUnavailable      service_unavailable nothing ran; another replica may be tried
│   ├── ReplicaUnauthorised service_unavailable an upstream refuses this gateway, not the request
│   ├── ReplicaDied         service_unavailable it was lost before its first event
│   ├── ReplicaStepFailed   service_unavailable a step of its engine raised before that
│   ├── ReplicaUnreadable   service_unavailable it answered, and nobody can read that
│   └── ReplicaOverloaded   overloaded          its bounded queue is full
│       └── NoSlot          overloaded          it did not get its turn, or not in time
├── UpstreamRefused         its own             an upstream's 4xx, for the client to read
├── DeadlinePassed          deadline_exceeded   the client's own time for it is over
└── ReplicaLost             none                after the first event; usage so far stands
    └── PromptComputed      none                another replica is to go on, as planned
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from foundation.errors import CodedError

if TYPE_CHECKING:
    from gateway.fleet.replica import PreparedRequest


class FleetError(CodedError):
    """The root of what can go wrong between the gateway and a replica."""


class ReplicaUnavailable(FleetError):
    """Its text is for the log; clients read `public_message`."""

    code = "service_unavailable"
    public_message: ClassVar[str] = "The model is not available at the moment."

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplicaUnauthorised(ReplicaUnavailable):
    """Says that an upstream does not accept the gateway's key or account. For clients it is as one
    that is down."""


class ReplicaDied(ReplicaUnavailable):
    """Says that a replica had the request and was lost before its first event: it may be asked once
    more when it is back."""


class ReplicaStepFailed(ReplicaUnavailable):
    """Says that a step of an engine failed with the request in it, before its first event: the
    request may be the cause."""


class ReplicaUnreadable(ReplicaUnavailable):
    """Says that an upstream's answer is malformed, cut off or too large, before anything of it was
    passed on. It had the request, and may answer so again."""

    public_message = "The model's answer cannot be read."


class ReplicaOverloaded(ReplicaUnavailable):
    code = "overloaded"
    public_message = "The model is overloaded; try again shortly."


class NoSlot(ReplicaOverloaded):
    """Says that a request got no slot, or not in time. Nothing is wrong with the replica, and
    another one would serve it no sooner."""


class RequestTakenBack(FleetError):
    """Says that a replica gave a request back of which nothing had run, as it was asked to."""


class UpstreamRefused(FleetError):
    """Carries `status` and the upstream's error object (OpenAI shape), safe to hand to the
    client."""

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
    """Says that a replica was lost after its first event. `rest`: what another replica of the same
    route goes on with; None: nobody can. `by_step`: a step of its engine failed with the request in
    it, which may be the cause."""

    def __init__(
        self, message: str, *, rest: PreparedRequest | None = None, by_step: bool = False
    ) -> None:
        super().__init__(message)
        self.rest, self.by_step = rest, by_step


class PromptComputed(ReplicaLost):
    """Says that a replica computed a prompt for another one and said its first token. Nothing is
    lost: `rest` is what the other one goes on with."""
