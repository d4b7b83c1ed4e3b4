"""What models are made of: one file a layer, weights taken from a `WeightSource` when a layer is
built. Above: `engine.models`. Below: `engine.kernels`. Knows no families and no requests."""
