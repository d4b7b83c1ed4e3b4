"""An invoice as others read it: tables, FOCUS rows, journals of two accounting tools, paper. Pure:
each is made of a `Document`, and the same one makes the same bytes."""
