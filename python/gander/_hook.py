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


class _Finder:
    """Finds a module as the finders after it do, and has something done once the module has run."""

    def __init__(self, name, action):
        self.name, self._action = name, action

    def find_spec(self, name, path=None, target=None):
        finders = list(sys.meta_path)
        if name != self.name or self not in finders:
            return None
        for finder in finders[finders.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def done(self):
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


class _Loader:
    """Another finder's loader. That one is left as it is: it may load other modules too."""

    def __init__(self, loader, finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name):
        if name == "_loader":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.done()


def after_import(name, action) -> None:
    """Calls action() once the module has been imported: now, if it has been."""
    if sys.modules.get(name) is None:
        sys.meta_path.insert(0, _Finder(name, action))
        return
    module = importlib.import_module(name)  # waits where another thread is importing it
    if not getattr(module.__spec__, "_initializing", False):
        action()
    # Else the module itself imports gander, and is not complete. With torch, the first call with a tensor registers.


def register_with_torch() -> None:
    """Registers the operators when torch has been imported."""
    after_import("torch", register)
