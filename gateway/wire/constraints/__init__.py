"""How an answer can be constrained: response formats and tools, as structs and as grammars."""
