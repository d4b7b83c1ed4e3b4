"""Asks a client of the older era, and takes the answer, which may come in at any worker.

What is asked has an id that names the worker that waits; an answer is led there, and counts from
the session that was asked.
"""

from __future__ import annotations

import asyncio
import itertools

from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.questions import to_legacy_params
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, INVALID_REQUEST, Message, RpcError
from mcp_bridge.routing.sessions import Session
from mcp_bridge.server.streams import Stream
from mcp_bridge.worker_relay import Payload, Relay

ANSWER_S = 600.0
ANSWER = "answer"

Pending = tuple[str, asyncio.Future[Message]]


class Questions:
    """The questions to clients that one worker waits for.

    `pending`: by id, whose session is asked.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.pending: dict[str, Pending] = {}
        self._numbers = itertools.count(1)
        relay.handlers[ANSWER] = self._take_answer

    async def ask(self, session: Session, request: Message, stream: Stream) -> Message:
        """Return what the client answers, or why it cannot. `request`: one that it declared
        (`from_server_question`)."""
        id_ = f"{self._relay.worker}.{next(self._numbers)}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self.pending[id_] = (session.id, future)
        try:
            if not stream.can_be_heard:
                raise RpcError(INTERNAL_ERROR, "The client is not there")
            params = to_legacy_params(request)
            await stream.put(rpc.request(id_, request["method"], params))
            async with asyncio.timeout(ANSWER_S):
                return await future
        except RpcError as error:
            return {"error": error.to_error()}
        except TimeoutError:
            return {"error": RpcError(INTERNAL_ERROR, "The client did not answer").to_error()}
        finally:
            del self.pending[id_]

    async def take(self, session: Session, message: Message) -> None:
        """Take an answer. Raises: RpcError, for one to nothing."""
        id_ = message.get("id")
        worker = str(id_).partition(".")[0]
        if worker == self._relay.worker:
            found = self._give(session.id, str(id_), message)
        else:
            found = worker.isalnum() and await self._relay.tell(
                worker, ANSWER, session=session.id, id=str(id_), message=message
            )
        if not found:
            raise RpcError(INVALID_REQUEST, "id: nothing was asked with it")

    def _give(self, session_id: str, id_: str, message: Message) -> bool:
        owner, future = self.pending.get(id_, (None, None))
        if future is None or owner != session_id:
            return False
        if not future.done():
            future.set_result(message)
        return True

    async def _take_answer(self, payload: Payload) -> None:
        self._give(payload["session"], payload["id"], payload["message"])
