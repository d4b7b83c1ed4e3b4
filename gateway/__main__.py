"""`python -m gateway` is `tollgate`, and `python -m gateway worker` a worker of `tollgate up`."""

import sys

from foundation.imports import hiding, import_part, importing

if sys.argv[1:2] == ["worker"]:
    # 9 MB of each worker: of SQLAlchemy its ORM, and the metrics for which the Redis client loads
    # OpenTelemetry. Nobody here uses either.
    with importing(), hiding("opentelemetry"):
        import_part("sqlalchemy.ext.asyncio", "engine")
        from gateway.app.worker import main
else:
    from gateway.cli.main import main

main()
