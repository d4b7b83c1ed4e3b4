"""Corrections rate anew what was booked: they post reversals beside it and change no row."""
