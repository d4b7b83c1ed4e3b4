"""The process tree of `tollgate up`: the supervisor, its children and the embedded databases."""
