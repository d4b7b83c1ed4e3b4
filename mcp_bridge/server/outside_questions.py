"""Answers what one server asks a session of the older era outside of requests."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from foundation.tasks import TaskSet
from mcp_bridge.protocol.allowed_fields import answer_for_server
from mcp_bridge.protocol.continuation import MAX_QUESTIONS
from mcp_bridge.protocol.questions import DeclinedQuestion, from_server_question
from mcp_bridge.protocol.rpc import METHOD_NOT_FOUND, Message, RpcError
from mcp_bridge.routing.endpoint import ClientContext
from mcp_bridge.routing.exchanges import MAX_ASKED
from mcp_bridge.routing.guard import Guard
from mcp_bridge.routing.sampling import WINDOW_S, SampleCount, is_sampling, sampled
from mcp_bridge.routing.sessions import Session
from mcp_bridge.server.elicitation import Questions
from mcp_bridge.server.streams import Stream
from mcp_bridge.upstream.upstream import SessionEnded, Upstream


class OutsideQuestions:
    """The questions of one server on one session's stream, at most MAX_ASKED at once; the stream is
    not read on before. In WINDOW_S its client, or a model of ours, is asked MAX_QUESTIONS."""

    def __init__(
        self,
        context: ClientContext,
        session: Session,
        upstream: Upstream,
        stream: Stream,
        guard: Guard,
        questions: Questions,
        tasks: TaskSet,
    ) -> None:
        self._context, self._session, self._upstream = context, session, upstream
        self._stream, self._guard, self._questions, self._tasks = stream, guard, questions, tasks
        self._samples = SampleCount(upstream, window_s=WINDOW_S)
        self._asked: set[asyncio.Task[None]] = set()
        self._declined: set[tuple[str, str]] = set()
        self._window_ends_at, self._count = 0.0, 0

    async def take(self, message: Message) -> None:
        """Answer a request of the server, in a task."""
        while len(self._asked) >= MAX_ASKED:
            await asyncio.wait(self._asked, return_when=asyncio.FIRST_COMPLETED)
        task = self._tasks.spawn(self._answer(message))
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    async def _answer(self, message: Message) -> None:
        method = message["method"]
        answered: Message = {"result": {}}
        if method != "ping":
            try:
                answered = answer_for_server(method, await self._answered(message))
            except DeclinedQuestion as error:
                await self._note_declined(error)
                answered = {"error": error.for_legacy_server()}
        own = await self._context.sessions.get(self._upstream)
        with suppress(RpcError, SessionEnded):
            reply = {"jsonrpc": "2.0", "id": message["id"], **answered}
            await self._upstream.notify(own, reply)

    async def _answered(self, message: Message) -> Message:
        """Return the answer of a model of ours, or of the client. Raises: DeclinedQuestion."""
        upstream, caller = self._upstream, self._context.caller
        can = upstream.to_server_envelope(self._context.envelope).capabilities
        asked = from_server_question(message, can)
        self._take_place(asked["method"])
        if not is_sampling(asked) or upstream.config.sampling == "caller":
            await self._guard.note_message(caller, upstream)
            return await self._questions.ask(self._session, asked, self._stream)
        try:
            return {"result": await sampled(upstream, caller, asked, self._samples)}
        except RpcError as error:
            return {"error": error.to_error()}

    def _take_place(self, method: str) -> None:
        """Count a question. Raises: DeclinedQuestion."""
        now = time.monotonic()
        if now >= self._window_ends_at:
            self._window_ends_at, self._count = now + WINDOW_S, 0
        self._count += 1
        if self._count > MAX_QUESTIONS:
            text, reason = "The server asked too often", "too_many_questions"
            raise DeclinedQuestion(METHOD_NOT_FOUND, text, method, reason)

    async def _note_declined(self, error: DeclinedQuestion) -> None:
        """Record that the client is not asked something, once for each reason."""
        if (error.method, error.reason) not in self._declined:
            self._declined.add((error.method, error.reason))
            whose = self._context.caller, self._upstream
            await self._guard.note_declined(*whose, error.method, "", error.reason)
