"""One step on the device: the batch's tensors, the model, the next tokens.
Above: `engine.core`. Below: `engine.models`, `engine.kernels`. Knows no queue and no budget."""
