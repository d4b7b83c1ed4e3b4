"""The `tollgate` command: one folder for each field of subcommands, one module for each group."""
