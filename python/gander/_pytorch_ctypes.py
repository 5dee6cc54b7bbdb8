"""The raw ops over ctypes, for a torch without the stable C ABI (before 2.10): same results, more host time."""

import ctypes
import functools

import torch

from ._library import (
    CPU,
    CUDA,
    Allocate,
    Allocator,
    CrossEntropyOptions,
    Device,
    RMSNormOptions,
    SoftmaxOptions,
    Tensor,
    check,
    dtype_of,
    load,
)


class _Views(list):
    """DLTensors of torch tensors, with what they point to; None stays None."""

    def add(self, tensor, name="x"):
        if tensor is None:
            return None
        sizes = (ctypes.c_int64 * tensor.ndim)(*tensor.shape)
        strides = (ctypes.c_int64 * tensor.ndim)(*tensor.stride())
        on_cuda = tensor.device.type == "cuda"
        device = Device(CUDA if on_cuda else CPU, tensor.device.index if on_cuda else 0)
        view = Tensor(tensor.data_ptr(), device, tensor.ndim, dtype_of(tensor.dtype, name), sizes, strides, 0)
        self.append((tensor, sizes, strides, view))
        return ctypes.byref(view)


def _call(name, options, fields, tensors):
    """Calls a borrowed entry point on the current stream of the first tensor's device."""
    views, scratch, allocator, stream = _Views(), [], None, None
    x = next(iter(tensors.values()))
    if x.device.type == "cuda":

        def allocate(context, size):
            try:
                scratch.append(torch.empty(size, dtype=torch.uint8, device=x.device))
            except RuntimeError:
                return None
            return scratch[0].data_ptr()

        allocator = Allocator(None, Allocate(allocate))
        stream = torch.cuda.current_stream(x.device).cuda_stream
    else:
        load().gander_set_num_threads(torch.get_num_threads())
    arguments = [views.add(tensor, argument) for argument, tensor in tensors.items()]
    check(getattr(load(), name)(*arguments, ctypes.byref(options(allocator, *fields)), stream))


def _rows(x):
    """x, or a copy of it where its leading dimensions might not collapse into rows one stride apart."""
    if x.ndim and (x.ndim > 2 or x.stride(-1) != 1):
        return x.contiguous()
    return x


def _vector(x):
    return None if x is None else x.contiguous()


def _statistic(x, shape):
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def softmax_fwd(x, *how):
    y = x.new_empty(x.shape)
    _call("gander_softmax_forward", SoftmaxOptions, how, {"x": _rows(x), "y": y})
    return y


def softmax_bwd(dy, y, *how):
    dx = dy.new_empty(dy.shape)
    tensors = {"dy": _rows(dy), "y": _rows(y), "dx": dx}
    _call("gander_softmax_backward", SoftmaxOptions, how, tensors)
    return dx


def _rmsnorm_fwd(x, weight, out_dtype, eps, rstd, how):
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    tensors = {"x": _rows(x), "weight": _vector(weight), "y": y, "rstd": rstd}
    _call("gander_rmsnorm_forward", RMSNormOptions, (eps, *how), tensors)
    return y


def rmsnorm_fwd(x, weight, out_dtype, eps, *how):
    return _rmsnorm_fwd(x, weight, out_dtype, eps, None, how)


def rmsnorm_fwd_rstd(x, weight, out_dtype, eps, *how):
    rstd = _statistic(x, x.shape[:-1])
    return _rmsnorm_fwd(x, weight, out_dtype, eps, rstd.view(-1), how), rstd


def _rmsnorm_bwd(x, weight, dout, rstd, dw, how):
    dx = x.new_empty(x.shape)
    tensors = {"x": _rows(x), "weight": _vector(weight), "dout": _rows(dout), "rstd": rstd.reshape(-1)}
    _call("gander_rmsnorm_backward", RMSNormOptions, (0.0, *how), tensors | {"dx": dx, "dw": dw})
    return dx


def rmsnorm_bwd(x, weight, dout, rstd, *how):
    return _rmsnorm_bwd(x, weight, dout, rstd, None, how)


def rmsnorm_bwd_dw(x, weight, dout, rstd, *how):
    dw = weight.new_empty(weight.shape)
    return _rmsnorm_bwd(x, weight, dout, rstd, dw, how), dw


def _targets(op, x, target):
    if x.ndim and target.shape != x.shape[:-1]:
        expected = ", ".join(map(str, x.shape[:-1]))
        given = ", ".join(map(str, target.shape))
        raise ValueError(f"{op}: target has shape ({given}), expected ({expected}), the leading dimensions of x")
    return target.reshape(-1)


