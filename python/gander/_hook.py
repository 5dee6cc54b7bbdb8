"""Registers gander's operators with PyTorch when torch is imported, whichever of the two comes first.

Graphs that were exported or cached look torch.ops.gander up before any call of ours, so registration cannot wait
for one; and a program that uses NumPy arrays only must not pay for importing torch. Hence a finder that does
nothing but wait for torch.
"""

import importlib
import importlib.util
import sys


class _TorchFinder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                importlib.import_module("._pytorch", __package__)

            spec.loader.exec_module = exec_module
        return spec


def register_with_torch() -> None:
    """Now, or when torch is imported."""
    if sys.modules.get("torch") is not None:
        importlib.import_module("._pytorch", __package__)
    elif _TorchFinder not in sys.meta_path:
        sys.meta_path.insert(0, _TorchFinder)
