"""An encoder of BERT's family embeds what `transformers` computes, pooled as sentence-transformers
does it, whatever stands beside a text; and a text is computed whole."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError, ContextLengthExceeded, InvalidRequest, UnsupportedModel
from engine.protocol import EngineRequest
from tests.engine.core.test_parity import greedy, run
from tests.engine.runner.test_embedding import embed, vector, write_modules

VOCAB = 151
CONTEXT = 64
TOLERANCE = 1e-5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def model() -> transformers.BertModel:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=80,
        max_position_embeddings=CONTEXT,
    )
    found = transformers.BertModel(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("bert")
    model().save_pretrained(found)
    return write_modules(
        found, ["Transformer", "Pooling", "Normalize"], {"pooling_mode_mean_tokens": True}
    )


def start(folder: Path, **changes: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=folder, dtype="float32", **changes))


@cache
def texts() -> list[list[int]]:
    rng = random.Random(5)
    lengths = [1, 2, 5, 16, 17, 31, CONTEXT, 40, 3, 64, 12, 9]
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def expected(text: list[int], dimensions: int | None = None) -> NDArray[np.float32]:
    mean = model()(torch.tensor([text])).last_hidden_state[0].mean(0)[:dimensions]
    return torch.nn.functional.normalize(mean, dim=0).numpy()


def assert_close(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [CONTEXT, 100, 2048])
def test_a_batch_is_what_transformers_says(folder: Path, budget: int, ahead: bool) -> None:
    core = start(folder, max_num_batched_tokens=budget, max_num_seqs=5, run_ahead=ahead)
    outputs = run(core, [embed(i, text) for i, text in enumerate(texts())])
    for i, text in enumerate(texts()):
        assert_close(vector(outputs[f"e{i}"]), expected(text))
    status = core.status()
    assert status.num_free_blocks == status.num_blocks
    assert (status.generates, status.embedding_size, status.max_model_len) == (False, 48, CONTEXT)
    assert core.resolved.kv_bytes_per_token == 0


def test_several_texts_of_one_request_and_fewer_dimensions(folder: Path) -> None:
    first, *others = texts()
    request = EngineRequest(
        request_id="all",
        prompt_token_ids=first,
        more_prompts=tuple(others),
        embed=True,
        dimensions=10,
    )
    outputs = run(start(folder, max_num_batched_tokens=CONTEXT), [request])["all"]
    for output in outputs:
        assert output.embedding is not None
        found = np.frombuffer(output.embedding, "<f4")
        assert_close(found, expected(texts()[output.index], 10))
    assert outputs[-1].usage.prompt_tokens == sum(map(len, texts()))


def test_a_text_that_is_told_twice_is_computed_twice(folder: Path) -> None:
    core = start(folder)
    for number in range(2):
        output = run(core, [embed(number, texts()[7])])[f"e{number}"][0]
        assert output.usage.cached_tokens == 0


def test_a_folder_that_says_nothing_means_the_mean(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    outputs = run(start(tmp_path), [embed(0, texts()[4])])
    assert_close(vector(outputs["e0"]), expected(texts()[4]))


def test_what_an_encoder_does_not_do(folder: Path) -> None:
    core = start(folder)
    with pytest.raises(InvalidRequest, match="no head"):
        core.add(greedy(0, [5]))
    with pytest.raises(ContextLengthExceeded):
        core.add(embed(0, [5] * (CONTEXT + 1)))
    assert not core.has_work()
    with pytest.raises(ConfigError, match="speculative"):
        start(folder, speculative="ngram")


def test_a_context_that_no_step_holds_is_cut(folder: Path) -> None:
    core = start(folder, max_num_batched_tokens=20)
    assert core.status().max_model_len == 20
    assert_close(vector(run(core, [embed(0, texts()[4])])["e0"]), expected(texts()[4]))


def test_random_weights(folder: Path) -> None:
    core = start(folder, load_format="dummy")
    assert abs(np.linalg.norm(vector(run(core, [embed(0, [5, 6])])["e0"])) - 1) < 1e-6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    ],
)
def test_another_form_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    config = transformers.BertConfig(architectures=["BertModel"], **changes)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=named):
        start(tmp_path, load_format="dummy")
