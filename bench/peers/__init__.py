"""Other engines under the benchmark's workloads, one file each, and other gateways in `gateways`.

Each engine's file has `installed()`, and a class `Peer(folder, dtype)` with `run(requests) ->
None`, which returns when all tokens are generated: greedy, EOS ignored, exactly as many as each
request asks for. Its docstring says what to install for it; put the peers into an environment of
their own that also has our engine's dependencies, and run `python -m bench.engine_cpu` there."""
