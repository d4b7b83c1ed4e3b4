"""Describes the items of work that `plan` writes and `attend` draws.

Constants alone: whoever plans need not have the kernels.
"""

BLOCK = 16
"""The keys of a block: as many as a vector has lanes."""
ROWS, LIBRARY_ROWS = 12, 32
"""Tokens of a prompt computed together for one head, by our own tiles and by a library."""
ITEM_WIDTH = 6
SEQ, HEAD, TOKEN, NUM_ROWS, VALID, VALID_STEP = range(ITEM_WIDTH)
"""The fields of an item, int64 each: row of the tables, first query head and token, rows, the keys
that row 0 sees (from the sequence's start on), and how many more each next row sees. With
VALID_STEP 0 rows are heads of one token, with 1 tokens of one head."""
