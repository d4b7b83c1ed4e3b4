"""Measures the engine by itself: kernels, the roofline of a processor, grammars."""
