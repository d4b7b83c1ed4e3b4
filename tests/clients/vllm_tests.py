"""vLLM's own tests of its entrypoints before a live server: run from their unpacked source.

    VLLM_SOURCE=/tmp/vllm-0.11.0 make clients ARGS=vllm-tests      (the sdist of 0.11.0, unpacked)

Their servers are one of ours: `vllm_server.py` stands in the place of their `tests/utils.py`, the
names of their models become penny's, and of `vllm` itself they find what they import and no more.
What fails is named here, with the reason; anything else that fails is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import httpx
import torch
from safetensors.torch import load_file, save_file

from tests.stack import ROOT, Stack, running

PENNY = ROOT / "models" / "penny"
TIMEOUT_S = 3600.0
OPENAI, V1 = "tests/entrypoints/openai", "tests/v1/entrypoints/openai"
SELECTION = {
    4096: (
        *(f"{OPENAI}/test_{name}.py" for name in ("chat", "chat_echo", "chunked_prompt")),
        f"{OPENAI}/test_chat_logit_bias_validation.py",
        f"{OPENAI}/test_chat_with_tool_reasoning.py",
        f"{OPENAI}/test_completion_with_function_calling.py",
        *(f"{OPENAI}/test_{name}.py" for name in ("models", "prompt_validation", "root_path")),
        f"{OPENAI}/test_return_token_ids.py",
        f"{OPENAI}/test_return_tokens_as_ids.py",
        f"{OPENAI}/test_token_in_token_out.py",
        *(f"{V1}/test_{name}.py" for name in ("chat_completion", "completion")),
        *(f"{V1}/responses/test_{name}.py" for name in ("basic", "stateful")),
        f"{V1}/responses/test_structured_output.py",
    ),
    8192: (f"{OPENAI}/test_tokenization.py",),
    10112: (f"{OPENAI}/test_basic.py",),
}
"""Files of theirs, by the context that they ask their server for."""
BESIDE = ("tests/entrypoints/conftest.py", f"{V1}/responses/conftest.py")
FIXTURES = "tests/v1/entrypoints/conftest.py"
DESELECTED = f"{OPENAI}/test_prompt_validation.py::test_load_prompt_embeds"
"""A unit of vLLM's, not its server's."""
DIFFERENCES = {
    "test_chat::test_long_seed": "errors in pydantic's words",
    "test_chat_echo::test_prompt_logprobs": "--max-logprobs",
    "test_chat_echo::test_top_logprobs": "--max-logprobs",
    "test_completion::test_batch_completions": "use_beam_search",
    "test_completion_with_function_calling::test_tool_id_kimi_k2": "ids of calls by model",
    "test_models::test_check_models": "root of an adapter",
    "test_prompt_validation::test_empty_prompt": "errors in vLLM's words",
    "test_return_tokens_as_ids::test_chat_return_tokens_as_token_ids_completion": "a server's flag",
    "test_return_tokens_as_ids::test_completion_return_tokens_as_token_ids_completion": "the same",
}
"""Tests that fail for what docs/vllm.md says differs."""
ANSWERS = (
    *("test_single_chat_session", "test_chat_streaming", "test_structured_outputs_json_chat"),
    *(
        "test_named_tool_use",
        "test_response_format_json_object",
        "test_response_format_json_schema",
    ),
    *("test_complex_message_content", "test_chat_streaming_of_tool_and_reasoning"),
    *("test_chat_full_of_tool_and_reasoning", "test_function_tool_use", "test_no_args_tool_call"),
    "test_completion_stream_options_and_logprobs_with_long_prompts",
    "test_chat_completion_stream_options_and_logprobs_with_long_prompts",
    "test_chat_session_with_echo_and_continue_final_message",
    "test_comparison_with_prompt_logprobs_and_logprobs",
    *("test_basic_completion_with_emoji", "test_chat_completion_with_tool_use"),
    "test_chat_completion_with_emoji_and_token_ids",
    *("test_simple_input", "test_instructions", "test_chat", "test_previous_response_id"),
    *("test_two_responses_with_same_prev_id", "test_structured_output"),
    *("test_structured_output_with_parse", "test_single_completion", "test_completion_streaming"),
    *("test_parallel_no_streaming", "test_parallel_streaming"),
    *("test_structured_outputs_choice_chat", "test_structured_outputs_regex_chat"),
)
"""Tests that want an answer which penny may not give, or the number of another tokenizer's tokens:
that 13 times 24 is 312, a thought before a call, a text that is not over after ten tokens."""
NEWER_SDK = "test_chat::test_invocations"
"""Compares a body with what the SDK makes of it, which has fields that vLLM 0.11 did not know."""
MODEL = re.compile(r'^MODEL_NAME = ".*"', re.MULTILINE)
REWRITTEN = (
    ('"HuggingFaceH4/zephyr-7b-beta"', "MODEL_NAME"),
    ('model_name = "gpt2"', 'model_name = "penny"'),
    ("import pybase64", "import base64 as pybase64"),
    ('API_KEY = "abc-123"', 'API_KEY = os.environ["SERVER_KEY"]'),
)
PACKAGES = {
    "vllm/__init__.py": "",
    "vllm/version.py": "import os\n__version__ = os.environ['SERVER_VERSION']\n",
    "vllm/config.py": (
        "class ModelConfig:\n    def __init__(self, **_): pass\n"
        "    def get_vocab_size(self): return 4096\n"
    ),
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/renderer.py": "class BaseRenderer: pass\n",
    "vllm/transformers_utils/__init__.py": "",
    "vllm/transformers_utils/tokenizer.py": (
        "import os\nfrom transformers import AutoTokenizer\n"
        "def get_tokenizer(tokenizer_name, **_):\n"
        "    return AutoTokenizer.from_pretrained(os.environ['MODEL_FOLDER'])\n"
    ),
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": "",
    "vllm/model_executor/model_loader/weight_utils.py": (
        "def download_weights_from_hf(*_, **__): return 'penny'\n"
    ),
    "pytest.ini": "[pytest]\nasyncio_default_fixture_loop_scope = function\n",
    "conftest.py": (
        "import os, pytest\n@pytest.fixture(scope='session')\n"
        "def zephyr_lora_files(): return os.environ['ADAPTER_FOLDER']\n"
    ),
}
CONFIG = """
root_path = "/llm"
[compat]
unknown_fields = "ignore"
dialect = "vllm"
[engine]
max_num_seqs = 128
[[model]]
name = "penny"
path = "{model}"
[[model.adapter]]
name = "zephyr-lora"
path = "{adapter}"
[plan.default]
tokens_per_minute = 100000000
requests_per_minute = 100000
max_concurrent_streams = 1000
"""


def vllm_tests() -> str:
    source = os.environ.get("VLLM_SOURCE")
    if source is None:
        return "vllm-tests: left out, as VLLM_SOURCE names no source of vLLM 0.11.0"
    passed, failed = 0, set[str]()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lay_out(Path(source), root)
        for window, files in SELECTION.items():
            model, adapter = write_models(root / str(window), window)
            with running(workers=1, config=CONFIG.format(model=model, adapter=adapter)) as stack:
                for name, ok in ask(stack, root, files, MODEL_FOLDER=model, ADAPTER_FOLDER=adapter):
                    passed += ok
                    failed |= set() if ok else {name}
    known = {name for name in failed if is_known(name)}
    assert known == failed, f"these fail for no reason that is known: {failed - known}"
    differ = sum(without_case(name) in DIFFERENCES for name in failed)
    newer = len(failed & {NEWER_SDK})
    others = f"{len(failed) - differ - newer} by penny's answers, {newer} by a newer SDK"
    return f"vllm-tests: {passed} passed; {differ} fail by what differs, {others}"


def without_case(name: str) -> str:
    return name.partition("[")[0]


def is_known(name: str) -> bool:
    bare = without_case(name)
    return bare in DIFFERENCES or bare == NEWER_SDK or bare.partition("::")[2] in ANSWERS


def lay_out(source: Path, root: Path) -> None:
    """Copy what is selected of their tests, with penny's name, beside what they import."""
    for path in (*BESIDE, FIXTURES, *(each for files in SELECTION.values() for each in files)):
        text = MODEL.sub('MODEL_NAME = "penny"', (source / path).read_text())
        for old, new in REWRITTEN:
            text = text.replace(old, new)
        if path == BESIDE[0]:  # its adapter comes from a hub
            text = re.sub(
                r"@pytest\.fixture\(scope=\"session\"\)\ndef zephyr_lora.*?\Z", "", text, flags=re.S
            )
        write(root / path, text)
    for path, text in PACKAGES.items():
        write(root / path, text)
    for folder in {Path(path).parent for files in SELECTION.values() for path in files}:
        for each in (folder, *list(folder.parents)[:-1]):
            write(root / each / "__init__.py", "")
    shutil.copy(Path(__file__).with_name("vllm_server.py"), root / "tests" / "utils.py")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_models(folder: Path, window: int) -> tuple[Path, Path]:
    """Write penny with another context, and a small adapter of it. Return both folders."""
    model, adapter = folder / "penny", folder / "adapter"
    shutil.copytree(PENNY, model, ignore=shutil.ignore_patterns("__pycache__"))
    for name, field in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        found = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**found, field: window}))
    torch.manual_seed(1)
    tensors, targets = {}, ["q_proj", "v_proj"]
    for name, weight in load_file(model / "model.safetensors").items():
        if any(f"{each}.weight" in name for each in targets):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(4, weight.shape[1]) / 100
            tensors[f"{at}.lora_B.weight"] = torch.randn(weight.shape[0], 4) / 100
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return model, adapter


def ask(
    stack: Stack, root: Path, files: tuple[str, ...], **folders: Path
) -> Iterator[tuple[str, bool]]:
    """Run files of theirs; yield each test, `test_chat::test_long_seed`, and whether it passed."""
    report = root / "report.xml"
    environ = {
        **os.environ,
        **{name: str(path) for name, path in folders.items()},
        "SERVER_URL": stack.base_url,
        "SERVER_KEY": str(stack.client().api_key),
        "SERVER_VERSION": stack_version(stack),
        "PYTHONPATH": str(root),
    }
    options = "-q -p no:cacheprovider -p no:schemathesis --tb=no".split()
    options += ["--deselect", DESELECTED, f"--junitxml={report}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=root,
        env=environ,
        timeout=TIMEOUT_S,
        check=False,  # some fail
    )
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = str(case.get("classname")).rpartition(".")[2]
        yield f"{module}::{case.get('name')}", case.find("failure") is case.find("error") is None


def stack_version(stack: Stack) -> str:
    found: str = httpx.get(f"{stack.base_url}/version", timeout=10).json()["version"]
    return found
