"""Folds a conversation into the form that strict chat templates take: one system message, which is
first, then user and assistant in turns.

Agents instruct a model also within a conversation, and say things in several messages in a row.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.generate_request import ChatPrompt

FOLDED = ("system", "user")


def folded(prompt: ChatPrompt) -> ChatPrompt | None:
    """Return the conversation with what the system says later on as said by the user, and messages
    in a row as one; None: it has nothing of the kind. Its breakpoints are lost with their
    places."""
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    for index, message in enumerate(prompt.messages):
        before = messages[-1] if messages else None
        role = message["role"]
        if role == "system" and before is not None and before["role"] != "system":
            role = "user"
        if before is not None and role in FOLDED and before["role"] == role:
            messages[-1] = {**before, "content": f"{before['content']}\n{message['content']}"}
        else:
            messages.append({**message, "role": role})
            paths.append(prompt.path_of(index))
    if len(messages) == len(prompt.messages):
        return None
    return msgspec.structs.replace(
        prompt, messages=messages, message_paths=tuple(paths), breakpoints=()
    )
