"""llama.cpp through its own C functions: many sequences in one batch, their answers' next tokens
beside the prompts that wait, as its server does.

The checkpoint is written as a GGUF file, in the same type. The key/value cache is llama.cpp's
default, float16, also for a model in float32: its fastest. `pip install llama-cpp-python gguf`,
compiled where it runs (`CMAKE_ARGS=-DGGML_NATIVE=ON`): a build for any processor knows no AVX-512.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import tempfile
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from bench.tools.workload import Request

NAME = "llama.cpp"
NUM_SLOTS = 64
SLOT_TOKENS = 768
"""64 times that is a cache of about 1 GiB for the model of 135 M."""
BATCH_TOKENS = 2048
UBATCH_TOKENS = 512


def installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))


@dataclass(slots=True)
class Slot:
    request: Request
    num_computed: int = 0
    num_said: int = 0
    last: int = -1

    def take(self, room: int) -> list[int]:
        """The tokens to compute next: a part of the prompt, or the last of the answer."""
        return self.request.prompt[self.num_computed :][:room] or [self.last]


class Peer:
    def __init__(self, folder: Path, dtype: str) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, "model.gguf")
            write_gguf(folder, path, dtype)
            how = llama_cpp.llama_model_default_params()
            how.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), how)
        assert self._model is not None
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max = NUM_SLOTS * SLOT_TOKENS, NUM_SLOTS
        asked.n_batch, asked.n_ubatch = BATCH_TOKENS, UBATCH_TOKENS
        asked.n_threads = asked.n_threads_batch = torch.get_num_threads()
        asked.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, asked)
        assert self._context is not None
        self._memory = llama_cpp.llama_get_memory(self._context)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        weakref.finalize(self, _free, llama_cpp, self._model, self._context)
        self.answers: list[list[int]] = []

    def run(self, requests: Sequence[Request]) -> None:
        self._lib.llama_memory_clear(self._memory, False)
        assert all(len(r.prompt) + r.num_output_tokens <= SLOT_TOKENS for r in requests)
        self.answers = [[] for _ in requests]
        waiting = deque(enumerate(requests))
        running: dict[int, tuple[Slot, list[int]]] = {}
        while waiting or running:
            while waiting and len(running) < NUM_SLOTS:
                i, request = waiting.popleft()
                running[_first_free(running)] = Slot(request), self.answers[i]
            self._close_gaps(running)
            for place in self._step(running):
                del running[place]
                self._lib.llama_memory_seq_rm(self._memory, place, -1, -1)
        said = [len(answer) for answer in self.answers]
        assert said == [request.num_output_tokens for request in requests], said

    def _close_gaps(self, running: dict[int, tuple[Slot, list[int]]]) -> None:
        """Only sequences of successive numbers are computed together."""
        while (last := max(running)) >= len(running):
            place = _first_free(running)
            self._lib.llama_memory_seq_cp(self._memory, last, place, -1, -1)
            self._lib.llama_memory_seq_rm(self._memory, last, -1, -1)
            running[place] = running.pop(last)

    def _step(self, running: dict[int, tuple[Slot, list[int]]]) -> list[int]:
        """One batch. The places of the requests that are done."""
        batch = Batch(BATCH_TOKENS)
        said: list[int] = []
        for place in range(len(running)):
            slot, _ = running[place]
            # Every sequence gets a token at least, prompts what is left.
            tokens = slot.take(batch.room - (len(running) - 1 - place))
            ends = slot.num_computed + len(tokens) >= len(slot.request.prompt)
            batch.add(place, tokens, slot.num_computed, ends)
            slot.num_computed += len(tokens)
            if ends:
                said.append(place)
        result = self._lib.llama_decode(self._context, batch.of(self._lib))
        assert result == 0, f"llama_decode: {result}"
        if not said:
            return []
        logits = np.ctypeslib.as_array(
            self._lib.llama_get_logits(self._context), (len(said), self._vocab_size)
        )
        done = []
        for place, token in zip(said, logits.argmax(-1).tolist(), strict=True):
            slot, answer = running[place]
            slot.last = token
            answer.append(token)
            if len(answer) == slot.request.num_output_tokens:
                done.append(place)
        return done


def _first_free(running: dict[int, tuple[Slot, list[int]]]) -> int:
    return next(place for place in range(NUM_SLOTS) if place not in running)


def _free(lib: Any, model: Any, context: Any) -> None:
    lib.llama_free(context)
    lib.llama_model_free(model)


class Batch:
    """A `llama_batch` over numpy's memory."""

    def __init__(self, size: int) -> None:
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._places = np.zeros(size, np.int32)
        self._says = np.zeros(size, np.int8)
        self._pointers = self._places.ctypes.data + np.arange(size, dtype=np.uint64) * 4
        self._used = 0

    @property
    def room(self) -> int:
        return len(self._tokens) - self._used

    def add(self, place: int, tokens: list[int], first: int, says: bool) -> None:
        """`says`: the logits of the last of them are wanted."""
        here = slice(self._used, self._used + len(tokens))
        self._tokens[here] = tokens
        self._positions[here] = np.arange(first, first + len(tokens))
        self._places[here] = place
        self._used = here.stop
        self._says[here.stop - 1] = says

    def of(self, lib: Any) -> Any:
        batch = lib.llama_batch()
        batch.n_tokens = self._used
        for field, values in (
            ("token", self._tokens),
            ("pos", self._positions),
            ("n_seq_id", self._counts),
            ("seq_id", self._pointers),
            ("logits", self._says),
        ):
            kind = dict(lib.llama_batch._fields_)[field]
            setattr(batch, field, ctypes.cast(values.ctypes.data, kind))
        return batch


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """A Llama checkpoint as a GGUF file without a tokenizer."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    matrix = {
        "bfloat16": gguf.GGMLQuantizationType.BF16,
        "float32": gguf.GGMLQuantizationType.F32,
    }[dtype]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        values = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            values = interleaved(values, heads)
        elif name.endswith("k_proj.weight"):
            values = interleaved(values, kv_heads)
        kind = matrix if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        new = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(values: Any, num_heads: int) -> Any:
    """A head's rows in the order of GGUF's rope, which turns neighbours: a checkpoint's turns the
    first half with the second."""
    halves = values.reshape(num_heads, 2, -1, values.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
