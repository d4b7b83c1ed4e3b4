"""Corrections rate again what was booked already: they post reversals beside it and change no row."""
