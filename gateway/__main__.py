"""`python -m gateway` is `tollgate`; `python -m gateway worker`, `conductor`, `join`, `lend` and
`ray` are processes of `tollgate up`."""

import sys

from foundation.imports import hiding, import_part, importing

if sys.argv[1:2] == ["worker"]:
    # 10 MB of each worker: of SQLAlchemy its ORM, the metrics for which the Redis client loads
    # OpenTelemetry, and uvicorn's command and supervisors. Nobody here uses any of them.
    with importing(), hiding("opentelemetry"):
        import_part("sqlalchemy.ext.asyncio", "engine")
        import_part("uvicorn", "server")
        from gateway.app.worker import main
elif sys.argv[1:2] == ["conductor"]:
    # Without the commands of the CLI, which would take more memory than all that it does.
    from gateway.fleet.conductor.process import main
elif sys.argv[1:2] == ["join"]:
    from gateway.fleet.joining.process import main
elif sys.argv[1:2] == ["lend"]:
    from gateway.fleet.cells.lending import main
elif sys.argv[1:2] == ["ray"]:
    from gateway.processes.launching.process import main
else:
    from gateway.cli.main import main

main()
