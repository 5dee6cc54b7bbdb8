"""Which backend serves an argument. Both register here: _arrays for objects with `__dlpack__`, and _torch for
tensors, once torch is imported.

Exported or cached graphs look up torch.ops.gander before any call of gander's functions, so registration
cannot wait for the first call. A program that only uses NumPy arrays must not spend time on importing torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from . import _imports
from ._table.protocol_gen import Operators


class Backend(Operators, Protocol):
    """What gander._functions asks of a backend: the operators, and what they need to know of its arrays."""

    def explained(self, error: Exception, names: dict[str, str] | None = None, **arguments: Any) -> Exception:
        """The exception to raise for an error: of the right type, about one of the arguments.

        names: what callers call the operators' results. arguments: those that are arrays.
        """

    def scalar(self, name: str, value: Any, x: Any) -> Any:
        """A new array of one element, of the dtype that x's statistics have, from a number or an array."""

    def detached(self, x: Any) -> Any:
        """x without its history."""

    def dtype(self, value: Any, argument: str) -> Any:
        """A dtype or None, also given by its name, in the form that the operators take."""

    def differs(self, x: Any, other: Any) -> bool:
        """Whether a dtype is another one than x's."""

    def converted(self, x: Any, to: Any) -> Any:
        """x in a dtype."""

    def cast(self, x: Any, to: Any) -> tuple[Any, Any]:
        """x, converted to a dtype if the kernels do not do that, and the dtype."""

    def is_ours(self, x: Any, other: Any) -> bool:
        """Whether another argument is of x's library."""

    def is_floating(self, x: Any) -> bool:
        """Whether an argument is an array of floating numbers."""

    def check_targets(self, classes: int, target: Any, ignore_index: int, name: str = "target") -> None:
        """Raises IndexError if an element of target is neither a class nor ignore_index."""

    def check_writable(self, **arrays: Any) -> None:
        """Refuses arrays or None, by argument, that may not be written."""

    def ones_like(self, x: Any) -> Any:
        """A new array of ones."""

    def empty(self, x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array where x is."""

    def may_share_memory(self, x: Any, out: Any) -> bool:
        """Whether writing out may change x."""

    def rows(self, x: Any, dims: list[int]) -> Any:
        """x with these dimensions at its end, as one."""

    def moved_back(self, y: Any, dim: int) -> Any:
        """A new contiguous array: y with its last dimension at dim."""

    def turned(self, x: Any) -> Any:
        """A view of x with the third last and the second last dimension exchanged."""

    def unsqueezed(self, x: Any, dims: list[int]) -> Any:
        """x with new dimensions of size 1, in ascending order."""

    def with_lse_partial(self, *arguments: Any) -> Any:
        """The loss of rows whose log-sum-exp comes in parts."""

    def cross_entropy_outputs(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """By name, the loss of rows and what comes with it. Some that nobody asks for may be missing."""

    def with_target_logit(self, *arguments: Any) -> Any:
        """The loss and the log-sum-exp of rows whose targets' logits come apart."""

    def linear_cross_entropy(self, *arguments: Any) -> Any:
        """By name, the loss of a linear layer's result and what comes with it."""

    def linear_token_statistics(self, *arguments: Any) -> Any:
        """The statistics of the tokens whose logits a linear layer makes."""


# The backends by the exact type of the argument that decides: those of torch.Tensor and Parameter.
BACKENDS: dict[type, Backend] = {}

torch: Any = None  # torch's backend, once it is registered
_arrays: Any = None
_Tensor: Any = ()  # torch.Tensor once that backend is registered; until then isinstance(x, ()) is False
_overrides: Callable[[Any], bool] | None = None  # whether an argument handles torch's functions itself
hand_over: Callable[..., Any]  # calls such an argument, once torch's backend is registered
_load_torch: Callable[[], Any] | None = None
_failure: Exception | None = None


def serve_arrays(backend: Any) -> None:
    """Registers the backend of all that no other serves."""
    global _arrays
    _arrays = backend


def serve_tensors(
    backend: Any, tensor: type, *others: type, overrides: Callable[[Any], bool], hand: Callable[..., Any]
) -> None:
    """Registers torch's backend, for torch.Tensor and other types that are no subclass to care about."""
    global torch, _Tensor, _overrides, hand_over
    torch, _Tensor, _overrides, hand_over = backend, tensor, overrides, hand
    BACKENDS.update(dict.fromkeys((tensor, *others), backend))


def load_with_torch(load: Callable[[], Any]) -> None:
    """Registers torch's backend, by calling load(), when torch is imported, before or after gander."""
    global _load_torch
    _load_torch = load
    _imports.after_import("torch", _register)


def _register() -> None:
    """A failure must not make `import torch` fail: the first call with a tensor raises it."""
    global _failure
    if _failure is None and _load_torch is not None:
        try:
            _load_torch()
        except Exception as error:
            _failure = error


def failure() -> str | None:
    """Why torch's backend is not registered, if that failed."""
    return _failure and f"{type(_failure).__name__}: {_failure}"


def backend_of(x: Any) -> Backend | None:
    """The backend of an argument whose exact type is not in BACKENDS. None: the argument handles the call
    itself, by `__torch_function__`, as a torch.fx.Proxy does."""
    if _overrides is not None and _overrides(x):
        return None
    backend: Backend = torch if is_tensor(x) else _arrays
    return backend


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor. If torch was imported without the import hook, its backend is registered
    here."""
    if isinstance(x, _Tensor):
        return True
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    if torch is not None or not isinstance(kind, type) or not isinstance(x, kind):
        return False
    _register()
    if _failure is not None:
        version = getattr(sys.modules["torch"], "__version__", "")
        raise RuntimeError(
            f"gander could not register its operators with torch {version}: {failure()}; gander.info() has "
            "the versions, and arrays with __dlpack__ are served without torch"
        ) from _failure
    return True
