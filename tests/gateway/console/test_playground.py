"""The playground in a browser: what is asked, how the answer comes and what it costs, on a worker
with an engine, an upstream and an MCP server."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from playwright.sync_api import expect

from gateway.tenancy.tables import api_keys
from tests.databases import Databases
from tests.gateway.console.conftest import NARROW, WIDE, Contexts, in_browser_thread, note
from tests.gateway.console.test_shots import OF_README, SHOTS
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, Script, chunk, usage_chunk
from tests.gateway.routes.console.signed_in import COOKIE, Person, sign_in
from tests.gateway.routes.openapi.fresh import fresh_worker
from tests.gateway.routes.openapi.running import CAPS, TIMEOUT_S, Running
from tests.journeys.upstreams import good
from tests.mcp_bridge.counting import counting

HOSTILE = (
    '</textarea><script>hacked=1</script><img src=x onerror="hacked=2"> \'; $(id) `id` \\n\\'
    " {{7*7}} \N{SLIGHTLY SMILING FACE}\nline 2"
)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOLS = json.dumps([{"type": "function", "function": WEATHER}])
SERVER = '[[mcp.servers]]\nname = "one"\nurl = "{url}"\nnetwork = "loopback"\ntrust = "all"\n'
ANSWER = (
    "A prefix cache keeps the key and value blocks of prompts that were computed before, by a hash"
    " of their tokens. A prompt that begins like an earlier one is computed from the first token"
    " that differs. It saves money where many requests share a long beginning, such as a system"
    " prompt, tools or documents: cached input costs a tenth. Put what changes, such as the time,"
    " behind what stays."
)
ROOT = Path(__file__).parents[3]
OPENAI_FOR_NODE = "openai@7.59.0"
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def worker(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder: Path = tmp_path_factory.mktemp("playground")
    with counting() as server:
        more = SERVER.format(url=server.url)
        with fresh_worker(databases, redis_server_url, folder, more=more) as found:
            yield found


@pytest.fixture
def person(worker: Running) -> Iterator[Person]:
    where = {"project_id": worker.project_id}
    yield sign_in(worker, worker.make_user(found=where, role="developer"))
    worker.far.script = good


@pytest.fixture
def play(contexts: Contexts, person: Person) -> Iterator[Open]:
    """Opens the page as a person whose model is the upstream's; `said`: what its console says."""
    said: list[str] = []

    def open_page(*, model: str = "far", theme: Any = "light", script: bool = True) -> Any:
        context = contexts.lend(
            person.worker.url,
            viewport=WIDE,
            java_script_enabled=script,
            color_scheme=theme,
            permissions=["clipboard-read", "clipboard-write"],
        )
        cookie = {"name": COOKIE, "value": person.cookie, "url": person.worker.url}
        context.add_cookies([cookie])
        tab = context.new_page()
        tab.on("console", lambda message: note(said, message))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(f"{person.worker.url}/console/playground")
        tab.get_by_label("Model", exact=True).select_option(model)
        return tab

    yield open_page
    in_browser_thread(contexts.take_back)
    # What the API refuses, a browser's console calls an error.
    assert [each for each in said if "Failed to load resource" not in each] == []


def ask(tab: Any, prompt: str) -> None:
    tab.get_by_role("textbox", name="What you ask").fill(prompt)
    tab.get_by_role("button", name="Send").click()


def answered(tab: Any) -> None:
    expect(tab.get_by_role("button", name="Send")).to_be_visible()
    expect(tab.locator(".turn.assistant").first).to_be_visible()


def says(tab: Any, text: str) -> None:
    expect(tab.get_by_role("log").first).to_contain_text(text)


def bodies(worker: Running) -> list[dict[str, Any]]:
    return [each.body for each in worker.far.exchanges]


def booked(worker: Running, request_id: str) -> Any:
    headers = {"authorization": f"Bearer {worker.everything}"}
    url = f"{worker.url}/api/v1/requests/{request_id}"
    return worker.session.get(url, headers=headers, timeout=TIMEOUT_S).json()["data"]


