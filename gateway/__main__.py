"""`python -m gateway` is `tollgate`, and `python -m gateway worker` a worker of `tollgate up`."""

import sys

from foundation.imports import importing

if sys.argv[1:2] == ["worker"]:
    with importing():
        from gateway.app.worker import main
else:
    from gateway.cli.main import main

main()
