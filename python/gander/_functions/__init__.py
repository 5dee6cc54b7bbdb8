"""gander's public functions. They take PyTorch tensors or any other objects with `__dlpack__`; _backend tells
what serves an argument."""