def own_key(person: Person) -> str:
    async def read() -> Any:
        async with person.worker.services.system_db.connect() as conn:
            own = sa.select(api_keys.c.id).where(api_keys.c.user_id == person.user_id)
            return await conn.scalar(own)

    return str(person.worker.run(read()))


def calling(name: str, *arguments: str) -> Script:
    """Call a tool, in pieces; with its result, say hello."""

    def piece(**function: str) -> dict[str, Any]:
        call = {"index": 0, "function": function}
        if "name" in function:
            call |= {"id": "call_1", "type": "function"}
        return {**chunk(), "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}

    async def script(exchange: Exchange) -> None:
        if any(each["role"] == "tool" for each in exchange.body["messages"]):
            return await good(exchange)
        await exchange.begin_stream()
        await exchange.send(piece(name=name, arguments=""))
        await exchange.send(*(piece(arguments=each) for each in arguments))
        await exchange.send(chunk(finish="tool_calls"), usage_chunk(), "[DONE]")
        await exchange.end_stream()

    return script


def test_an_answer_streams_with_what_it_costs_and_the_tab_keeps_it(
    play: Open, worker: Running
) -> None:
    tab = play()
    ask(tab, "Hi")
    answered(tab)
    says(tab, "Hello")
    address = tab.get_by_role("link", name="The request").get_attribute("href")
    told = booked(worker, address.rpartition("/")[2])
    assert tab.locator(".cost").inner_text() == f"$ {told['cost']}" == "$ 0.00000556"
    assert tab.locator(".tokens").inner_text() == "20 in · 5 out"
    assert "8 cached (40 %)" in tab.locator(".kinds").inner_text()
    assert tab.locator(".ttft").inner_text().endswith("ms")
    tab.get_by_role("textbox", name="What you ask").fill("a draft")
    tab.get_by_label("System prompt").fill("Be brief.")
    tab.reload()
    says(tab, "Hello")
    assert tab.get_by_role("textbox", name="What you ask").input_value() == "a draft"
    ask(tab, "And now?")
    answered(tab)
    roles = [each["role"] for each in bodies(worker)[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


def test_what_is_left_of_the_cap_shrinks_as_it_runs(play: Open, worker: Running) -> None:
    """By what has been written so far, then by what it cost, to the pico-dollar."""
    go_on = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"), chunk("l"))
        await go_on.wait()
        await exchange.send(chunk("o"), chunk(finish="stop"), usage_chunk(), "[DONE]")
        await exchange.end_stream()

    async def resume() -> None:
        go_on.set()

    worker.far.script = script
    tab = play()
    left = tab.locator("#left")
    expect(left).to_contain_text("$ 1.00 of $ 1.00 a day left, resets in")
    ask(tab, "Hi")
    says(tab, "Hel")
    expect(left.locator("b")).to_contain_text("$ 0.9999")
    expect(tab.locator(".cost")).to_contain_text("so far")
    worker.run(resume())
    answered(tab)
    expect(tab.locator(".cost")).to_have_text("$ 0.00000556")
    expect(left.locator("b")).to_have_text("$ 0.999994")
    tab.reload()
    expect(left.locator("b")).to_have_text("$ 0.999994")


def test_the_code_is_the_request_that_was_sent(play: Open, worker: Running) -> None:
    """Also once it was answered, and after the page is loaded again."""
    tab = play()
    code, copy = tab.locator(".code pre"), tab.get_by_role("button", name="Copy", exact=True)
    expect(code).to_contain_text("Ask something")
    expect(copy).to_be_disabled()
    tab.get_by_label("System prompt").fill("Be brief.")
    for prompt in ("Hi", "And now?"):
        ask(tab, prompt)
        answered(tab)
        expect(tab.locator("#code-when")).to_have_text("as it was sent")
        expect(code).to_contain_text(prompt)
        sent = bodies(worker)[-1]["messages"]
        assert sent[-1] == {"role": "user", "content": prompt}
        shown = json.loads(str(code.inner_text()).partition("-d '")[2].removesuffix("'"))
        assert shown["messages"] == sent and shown["model"] == "far"
    tab.reload()
    expect(code).to_contain_text("And now?")
    assert json.loads(code.inner_text().partition("-d '")[2][:-1])["messages"] == sent
    tab.get_by_role("textbox", name="What you ask").fill("Next")
    expect(tab.locator("#code-when")).to_have_text("as it is sent next")
    tab.get_by_role("button", name="Begin anew").click()


def test_what_is_copied_runs_and_says_the_same(play: Open, worker: Running) -> None:
    tab = play()
    tab.get_by_role("textbox", name="What you ask").fill(HOSTILE)
    env = {**os.environ, "TOLLGATE_API_KEY": worker.run(worker.new_key(["inference"]))}
    commands = {
        "curl": lambda text: ["bash", "-c", text],
        "Python": lambda text: [sys.executable, "-c", text],
    }
    for language, command in commands.items():
        if language == "curl" and shutil.which("curl") is None:
            continue
        tab.get_by_role("button", name=language, exact=True).click()
        tab.get_by_role("button", name="Copy", exact=True).click()
        tab.get_by_text("Copied").wait_for()
        copied = tab.evaluate("navigator.clipboard.readText()")
        ran = subprocess.run(
            command(copied), env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert ran.returncode == 0, ran.stderr
        assert "lo" in ran.stdout, ran.stdout
        assert bodies(worker)[-1]["messages"] == [{"role": "user", "content": HOSTILE}]
        tab.get_by_role("button", name="Copy", exact=True).wait_for()


@pytest.fixture(scope="module")
def openai_for_node() -> Path:
    """A folder in which node finds OpenAI's own package, installed by npm once a checkout."""
    modules = ROOT / ".clients" / "npm" / "node_modules"
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node (apt-get install nodejs npm)")
    if not (modules / "openai").exists():
        command = ["npm", "install", "--prefix", str(modules.parent), "--no-audit", "--no-fund"]
        command += ["--ignore-scripts", "--loglevel=error", OPENAI_FOR_NODE]
        made = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if made.returncode != 0:
            pytest.skip(f"npm installs no {OPENAI_FOR_NODE}: {made.stderr[-200:]}")
    return modules.parent


@pytest.mark.nightly
def test_the_copied_typescript_runs_with_openais_package(
    play: Open, worker: Running, openai_for_node: Path
) -> None:
    tab = play()
    tab.get_by_role("textbox", name="What you ask").fill(HOSTILE)
    tab.get_by_role("button", name="TypeScript", exact=True).click()
    tab.get_by_role("button", name="Copy", exact=True).click()
    tab.get_by_text("Copied").wait_for()
    # It names no types, so that node runs it as it stands.
    program = openai_for_node / f"copied_{os.getpid()}.mjs"
    program.write_text(tab.evaluate("navigator.clipboard.readText()"))
    key = worker.run(worker.new_key(["inference"]))
    try:
        ran = subprocess.run(
            ["node", str(program)],
            env={**os.environ, "TOLLGATE_API_KEY": key},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    finally:
        program.unlink()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Hello") and "total_tokens: 25" in ran.stdout, ran.stdout
    assert bodies(worker)[-1]["messages"] == [{"role": "user", "content": HOSTILE}]


def test_what_people_and_models_write_is_text(play: Open, worker: Running) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk(HOSTILE), chunk(finish="stop"), usage_chunk(), "[DONE]")
        await exchange.end_stream()

    worker.far.script = script
    tab = play()
    ask(tab, HOSTILE)
    answered(tab)
    says(tab, "<script>hacked=1</script>")
    tab.reload()
    says(tab, "<script>hacked=1</script>")
    assert tab.evaluate("typeof hacked") == "undefined"
    assert tab.locator("main img").count() == 0


def test_stopping_stops_the_upstream(play: Open, worker: Running) -> None:
    left = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        await exchange.send(chunk("Hel"), chunk("l"))
        await exchange.hang()
        left.set()

    async def until_left() -> None:
        await asyncio.wait_for(left.wait(), TIMEOUT_S)

    worker.far.script = script
    tab = play()
    ask(tab, "Hi")
    says(tab, "Hel")
    expect(tab.locator(".cost")).to_contain_text("so far")
    expect(tab.locator(".ttft")).to_contain_text("ms")
    tab.keyboard.press("Escape")
    says(tab, "Stopped.")
    worker.run(until_left())
    answered(tab)


@pytest.mark.nightly
def test_a_call_is_shown_and_answered_by_the_person(play: Open, worker: Running) -> None:
    worker.far.script = calling("weather", '{"place": ', '"<b>Wien</b>"}')
    tab = play()
    tab.get_by_label("Tools, as JSON").fill(TOOLS)
    ask(tab, "How is the weather?")
    says(tab, "calls weather")
    says(tab, '"place": "<b>Wien</b>"')
    ask(tab, "Well?")
    tab.get_by_role("alert").get_by_text("waits for the results").wait_for()
    tab.get_by_label("Result of weather").fill("sunny")
    tab.get_by_role("button", name="Answer the call").click()
    says(tab, "Hello")
    messages = bodies(worker)[-1]["messages"]
    assert messages[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    assert messages[-2]["tool_calls"][0]["function"]["name"] == "weather"
    assert bodies(worker)[-1]["tools"] == json.loads(TOOLS)


@pytest.mark.nightly
def test_a_server_of_the_organization_answers_a_call(play: Open, worker: Running) -> None:
    worker.far.script = calling("one__look", '{"n": 1}')
    tab = play()
    tab.get_by_label("one", exact=True).check()
    ask(tab, "Look")
    says(tab, "one: look was called")
    says(tab, "all is well")
    says(tab, "Hello")
    answered(tab)


@pytest.mark.nightly
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_conversation_is_accessible(play: Open, theme: str) -> None:
    tab = play(theme=theme)
    ask(tab, "Hi")
    answered(tab)
    tab.get_by_role("button", name="Compare two models").click()
    tab.evaluate(AXE.read_text())
    found = tab.evaluate("axe.run()")
    assert [(each["id"], each["nodes"][0]["html"]) for each in found["violations"]] == []
    tab.set_viewport_size(NARROW)
    assert tab.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.mark.nightly
def test_two_models_answer_side_by_side(play: Open, worker: Running) -> None:
    tab = play(model="near")
    tab.get_by_role("button", name="Compare two models").click()
    tab.get_by_label("The other model").select_option("far")
    tab.get_by_label("Max tokens").fill("3")
    ask(tab, "Hi")
    answered(tab)
    other = tab.get_by_role("log", name="Conversation with far")
    expect(other).to_contain_text("Hello")
    expect(tab.locator(".tokens").first).to_contain_text("3 out")
    expect(tab.get_by_role("link", name="The request")).to_have_count(2)


@pytest.mark.nightly
def test_a_schema_and_an_image_are_sent(play: Open, worker: Running) -> None:
    tab = play()
    tab.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    file = {"name": "p.png", "mimeType": "image/png", "buffer": PIXEL}
    tab.locator("#attach input").set_input_files(file)
    tab.get_by_role("button", name="Remove").wait_for()
    ask(tab, "What is it?")
    answered(tab)
    body = bodies(worker)[-1]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    text, image = body["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PIXEL).decode()}"


def test_what_is_refused_says_why_at_its_field(play: Open, worker: Running) -> None:
    tab = play(model="near")
    tab.get_by_label("Temperature").fill("9")
    ask(tab, "Hi")
    says(tab, "temperature")
    tab.locator('[name="temperature"][aria-invalid="true"]').wait_for()
    assert tab.get_by_role("textbox", name="What you ask").input_value() == "Hi", "nothing is lost"
    tab.get_by_label("Temperature").fill("")
    tab.get_by_label("Tools, as JSON").fill("[")
    tab.get_by_role("button", name="Send").click()
    tab.get_by_role("alert").get_by_text("not JSON").wait_for()
    assert tab.get_by_label("Tools, as JSON").get_attribute("aria-invalid") == "true"


@pytest.mark.nightly
def test_a_cap_that_is_reached_between_two_turns_is_told(
    play: Open, worker: Running, person: Person
) -> None:
    tab = play()
    ask(tab, "Hi")
    answered(tab)
    headers = {"authorization": f"Bearer {worker.everything}"}
    caps = worker.session.get(f"{worker.url}{CAPS}?limit=100", headers=headers).json()["data"]
    cap = next(each for each in caps if each["key_id"] == own_key(person))
    body = {"amount_usd": "0.000006"}
    assert worker.session.patch(f"{worker.url}{CAPS}/{cap['id']}", json=body, headers=headers).ok
    ask(tab, "Go on")
    says(tab, "What this key may spend today (UTC) does not allow this request")
    assert tab.get_by_role("textbox", name="What you ask").input_value() == "Go on"


def test_an_expired_session_loses_nothing(play: Open, person: Person) -> None:
    tab = play()
    tab.context.clear_cookies()
    ask(tab, "kept")
    alert = tab.get_by_role("alert").get_by_text("You are signed out.")
    alert.wait_for()
    address = tab.get_by_role("link", name="Sign in again").get_attribute("href")
    assert address.startswith("/oauth/login?next=%2Fconsole%2Fplayground%3Fpayer%3Dproj_")
    url = person.worker.url
    tab.context.add_cookies([{"name": COOKIE, "value": person.cookie, "url": url}])
    tab.goto(f"{url}/console/playground")
    assert tab.get_by_role("textbox", name="What you ask").input_value() == "kept"


@pytest.mark.nightly
def test_what_paid_last_pays_again(play: Open, worker: Running, person: Person) -> None:
    secret = worker.run(worker.new_key(["inference"], user_id=person.user_id))
    key_id = worker.run(worker.services.authenticator.authenticate(secret)).key_id
    tab = play()
    tab.get_by_label("Spend under").select_option(key_id)
    tab.wait_for_url(f"**/console/playground?payer={key_id}")
    ask(tab, "Hi")
    answered(tab)
    address = tab.get_by_role("link", name="The request").get_attribute("href")
    assert booked(worker, address.rpartition("/")[2])["api_key_id"] == key_id
    tab.goto(f"{worker.url}/console/playground")
    tab.wait_for_url(f"**/console/playground?payer={key_id}")
    says(tab, "Hello")


def test_without_a_script_the_form_is_answered_whole(play: Open, worker: Running) -> None:
    tab = play(script=False)
    tab.get_by_label("System prompt").fill("Be brief.")
    ask(tab, HOSTILE)
    says(tab, "Hello there")
    assert tab.locator(".cost").inner_text().startswith("$ 0.0000")
    ask(tab, "Again")
    tab.get_by_text("Again").wait_for()
    roles = [each["role"] for each in bodies(worker)[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert bodies(worker)[-1]["messages"][1]["content"].replace("\r\n", "\n") == HOSTILE
    tab.get_by_label("Tools, as JSON").fill("[")
    ask(tab, "Once more")
    tab.get_by_role("alert").get_by_text("not JSON").wait_for()


@pytest.mark.skipif(not SHOTS, reason="`make shots` makes pictures")
def test_the_readmes_picture_of_the_playground_is_made(play: Open, worker: Running) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.begin_stream()
        for each in ANSWER.split(" "):
            await exchange.send(chunk(f"{each} "))
        await exchange.send(chunk(finish="stop"), usage_chunk(), "[DONE]")
        await exchange.end_stream()

    worker.far.script = script
    tab = play(theme="dark")
    tab.set_viewport_size(OF_README)
    tab.get_by_label("System prompt").fill("You explain inference to engineers, briefly.")
    ask(tab, "What is a prefix cache, and when does it save money?")
    answered(tab)
    says(tab, ANSWER)
    expect(tab.locator("#code-when")).to_have_text("as it was sent")
    Path(SHOTS).mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=Path(SHOTS) / "readme-playground.png")


def test_who_may_use_no_model_sees_no_page(contexts: Contexts, worker: Running) -> None:
    reader = sign_in(worker, worker.make_user(role="reader"))
    context = contexts.lend(worker.url, viewport=WIDE)
    context.add_cookies([{"name": COOKIE, "value": reader.cookie, "url": worker.url}])
    tab = context.new_page()
    answer = tab.goto(f"{worker.url}/console/playground")
    assert answer.status == 403
    assert tab.get_by_role("link", name="Playground").count() == 0
