"""Holds the layers that models are made of, one file each, which take their weights from a
`WeightSource` when they are built. Knows no families and no requests.
"""
