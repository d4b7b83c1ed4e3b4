"""Holds what `make gpu-check` and `make gpu-bench` run on one GPU: checks, rows, floors, the
page.
"""
