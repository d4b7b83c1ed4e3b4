"""`python -m gateway` is `tollgate`. Above: the shell, the supervisor's children. Below: `cli`."""

from gateway.cli.main import main

main()
