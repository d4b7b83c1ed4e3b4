"""Multiplies by the weights of linear layers, dense or quantized."""
