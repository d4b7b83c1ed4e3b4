"""Says of which pods a model's engines are that join, as `[model.kubernetes]` has it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

OBJECT_PATTERN = r"^[a-z0-9](?:[-a-z0-9]*[a-z0-9])?\Z"


class KubernetesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[model.kubernetes]`: the pods that the planner scales."""

    stateful_set: Annotated[str, Meta(pattern=OBJECT_PATTERN, max_length=52)]
    """Each of its pods is an engine of the model. With a longer name it would have no pods."""
    namespace: Annotated[str, Meta(pattern=OBJECT_PATTERN, max_length=63)] | None = None
    """None: the gateway's own."""
