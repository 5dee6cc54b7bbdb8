"""Cross-entropy's gradient in graphs for Inductor.

By default it is a formula in torch's operators. Inductor can fuse it with what follows, and write it over the
logits. It could do neither with a kernel of ours. On request (one_pass) forward makes it along with the loss.
"""

import functools
import math
import operator

import torch
from torch import Tensor, no_grad
from torch._functorch import config as functorch_config
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils.checkpoint import CheckpointPolicy

from .._table import MEAN, NONE, TORCH, arguments
from .autograd import once_differentiable
from .graph_operators import define
from .registry import by_name, overloads

# ---- A formula ----

_GRADIENT = "cross_entropy_bwd"


def _minus_one(log):
    """exp(log) - 1 for log <= 0, with the digits of a small log. It is a series there, because every element
    of the logits pays for it.
    """
    series = 1.0
    for divisor in (6, 5, 4, 3, 2):
        series = 1 + log / divisor * series
    return torch.where(log > -0.25, log * series, log.exp() - 1)


def formula(
    x,
    target,
    weight,
    dloss,
    lse,
    divisor,
    ignore_index,
    reduction,
    label_smoothing=0.0,
    z_loss=0.0,
    scale=1.0,
    softcap=0.0,
    temperature=1.0,
    dlse=None,
):
    """What cross_entropy_bwd computes, in torch's operators. lse is what cross_entropy returns: the rows'
    maxima, the logarithms of their sums, and the denominator of the mean.

    dlse: the upstream gradient of the rows' log-sum-exps, whose gradient is added.
    """
    classes, rows = x.shape[-1], target.numel()
    high, log_sum = (part.view(*target.shape, 1) for part in (lse[:rows], lse[rows : 2 * rows]))
    target = target.long().unsqueeze(-1)
    dlse = None if dlse is None else dlse.reshape(target.shape)
    gradient = dloss.to(lse.dtype)
    if reduction == NONE and dloss.shape not in ((), (1,)):
        gradient = gradient.reshape(target.shape)
    if reduction == MEAN:
        gradient = gradient / lse[-1]
    if divisor is not None:
        gradient = gradient / divisor
    ignored, others = target == ignore_index, gradient * (label_smoothing / classes)
    of_lse = gradient * (2 * z_loss)
    if weight is not None:
        weight = weight.to(lse.dtype)
        own = weight[target.clamp(0, classes - 1)]
        gradient = gradient * own
        if not label_smoothing and not z_loss:
            unused = own == 0 if dlse is None else (own == 0) & (dlse == 0)
            ignored = ignored | unused
    gradient = torch.where((target < 0) | (target >= classes), math.nan, gradient)
    z, slope = x.to(lse.dtype), scale / temperature
    if softcap:
        capped = torch.tanh(z * (scale / softcap))
        z, slope = capped * (softcap / temperature), (1 - capped) * (1 + capped) * slope
    elif slope != 1:
        z = z * slope
    log = (z - high) - log_sum
    at_target = torch.arange(classes, device=x.device) == target
    dx = gradient * torch.where(at_target, _minus_one(log), log.exp())
    if label_smoothing:
        weight, whole = (1, classes) if weight is None else (weight, weight.sum())
        dx = dx * (1 - label_smoothing) + others * (log.exp() * whole - weight)
    if z_loss:
        dx = dx + of_lse * (high + log_sum) * log.exp()
    if dlse is not None:
        dx = dx + dlse * log.exp()
    return torch.where(ignored, 0, dx * slope).to(x.dtype)


FUSED_ON = ("cuda",)  # measured there; on the CPU a compiled call keeps the bits of an eager one


def is_for_inductor(x):
    """Whether the graph that is being traced is for Inductor, or torch's backend for debugging it."""
    traced = isinstance(x, FunctionalTensor) and getattr(functorch_config, "unlift_effect_tokens", False)
    return traced and x.device.type in FUSED_ON


_aten = torch.ops.aten
_VIEWS = {
    *(_aten.alias, _aten.detach, _aten.view, _aten._unsafe_view, _aten.reshape, _aten.t, _aten.transpose),
    *(_aten.permute, _aten.slice, _aten.select, _aten.squeeze, _aten.unsqueeze),
}
_CASTS = {_aten._to_copy, torch.ops.prims.convert_element_type}
_PRODUCTS = {_aten.mm, _aten.bmm}


def _is(node, overloads):
    return getattr(node.target, "overloadpacket", None) in overloads


def _is_exact(node):
    """Whether a node holds the numbers of its argument, all their digits included."""
    if not _is(node, _CASTS):
        return _is(node, _VIEWS)
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    return torch.promote_types(before, after) == after


def _source(node, steps):
    while _is(node, steps) and _is_exact(node):
        node = node.args[0]
    return node


