"""Label smoothing of classes that are divided among ranks.

With e for label_smoothing and C classes in all slices, the loss of a row is
(1 - e) (lse - z[t]) + e / C sum (lse - z[c]). The sum is that of the slices' own, sum (lse_r - z[c]), each of
which has n_r (lse - lse_r) more. No term is negative, so no digits cancel. Each rank sends its own sum along
with its statistics. The operators compute it as the loss of a slice with label_smoothing 1.

The operators' gradient with label_smoothing e n_r / C has e / C for each class. Only at the target it has
another factor, so the gradient there is computed apart.
"""

import torch

from .._table import MEAN, NONE
from . import operators_gen
from .autograd import once_differentiable
from .graph_operators import define
from .tensors import statistic

IGNORED = -(2**63)  # the local target of an ignored row, which equals no class


def _mapped(x, scale, softcap, temperature):
    """Mapped logits and their derivatives, as the operators have them."""
    if not softcap:
        factor = scale / temperature
        return x * factor, torch.full_like(x, factor)
    inner, outer = scale / softcap, softcap / temperature
    t = (x * inner).tanh()
    return t * outer, (1 - t) * (1 + t) * (inner * outer)


def _of_target(x, target):
    """Of each row of a slice: whether the target is in it, a column of it, and the logit there."""
    inside, column = (target >= 0) & (target < x.shape[-1]), target.clamp(0, x.shape[-1] - 1)
    return inside, column, x.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(statistic(x.dtype))


def write_part(part, x, target, ignored, scale=1.0, softcap=0.0, temperature=1.0):
    """Fills part, (4, rows): the statistics that sharded_cross_entropy_combine reads, and the sum of
    lse - z. target: counted from this slice."""
    inside, column, logit = _of_target(x, target)
    options = {"scale": scale, "softcap": softcap, "temperature": temperature, "label_smoothing": 1.0}
    skipped = target == ignored
    column = column.masked_fill(skipped, IGNORED)
    operators_gen.cross_entropy_fwd_out(
        x, column, None, loss=part[3], lse=part[:2], ignore_index=IGNORED, **options
    )
    part[3].mul_(x.shape[-1])
    own = part[1] + (part[0] - _mapped(logit, scale, softcap, temperature)[0].view(-1))
    part[2] = torch.where(inside.view(-1), own, float("nan")).masked_fill_(skipped.view(-1), 0)


def sums(parts, own, lse, sizes):
    """sum (lse - z) of whole rows. parts, (ranks, 3, rows): the statistics of the slices. own: their sums.
    lse: (2, rows), the two parts of whole rows' log-sum-exp."""
    total = torch.zeros_like(lse[0])
    for (high, log_sum, _), each, size in zip(parts, own, sizes, strict=True):
        if size:  # a slice whose logits are all -inf is infinitely far from any other
            each = each + size * ((lse[0] - high) + (lse[1] - log_sum))
            total = total + torch.where(high == float("-inf"), lse[0] - high, each)
    return total


def gradient(
    x, target, lse, dloss, classes, ignored, reduction, e, z_loss, scale, softcap, temperature, over=False
):
    """dx of a slice, over x on request. classes: how many there are in all slices. lse, dloss and reduction:
    those of cross_entropy_bwd. target: counted from this slice."""
    n, rows = x.shape[-1], target.numel()
    (inside, column, logit), skipped = _of_target(x, target), target == ignored
    z, slope = _mapped(logit, scale, softcap, temperature)
    high, log_sum = (part.view(target.shape) for part in lse[: 2 * rows].view(2, rows))
    log = (z - high) - log_sum
    own = torch.where(inside, log.expm1(), log.exp()) * (1 - e)
    own += (e + 2 * z_loss * (high + log_sum)) * log.exp() - e / classes
    own *= slope * dloss
    if reduction == MEAN:
        own /= lse[-1]
    options = {"reduction": reduction if reduction == MEAN else NONE, "label_smoothing": e * n / classes}
    options |= {"z_loss": z_loss, "scale": scale, "softcap": softcap, "temperature": temperature}
    given = {"target": column.masked_fill(skipped, IGNORED), "ignore_index": IGNORED, **options}
    given |= {"weight": None, "lse": lse, "dloss": dloss}
    if over:
        operators_gen.cross_entropy_bwd_(x, **given)
    dx = x if over else operators_gen.cross_entropy_bwd(x, **given)
    own = own.masked_fill_(skipped, 0).to(dx.dtype)
    return dx.scatter_(-1, column.unsqueeze(-1), own.unsqueeze(-1))


def _fake(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_gradient_in_graph = define(
    "cross_entropy_bwd_of_slice(Tensor x, Tensor target, Tensor lse, Tensor dloss, SymInt classes, "
    "SymInt ignore_index, int reduction, float label_smoothing, float z_loss, float scale, float softcap, "
    "float temperature) -> Tensor",
    gradient,
    _fake,
)


def gradient_once(x, target, lse, dloss, *options, over=False):
    """The same, whose own derivative raises an error."""
    with torch.no_grad():
        if over:
            dx = gradient(x, target, lse, dloss, *options, over=True).detach()
        else:
            dx = _gradient_in_graph(x, target, lse, dloss, *options)
    return once_differentiable(dx, x, dloss)