def _cross_entropy_fwd(x, target, weight, options, *, lse=None, dx=None, denominator=None):
    loss = _statistic(x, () if options[1] else x.shape[:-1])
    targets = _targets("cross_entropy_forward", x, target)
    tensors = {"x": _rows(x), "target": targets, "weight": _vector(weight), "loss": loss.view(-1)}
    if dx is x:
        dx = tensors["x"]
    tensors |= {"lse": lse, "dx": dx, "denominator": denominator}
    _call("gander_cross_entropy_forward", CrossEntropyOptions, options, tensors)
    return loss, dx


def _split(saved):
    return saved[:-1].view(2, -1), saved[-1]


def cross_entropy_fwd(x, target, weight, ignore_index, reduction, batch_invariant=False):
    return _cross_entropy_fwd(x, target, weight, (ignore_index, reduction, 0, 0, batch_invariant))[0]


def cross_entropy_fwd_lse(x, target, weight, ignore_index, batch_invariant=False):
    lse = _statistic(x, x.shape[:-1])
    options = (ignore_index, 0, 0, 0, batch_invariant)
    return _cross_entropy_fwd(x, target, weight, options, lse=lse.view(-1))[0], lse


def cross_entropy_fwd_saved(x, target, weight, ignore_index, reduction, batch_invariant=False):
    saved = _statistic(x, (2 * target.numel() + 1,))
    lse, denominator = _split(saved)
    options = (ignore_index, reduction, 0, 0, batch_invariant)
    return _cross_entropy_fwd(x, target, weight, options, lse=lse, denominator=denominator)[0], saved


def cross_entropy_fwd_one_pass(x, target, weight, ignore_index, reduction):
    saved, dx = _statistic(x, (2 * target.numel() + 1,)), x.new_empty(x.shape)
    lse, denominator = _split(saved)
    options = (ignore_index, reduction, 1)
    loss, dx = _cross_entropy_fwd(x, target, weight, options, lse=lse, denominator=denominator, dx=dx)
    return loss, saved, dx


def cross_entropy_fwd_dx(x, target, weight, ignore_index, batch_invariant=False):
    lse, dx = _statistic(x, x.shape[:-1]), x.new_empty(x.shape)
    options = (ignore_index, 0, 0, 0, batch_invariant)
    return _cross_entropy_fwd(x, target, weight, options, lse=lse.view(-1), dx=dx)[0], lse, dx


def cross_entropy_fwd_dx_(x, target, weight, ignore_index, batch_invariant=False):
    lse = _statistic(x, x.shape[:-1])
    options = (ignore_index, 0, 0, 0, batch_invariant)
    loss, dx = _cross_entropy_fwd(x, target, weight, options, lse=lse.view(-1), dx=x)
    if dx is not x:
        x.copy_(dx)
    return loss, lse


def _cross_entropy_bwd(x, target, weight, dloss, lse, options, dx):
    rows = _rows(x)
    if dx is x:
        dx = rows
    lse, denominator = lse.reshape(-1), None
    if lse.numel() == 2 * target.numel() + 1:
        lse, denominator = _split(lse)
    tensors = {
        "x": rows,
        "target": _targets("cross_entropy_backward", x, target),
        "weight": _vector(weight),
        "dloss": dloss.reshape(-1),
        "lse": lse,
        "denominator": denominator if options[1] == 1 else None,
        "dx": dx,
    }
    _call("gander_cross_entropy_backward", CrossEntropyOptions, options, tensors)
    return dx


def cross_entropy_bwd(x, target, weight, dloss, lse, ignore_index, reduction):
    options = (ignore_index, reduction)
    return _cross_entropy_bwd(x, target, weight, dloss, lse, options, x.new_empty(x.shape))


def cross_entropy_bwd_(x, target, weight, dloss, lse, ignore_index, reduction):
    dx = _cross_entropy_bwd(x, target, weight, dloss, lse, (ignore_index, reduction), x)
    if dx is not x:
        x.copy_(dx)


def cross_entropy_bwd_one_pass(x, target, weight, dloss, saved, dx, ignore_index, reduction):
    _cross_entropy_bwd(x, target, weight, dloss, saved, (ignore_index, reduction, 1), dx)


softmax_fwd_by, softmax_bwd_by, rmsnorm_fwd_by, rmsnorm_fwd_rstd_by, rmsnorm_bwd_by, rmsnorm_bwd_dw_by = (
    softmax_fwd, softmax_bwd, rmsnorm_fwd, rmsnorm_fwd_rstd, rmsnorm_bwd, rmsnorm_bwd_dw
)  # fmt: skip
(
    cross_entropy_fwd_invariant,
    cross_entropy_fwd_lse_invariant,
    cross_entropy_fwd_saved_invariant,
    cross_entropy_fwd_dx_invariant,
    cross_entropy_fwd_dx_invariant_,
) = (
    functools.partial(function, batch_invariant=True)
    for function in (
        cross_entropy_fwd,
        cross_entropy_fwd_lse,
        cross_entropy_fwd_saved,
        cross_entropy_fwd_dx,
        cross_entropy_fwd_dx_,
    )
)
