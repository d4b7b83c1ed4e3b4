"""OpenVINO GenAI's continuous batching. Its model is another folder, converted by optimum-intel
from the same checkpoint (`--openvino FOLDER`; without, the peer is left out)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bench.tools.workload import Request

NAME = "OpenVINO GenAI"
CACHE_GIB = 1


def installed() -> bool:
    return importlib.util.find_spec("openvino_genai") is not None


class Peer:
    def __init__(self, folder: Path, dtype: str) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = False
        precision = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(folder),
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": precision,
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            },
        )
        self._num_requests = 0

    def run(self, requests: Sequence[Request]) -> None:
        import openvino

        handles = []
        for request in requests:
            config = self._genai.GenerationConfig()
            config.max_new_tokens = request.num_output_tokens
            config.ignore_eos = True
            config.do_sample = False
            prompt = openvino.Tensor(np.array([request.prompt], np.int64))
            handle = self._pipeline.add_request(self._num_requests, prompt, config)
            handles.append(handle)
            self._num_requests += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for handle, request in zip(handles, requests, strict=True):
            said = sum(len(output.generated_ids) for output in handle.read_all())
            assert said == request.num_output_tokens, f"{said} of {request.num_output_tokens}"
