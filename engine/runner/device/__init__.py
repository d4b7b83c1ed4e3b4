"""Runs steps on a GPU without waiting for the host: buffers, packed inputs, CUDA graphs."""
