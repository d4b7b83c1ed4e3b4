"""Stands in the place of vLLM's `tests/utils.py`, in its tests: their server is one of ours, which
runs already and wants a key of every request."""

from __future__ import annotations

import os
from typing import Any

import openai
import requests

URL, KEY = os.environ["SERVER_URL"], os.environ["SERVER_KEY"]
TIMEOUT_S = 400.0
_plainly = requests.Session.request


def request_with_key(self: requests.Session, method: str, url: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", **(options.pop("headers", None) or {})}
    return _plainly(self, method, url, headers=headers, **options)


requests.Session.request = request_with_key  # type: ignore[method-assign, assignment]


class RemoteOpenAIServer:
    DUMMY_API_KEY = KEY

    def __init__(self, model: str, vllm_serve_args: list[str], **_: Any) -> None:
        """Stand for a server of that model with those flags, which are not read."""
        self.url_root = URL

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the server running."""

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *parts])

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        chosen = {"timeout": TIMEOUT_S, **options}
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **chosen)
