"""Calls a function after a module is imported, now or later, without importing it (a finder in
sys.meta_path)."""

import importlib
import sys


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
