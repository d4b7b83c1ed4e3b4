"""The `tollgate` command: one module for each group of subcommands."""
