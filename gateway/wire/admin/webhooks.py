"""/v1/admin/webhooks and /mail-deliveries: what clients write and read.

Moments are Unix seconds. A field that a change leaves out stays as it is.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from foundation.structs import patch_of
from gateway.wire.admin.webhook_events import EventType

Url = Annotated[str, Meta(min_length=1, max_length=2048)]
Description = Annotated[str, Meta(max_length=200)]
DeliveryState = Literal["pending", "delivered", "dead"]
EventTypes = Annotated[list[EventType], Meta(min_length=1, max_length=32)]


class NewWebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Url
    """https, of a host on the public internet."""
    event_types: EventTypes
    description: Description | None = None


@patch_of(NewWebhookEndpoint)
class WebhookEndpointPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool | UnsetType = UNSET


class WebhookEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "webhook_endpoint"
    id: str
    url: str
    event_types: list[str]
    description: str | None
    in_settings: bool
    """It follows the settings file, and is changed there."""
    enabled: bool
    """False: nothing is sent, because somebody said so or the receiver answered 410."""
    older_secret_expires_at: int | None
    """Until then the secret before this one signs, too."""
    created_at: int | None
    disabled_at: int | None
    archived_at: int | None


class WebhookEndpointOnce(WebhookEndpoint, frozen=True, kw_only=True):
    secret: str
    """In this answer alone."""


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "webhook_delivery"
    id: str
    endpoint_id: str
    event_id: str
    """The header `webhook-id`: the same in every attempt."""
    event_type: str
    state: str
    """pending, delivered, or dead: given up, after a day at the latest."""
    attempts: int
    next_attempt_at: int | None
    expires_at: int | None
    """When it is given up."""
    last_status: int | None
    """The status that answered the last attempt; null: no answer came."""
    last_failure: str | None
    created_at: int | None
    ended_at: int | None


class MailDelivery(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "mail_delivery"
    id: str
    user_id: str
    event_id: str
    event_type: str
    state: str
    """pending, delivered (the SMTP server took it), or dead: refused for good, or not taken within
    a day."""
    attempts: int
    next_attempt_at: int | None
    expires_at: int | None
    """When it is given up."""
    last_status: int | None
    """The reply code of the SMTP server that refused the last attempt; null: there was none."""
    last_failure: str | None
    created_at: int | None
    ended_at: int | None
