"""Compiles the processor's kernels in processes of their own, side by side, and keeps them on
disk."""
