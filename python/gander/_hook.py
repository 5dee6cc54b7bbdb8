"""Registers gander's operators with PyTorch when torch is imported, whichever of the two comes first.

Graphs that were exported or cached look torch.ops.gander up before any call of ours, so registration cannot wait for
one; and a program that uses NumPy arrays only must not pay for importing torch. Hence a finder that waits for torch.
"""

import importlib
import sys

_failure: Exception | None = None


def register() -> None:
    """Registers the operators. Where that fails, `import torch` must not: the first call with a tensor says why."""
    global _failure
    if _failure is None:
        try:
            importlib.import_module("._pytorch", __package__)
        except Exception as error:
            _failure = error


def failure() -> str | None:
    """Why the operators are not registered, if that failed."""
    return _failure and f"{type(_failure).__name__}: {_failure}"


def meets_tensor(x) -> bool:
    """Whether x is a tensor of a torch that no finder saw; its operators are registered then."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if not isinstance(kind, type) or not isinstance(x, kind):
        return False
    register()
    if _failure is not None:
        raise RuntimeError(
            f"gander could not register its operators with torch {getattr(sys.modules['torch'], '__version__', '')}: "
            f"{failure()}; gander.info() has the versions, and arrays with __dlpack__ are served without torch"
        ) from _failure
    return True


class _TorchFinder:
    """Finds torch as the finders after it do, and has the operators registered once torch has run."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in tuple(sys.meta_path):
            find = None if finder is cls else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _TorchLoader):
                    spec.loader = _TorchLoader(spec.loader)
                return spec
        return None


class _TorchLoader:
    """Another finder's loader of torch. It is left as it is: such a loader may load other modules too."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        if name == "_loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if _TorchFinder in sys.meta_path:
            sys.meta_path.remove(_TorchFinder)
        register()


def register_with_torch() -> None:
    """Now, or when torch is imported."""
    if sys.modules.get("torch") is None:
        if _TorchFinder not in sys.meta_path:
            sys.meta_path.insert(0, _TorchFinder)
        return
    torch = importlib.import_module("torch")  # waits where another thread is importing it
    if not getattr(torch.__spec__, "_initializing", False):
        register()
    # Else torch itself imports gander, and is not complete: the first call with a tensor registers.
