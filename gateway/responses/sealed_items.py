"""Seals what a client carries from one request to the next without reading it: what a model
thought, and the summary in place of a conversation that was made shorter.

Bound to the project, so that another one's is as good as made up.
"""

from __future__ import annotations

from typing import Literal

from gateway.request_errors import BadField
from gateway.responses.kept import ResponseOwner
from gateway.secret import Cipher
from gateway.wire.openai_responses.items import (
    InCompaction,
    InItem,
    InMessage,
    InReasoning,
    ReasoningText,
)

PURPOSE = "response-items"
"""The purpose that `Secret` derives the key for."""
SealedKind = Literal["reasoning", "compaction"]
SUMMARY = "The conversation before this was made shorter. What it had come to:\n\n"


class ItemSeal:
    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def seal(self, owner: ResponseOwner, kind: SealedKind, text: str) -> str:
        return self._cipher.seal_text(text.encode(errors="replace"), owner.context("item", kind))

    def unseal(self, owner: ResponseOwner, kind: SealedKind, sealed: str, param: str) -> str:
        """Raises BadField."""
        try:
            return self._cipher.open_text(sealed, owner.context("item", kind)).decode()
        except ValueError as error:
            message = f"Invalid value for '{param}': it was not sealed here, for this project."
            raise BadField(message, param=param) from error

    def unseal_items(
        self, owner: ResponseOwner, given: str | list[InItem] | None
    ) -> str | list[InItem] | None:
        """Return the items of a request with what is sealed in them as text. Raises BadField."""
        if not isinstance(given, list):
            return given
        return [self._unsealed(owner, item, f"input[{i}]") for i, item in enumerate(given)]

    def _unsealed(self, owner: ResponseOwner, item: InItem, place: str) -> InItem:
        param = f"{place}.encrypted_content"
        if isinstance(item, InCompaction):
            text = self.unseal(owner, "compaction", item.encrypted_content, param)
            return InMessage(role="user", content=SUMMARY + text, id=item.id)
        if isinstance(item, InReasoning) and item.encrypted_content is not None:
            text = self.unseal(owner, "reasoning", item.encrypted_content, param)
            item.content = item.content or [ReasoningText(text=text)]
            item.encrypted_content = None
        return item
