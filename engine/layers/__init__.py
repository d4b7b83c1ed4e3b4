"""What models are made of: one file a layer, weights taken from a `WeightSource` when a layer is
built. Knows no families and no requests.
"""
