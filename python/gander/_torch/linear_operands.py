"""The operands of functions that take rows, and a weight whose product with them are the logits."""

import torch

from .dtensor import is_dtensor
from .tensors import DTYPES, differ, dtype_of, unusable


def check_operands(name, x, weight, of_rows, of_classes, is_slice=False):
    """Refuses operands that do not fit. name: that of x. is_slice: weight may have no classes.

    of_rows: by name, what has an element for each row; the first are the labels. of_classes: by name, what
    has an element for each class. Those that are left out are None.
    """
    given = {name: x, "weight": weight} | of_rows | of_classes
    labels, *others = of_rows
    for argument, value in given.items():
        if value is None and argument not in (name, "weight", labels):
            continue
        if refusal := unusable(argument, value):
            raise refusal
        if is_dtensor(value) and not is_dtensor(weight):
            raise TypeError(
                f"{argument} is a DTensor, expected a plain tensor as weight is; pass {argument}.to_local() "
                "or gather it, or shard the classes of weight"
            )
        if value.device != x.device:
            raise RuntimeError(
                f"{argument} is on {value.device}, expected {x.device} as {name}; move one of them"
            )
    if x.ndim < 1 or weight.ndim != 2 or weight.shape[1] != x.shape[-1] or not (weight.shape[0] or is_slice):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, expected (V, {x.shape[-1] if x.ndim else 'K'}) with V "
            f"classes and the last dimension of {name}, which has shape {tuple(x.shape)}"
        )
    for argument in (labels, *others):
        value = given[argument]
        if value is not None and differ(value.shape, x.shape[:-1]):
            raise ValueError(
                f"{argument} has shape {tuple(value.shape)}, expected {tuple(x.shape[:-1])}, the leading "
                f"dimensions of {name}"
            )
    if given[labels].dtype not in (torch.uint8, torch.int32, torch.int64):
        raise TypeError(f"{labels} has dtype {dtype_of(given[labels])}, expected int32 or int64; convert it")
    for argument, value in of_classes.items():
        if value is not None and value.shape != weight.shape[:1]:
            raise ValueError(
                f"{argument} has shape {tuple(value.shape)}, expected {tuple(weight.shape[:1])}: one for "
                "each class of weight"
            )


def check_dtype(name, x):
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {dtype_of(x)}, expected float16, bfloat16, float32 or float64; convert it"
        )


def autocast(x, weight, bias):
    """These operands in the dtype of autocast, if it is enabled for x's device."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):  # meta has no autocast
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, weight, bias)
    )
