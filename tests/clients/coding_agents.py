"""Coding agents before a live Tollgate, as their users run them: Claude Code and Codex, from npm.

A scripted model behind Tollgate makes the turns: it reads a file, edits it and runs a command. The
agent has done them when the file is changed and the command has left what it writes. With
`RECORD=1` the requests replace those that `tests/gateway/wire/recorded` keeps for the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.recorder import Recorder
from tests.gateway.fleet.upstream.scripted_upstream import USAGE, Exchange, Script
from tests.journeys.upstreams import live_upstreams
from tests.stack import ROOT, Stack, running

RECORDED = ROOT / "tests" / "gateway" / "wire" / "recorded"
AGENTS = ROOT / ".clients" / "agents" / "node_modules"
TIMEOUT_S = 180.0
MODEL = "coder"
TASK = "Fix the typo in hello.py, then run it."
BEFORE, AFTER = "print('helo')\n", "print('hello')\n"
CONFIG = """
[[model]]
name = "{model}"
upstream = "{upstream}"
"""
Turn = tuple[str, dict[str, Any]]
"""A tool and the arguments that it is called with."""


class Session(NamedTuple):
    """One run of an agent: where it works, its own home, whom it asks and as whom."""

    folder: Path
    home: Path
    url: str
    key: str


def play(turns: Sequence[Turn]) -> Script:
    """Return a model that calls those of the tools that it is shown, one after the other, and then
    says that it is done."""

    async def answer(exchange: Exchange) -> None:
        body = exchange.body
        offered = {tool["function"]["name"] for tool in body.get("tools") or ()}
        to_do = [turn for turn in turns if turn[0] in offered]
        done = sum(message["role"] == "tool" for message in body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "It says hello now."}
        reason = "stop"
        if done < len(to_do):
            name, arguments = to_do[done]
            function = {"name": name, "arguments": json.dumps(arguments)}
            call = {"index": 0, "id": f"call_{done}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            reason = "tool_calls"
        head = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
        choice = {"index": 0, "finish_reason": reason}
        if not body.get("stream"):
            whole = {**head, "object": "chat.completion", "usage": USAGE}
            await exchange.answer({**whole, "choices": [{**choice, "message": message}]})
            return
        chunk = {**head, "object": "chat.completion.chunk"}
        await exchange.begin_stream()
        await exchange.send(
            {**chunk, "choices": [{**choice, "delta": message}]},
            {**chunk, "choices": [], "usage": USAGE},
            "[DONE]",
        )
        await exchange.end_stream()

    return answer


def work(
    name: str,
    run: Callable[[Session], str],
    turns: Callable[[Path], Sequence[Turn]],
    model: str = MODEL,
) -> str:
    """Let an agent work through `turns` with a model of that name; what there is to say of it."""
    with live_upstreams(1) as (upstream,), tempfile.TemporaryDirectory() as temporary:
        folder, home = Path(temporary) / "project", Path(temporary) / "home"
        folder.mkdir()
        home.mkdir()
        (folder / "hello.py").write_text(BEFORE)
        upstream.play(play(turns(folder)))
        config = CONFIG.format(model=model, upstream=upstream.base_url)
        with running(workers=1, config=config) as stack:
            recorder = Recorder(stack.base_url)
            with recorder.serving():
                key = str(stack.client().api_key)
                said = run(Session(folder, home, recorder.url, key))
            assert (folder / "hello.py").read_text() == AFTER, said
            assert (folder / "ran.txt").read_text() == "hello\n", said
            refused = [status for status in recorder.statuses if status >= 300]
            assert not refused, (refused, said)
            check_usage(stack, len(upstream.exchanges))
            if os.environ.get("RECORD"):
                keep(name, recorder, temporary)
        return f"{name}: {len(recorder.requests)} requests, the file changed, the command ran"


def check_usage(stack: Stack, num_requests: int) -> None:
    """Every turn is booked once, as the model counted it."""
    stack.wait_booked()
    admin, yesterday = stack.client(), int(time.time()) - 86_400
    page = admin.admin.organization.usage.completions(start_time=yesterday)
    found = [result for bucket in page.data for result in bucket.results]
    assert sum(each.num_model_requests for each in found) == num_requests, found
    assert sum(each.output_tokens for each in found) == num_requests * USAGE["completion_tokens"]
    assert sum(each.input_tokens for each in found) == num_requests * USAGE["prompt_tokens"]


def keep(name: str, recorder: Recorder, folder: str) -> None:
    """Keep the last request of each kind, a line for each: it has what those before it had."""
    kinds = {(each["method"], each["path"]): each for each in recorder.kept(folder)}
    lines = [json.dumps(each, ensure_ascii=False) for each in kinds.values()]
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def binary(pattern: str) -> str:
    """Find the program in its package for this machine."""
    found = sorted(AGENTS.glob(pattern))
    assert found, f"{AGENTS / pattern}: make clients installs it"
    return str(found[0])


def run_agent(session: Session, command: Sequence[str], **environ: str) -> str:
    """Run it without a terminal, with nothing of this process's environment but its PATH."""
    done = subprocess.run(
        command,
        cwd=session.folder,
        env={"PATH": os.environ["PATH"], "HOME": str(session.home), **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


# ---- Claude Code


def claude_turns(folder: Path) -> list[Turn]:
    file = str(folder / "hello.py")
    return [
        ("ToolSearch", {"query": "select:CronList"}),
        ("Read", {"file_path": file}),
        ("Edit", {"file_path": file, "old_string": "helo", "new_string": "hello"}),
        ("Bash", {"command": "python3 hello.py > ran.txt", "description": "Run it"}),
    ]


def run_claude(session: Session) -> str:
    command = [binary("@anthropic-ai/claude-code-*/claude"), "-p", TASK]
    command += ["--permission-mode", "acceptEdits", "--allowedTools", "Read,Edit,Bash"]
    return run_agent(
        session,
        command,
        ANTHROPIC_BASE_URL=session.url,
        ANTHROPIC_API_KEY=session.key,
        ANTHROPIC_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_AUTOUPDATER="1",
    )


def claude_code() -> str:
    return work("claude_code", run_claude, claude_turns)


# ---- Codex

PATCH = """\
*** Begin Patch
*** Update File: hello.py
@@
-print('helo')
+print('hello')
*** End Patch
"""
CODEX_CONFIG = """
model = "{model}"
model_provider = "tollgate"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.tollgate]
name = "Tollgate"
base_url = "{url}/v1"
env_key = "TOLLGATE_API_KEY"
wire_api = "responses"
"""
KNOWN_MODEL = "gpt-5.5"
"""Codex knows of this name that its model takes patches as free text, by a grammar."""


def codex_turns(folder: Path) -> list[Turn]:
    return [
        ("exec_command", {"cmd": "cat hello.py"}),
        ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}EOF"}),
        ("exec_command", {"cmd": "python3 hello.py > ran.txt"}),
    ]


def codex_turns_of_text(folder: Path) -> list[Turn]:
    first, _, last = codex_turns(folder)
    return [first, ("apply_patch", {"input": PATCH}), last]


def run_codex(session: Session, model: str = MODEL) -> str:
    folder = session.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(CODEX_CONFIG.format(model=model, url=session.url))
    command = [binary("@openai/codex-*/vendor/*/bin/codex"), "exec", "--skip-git-repo-check", TASK]
    return run_agent(session, command, TOLLGATE_API_KEY=session.key)


def codex() -> str:
    plain = work("codex", run_codex, codex_turns)
    run = partial(run_codex, model=KNOWN_MODEL)
    return f"{plain}\n{work('codex_custom', run, codex_turns_of_text, KNOWN_MODEL)}"
