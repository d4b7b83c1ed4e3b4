"""vLLM's own tests of its entrypoints before a live server: run from their unpacked source.

    VLLM_SOURCE=/tmp/vllm-0.11.0 make clients ARGS=vllm-tests      (the sdist of 0.11.0, unpacked)

Their servers are one of ours: `vllm_server.py` stands in the place of their `tests/utils.py`, their
models become the two of `vllm_models.py`, which have learnt what to answer, and of `vllm` itself
they find what they import and no more. What fails is named here, with the reason; anything else
that fails is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import httpx
import torch
from safetensors.torch import load_file, save_file

from tests.clients.vllm_models import write_models
from tests.stack import Stack, running

NAME = "learner"
"""The model that a server serves has this name."""
TIMEOUT_S = 3600.0
OPENAI, V1 = "tests/entrypoints/openai", "tests/v1/entrypoints/openai"
SELECTION = {
    "base": (
        f"{OPENAI}/test_chat.py",
        f"{OPENAI}/test_chunked_prompt.py",
        *(f"{OPENAI}/test_{name}.py" for name in ("models", "prompt_validation")),
        f"{OPENAI}/test_return_tokens_as_ids.py",
        f"{V1}/test_completion.py",
        f"{OPENAI}/test_basic.py",
    ),
    "thinking": (
        f"{OPENAI}/test_chat_echo.py",
        f"{OPENAI}/test_chat_logit_bias_validation.py",
        f"{OPENAI}/test_chat_with_tool_reasoning.py",
        f"{OPENAI}/test_completion_with_function_calling.py",
        *(f"{OPENAI}/test_{name}.py" for name in ("return_token_ids", "root_path")),
        f"{OPENAI}/test_token_in_token_out.py",
        f"{V1}/test_chat_completion.py",
        *(f"{V1}/responses/test_{name}.py" for name in ("basic", "stateful")),
        f"{V1}/responses/test_structured_output.py",
        f"{OPENAI}/test_tokenization.py",
    ),
}
"""Files of theirs, by the model that answers them."""
CACHING = ("thinking",)
"""The others' tests want no word of what was cached, which is always told here."""
BESIDE = ("tests/entrypoints/conftest.py", f"{V1}/responses/conftest.py")
FIXTURES = "tests/v1/entrypoints/conftest.py"
DESELECTED = f"{OPENAI}/test_prompt_validation.py::test_load_prompt_embeds"
"""A unit of vLLM's, not its server's."""
SERVER_FLAG = "--return-tokens-as-token-ids of the server"
DIFFERENCES = {
    "test_chat::test_invocations": "fields of an SDK that is newer than vLLM 0.11",
    "test_chat::test_long_seed": "errors in pydantic's words",
    "test_chat_echo::test_prompt_logprobs": "--max-logprobs",
    "test_chat_echo::test_top_logprobs": "--max-logprobs",
    **{
        f"test_completion::test_batch_completions[server{i}-{NAME}]": "use_beam_search"
        for i in range(2)
    },
    **{
        f"test_completion_with_function_calling::test_tool_id_kimi_k2[required-{streams}-{NAME}]": (
            "ids of calls by model"
        )
        for streams in (True, False)
    },
    "test_models::test_check_models": "root of an adapter",
    "test_prompt_validation::test_empty_prompt": "errors in vLLM's words",
    **{
        f"test_return_tokens_as_ids::test_{kind}_return_tokens_as_token_ids_completion[True]": (
            SERVER_FLAG
        )
        for kind in ("chat", "completion")
    },
}
"""Cases that fail for what docs/vllm.md says differs."""
MODEL = re.compile(r'^MODEL_NAME = ".*"', re.MULTILINE)
REWRITTEN = (
    ('"HuggingFaceH4/zephyr-7b-beta"', "MODEL_NAME"),
    ('model_name = "gpt2"', f'model_name = "{NAME}"'),
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
        f"def download_weights_from_hf(*_, **__): return '{NAME}'\n"
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
prefix_caching = {caching}
[[model]]
name = "{name}"
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
    found = os.environ.get("VLLM_SOURCE")
    if found is None:
        return "vllm-tests: left out, as VLLM_SOURCE names no source of vLLM 0.11.0"
    source, passed, failed, late = Path(found), 0, set[str](), 0
    models = write_models(source)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lay_out(source, root)
        for kind, files in SELECTION.items():
            adapter = write_adapter(root / f"{kind}_adapter", models[kind])
            caching = "true" if kind in CACHING else "false"
            config = CONFIG.format(name=NAME, model=models[kind], adapter=adapter, caching=caching)
            folders = {"MODEL_FOLDER": models[kind], "ADAPTER_FOLDER": adapter}
            with running(workers=1, config=config) as stack:
                results = dict(ask(stack, root, files, **folders))
                if again := [
                    case
                    for case, ok in results.items()
                    if not ok and name_of(case) not in DIFFERENCES
                ]:
                    # Some count chunks, and tokens that nobody took yet come in one, as vLLM's do.
                    second = dict(ask(stack, root, again, **folders))
                    late += sum(second.values())
                    results |= second
            passed += sum(results.values())
            failed |= {name_of(case) for case, ok in results.items() if not ok}
    assert failed == set(DIFFERENCES), (
        f"fail for no reason that is known: {failed - set(DIFFERENCES)}; "
        f"fail no longer: {set(DIFFERENCES) - failed}"
    )
    return (
        f"vllm-tests: {passed} passed, {late} of them at the second try; "
        f"{len(failed)} fail by what differs"
    )


def name_of(case: str) -> str:
    """`FOLDER/test_chat.py::test_long_seed` to `test_chat::test_long_seed`."""
    file, _, test = case.partition("::")
    return f"{Path(file).stem}::{test}"


def lay_out(source: Path, root: Path) -> None:
    """Copy what is selected of their tests, with our model's name, beside what they import."""
    for path in (*BESIDE, FIXTURES, *(each for files in SELECTION.values() for each in files)):
        text = MODEL.sub(f'MODEL_NAME = "{NAME}"', (source / path).read_text())
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


def write_adapter(folder: Path, model: Path) -> Path:
    """Write a small adapter of a model, which hardly changes it. Return the folder."""
    torch.manual_seed(1)
    tensors, targets = {}, ["q_proj", "v_proj"]
    for name, weight in load_file(model / "model.safetensors").items():
        if any(f"{each}.weight" in name for each in targets):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(4, weight.shape[1]) / 100
            tensors[f"{at}.lora_B.weight"] = torch.randn(weight.shape[0], 4) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def ask(
    stack: Stack, root: Path, chosen: Sequence[str], **folders: Path
) -> Iterator[tuple[str, bool]]:
    """Run files or cases of theirs; yield each case, as pytest names it, and whether it passed."""
    report = root / "report.xml"
    environ = {
        **os.environ,
        **{name: str(path) for name, path in folders.items()},
        "SERVER_URL": stack.base_url,
        "SERVER_KEY": str(stack.client().api_key),
        "SERVER_VERSION": stack_version(stack),
        "PYTHONPATH": str(root),
    }
    options = "-q -p no:cacheprovider -p no:schemathesis --tb=line".split()
    options += ["--deselect", DESELECTED, f"--junitxml={report}"]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen],
        cwd=root,
        env=environ,
        timeout=TIMEOUT_S,
        check=False,  # some fail
    )
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = f"{str(case.get('classname')).replace('.', '/')}.py"
        yield f"{file}::{case.get('name')}", case.find("failure") is case.find("error") is None


def stack_version(stack: Stack) -> str:
    found: str = httpx.get(f"{stack.base_url}/version", timeout=10).json()["version"]
    return found
