"""Bounds the tokens of the images in a request, of which an upstream alone knows what they count.

Pure. An image counts as the most that a vendor states for any image, or as the model's setting
says; never by its own bytes. Its size in pixels is not looked up: vendors scale small images up as
well as large ones down, most do not know OpenAI's `detail`, and a header is the client's word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

IMAGE_TOKENS = 2833 + 8 * 5667
"""The most that a vendor states for one image: OpenAI for gpt-4o-mini, 2,833 and 5,667 for each of
the 8 tiles of the largest image ("Images and vision", calculating costs). Its other models count
some thousands at most, Anthropic about one for 750 pixels of an image that is scaled down first
("Vision"), Gemini 258 a tile ("Understand and count tokens"), Qwen-VL 16,384 at most."""
PLAIN_PARTS = ("text", "refusal")


class ImageTotal(msgspec.Struct, frozen=True):
    """Counts images and the bytes of the body that are their data and no text."""

    num_images: int
    data_bytes: int


def parts_beside_text(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the content of each part of a chat completion's body that is no text."""
    for position, message in enumerate(body["messages"]):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") not in PLAIN_PARTS:
                yield f"messages[{position}].content[{index}]", part


def is_image(part: dict[str, Any]) -> bool:
    """Tell whether a part is one image: by a URL, or its data, which may be a document's as well
    and is one of many pages then."""
    url = _url_of(part)
    return url is not None and (url[:11].lower() == "data:image/" or not _has_data(url))


def total_of(body: dict[str, Any]) -> ImageTotal:
    urls = [_url_of(part) or "" for _, part in parts_beside_text(body) if is_image(part)]
    return ImageTotal(len(urls), sum(len(url) for url in urls if _has_data(url)))


def _has_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def _url_of(part: dict[str, Any]) -> str | None:
    """Return the URL of a part of OpenAI's type `image_url`; some vendors take it as a text."""
    if part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None
