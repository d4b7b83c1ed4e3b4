"""Compares answers with the official SDK's types, to the letter."""

from __future__ import annotations

from typing import Any

from openai import BaseModel
from openai.types.admin.organization.projects import ProjectRateLimit

OPTIONAL = {
    ProjectRateLimit: {
        "batch_1_day_max_input_tokens",
        "max_audio_megabytes_per_1_minute",
        "max_images_per_1_minute",
        "max_requests_per_1_day",
    }
}
"""Only present for relevant models, says OpenAI."""


def exact(found: Any) -> None:
    """No field more than the SDK's type has, none less, and each of its type."""
    if isinstance(found, list):
        for each in found:
            exact(each)
    if not isinstance(found, BaseModel):
        return
    kind = type(found)
    kind.model_validate(found.to_dict(mode="json"), strict=True)
    assert not found.model_extra, found
    assert found.model_fields_set >= set(kind.model_fields) - OPTIONAL.get(kind, set()), found
    for name in kind.model_fields:
        exact(getattr(found, name))
