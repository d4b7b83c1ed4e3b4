"""`python -m gateway` is `tollgate`."""

from gateway.cli.main import main

main()