def _fuses_products():
    """Whether Inductor may cast a matrix product before it rounds it."""
    from torch._inductor import config

    return config.max_autotune or config.max_autotune_gemm


def _keep_for_backward(x, steps=_VIEWS | _CASTS):
    """Makes the graph save the logits that forward reads, or the product from which these steps lead to them.
    False if it can't.

    Inductor would compute them anew where that is cheap, and does not round 16-bit numbers that it computes.
    They would then not be the logits whose log-sum-exp is subtracted: see RATIONALE.md.
    """
    mode = get_proxy_mode()
    if mode is None:  # nothing is recorded
        return True
    known = get_proxy_slot(torch._from_functional_tensor(x.elem), mode.tracer, None)
    if known is None:
        return False
    node = _source(known.proxy.node, _VIEWS)
    product = _source(node, steps)
    if product.op == "placeholder" or (_is(product, _PRODUCTS) and not _fuses_products()):
        node = product  # it is in memory, rounded, when it is cast
    if node.meta.get("recompute") not in (None, CheckpointPolicy.MUST_SAVE):  # an activation checkpoint
        return False
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return True


def gradient(given):
    """The gradient in a graph for Inductor, otherwise None."""
    if not is_for_inductor(given[0]):
        return None
    values = by_name(_GRADIENT, given)
    x, target, lse = values["x"], values["target"], values["lse"]
    if lse.dim() != 1 or lse.shape[0] != 2 * target.numel() + 1:  # one number for each row
        return None
    if values.pop("slice") or not _keep_for_backward(x):
        return None
    values.pop("batch_invariant")  # it always is
    with no_grad():
        dx = formula(**values)
    return once_differentiable(dx, *(operand for operand in given if isinstance(operand, Tensor)))


def gradient_with_lse(values, dlse):
    """The same from arguments by name, with the gradient of the rows' log-sum-exps."""
    x = values["x"]
    if not (is_for_inductor(x) and _keep_for_backward(x)):
        return None
    given = {name: value for name, value in values.items() if name != "batch_invariant"}
    with no_grad():
        dx = formula(**given, dlse=dlse)
    return once_differentiable(dx, *(value for value in given.values() if isinstance(value, Tensor)), dlse)


# ---- One pass ----
#
# Two operators that only graphs have. Backward returns a new tensor, as operators in graphs have to. Inductor
# is told to write it over the gradient that forward made, if nothing else reads that. Forward has a name of
# its own, so that torch cannot merge it with a call whose gradient the caller sees.

_FORWARD, _BACKWARD = "cross_entropy_fwd_one_pass", "cross_entropy_bwd_one_pass"
_DX = arguments(_BACKWARD).index("dx")


def _forward(*given):
    return overloads[_FORWARD](*given)


def _backward(*given):
    given = list(given)
    given[_DX] = given[_DX].clone()
    overloads[_BACKWARD](*given)
    return given[_DX]


def _schema(name):
    return TORCH[name].schema.replace(name, f"_{name}_in_graph")


forward_in_graph = define(_schema(_FORWARD), _forward, _forward)
backward_in_graph = define(
    _schema(_BACKWARD).replace("Tensor(a!) dx", "Tensor dx").replace("-> ()", "-> Tensor"),
    _backward,
    lambda *given: torch.empty_like(given[_DX]),
)


@functools.cache
def _teach_inductor():
    """Whether Inductor now writes the gradient over that of forward: not if it lacks a name used here."""
    try:
        from torch._inductor.ir import DonatedBuffer, FallbackKernel
        from torch._inductor.lowering import clone, fallback_handler, register_lowering
        from torch._inductor.virtualized import V
    except ImportError:
        return False

    def lower_backward(*given):
        given, node = list(given), V.graph.current_node.args[_DX]
        dx = given[_DX]
        is_own = node.target is operator.getitem or isinstance(dx.data.data, DonatedBuffer)
        if not is_own or len(node.users) > 1:
            given[_DX] = dx = clone(dx)
            dx.realize()
        FallbackKernel.create(overloads[_BACKWARD], *given)
        return dx

    forward = fallback_handler(overloads[_FORWARD], add_to_fallback_set=False)
    register_lowering(forward_in_graph, type_promotion_kind=None)(forward)
    register_lowering(backward_in_graph, type_promotion_kind=None)(lower_backward)
    return True


def may_keep_gradient(x):
    """Whether a graph can keep the gradient that forward makes, and write over it.

    Without donated buffers, a backward pass may run again, with the same tensors. What an activation
    checkpoint drops would be made twice.
    """
    if not (is_for_inductor(x) and functorch_config.donated_buffer and _teach_inductor()):
        return False
    return _keep_for_backward(x, _VIEWS)
