"""The pages about MCP: how strangers' texts are shown to a person, and what a person answers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import sqlalchemy as sa

from tests.gateway.console.conftest import Visit
from tests.gateway.console.mcp_seeds import CHANGED, HOSTILE, MANY_TOOLS, SERVERS, tool
from tests.gateway.console.server import ConsoleServer

FILES, MANY = "/console/mcp/servers/files", "/console/mcp/servers/many"
ACTS = re.compile("^(Approve|Deny|Revoke|Remove|Save the rule|Lift)")
Sessions = Callable[[str, str], dict[str, str]]


@pytest.fixture
def ask(console: ConsoleServer, sessions: Sessions) -> Iterator[Callable[..., httpx.Response]]:
    with httpx.Client(base_url=console.url, timeout=60) as client:

        def asked(org: str, role: str, path: str, **form: str) -> httpx.Response:
            client.cookies.clear()
            client.cookies.update(sessions(org, role))
            if not form:
                return client.get(path)
            token = found('name="form-token" content="([^"]+)"', client.get("/console/mcp"))
            return client.post(path, data=form | {"form_token": token})

        yield asked


def found(pattern: str, page: httpx.Response) -> str:
    match = re.search(pattern, page.text)
    assert match is not None
    return match[1]


def test_a_call_is_answered_by_keys_and_by_buttons(visit: Visit) -> None:
    tab = visit("much", "admin", "/console/mcp/approvals")
    first = tab.locator(".ask").first.get_attribute("aria-label")
    tab.keyboard.press("y")
    assert tab.locator(".ask").first.get_attribute("aria-label") == first, "none was chosen"
    tab.keyboard.press("j")
    tab.keyboard.press("j")
    chosen = tab.locator(".ask:focus").get_attribute("aria-label")
    assert chosen != first
    tab.keyboard.press("k")
    with tab.expect_response(lambda answer: answer.url.endswith("/approve")):
        tab.keyboard.press("y")
    tab.get_by_text("goes out once").wait_for()
    assert tab.locator(".ask").first.get_attribute("aria-label") == chosen
    tab.locator(".ask").first.get_by_role("button", name="Deny").click()
    tab.get_by_text("was denied").wait_for()
    tab.goto(f"{tab.url.partition('?')[0]}?state=denied")
    assert tab.locator("tbody tr").count() == 1


def test_who_decides_sees_the_arguments_and_all_that_is_hidden_in_them(visit: Visit) -> None:
    tab = visit("much", "owner", "/console/mcp/approvals")
    hidden = tab.locator(".ask pre mark")
    assert "\\u{202E}" in hidden.all_text_contents()
    assert tab.evaluate("document.querySelectorAll('main script, main img').length") == 0
    reader = visit("much", "reader", "/console/mcp/approvals")
    assert reader.locator(".ask").count() > 0 and reader.locator(".ask pre").count() == 0


def test_what_changed_is_shown_word_by_word_with_what_looks_like_an_attack(visit: Visit) -> None:
    SERVERS["files"].tools = CHANGED
    tab = visit("little", "owner", FILES)
    tab.get_by_role("link", name="Ask it now").click()
    tab.wait_for_url("**/offer")
    changed = tab.get_by_role("region", name="read_file")
    assert changed.locator("ins").all_text_contents() == [" or of the machine"]
    evil = tab.get_by_role("region", name="summarize")
    assert "looks like an attack" in evil.locator(".head").text_content()
    assert "Ignore all previous instructions" in evil.locator("ins b").first.text_content()
    changed.get_by_role("checkbox").check()
    tab.get_by_role("button", name="Approve what is chosen").click()
    tab.get_by_text("Approved: every worker shows it").wait_for()
    assert tab.get_by_role("region", name="read_file").count() == 0
    # What the page said of the first approval is still there.
    with tab.expect_response(lambda answer: answer.url.endswith("/approve")):
        tab.get_by_role("button", name="Approve all that looks harmless").click()
    assert evil.count() == 1, "it is approved by its name alone"
    tab.goto(tab.url.removesuffix("/offer"))
    row = tab.locator("tr", has_text="write_file")
    row.get_by_role("button", name="Revoke").click()
    tab.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    tab.get_by_text("write_file is taken back").wait_for()
    assert row.count() == 0


def test_a_yes_is_to_what_was_looked_at(visit: Visit) -> None:
    SERVERS["files"].tools = [*CHANGED, tool("later", "Comes later.")]
    tab = visit("little", "owner", f"{FILES}/offer", quiet=False)
    SERVERS["files"].tools = [*CHANGED, tool("later", "Is something else.")]
    tab.get_by_role("button", name="Approve all that looks harmless").click()
    tab.get_by_text("offers something else by now").wait_for()


def test_a_call_is_tried_by_the_rules_and_a_rule_changes_the_answer(visit: Visit) -> None:
    tab = visit("little", "admin", "/console/mcp/rules")
    form = tab.locator("form.form").last
    form.get_by_label("Name").fill("no etc")
    form.get_by_label("Decision").select_option("deny")
    form.get_by_label("Tools", exact=True).fill("files__list_folder")
    form.get_by_label("Condition").fill('args.path.startsWith("/etc")')
    form.get_by_role("button", name="Save the rule").click()
    tab.get_by_text("The rule no etc holds").wait_for()
    offered = {
        name: tab.locator(f"#{name} option").evaluate_all("all => all.map(each => each.text)")
        for name in ("tools", "callers", "owners", "try-project")
    }
    assert "files" in offered["tools"] and "web" in offered["try-project"]
    assert "project web" in offered["owners"]
    for path, answer in (("/etc/passwd", "is denied"), ("/srv", "passes")):
        tab.get_by_label("Server", exact=True).select_option("files")
        tab.get_by_label("Tool, by its own name").fill("list_folder")
        tab.get_by_label("Arguments, as JSON").fill(f'{{"path": "{path}"}}')
        tab.get_by_role("button", name="Try it").click()
        tab.get_by_role("status", name="The answer").get_by_text(answer).wait_for()
        assert "tool=list_folder" in tab.url, "it can be shared"
    assert "its condition does not hold" in tab.get_by_role("status").text_content()
    tab.get_by_role("button", name="Remove no etc").click()
    tab.get_by_role("dialog").get_by_role("button", name="Remove").click()
    tab.get_by_text("The rule no etc is gone").wait_for()


def test_who_begins_by_asking_for_one_tool_keeps_all_others(
    ask: Callable[..., httpx.Response],
) -> None:
    """Without a rule all may be called; the first rule of an organization ends that."""
    path = "/console/mcp/rules"

    def act(act: str, **form: str) -> None:
        version = found('name="version" value="([^"]+)"', ask("little", "owner", path))
        done = ask("little", "owner", f"{path}/{act}", version=version, **form)
        assert done.status_code == 303, done.text

    def answer_of(tool: str) -> str:
        return ask("little", "owner", f"{path}?server=files&tool={tool}").text

    for name in ("all", "writes"):
        act("remove", id=name)
    act("set", id="writes", effect="ask", tools="files__write_*")
    assert "all-others" in ask("little", "owner", path).text
    assert "asks a person" in answer_of("write_file") and "passes" in answer_of("list_folder")
    act("remove", id="all-others")
    assert "is denied" in answer_of("list_folder")
    act("remove", id="writes")
    act("set", id="all", effect="allow")
    assert "all-others" not in ask("little", "owner", path).text, "who allows means no more"
    act("set", id="writes", effect="ask", tools="files__write_*")


def test_a_rule_that_is_none_is_shown_again_with_its_reason(
    ask: Callable[..., httpx.Response],
) -> None:
    version = found('name="version" value="([^"]+)"', ask("little", "owner", "/console/mcp/rules"))
    rule = {"id": "bad", "effect": "allow", "when": "arguments.", "version": version}
    bad = ask("little", "owner", "/console/mcp/rules/set", **rule)
    assert bad.status_code == 400 and 'value="arguments."' in bad.text
    late = ask("little", "owner", "/console/mcp/rules/set", **{**rule, "when": "", "version": "1"})
    assert late.status_code == 409 and "somebody else changed the rules" in late.text
    for field, value in (("arguments", "[]"), ("arguments", "{"), ("server", "nobody")):
        tried = ask("little", "owner", f"/console/mcp/rules?tool=t&{field}={quote(value)}")
        assert tried.status_code == 400, value


def test_a_taint_is_lifted(visit: Visit) -> None:
    tab = visit("little", "admin", "/console/mcp/taints")
    before = tab.locator("tbody tr").count()
    tab.get_by_role("button", name="Lift").first.click()
    tab.get_by_role("dialog").get_by_role("button", name="Lift").click()
    tab.get_by_text("The taint is lifted").wait_for()
    assert tab.locator("tbody tr").count() == before - 1


def test_a_thousand_tools_come_in_pages_and_are_found_by_name(visit: Visit) -> None:
    tab = visit("much", "owner", MANY)
    assert tab.locator("tbody tr").count() == 50
    tab.get_by_role("link", name="Next 50").click()
    tab.get_by_role("link", name="First page").wait_for()
    assert tab.locator("tbody tr").count() == 50
    tab.get_by_label("Name").fill(f"tool_{MANY_TOOLS - 3:04}")
    tab.get_by_label("Name").press("Enter")
    tab.locator("tbody tr").nth(1).wait_for(state="detached")
    tab.locator("tbody a").click()
    assert "Does number" in tab.locator("pre").text_content()


def test_who_only_reads_sees_no_button_that_would_refuse(
    visit: Visit, ask: Callable[..., httpx.Response]
) -> None:
    for path in ("", "/approvals", "/rules", "/taints", "/servers/files"):
        tab = visit("little", "reader", f"/console/mcp{path}")
        assert tab.get_by_role("button", name=ACTS).count() == 0, path
        assert tab.get_by_role("link", name="Ask it now").count() == 0
        assert tab.get_by_role("link", name="Calls").count() == 0
    for path in ("/servers/files/offer", "/calls"):
        assert ask("little", "reader", f"/console/mcp{path}").status_code == 403
    for path in ("/rules/set", "/rules/remove", "/taints/lift", "/servers/files/approve"):
        assert ask("little", "reader", f"/console/mcp{path}", id="x").status_code == 403, path
    assert ask("little", "owner", "/console/mcp/servers/many").status_code == 404, "another's"


def test_calls_are_paged_and_exported(ask: Callable[..., httpx.Response]) -> None:
    first = ask("much", "owner", "/console/mcp/calls?range=24h")
    assert first.text.count("<tr>") == 51 and "<script>alert" not in first.text
    after = found(r'href="([^"]*after=\d+[^"]*)"', first).replace("&amp;", "&")
    assert ask("much", "owner", after).text.count("<tr>") == 51
    denied = ask("much", "owner", "/console/mcp/calls?kind=denied&format=csv")
    rows = list(csv.DictReader(io.StringIO(denied.text.removeprefix("\ufeff"))))
    assert {row["What"] for row in rows} == {"denied"} and len(rows) == 50
    assert HOSTILE in {row["Tool or name"] for row in rows}
    assert ask("much", "owner", "/console/mcp/calls?after=x").status_code == 400


@contextmanager
def counting_queries(console: ConsoleServer) -> Iterator[list[str]]:
    asked: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "set_config" not in statement:
            asked.append(statement)

    engine = console.services.db.sync_engine
    sa.event.listen(engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        sa.event.remove(engine, "before_cursor_execute", note)


def test_a_page_takes_two_queries_at_most(
    console: ConsoleServer, ask: Callable[..., httpx.Response]
) -> None:
    tried = "/rules?server=many&tool=tool_0001&arguments=%7B%7D"
    for path in ("", "/approvals", tried, "/taints", "/calls", "/servers/many"):
        with counting_queries(console) as asked:
            assert ask("much", "owner", f"/console/mcp{path}").status_code == 200
        assert len(asked) <= 2, (path, asked)
