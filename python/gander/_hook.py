"""Registers gander's operators with PyTorch when torch is imported, before or after gander.

Exported or cached graphs look up torch.ops.gander before any call of gander's functions, so registration
cannot wait for the first call. A program that only uses NumPy arrays must not spend time on importing torch.
So an import hook (a finder in sys.meta_path) waits for the import of torch.
"""

import importlib
import sys

_failure: Exception | None = None


def register() -> None:
    """Registers the operators. A failure must not make `import torch` fail: the first call with a tensor
    raises it."""
    global _failure
    if _failure is None:
        try:
            importlib.import_module("._pytorch", __package__)
        except Exception as error:
            _failure = error


def failure() -> str | None:
    """Why the operators are not registered, if that failed."""
    return _failure and f"{type(_failure).__name__}: {_failure}"


def is_late_tensor(x) -> bool:
    """Whether x is a torch tensor, for a torch that was imported without the import hook. Then the operators
    are registered here."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if not isinstance(kind, type) or not isinstance(x, kind):
        return False
    register()
    if _failure is not None:
        version = getattr(sys.modules["torch"], "__version__", "")
        raise RuntimeError(
            f"gander could not register its operators with torch {version}: {failure()}; gander.info() has "
            "the versions, and arrays with __dlpack__ are served without torch"
        ) from _failure
    return True


class _Finder:
    """Finds a module through the finders after this one, and calls an action after the module has run."""

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
    """Wraps another finder's loader, which is not changed, because it may load other modules too."""

    def __init__(self, loader, finder):
        self._loader, self._finder = loader, finder

    def __getattr__(self, name):
        if name == "_loader":  # not set yet on an object that copy.copy() is making
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.done()


def after_import(name, action) -> None:
    """Calls action() after the module is imported, or now if it already is."""
    if sys.modules.get(name) is None:
        sys.meta_path.insert(0, _Finder(name, action))
        return
    module = importlib.import_module(name)  # waits if another thread is importing it
    # If the module is still initializing, it is the module itself that imports gander. For torch, the first
    # call with a tensor then registers the operators.
    if not getattr(module.__spec__, "_initializing", False):
        action()


def register_with_torch() -> None:
    """Registers the operators after torch is imported."""
    after_import("torch", register)
