"""Lends engines of this home to other cells, and believes theirs only as far as it may."""
