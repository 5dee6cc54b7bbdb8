"""gander's operators in PyTorch: schemas, fakes, kernels, gradients.

Importing this module registers everything; the library itself is loaded by the first kernel. Two layers of ops:

- raw ops (`torch.ops.gander.softmax_fwd`, ...) have a C kernel (_torch.c) for CPU and CUDA and no gradient;
- `torch.ops.gander.softmax`, `.rmsnorm` and `.cross_entropy` are differentiable: they decompose into the functions
  below, which call a raw op, inside an autograd.Function where a gradient is needed. register_autograd would slow
  the calls without gradient too, and would have to recompute rstd and lse in backward.

Eager calls on plain tensors, with no mode or transform active, gain nothing from the dispatcher but its host time.
There functions of _torch.c take the tensors straight from Python. Where anything else is going on they give None, and
the call is served, or refused, through the ops above.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.compiler import is_compiling, is_dynamo_compiling

from . import _library, _ops

_SCHEMAS = (
    "softmax_fwd(Tensor x) -> Tensor",
    "softmax_bwd(Tensor dy, Tensor y) -> Tensor",
    "rmsnorm_fwd(Tensor x, Tensor? weight, ScalarType? out_dtype, float eps) -> Tensor",
    "rmsnorm_fwd_rstd(Tensor x, Tensor? weight, ScalarType? out_dtype, float eps) -> (Tensor out, Tensor rstd)",
    "rmsnorm_bwd(Tensor x, Tensor? weight, Tensor dout, Tensor rstd) -> Tensor",
    "rmsnorm_bwd_dw(Tensor x, Tensor weight, Tensor dout, Tensor rstd) -> (Tensor dx, Tensor dw)",
    # reduction: 0 none, 1 mean, 2 sum. lse has a value for each row. saved has 2 M + 1: each row's maximum, each row's
    # logarithm of the sum (their sum would lose digits where logits are large), and the denominator of the mean; the
    # backward ops take either, but a mean needs saved.
    "cross_entropy_fwd(Tensor x, Tensor target, Tensor? weight, int ignore_index, int reduction) -> Tensor",
    "cross_entropy_fwd_lse(Tensor x, Tensor target, Tensor? weight, int ignore_index) -> (Tensor loss, Tensor lse)",
    "cross_entropy_fwd_saved(Tensor x, Tensor target, Tensor? weight, int ignore_index, int reduction)"
    " -> (Tensor loss, Tensor saved)",
    "cross_entropy_fwd_dx(Tensor x, Tensor target, Tensor? weight, int ignore_index)"
    " -> (Tensor loss, Tensor lse, Tensor dx)",
    "cross_entropy_fwd_dx_(Tensor(a!) x, Tensor target, Tensor? weight, int ignore_index) -> (Tensor loss, Tensor lse)",
    # One pass over x for both directions: the first op gives the gradient of the reduced loss too; the second one makes
    # it again where dloss is not 1, which it finds out on the device.
    "cross_entropy_fwd_one_pass(Tensor x, Tensor target, Tensor? weight, int ignore_index, int reduction)"
    " -> (Tensor loss, Tensor saved, Tensor dx)",
    "cross_entropy_bwd_one_pass(Tensor x, Tensor target, Tensor? weight, Tensor dloss, Tensor saved, Tensor(a!) dx,"
    " int ignore_index, int reduction) -> ()",
    "cross_entropy_bwd(Tensor x, Tensor target, Tensor? weight, Tensor dloss, Tensor lse, int ignore_index,"
    " int reduction) -> Tensor",
    "cross_entropy_bwd_(Tensor(a!) x, Tensor target, Tensor? weight, Tensor dloss, Tensor lse, int ignore_index,"
    " int reduction) -> ()",
)


def _names(schemas):
    return tuple(schema.partition("(")[0] for schema in schemas)


# The same ops by algorithm (gander_algorithm of gander.h), and with batch-invariant rows. They are apart because every
# argument that an op has costs each of its calls host time.
_SCHEMAS_BY = tuple(
    schema.replace("(", "_by(", 1).replace(") ->", ", int algorithm, bool batch_invariant) ->", 1)
    for schema in _SCHEMAS[:6]
)
_SCHEMAS_INVARIANT = tuple(
    schema.replace("_(" if "_(" in schema else "(", "_invariant_(" if "_(" in schema else "_invariant(", 1)
    for schema in _SCHEMAS[6:11]
)
_RAW_OPS = _names(_SCHEMAS + _SCHEMAS_BY + _SCHEMAS_INVARIANT)
_DIFFERENTIABLE = (
    "softmax(Tensor x) -> Tensor",
    "rmsnorm(Tensor x, Tensor? weight=None, ScalarType? out_dtype=None, float eps=1e-06) -> Tensor",
    "cross_entropy(Tensor x, Tensor target, Tensor? weight=None, int ignore_index=-100, int reduction=1) -> Tensor",
)

_registry = torch.library.Library("gander", "FRAGMENT")
for _schema in _SCHEMAS + _SCHEMAS_BY + _SCHEMAS_INVARIANT + _DIFFERENTIABLE:
    _registry.define(_schema)


# ---- Kernels ----


_BINARY = Path(__file__).with_name("_torch.so")


def _register_c() -> ctypes.CDLL | None:
    """The C kernels; None where they or this torch's stable C ABI are missing."""
    if os.environ.get("GANDER_TORCH_BINDING") == "ctypes" or not _BINARY.exists():
        return None
    kernels = ctypes.CDLL(str(_BINARY))
    kernels.gander_torch_register.restype = ctypes.c_char_p
    kernels.gander_torch_failure.argtypes = [ctypes.POINTER(ctypes.c_char_p)]
    return None if kernels.gander_torch_register(os.fsencode(_library.path())) else kernels


