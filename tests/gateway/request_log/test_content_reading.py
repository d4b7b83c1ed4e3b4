"""The break of a prompt is marked where its text parts from the earlier prompt that is longest the
same, and nowhere else."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from gateway.audit.tables import entries
from gateway.cache_report.rows import ReportCounts, RowId, write
from gateway.db import tenant
from gateway.request_log.content import RequestContent, StoredMessage
from gateway.request_log.content_log import PURPOSE
from gateway.request_log.content_reading import (
    PromptBreak,
    explain_content,
    find_break,
    num_common,
)
from gateway.request_log.search import find_request
from gateway.request_log.writer import RequestLog
from gateway.secret import Cipher
from gateway.wire.usage.cache_report import Break
from tests.gateway.request_log.making import ORG, OTHER, new_row
from tests.gateway.request_log.test_content_log import READER, SECRET, Texts, said, texts

__all__ = ["texts"]

AT = datetime(2026, 11, 28, tzinfo=UTC)


def chat(*said: str, tools: tuple[str, ...] = (), **more: Any) -> RequestContent:
    messages = tuple(
        StoredMessage(index=index, role="user" if index % 2 else "system", text=text)
        for index, text in enumerate(said)
    )
    shown = tuple({"name": name} for name in tools)
    return RequestContent(messages=messages, tools=shown, **more)


def broke(now: RequestContent, before: RequestContent) -> PromptBreak | None:
    return find_break(now, before, earlier_id="req_1", earlier_at=AT)[1]


def test_the_first_words_that_differ_are_marked() -> None:
    found = broke(chat("Today is Monday.", "hi"), chat("Today is Sunday.", "hi"))
    assert found is not None
    assert (found.place, found.role, found.same) == ("messages[0]", "system", "Today is ")
    assert (found.now, found.before, found.is_cut) == ("Monday.", "Sunday.", False)


def test_a_change_behind_whole_messages_is_shown_behind_the_last_words_of_them() -> None:
    found = broke(chat("be kind", "b"), chat("be kind", "a"))
    assert found is not None and (found.place, found.same) == ("messages[1]", "be kind")
    assert (found.now, found.before) == ("b", "a")
    tools = broke(chat("x", tools=("a", "c")), chat("x", tools=("a", "b")))
    assert tools is not None and tools.place == "tools"
    assert (tools.now, tools.before) == ('c"}', 'b"}')
    prompts = broke(RequestContent(prompts=("ab",)), RequestContent(prompts=("ac",)))
    assert prompts is not None and (prompts.place, prompts.now) == ("prompts[0]", "b")


def test_a_prompt_that_goes_on_breaks_nowhere() -> None:
    assert broke(chat("a", "b", "c"), chat("a", "b")) is None
    assert broke(chat("a"), chat("a")) is None


def test_what_is_not_stored_is_not_compared() -> None:
    cut = RequestContent(messages=(StoredMessage(index=0, role="system", text="long", left_out=9),))
    found = broke(chat("long and more"), cut)
    assert found is not None and found.is_cut
    gap = RequestContent(
        messages=(
            StoredMessage(index=0, role="system", text="a"),
            StoredMessage(index=7, role="user", text="z"),
        ),
        messages_left_out=6,
    )
    found = broke(gap, gap)
    assert found is not None and (found.place, found.is_cut) == ("messages[1]", True)


@given(st.text("ab"), st.text("ab"))
def test_common_characters_are_counted(one: str, other: str) -> None:
    number = num_common(one, other)
    assert one[:number] == other[:number]
    assert number == min(len(one), len(other)) or one[number] != other[number]


async def test_the_earlier_prompt_that_is_longest_the_same_is_found(texts: Texts) -> None:
    log = RequestLog(texts.system_db, keep_days=7, on_dropped=texts.dropped.append)
    now, rows = time.time(), {}
    asked = {
        "far": ("other words", {}),
        "near": ("You are kind. Today is Sunday.", {}),
        "later": ("You are a cat.", {}),
        "another_key": ("You are kind. Today is Monday!", {"key": "key_2"}),
        "another_model": ("You are kind. Today is Monday!", {"model": "other"}),
        "another_org": ("You are kind. Today is Monday!", {"org": OTHER, "project": "proj_2"}),
        "this": ("You are kind. Today is Monday.", {"cache_cause": "changed"}),
        "after": ("You are kind. Today is Monday?", {}),
    }
    for number, (name, (text, fields)) in enumerate(asked.items()):
        rows[name] = new_row(at=now - 60 + number, **fields)
        log.put(rows[name])
        texts.log.put(rows[name], said(text))
    log.put(without := new_row(at=now - 90))
    await log.close()
    await texts.log.close()
    cipher = Cipher(SECRET, PURPOSE)
    async with tenant(texts.app_db, ORG) as conn:
        this = rows["this"].id
        found = await explain_content(conn, cipher, ORG, this, compares=True, reader=READER)
        alone = await explain_content(conn, cipher, ORG, this, compares=False, reader=READER)
        row = await find_request(conn, ORG, rows["this"].id)
        none = await find_request(conn, ORG, without.id)
        nothing = await explain_content(conn, cipher, ORG, without.id, compares=True, reader=READER)
        assert nothing is None
        noted = (await conn.execute(sa.select(entries).order_by(entries.c.sequence))).mappings()
        readings = [each for each in noted.all() if each["action"] == "request.content.read"]
    assert found is not None and found.parted is not None
    assert found.parted.compared_with == f"req_{rows['near'].id}"
    assert (found.parted.now, found.parted.before) == ("Monday.", "Sunday.")
    assert found.parted.same == "You are kind. Today is "
    assert alone is not None and alone.parted is None and alone.content == found.content
    assert [(each["target"], each["project_id"], each["after"]) for each in readings] == [
        (f"req_{this}", "proj_1", f'{{"compared_with":"req_{rows["near"].id}"}}'),
        (f"req_{this}", "proj_1", None),
    ], "each reading once, and none of what is not there"
    assert {(each["actor_id"], each["on_behalf_of"]) for each in readings} == {
        ("session_1", "user_1")
    }
    assert "kind" not in str(readings).replace("actor_kind", "")
    assert row is not None and row.has_content and none is not None and not none.has_content


async def test_the_message_of_a_break_comes_from_the_cache_report(texts: Texts) -> None:
    log = RequestLog(texts.system_db, keep_days=7, on_dropped=texts.dropped.append)
    row = new_row(cache_cause="changed", cache_position=268)
    elsewhere = new_row(cache_cause="changed", cache_position=269)
    log.put(row)
    log.put(elsewhere)
    await log.close()
    place = RowId(ORG, "proj_1", "key_1", "penny", int(time.time()) // 3600 * 3600, "digest", "x")
    one = Break(cause="changed", position=268, message="messages[2]", message_index=2, role="user")
    counted = ReportCounts(num_requests=1, breaks={("changed", 268): one})
    await write(texts.system_db, {place: counted}, [place])
    async with tenant(texts.app_db, ORG) as conn:
        found = await find_request(conn, ORG, row.id)
        other = await find_request(conn, ORG, elsewhere.id)
    assert found is not None and found.cache_break == {"place": "messages[2]", "role": "user"}
    assert other is not None and other.cache_break is None
