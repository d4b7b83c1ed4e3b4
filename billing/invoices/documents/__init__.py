"""Documents export invoices: tables, FOCUS rows, journals of two accounting tools, PDF. Those that
are made of a `Document` are pure, and the same one makes the same bytes."""