_kernels = _register_c()
binding = "ctypes" if _kernels is None else "stable C ABI"
if _kernels is None:
    from . import _pytorch_ctypes

    for _name in _RAW_OPS:
        for _key in ("CPU", "CUDA"):
            _registry.impl(_name, getattr(_pytorch_ctypes, _name), _key)

for _name in _RAW_OPS:  # no gradient, and none pretended
    _registry.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def _bump_version(op):
    """Gives a mutating op the step that autograd's checks rely on: kernels write past torch's version counters."""
    keys = torch._C._after_ADInplaceOrView_keyset
    written = next(i for i, argument in enumerate(op._schema.arguments) if argument.is_write)

    def kernel(keyset, *arguments):
        x = arguments[written]
        if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(
                f"x has strides {x.stride()}, expected elements apart from one another, as the gradient is written "
                "over them; leave inplace_backward out"
            )
        torch.autograd.graph.increment_version(x)
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & keys, *arguments)

    return kernel


def explained(error: RuntimeError, **arguments) -> Exception:
    """The exception that a user is to see for an error out of the dispatcher: one of the right type."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            return TypeError(f"{name} is a {type(value).__name__}, expected a torch.Tensor, like the first argument")
    if _kernels is None:
        return error
    message = ctypes.c_char_p()
    status = _kernels.gander_torch_failure(ctypes.byref(message))
    text = (message.value or b"").decode(errors="replace")
    if not status or text not in str(error):
        return error
    return torch.cuda.OutOfMemoryError(text) if status == _library.STATUS_MEMORY else _library.exception(status, text)


# ---- Fakes: shapes and dtypes of the outputs ----


def _statistic(x, shape):
    return x.new_empty(shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _same(x, *_):
    return x.new_empty(x.shape)


def _loss(x, reduction):
    return _statistic(x, () if reduction else x.shape[:-1])


def _rmsnorm_fake(x, weight, out_dtype, eps):
    return x.new_empty(x.shape, dtype=out_dtype or x.dtype)


def _per_row(x, *_):
    return _statistic(x, x.shape[:-1])


_FAKES = {
    "softmax_fwd": _same,
    "softmax_bwd": _same,
    "rmsnorm_fwd": _rmsnorm_fake,
    "rmsnorm_fwd_rstd": lambda *a: (_rmsnorm_fake(*a), _per_row(*a)),
    "rmsnorm_bwd": _same,
    "rmsnorm_bwd_dw": lambda x, weight, dout, rstd: (_same(x), _same(weight)),
    "cross_entropy_fwd": lambda x, target, weight, ignore_index, reduction: _loss(x, reduction),
    "cross_entropy_fwd_lse": lambda *a: (_per_row(*a), _per_row(*a)),
    "cross_entropy_fwd_saved": lambda x, target, weight, ignore_index, reduction: (
        _loss(x, reduction),
        _statistic(x, (2 * target.numel() + 1,)),
    ),
    "cross_entropy_fwd_one_pass": lambda x, target, weight, ignore_index, reduction: (
        _loss(x, reduction),
        _statistic(x, (2 * target.numel() + 1,)),
        _same(x),
    ),
    "cross_entropy_fwd_dx": lambda *a: (_per_row(*a), _per_row(*a), _same(*a)),
    "cross_entropy_fwd_dx_": lambda *a: (_per_row(*a), _per_row(*a)),
    "cross_entropy_bwd": _same,
    "cross_entropy_bwd_": lambda *a: None,
    "cross_entropy_bwd_one_pass": lambda *a: None,
}
_FAKES |= {
    by: lambda *a, fake=_FAKES[name]: fake(*a[:-2]) for name, by in zip(_FAKES, _names(_SCHEMAS_BY), strict=False)
}
_FAKES |= {name: _FAKES[name.replace("_invariant", "")] for name in _names(_SCHEMAS_INVARIANT)}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"gander::{_name}", _fake, lib=_registry)

_softmax_fwd, _softmax_bwd, _rmsnorm_fwd, _rmsnorm_fwd_rstd, _rmsnorm_bwd, _rmsnorm_bwd_dw = (
    getattr(torch.ops.gander, name).default for name in _names(_SCHEMAS[:6])
)
_softmax_fwd_by, _softmax_bwd_by, _rmsnorm_fwd_by, _rmsnorm_fwd_rstd_by, _rmsnorm_bwd_by, _rmsnorm_bwd_dw_by = (
    getattr(torch.ops.gander, name).default for name in _names(_SCHEMAS_BY)
)
(
    _cross_entropy_fwd,
    _cross_entropy_fwd_lse,
    _cross_entropy_fwd_saved,
    _cross_entropy_fwd_dx,
    _cross_entropy_fwd_dx_,
    _cross_entropy_fwd_one_pass,
    _cross_entropy_bwd_one_pass,
    _cross_entropy_bwd,
    _cross_entropy_bwd_,
) = (getattr(torch.ops.gander, name).default for name in _names(_SCHEMAS[6:]))
(
    _cross_entropy_fwd_invariant,
    _cross_entropy_fwd_lse_invariant,
    _cross_entropy_fwd_saved_invariant,
    _cross_entropy_fwd_dx_invariant,
    _cross_entropy_fwd_dx_invariant_,
) = (getattr(torch.ops.gander, name).default for name in _names(_SCHEMAS_INVARIANT))

for _mutating in (
    _cross_entropy_fwd_dx_,
    _cross_entropy_fwd_dx_invariant_,
    _cross_entropy_bwd_one_pass,
    _cross_entropy_bwd_,
):
    _registry.impl(_mutating, _bump_version(_mutating), "ADInplaceOrView", with_keyset=True)


# ---- Autocast ----
# torch's own rules (2.11): on CUDA softmax runs in float32, rms_norm in the dtype of its input; the CPU casts
# neither. cross_entropy gives a float32 loss there, as gander always does.


def _autocast(op):
    def kernel(x, *how):
        with torch.autocast("cuda", enabled=False):
            return op(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, *how)

    return kernel


for _op in (_softmax_fwd, _softmax_fwd_by):
    _registry.impl(_op, _autocast(_op), "AutocastCUDA")


# ---- What would be silently wrong ----


def _no_vmap(*arguments):
    raise NotImplementedError("gander: vmap is not supported; the ops take any leading dimensions: call them directly")


for _name in _RAW_OPS:  # torch's fallback would lose the gradients of what vmap's function closes over
    _registry.impl(_name, _no_vmap, "FuncTorchBatched")


def _refuse_tangents(*tensors):
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError("gander: forward-mode derivatives are not supported; use torch's operators")


# ---- Gradients ----


class _NotTwice(Function):
    """Hands a gradient through, and refuses to be differentiated: without it, a second derivative would be taken
    with the first one for a constant, and be silently wrong."""

    @staticmethod
    def forward(ctx, gradient, *sources):
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("gander: second derivatives are not supported; use torch's operators")


def _once(backward):
    """once_differentiable without its cost where no second derivative is asked for, and without its gap: it overlooks
    that gradients depend on the saved tensors."""

    def once(ctx, gradient):
        results = backward(ctx, gradient)
        if is_grad_enabled():
            sources = (gradient, *ctx.saved_tensors)
            return tuple(None if result is None else _NotTwice.apply(result, *sources) for result in results)
        return results

    return once


class _Softmax(Function):
    @staticmethod
    def forward(ctx, x):
        y = _softmax_fwd(x)
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        return (None if dy is None else _softmax_bwd(dy, *ctx.saved_tensors),)


def _where_served(how):
    """What backward is asked for: the same algorithm, where that serves its rows too."""
    return how[0] | _library.IF_SERVED, how[1]


class _SoftmaxBy(Function):
    @staticmethod
    def forward(ctx, x, *how):
        y = _softmax_fwd_by(x, *how)
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        ctx.how = _where_served(how)
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        return None if dy is None else _softmax_bwd_by(dy, *ctx.saved_tensors, *ctx.how), None, None


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx, x, weight, out_dtype, eps):
        out, rstd = _rmsnorm_fwd_rstd(x, weight, out_dtype, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @_once
    def backward(ctx, dout):
        if dout is None:
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            dx, dw = _rmsnorm_bwd_dw(x, weight, dout, rstd)
            return dx if ctx.needs_input_grad[0] else None, dw, None, None
        return _rmsnorm_bwd(x, weight, dout, rstd), None, None, None


class _RMSNormBy(Function):
    @staticmethod
    def forward(ctx, x, weight, out_dtype, eps, *how):
        out, rstd = _rmsnorm_fwd_rstd_by(x, weight, out_dtype, eps, *how)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.how = _where_served(how)
        return out

    @staticmethod
    @_once
    def backward(ctx, dout):
        dx = dw = None
        if dout is not None:
            x, weight, rstd = ctx.saved_tensors
            if ctx.needs_input_grad[1]:
                dx, dw = _rmsnorm_bwd_dw_by(x, weight, dout, rstd, *ctx.how)
            else:
                dx = _rmsnorm_bwd_by(x, weight, dout, rstd, *ctx.how)
        return dx if ctx.needs_input_grad[0] else None, dw, None, None, None, None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx, x, target, weight, ignore_index, reduction, in_place):
        loss, saved = _cross_entropy_fwd_saved(x, target, weight, ignore_index, reduction)
        ctx.save_for_backward(x, target, weight, saved)
        ctx.set_materialize_grads(False)
        ctx.options = ignore_index, reduction, in_place
        return loss

    @staticmethod
    @_once
    def backward(ctx, dloss):
        if dloss is None:
            return None, None, None, None, None, None
        x, target, weight, saved = ctx.saved_tensors
        *options, in_place = ctx.options
        arguments = (x, target, weight, dloss, saved, *options)
        if in_place:
            _cross_entropy_bwd_(*arguments)
            dx = x.detach()
        else:
            dx = _cross_entropy_bwd(*arguments)
        return dx, None, None, None, None, None


class _CrossEntropyInvariant(_CrossEntropy):
    @staticmethod
    def forward(ctx, x, target, weight, ignore_index, reduction, in_place):
        loss, saved = _cross_entropy_fwd_saved_invariant(x, target, weight, ignore_index, reduction)
        ctx.save_for_backward(x, target, weight, saved)
        ctx.set_materialize_grads(False)
        ctx.options = ignore_index, reduction, in_place
        return loss


class _CrossEntropyOnePass(Function):
    @staticmethod
    def forward(ctx, x, target, weight, ignore_index, reduction):
        # dx is given away by the first backward pass, so it is no saved tensor; it is neither input nor output, so
        # keeping it here makes no cycle.
        loss, saved, ctx.dx = _cross_entropy_fwd_one_pass(x, target, weight, ignore_index, reduction)
        ctx.save_for_backward(x, target, weight, saved)
        ctx.set_materialize_grads(False)
        ctx.options = ignore_index, reduction
        return loss

    @staticmethod
    @_once
    def backward(ctx, dloss):
        if dloss is None:
            return None, None, None, None, None
        x, target, weight, saved = ctx.saved_tensors
        dx, ctx.dx = ctx.dx, None
        if dx is None:  # another backward pass, with retain_graph
            dx = _cross_entropy_bwd(x, target, weight, dloss, saved, *ctx.options)
        else:
            _cross_entropy_bwd_one_pass(x, target, weight, dloss, saved, dx, *ctx.options)
        return dx, None, None, None, None


# Function.apply has a Python part, about 0.5 us, that serves nothing but tracing and functorch's transforms.
_softmax_apply, _rmsnorm_apply, _cross_entropy_apply, _one_pass_apply = (
    super(Function, function).apply for function in (_Softmax, _RMSNorm, _CrossEntropy, _CrossEntropyOnePass)
)


def _traced():
    return is_compiling() or torch._C._are_functorch_transforms_active()


# ---- Past the dispatcher ----

# Elements of CUDA logits from which a loss and its gradient are made in one pass. Fewer lie in L2 when backward reads
# them again, and the launch that the pass needs before it costs more than that. The CPU's backward reads x in any case.
_ONE_PASS = 1 << 22


def _objects_of_torch() -> dict:
    """What _torch.c uses of torch beside its C ABI. Raises where this torch has it no more."""
    from torch._C._dynamo import guards

    def empty_on(device):
        def empty(size, stride, dtype):
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        return getattr(guards, f"_empty_strided_{device}", empty)  # inductor's, at two thirds of the time

    return {
        "Tensor": Tensor,
        "Parameter": torch.nn.Parameter,
        "None": None,
        "False": False,
        "RuntimeError": RuntimeError,
        "is_neg": Tensor.is_neg,
        "is_cow": torch._C._is_cow_tensor,
        "contiguous": Tensor.contiguous,
        "empty_strided_cpu": empty_on("cpu"),
        "empty_strided_cuda": empty_on("cuda"),
        "forward_ad": vars(forward_ad),
        "exchange": Tensor.__dlpack_c_exchange_api__,
        "most": _ONE_PASS,
        **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")},
    }


def _straight_functions() -> dict:
    """The functions of _torch.c by name; none where this torch, or the moment of the import, does not allow them."""
    if _kernels is None:
        return {}
    try:
        objects = _objects_of_torch()
    except (AttributeError, ImportError):
        return {}
    library, functions = ctypes.PyDLL(str(_BINARY)), {}
    library.gander_torch_dispatch_state.restype = ctypes.c_bool
    library.gander_torch_functions.restype = ctypes.c_char_p
    library.gander_torch_functions.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.py_object]

    def dispatch_state():
        words = (ctypes.c_uint64 * 2)()
        return words if library.gander_torch_dispatch_state(words) else None

    # What inference mode changes is learned here, so nothing else may be active on this thread now.
    now = dispatch_state()
    with torch.inference_mode():
        inference = dispatch_state()
    if now is None or not all(inference) or (any(now) and list(now) != list(inference)):
        return {}
    classes = {}
    for name, function in ("softmax", _Softmax), ("rmsnorm", _RMSNorm), ("cross_entropy", _CrossEntropy):
        classes[name] = type(function)(function.__name__, (function,), {"__module__": __name__})
        objects[name] = super(Function, classes[name]).apply
    if library.gander_torch_functions(objects, inference, functions):
        return {}
    for function in classes.values():
        function.forward = functions["forward"]
    return functions


_straight = _straight_functions()
_straight_softmax, _straight_rmsnorm, _straight_cross_entropy = (
    _straight.get(name, lambda *arguments: None) for name in ("softmax", "rmsnorm", "cross_entropy")
)


def _straight_or(op):
    """A raw op, past the dispatcher where that is possible."""
    straight = _straight.get(op._schema.name.removeprefix("gander::"))
    if straight is None:
        return op

    def call(*arguments):
        if not is_dynamo_compiling() and (results := straight(*arguments)) is not None:
            return results
        return op(*arguments)

    return call


_softmax_bwd, _rmsnorm_bwd, _rmsnorm_bwd_dw, _cross_entropy_bwd = map(
    _straight_or, (_softmax_bwd, _rmsnorm_bwd, _rmsnorm_bwd_dw, _cross_entropy_bwd)
)


# ---- The functions behind gander's public ones (_ops.py) ----


def softmax(x):
    if not is_dynamo_compiling() and (y := _straight_softmax(x)) is not None:
        return y
    if x.requires_grad and is_grad_enabled():
        return (_Softmax.apply if _traced() else _softmax_apply)(x)
    if forward_ad._current_level >= 0:
        _refuse_tangents(x)
    return _softmax_fwd(x)


softmax_fwd, softmax_bwd = _softmax_fwd, _softmax_bwd
softmax_fwd_by, softmax_bwd_by = _softmax_fwd_by, _softmax_bwd_by


def softmax_by(x, algorithm, batch_invariant):
    if x.requires_grad and is_grad_enabled():
        return _SoftmaxBy.apply(x, algorithm, batch_invariant)
    if forward_ad._current_level >= 0:
        _refuse_tangents(x)
    return _softmax_fwd_by(x, algorithm, batch_invariant)


def rmsnorm(x, weight=None, out_dtype=None, eps=1e-6):
    if not is_dynamo_compiling() and (out := _straight_rmsnorm(x, weight, out_dtype, eps)) is not None:
        return out
    if is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return (_RMSNorm.apply if _traced() else _rmsnorm_apply)(x, weight, out_dtype, eps)
    if forward_ad._current_level >= 0:
        _refuse_tangents(x, weight)
    return _rmsnorm_fwd(x, weight, out_dtype, eps)


def rmsnorm_fwd(x, weight, out_dtype, eps, store_rstd):
    if store_rstd:
        return _rmsnorm_fwd_rstd(x, weight, out_dtype, eps)
    return _rmsnorm_fwd(x, weight, out_dtype, eps), None


def rmsnorm_bwd(x, weight, dout, rstd):
    if weight is None:
        return _rmsnorm_bwd(x, None, dout, rstd), None
    return _rmsnorm_bwd_dw(x, weight, dout, rstd)


def rmsnorm_by(x, weight, out_dtype, eps, *how):
    if is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return _RMSNormBy.apply(x, weight, out_dtype, eps, *how)
    if forward_ad._current_level >= 0:
        _refuse_tangents(x, weight)
    return _rmsnorm_fwd_by(x, weight, out_dtype, eps, *how)


def rmsnorm_fwd_by(x, weight, out_dtype, eps, store_rstd, *how):
    if store_rstd:
        return _rmsnorm_fwd_rstd_by(x, weight, out_dtype, eps, *how)
    return _rmsnorm_fwd_by(x, weight, out_dtype, eps, *how), None


def rmsnorm_bwd_by(x, weight, dout, rstd, *how):
    if weight is None:
        return _rmsnorm_bwd_by(x, None, dout, rstd, *how), None
    return _rmsnorm_bwd_dw_by(x, weight, dout, rstd, *how)


def cross_entropy(x, target, weight=None, ignore_index=-100, reduction=1, in_place=False, one_pass=None):
    if one_pass is None and not is_dynamo_compiling():
        loss = _straight_cross_entropy(x, target, weight, ignore_index, reduction, in_place)
        if loss is not None:
            return loss
    if is_grad_enabled():
        if weight is not None and weight.requires_grad:
            raise _class_weights_need_gradient()
        if x.requires_grad:
            if _traced():  # a compiled graph plans its own memory, and cannot write to its inputs in backward
                return _CrossEntropy.apply(x, target, weight, ignore_index, reduction, False)
            if one_pass is None:
                one_pass = x.numel() >= _ONE_PASS
            if one_pass and reduction and x.is_cuda and not in_place:
                return _one_pass_apply(x, target, weight, ignore_index, reduction)
            return _cross_entropy_apply(x, target, weight, ignore_index, reduction, in_place)
    if forward_ad._current_level >= 0:
        _refuse_tangents(x)
    return _cross_entropy_fwd(x, target, weight, ignore_index, reduction)


def _class_weights_need_gradient():
    return NotImplementedError("weight requires a gradient, but class weights have none; detach it")


def cross_entropy_invariant(x, target, weight, ignore_index, reduction, in_place):
    if is_grad_enabled():
        if weight is not None and weight.requires_grad:
            raise _class_weights_need_gradient()
        if x.requires_grad:  # in two passes whatever x's size
            in_place = in_place and not _traced()
            return _CrossEntropyInvariant.apply(x, target, weight, ignore_index, reduction, in_place)
    if forward_ad._current_level >= 0:
        _refuse_tangents(x)
    return _cross_entropy_fwd_invariant(x, target, weight, ignore_index, reduction)


# One forward pass over the logits: the ops for the loss alone, with lse, with dx too, and with dx over x.
_FORWARDS = _cross_entropy_fwd, _cross_entropy_fwd_lse, _cross_entropy_fwd_dx, _cross_entropy_fwd_dx_
_INVARIANT_FORWARDS = (
    _cross_entropy_fwd_invariant,
    _cross_entropy_fwd_lse_invariant,
    _cross_entropy_fwd_dx_invariant,
    _cross_entropy_fwd_dx_invariant_,
)


def _cross_entropy_parts(ops, x, target, weight, ignore_index, with_lse, with_dx, in_place):
    """(loss, lse or None, dx or None)"""
    loss, loss_lse, loss_lse_dx, over_x = ops
    if with_dx and in_place:
        return *over_x(x, target, weight, ignore_index), x
    if with_dx:
        return loss_lse_dx(x, target, weight, ignore_index)
    if with_lse:
        return *loss_lse(x, target, weight, ignore_index), None
    return loss(x, target, weight, ignore_index, 0), None, None


def cross_entropy_fwd(*arguments):
    return _cross_entropy_parts(_FORWARDS, *arguments)


def cross_entropy_fwd_invariant(*arguments):
    return _cross_entropy_parts(_INVARIANT_FORWARDS, *arguments)


def cross_entropy_bwd(x, target, dloss, lse, weight, ignore_index, in_place):
    if in_place:
        _cross_entropy_bwd_(x, target, weight, dloss, lse, ignore_index, 0)
        return x
    return _cross_entropy_bwd(x, target, weight, dloss, lse, ignore_index, 0)


for _function in (softmax, rmsnorm, cross_entropy):
    _registry.impl(_function.__name__, _function, "CompositeImplicitAutograd")

_ops.use_torch(sys.modules[__name__])
