"""A process that loads a model, says a token, and says when: `python -m bench.gpu.first_token
FOLDER cuda|cpu`.

`time.perf_counter` is on Linux one clock for all processes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench.gpu.place import place


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2]
    began = time.perf_counter()
    here = place(device, tiny=device == "cpu")
    from bench.gpu.rows.engine_rows import add
    from engine.config import EngineConfig
    from engine.core.engine_core import EngineCore
    from engine.transport.startup import Startup

    imported, startup = time.perf_counter(), Startup()
    config = EngineConfig(
        model=folder,
        device="cuda" if device == "cuda" else "cpu",
        dtype="bfloat16" if device == "cuda" else "float16",
        max_num_batched_tokens=here.pick(8192, 32),
        max_num_seqs=here.pick(256, 2),
        num_blocks=None if device == "cuda" else 16,
    )
    core = EngineCore(config, startup=startup)
    ready = time.perf_counter()
    add(core, "first", [3, 4, 5, 6], 1)
    token_ids: list[int] = []
    while core.has_work():
        for output in core.step():
            token_ids += output.token_ids
    said = time.perf_counter()
    assert len(token_ids) == 1
    found = {"imports_s": imported - began, "engine_s": ready - imported, "token_s": said - ready}
    table = startup.table().splitlines()
    print(json.dumps(found | {"monotonic_s": said, "table": table}), flush=True)


if __name__ == "__main__":
    main()
