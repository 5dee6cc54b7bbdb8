"""What is measured: the operators, their inputs, a float64 reference, and how each provider computes them."""

import functools
import importlib.metadata
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import gander
import torch
import torch.nn.functional as F

from .losses import OF_ENTROPY

EPS = 1e-6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# ---- Operators ----


@dataclass(frozen=True)
class Operator:
    """inputs(m, n, dtype, device) gives tensors, reference(*inputs) the results for float64 inputs, of which
    the first `checked` have the rows. traffic: an "r" for each (M, N) tensor that has to be read, then a "w"
    for each that has to be written; statistics, targets and weights are not counted. shared: the positions of
    the inputs that are not split into rows."""

    traffic: str
    inputs: Callable[..., tuple]
    reference: Callable[..., tuple]
    shared: tuple[int, ...] = ()
    checked: int = 1


def _logits(m, n, dtype, device):
    return (torch.randn(m, n, dtype=dtype, device=device),)


def _softmax_backward_inputs(m, n, dtype, device):
    (x,) = _logits(m, n, dtype, device)
    return torch.randn_like(x), F.softmax(x, -1)


def _rmsnorm_inputs(m, n, dtype, device):
    return *_logits(m, n, dtype, device), torch.randn(n, dtype=dtype, device=device)


def _rmsnorm_backward_inputs(m, n, dtype, device):
    x, weight = _rmsnorm_inputs(m, n, dtype, device)
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)  # without a float32 copy of x
    return x, weight, torch.randn_like(x), (norm.square() / n + EPS).rsqrt()


def _cross_entropy_inputs(m, n, dtype, device):
    return *_logits(m, n, dtype, device), torch.randint(n, (m,), device=device)


def _softmax_backward(dy, y):
    return ((dy - (dy * y).sum(-1, keepdim=True)) * y,)


def _rmsnorm_backward(x, weight, dout, rstd):
    h, g = x * rstd.unsqueeze(-1), dout * weight
    dx = (g - h * (g * h).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx, (dout * h).sum(0)


def _cross_entropy_gradient(x, target):
    onehot = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    return (F.softmax(x, -1) - onehot.to(x.dtype),)


OPERATORS = {
    "softmax_forward": Operator("rw", _logits, lambda x: (F.softmax(x, -1),)),
    "softmax_backward": Operator("rrw", _softmax_backward_inputs, _softmax_backward),
    "rmsnorm_forward": Operator(
        "rw", _rmsnorm_inputs, lambda x, weight: (F.rms_norm(x, weight.shape, weight, EPS),), (1,)
    ),
    "rmsnorm_backward": Operator("rrw", _rmsnorm_backward_inputs, _rmsnorm_backward, (1,)),
    "cross_entropy_forward": Operator(
        "r", _cross_entropy_inputs, lambda x, target: (F.cross_entropy(x, target, reduction="none"),)
    ),
    "cross_entropy_loss_gradient": Operator("rw", _cross_entropy_inputs, _cross_entropy_gradient),
}


def _rmsnorm_residual_inputs(m, n, dtype, device):
    x, weight = _rmsnorm_inputs(m, n, dtype, device)
    return x, torch.randn_like(x), weight


def _rmsnorm_residual_backward_inputs(m, n, dtype, device):
    """x is what forward returned as residual_out."""
    x, weight, dout, rstd = _rmsnorm_backward_inputs(m, n, dtype, device)
    return x, weight, dout, rstd, torch.randn_like(x)


def _rmsnorm_residual_backward(x, weight, dout, rstd, dresidual_out):
    dx, dw = _rmsnorm_backward(x, weight, dout, rstd)
    return dx + dresidual_out, dw


def _fused_add_rmsnorm_inputs(m, n, dtype, device):
    """With weights below 1, the residual stays within float16 for as many calls as are timed."""
    x, residual, weight = _rmsnorm_residual_inputs(m, n, dtype, device)
    return x, residual, torch.rand_like(weight)


def _layernorm_inputs(m, n, dtype, device):
    return *_rmsnorm_inputs(m, n, dtype, device), torch.randn(n, dtype=dtype, device=device)


def _layernorm_residual_inputs(m, n, dtype, device):
    x, weight, bias = _layernorm_inputs(m, n, dtype, device)
    return x, torch.randn_like(x), weight, bias


def _layernorm_backward_inputs(m, n, dtype, device):
    x, weight = _rmsnorm_inputs(m, n, dtype, device)
    mean = x.mean(-1, dtype=torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)  # without a float32 copy of x
    rstd = (norm.square() / n - mean.square() + EPS).rsqrt()
    return x, weight, torch.randn_like(x), rstd, mean


def _layernorm_backward(x, weight, dout, rstd, mean):
    h, g = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1), dout * weight
    dx = (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx, (dout * h).sum(0), dout.sum(0)


def _rmsnorm_residual(x, residual, weight):
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, EPS), h


def _layernorm(x, weight, bias):
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def _layernorm_residual(x, residual, weight, bias):
    h = x + residual
    return _layernorm(h, weight, bias), h


# The norms with options, which the section `norms` compares.
NORMS = {
    "rmsnorm_residual_forward": Operator("rrww", _rmsnorm_residual_inputs, _rmsnorm_residual, (2,), 2),
    "rmsnorm_residual_backward": Operator(
        "rrrw", _rmsnorm_residual_backward_inputs, _rmsnorm_residual_backward, (1,)
    ),
    "layernorm_forward": Operator("rw", _layernorm_inputs, lambda *inputs: (_layernorm(*inputs),), (1, 2)),
    "layernorm_residual_forward": Operator(
        "rrww", _layernorm_residual_inputs, _layernorm_residual, (2, 3), 2
    ),
    "layernorm_backward": Operator("rrw", _layernorm_backward_inputs, _layernorm_backward, (1,)),
    "fused_add_rmsnorm": Operator("rrww", _fused_add_rmsnorm_inputs, _rmsnorm_residual, (2,), 2),
}


def _glu_inputs(m, n, dtype, device):
    return *_logits(m, n, dtype, device), *_logits(m, n, dtype, device)


def _glu_backward_inputs(m, n, dtype, device):
    return *_glu_inputs(m, n, dtype, device), *_logits(m, n, dtype, device)


def _swiglu(gate, up):
    return F.silu(gate) * up


def _swiglu_backward(gate, up, dy):
    share = torch.sigmoid(gate)
    return dy * up * share * (1 + gate * (1 - share)), dy * gate * share


# Gated linear units, which the section `glu` compares.
GLU = {
    "swiglu_forward": Operator("rrw", _glu_inputs, lambda *inputs: (_swiglu(*inputs),)),
    "swiglu_backward": Operator("rrrww", _glu_backward_inputs, _swiglu_backward, (), 2),
}


def _heads(m, n, dtype, device):
    """Heads of m tokens, of queries and of keys, which have n elements for each token together. Models have
    heads of 128 elements, mostly 32 of queries, and fewer of keys."""
    columns = math.gcd(n, 128)
    queries = min(32, n // columns - 1)
    return tuple(
        torch.randn(m, heads, columns, dtype=dtype, device=device)
        for heads in (queries, n // columns - queries)
    )


def _rotary_inputs(m, n, dtype, device, *, partial=False, interleaved=False):
    """Tables have a number for each element, as transformers makes them."""
    q, k = _heads(m, n, dtype, device)
    pairs = q.shape[-1] // (4 if partial else 2)
    frequencies = 1e4 ** -(torch.arange(pairs, device=device) / pairs)
    angles = torch.arange(m, device=device).unsqueeze(-1) * frequencies
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def _as_in_models(function, **options):
    """A function of heads (1, H, S, D) that are transposed views, and of tables (1, S, R), as transformers
    calls it, for heads (S, H, D) and tables (S, R)."""

    def call(q, k, cos, sin):
        turned = function(*(x.transpose(0, 1)[None] for x in (q, k)), cos[None], sin[None], **options)
        return tuple(y[0].transpose(0, 1) for y in turned)

    return call


def _rotary(q, k, cos, sin, interleaved=False):
    """The formula of transformers."""
    cos, sin, rotated = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]

    def rotate(x):
        head, rest = x[..., :rotated], x[..., rotated:]
        if interleaved:
            turned = torch.stack((-head[..., 1::2], head[..., ::2]), -1).flatten(-2)
        else:
            turned = torch.cat((-head[..., rotated // 2 :], head[..., : rotated // 2]), -1)
        y = head * cos + turned * sin
        return torch.cat((y, rest), -1) if rest.shape[-1] else y

    return rotate(q), rotate(k)


def _rotary_backward(q, k, cos, sin, interleaved=False):
    """Rotates gradients back. Both elements of a pair have the same angle."""
    return _rotary(q, k, cos, -sin, interleaved)


# Rotary position embeddings, which the section `rotary` compares. By name: what is another than in Llama.
_ROTARY = {"rotary": {}, "rotary_partial": {"partial": True}, "rotary_interleaved": {"interleaved": True}}


def _of_rotary(direction, operator):
    """By name, what operator(interleaved) gives for each kind of embeddings."""
    return {f"{name}_{direction}": operator("interleaved" in kind) for name, kind in _ROTARY.items()}


ROTARY = {
    f"{name}_{direction}": Operator(
        "rw",
        functools.partial(_rotary_inputs, **kind),
        _as_in_models(function, interleaved="interleaved" in kind),
        checked=2,
    )
    for direction, function in (("forward", _rotary), ("backward", _rotary_backward))
    for name, kind in _ROTARY.items()
}


def _qk_norm_inputs(m, n, dtype, device):
    q, k, *tables = _rotary_inputs(m, n, dtype, device)
    return q, k, *tables, *(torch.randn(q.shape[-1], dtype=dtype, device=device) for _ in "qk")


def _qk_norm_backward_inputs(m, n, dtype, device):
    q, k, *more = _qk_norm_inputs(m, n, dtype, device)
    return q, k, *more, torch.randn_like(q), torch.randn_like(k)


def _qk_norm_rotary(q, k, cos, sin, q_weight, k_weight):
    """As Qwen3 has it: RMSNorm of each head, then rotary."""
    normed = [F.rms_norm(x, w.shape, w, EPS) for x, w in ((q, q_weight), (k, k_weight))]
    return _rotary(*normed, cos, sin)


def _qk_norm_rotary_backward(q, k, cos, sin, q_weight, k_weight, dq, dk):
    dx, dw = [], []
    turned = _rotary_backward(dq, dk, cos, sin)
    for x, weight, dout in zip((q, k), (q_weight, k_weight), turned, strict=True):
        heads = x.flatten(0, 1)
        rstd = (heads.square().mean(-1) + EPS).rsqrt()
        gradient, total = _rmsnorm_backward(heads, weight, dout.flatten(0, 1), rstd)
        dx.append(gradient.view(x.shape)), dw.append(total)
    return *dx, *dw


# Rotary of normalized heads, in the same section. Tables and weights are shared by all heads of a token.
QK_NORM = {
    "qk_norm_rotary_forward": Operator("rw", _qk_norm_inputs, _qk_norm_rotary, (4, 5), checked=2),
    "qk_norm_rotary_backward": Operator(
        "rrw", _qk_norm_backward_inputs, _qk_norm_rotary_backward, (4, 5), checked=2
    ),
}


def _mapped(x, temperature, softcap):
    """The logits that the loss is of."""
    z = x if softcap is None else softcap * (x / softcap).tanh()
    return z if temperature == 1 else z / temperature


def _losses_with(
    x, target, reduction="none", *, label_smoothing=0.0, z_loss=0.0, temperature=1.0, softcap=None
):
    z = _mapped(x, temperature, softcap)
    loss = F.cross_entropy(z, target, reduction=reduction, label_smoothing=label_smoothing)
    if not z_loss:
        return loss
    squares = z_loss * z.logsumexp(-1).square()
    return loss + (squares.sum() if reduction == "sum" else squares)


def _gradient_with(x, target, *, label_smoothing=0.0, z_loss=0.0, temperature=1.0, softcap=None):
    """Of the sum of the losses."""
    z = _mapped(x, temperature, softcap)
    lse = z.logsumexp(-1, keepdim=True)
    onehot = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    dz = (z - lse).exp() * (1 + 2 * z_loss * lse)
    dz = dz - (1 - label_smoothing) * onehot.to(x.dtype) - label_smoothing / x.shape[-1]
    dz = dz if temperature == 1 else dz / temperature
    return dz if softcap is None else dz * (1 - (x / softcap).tanh().square())


# Options of a loss by the name of what has them. Liger has no temperature.
_EACH = {
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-4},
    "temperature": {"temperature": 0.7},
    "softcap": {"softcap": 30.0},
}
LOSS_OPTIONS = _EACH | {"options": {name: value for one in _EACH.values() for name, value in one.items()}}


def _of_losses(way, operator, names=tuple(LOSS_OPTIONS)):
    """By name, what operator(**options) gives for each of the options of a loss."""
    return {f"cross_entropy_{name}_{way}": operator(**LOSS_OPTIONS[name]) for name in names}


# Cross-entropy with options, which the section `options` compares.
OPTIONED = _of_losses(
    "forward",
    lambda **how: Operator("r", _cross_entropy_inputs, lambda *inputs: (_losses_with(*inputs, **how),)),
) | _of_losses(
    "loss_gradient",
    lambda **how: Operator("rw", _cross_entropy_inputs, lambda *inputs: (_gradient_with(*inputs, **how),)),
)


def _probability_inputs(m, n, dtype, device):
    x, p = (torch.randn(m, n, dtype=dtype, device=device) for _ in range(2))
    return x, p.softmax(-1)


def _probability_losses(x, p):
    return (F.cross_entropy(x, p.to(x.dtype), reduction="none"),)


def _probability_gradient(x, p):
    """Of the sum of the losses. Rounded probabilities do not sum to 1."""
    return (x.softmax(-1) * p.sum(-1, keepdim=True) - p,)


# Cross-entropy of class probabilities, in the section `options`. Backward is measured without forward.
PROBABILITIES = {
    "cross_entropy_probabilities_forward": Operator("rr", _probability_inputs, _probability_losses),
    "cross_entropy_probabilities_backward": Operator("rrw", _probability_inputs, _probability_gradient),
}


def _token_inputs(m, n, dtype, device, *, masked=False):
    """With a mask, every second row is left out."""
    x, index = _cross_entropy_inputs(m, n, dtype, device)
    return (x, index, torch.arange(m, device=device) % 2 == 0) if masked else (x, index)


def _tokens(x, index, row_mask=None, *, temperature=1.0, softcap=None, every=False):
    """log_prob and entropy; with `every` all statistics."""
    z = _mapped(x, temperature, softcap)
    log_p = F.log_softmax(z, -1)
    p = log_p.exp()
    found = [log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), -(p * log_p).sum(-1)]
    if every:
        predicted = z.argmax(-1)
        found += [p.square().sum(-1).log(), z.mean(-1), predicted == index, predicted]
    return tuple(found if row_mask is None else (torch.where(row_mask, v, 0) for v in found))


def _tokens_gradient(x, index, row_mask=None, *, temperature=1.0, softcap=None):
    z = _mapped(x, temperature, softcap)
    log_p = F.log_softmax(z, -1)
    p = log_p.exp()
    onehot = torch.arange(x.shape[-1], device=x.device) == index.unsqueeze(-1)
    entropy = -(p * log_p).sum(-1, keepdim=True)
    dz = onehot.to(x.dtype) - p - OF_ENTROPY * p * (log_p + entropy)
    dz = dz if temperature == 1 else dz / temperature
    dz = dz if softcap is None else dz * (1 - (x / softcap).tanh().square())
    return (dz if row_mask is None else torch.where(row_mask.unsqueeze(-1), dz, 0),)


_TOKENS = {
    "token_statistics": {},
    "token_statistics_temperature": {"temperature": 0.7},
    "token_statistics_softcap": {"softcap": 30.0},
    "token_statistics_masked": {},
    "token_statistics_all": {"every": True},
}


def _of_tokens(way, operator, names=tuple(_TOKENS)):
    """By name, what operator(**options) gives for each kind of call."""
    return {f"{name}_{way}": operator(**_TOKENS[name]) for name in names}


_DIFFERENTIATED = tuple(_TOKENS)[:-1]
# Statistics of tokens, which the section `tokens` compares: log_prob and entropy, forward and through
# autograd, and forward all of them.
STATISTICS = _of_tokens(
    "forward", lambda **how: Operator("r", _token_inputs, functools.partial(_tokens, **how))
) | _of_tokens(
    "gradient",
    lambda **how: Operator("rw", _token_inputs, functools.partial(_tokens_gradient, **how)),
    _DIFFERENTIATED,
)
for _name in [name for name in STATISTICS if "masked" in name]:
    STATISTICS[_name] = replace(STATISTICS[_name], inputs=functools.partial(_token_inputs, masked=True))
# What the section `invariant` measures with batch_invariant=True, and without.
BATCH_INVARIANT = (*OPERATORS, "token_statistics_forward", "token_statistics_gradient")
COMPARED = OPERATORS | NORMS | GLU | ROTARY | QK_NORM | OPTIONED | PROBABILITIES | STATISTICS


def _rmsnorm_backward_dx_inputs(m, n, dtype, device):
    x, _, dout, rstd = _rmsnorm_backward_inputs(m, n, dtype, device)
    return x, dout, rstd


def _rmsnorm_backward_dx(x, dout, rstd):
    return (_rmsnorm_backward(x, torch.ones_like(x[0]), dout, rstd)[0],)


def _cross_entropy_backward_inputs(m, n, dtype, device):
    x, target = _cross_entropy_inputs(m, n, dtype, device)
    return x, target, torch.rand(m, device=device) + 0.5, torch.logsumexp(x.float(), -1)


def _cross_entropy_backward(x, target, dloss, lse):
    onehot = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    return (((x - lse.unsqueeze(-1)).exp() - onehot.to(x.dtype)) * dloss.unsqueeze(-1),)


# What the planner chooses kernels for, but the benchmark does not compare: gander alone has it.
PARTS = {
    "rmsnorm_backward_dx": Operator("rrw", _rmsnorm_backward_dx_inputs, _rmsnorm_backward_dx),
    "cross_entropy_backward": Operator("rw", _cross_entropy_backward_inputs, _cross_entropy_backward),
}
ALL = COMPARED | PARTS


def double(tensors):
    """The same numbers in float64; targets stay as they are."""
    return [t.double() if t.is_floating_point() else t for t in tensors]


def rows_of(op: str, inputs, rows):
    """The same inputs for some of the M rows."""
    return [t if position in ALL[op].shared else t[rows] for position, t in enumerate(inputs)]


def nan_last(error: float) -> tuple[bool, float]:
    """A key for max(), which by itself leaves out a NaN that is not first."""
    return math.isnan(error), error


# ---- Providers ----


@dataclass(frozen=True)
class Provider:
    """functions: what people call, by name: softmax(x), rmsnorm(x, weight), cross_entropy(x, target),
    linear_cross_entropy(x, weight, target), token_statistics(x, index) and linear_token_statistics(x, weight,
    index, outputs), differentiable. operators: by name a function that takes the
    inputs and gives run(), which does the work anew at each call and returns its results, first those that
    belong to the rows. A provider need not have all of either."""

    functions: dict[str, Callable]
    operators: dict[str, Callable]


def _direct(function):
    return functools.partial(functools.partial, function)


def _tuple(function):
    """For functions that return a tensor: all results are tuples."""
    return _direct(lambda *inputs: (function(*inputs),))


def _leaf(x):
    return x.detach().requires_grad_()


def _backward_of(function, tensors, gradients):
    """The backward pass alone: the graph is made once and kept."""
    leaves = tuple(_leaf(tensor) for tensor in tensors)
    results = function(*leaves)
    return lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True)


def _rmsnorm_gradient(rmsnorm):
    return lambda x, weight, dout, rstd: _backward_of(rmsnorm, (x, weight), dout)


def _rmsnorm_residual_gradient(rmsnorm):
    """rmsnorm(x, residual, weight) gets the sum as x, and zeros to add."""

    def prepare(x, weight, dout, rstd, dresidual_out):
        def forward(x, weight):
            return rmsnorm(x, torch.zeros_like(x), weight)

        return _backward_of(forward, (x, weight), (dout, dresidual_out))

    return prepare


def _layernorm_gradient(layernorm):
    def prepare(x, weight, dout, rstd, mean):
        return _backward_of(layernorm, (x, weight, torch.zeros_like(weight)), dout)

    return prepare


def _in_place(function):
    """For functions that write over x and residual: they get copies, whose values are right for the first
    call only."""

    def prepare(x, residual, weight):
        x, residual = x.clone(), residual.clone()

        def run():
            function(x, residual, weight)
            return x, residual

        return run

    return prepare


def _loss_gradient(cross_entropy):
    def prepare(x, target):
        leaf = _leaf(x)
        return lambda: torch.autograd.grad(cross_entropy(leaf, target), leaf)

    return prepare


def _loss_gradient_in_place(cross_entropy):
    """The gradient is written over the logits: a copy, whose values are right for the first call only."""
    return lambda x, target: _loss_gradient(cross_entropy)(x.clone(), target)


def _probabilities_backward(cross_entropy):
    def prepare(x, p):
        leaf = _leaf(x)
        losses = cross_entropy(leaf, p, reduction="none")
        ones = torch.ones_like(losses)
        return lambda: torch.autograd.grad(losses, leaf, ones, retain_graph=True)

    return prepare


def _softmax(x):
    return F.softmax(x, -1)


def _rmsnorm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def _add_rmsnorm_in_place(x, residual, weight):
    residual.add_(x)
    x.copy_(_rmsnorm(residual, weight))


def _torch_layernorm_backward(x, weight, dout, rstd, mean):
    """torch's own operator, with statistics of the dtype and the shape that it gives them."""
    more = weight.shape, weight, torch.zeros_like(weight)
    _, mean, rstd = torch.native_layer_norm(x, *more, EPS)
    shape, *parameters = more
    operator = torch.ops.aten.native_layer_norm_backward
    return functools.partial(operator, dout, x, shape, mean, rstd, *parameters, [True] * 3)


def _torch_rotary_backward(interleaved):
    def prepare(dq, dk, cos, sin):
        function = _as_in_models(_rotary, interleaved=interleaved)
        return _backward_of(lambda q, k: function(q, k, cos, sin), (dq, dk), (dq, dk))

    return prepare


def _qk_norm_rotary_gradient(function):
    def prepare(q, k, cos, sin, q_weight, k_weight, dq, dk):
        def forward(q, k, q_weight, k_weight):
            return function(q, k, cos, sin, q_weight, k_weight)

        return _backward_of(forward, (q, k, q_weight, k_weight), (dq, dk))

    return prepare


def _losses(x, target):
    return F.cross_entropy(x, target, reduction="none")


def _sum_of_losses(x, target):
    return F.cross_entropy(x, target, reduction="sum")


def _linear_loss(x, weight, target):
    return F.cross_entropy(F.linear(x, weight), target)


def _log_probs(x, index):
    return _tokens(x.float(), index)


def _linear_tokens(x, weight, index, outputs=("log_prob", "entropy")):
    return _tokens(F.linear(x, weight).float(), index)[: len(outputs)]


@functools.cache
def _mesh(device: str):
    """Of all ranks; the group stays as long as the process."""
    return torch.distributed.init_device_mesh(device, (torch.distributed.get_world_size(),))


def _loss_parallel(x, target):
    """The loss of a DTensor. Forward and backward have to run under torch's loss_parallel."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = _mesh(x.device.type)
    logits = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    loss = F.cross_entropy(logits, DTensor.from_local(target, mesh, [Replicate()], run_check=False))
    return loss.to_local()


def _torch():
    return Provider(
        {
            "softmax": _softmax,
            "rmsnorm": _rmsnorm,
            "cross_entropy": F.cross_entropy,
            "linear_cross_entropy": _linear_loss,
            "token_statistics": _log_probs,
            "linear_token_statistics": _linear_tokens,
            "sharded_cross_entropy": _loss_parallel,
        },
        {
            "softmax_forward": _tuple(_softmax),
            "softmax_backward": _tuple(lambda dy, y: torch._softmax_backward_data(dy, y, -1, y.dtype)),
            "rmsnorm_forward": _tuple(_rmsnorm),
            "rmsnorm_backward": _rmsnorm_gradient(_rmsnorm),
            "cross_entropy_forward": _tuple(_losses),
            "cross_entropy_loss_gradient": _loss_gradient(_sum_of_losses),
            "cross_entropy_probabilities_forward": _tuple(_losses),
            "cross_entropy_probabilities_backward": _probabilities_backward(F.cross_entropy),
            "rmsnorm_residual_forward": _direct(_rmsnorm_residual),
            "rmsnorm_residual_backward": _rmsnorm_residual_gradient(_rmsnorm_residual),
            "layernorm_forward": _tuple(_layernorm),
            "layernorm_residual_forward": _direct(_layernorm_residual),
            "layernorm_backward": _torch_layernorm_backward,
            "swiglu_forward": _tuple(_swiglu),
            "swiglu_backward": lambda gate, up, dy: _backward_of(_swiglu, (gate, up), dy),
            "fused_add_rmsnorm": _in_place(_add_rmsnorm_in_place),
            "qk_norm_rotary_forward": _direct(_qk_norm_rotary),
            "qk_norm_rotary_backward": _qk_norm_rotary_gradient(_qk_norm_rotary),
        }
        | _of_rotary("forward", lambda i: _direct(_as_in_models(_rotary, interleaved=i)))
        | _of_rotary("backward", _torch_rotary_backward)
        | _of_losses("forward", lambda **how: _tuple(functools.partial(_losses_with, **how)))
        | _of_losses(
            "loss_gradient",
            lambda **how: _loss_gradient(functools.partial(_losses_with, reduction="sum", **how)),
        )
        | _of_tokens("forward", lambda **how: _direct(_of_floats(_tokens, **how)))
        | _of_tokens(
            "gradient", lambda **how: statistics_gradient(_of_floats(_tokens, **how)), _DIFFERENTIATED
        ),
    )


def _float_softmax_backward(dy, y):
    (dx,) = _softmax_backward(dy.float(), y.float())
    return (dx.to(y.dtype),)


def _float_swiglu_backward(gate, up, dy):
    results = _swiglu_backward(*(t.float() for t in (gate, up, dy)))
    return tuple(t.to(gate.dtype) for t in results)


def _float_norm_backward(backward):
    """A norm's backward formula in float32, with results in the dtypes of x and weight."""

    def function(x, weight, *more):
        dx, *sums = backward(x.float(), weight.float(), *(t.float() for t in more))
        return dx.to(x.dtype), *(total.to(weight.dtype) for total in sums)

    return function


def _float_qk_norm_rotary_backward(q, *more):
    """In float32, with results in q's dtype."""
    return tuple(t.to(q.dtype) for t in _qk_norm_rotary_backward(q.float(), *(t.float() for t in more)))


def _float_loss_gradient(x, target):
    log_p = F.log_softmax(x.float(), -1)
    onehot = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    return (log_p.exp() - onehot.float()).to(x.dtype), -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _float_losses_with(**how):
    return lambda x, target: (_losses_with(x.float(), target, **how),)


def _float_gradient_with(**how):
    def function(x, target):
        wide = x.float()
        return _gradient_with(wide, target, **how).to(x.dtype), _losses_with(wide, target, **how)

    return function


def _of_floats(function, **how):
    """function of float32 logits. A gradient gets the logits' dtype."""

    def narrowed(x, *given):
        results = function(x.float(), *given, **how)
        return tuple(v.to(x.dtype) if v.shape == x.shape else v for v in results)

    return narrowed


def _separate_cache():
    """Gives Inductor a cache of its own for the instruction set that the user has chosen. Its cache does not
    tell them apart, and code for other vectors gives wrong results and writes beyond its tensors."""
    if chosen := os.environ.get("ATEN_CPU_CAPABILITY"):
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/gander-inductor-{os.getuid()}-{chosen}"
        )


# torch.compile at its best: for one shape, tuned.
_compile = functools.partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs")


def _compiled(function):
    """torch.compile at its best: compiled anew for each shape, tuned, and without autograd's bookkeeping."""

    def prepare(*inputs):
        torch.compiler.reset()  # or its limit of compilations per function is met
        return functools.partial(_compile(function), *inputs)

    return prepare


def _compiled_in_place(function):
    def prepare(*inputs):
        torch.compiler.reset()
        return _in_place(_compile(function))(*inputs)

    return prepare


def _compiled_functions(functions):
    _separate_cache()
    return {name: _compile(eager) for name, eager in functions.items()}


def _torch_compile():
    # Backward passes as formulas: Inductor fuses them as it does the gradients that autograd traces, and
    # nothing of autograd is timed.
    return Provider(
        _compiled_functions(
            {
                "softmax": _softmax,
                "rmsnorm": _rmsnorm,
                "cross_entropy": lambda x, target: F.cross_entropy(x, target),
                "linear_cross_entropy": _linear_loss,
                "token_statistics": _log_probs,
                "linear_token_statistics": _linear_tokens,
            }
        ),
        {
            "softmax_forward": _compiled(lambda x: (_softmax(x),)),
            "softmax_backward": _compiled(_float_softmax_backward),
            "rmsnorm_forward": _compiled(lambda x, weight: (_rmsnorm(x, weight),)),
            "rmsnorm_backward": _compiled(_float_norm_backward(_rmsnorm_backward)),
            "cross_entropy_forward": _compiled(lambda x, target: (_losses(x, target),)),
            "cross_entropy_loss_gradient": _compiled(_float_loss_gradient),
            "cross_entropy_probabilities_forward": _compiled(_of_floats(_probability_losses)),
            "cross_entropy_probabilities_backward": _compiled(_of_floats(_probability_gradient)),
            "rmsnorm_residual_forward": _compiled(_rmsnorm_residual),
            "rmsnorm_residual_backward": _compiled(_float_norm_backward(_rmsnorm_residual_backward)),
            "layernorm_forward": _compiled(lambda *inputs: (_layernorm(*inputs),)),
            "layernorm_residual_forward": _compiled(_layernorm_residual),
            "layernorm_backward": _compiled(_float_norm_backward(_layernorm_backward)),
            "swiglu_forward": _compiled(lambda *inputs: (_swiglu(*inputs),)),
            "swiglu_backward": _compiled(_float_swiglu_backward),
            "fused_add_rmsnorm": _compiled_in_place(_add_rmsnorm_in_place),
            "qk_norm_rotary_forward": _compiled(_qk_norm_rotary),
            "qk_norm_rotary_backward": _compiled(_float_qk_norm_rotary_backward),
        }
        | _of_rotary("forward", lambda i: _compiled(_as_in_models(_rotary, interleaved=i)))
        | _of_rotary("backward", lambda i: _compiled(_as_in_models(_rotary_backward, interleaved=i)))
        | _of_losses("forward", lambda **how: _compiled(_float_losses_with(**how)))
        | _of_losses("loss_gradient", lambda **how: _compiled(_float_gradient_with(**how)))
        | _of_tokens("forward", lambda **how: _compiled(_of_floats(_tokens, **how)))
        | _of_tokens(
            "gradient", lambda **how: _compiled(_of_floats(_tokens_gradient, **how)), _DIFFERENTIATED
        ),
    )


def _gander_losses(**how):
    return _tuple(functools.partial(gander.cross_entropy, reduction="none", **how))


def _gander_loss_gradient(**how):
    return _direct(lambda x, target: gander.cross_entropy_fwd(x, target, return_dx=True, **how)[::-1])


def _gander_rotary_backward(interleaved):
    options = {"interleaved": interleaved, "per_element": True, "needs_dk": True}
    return _direct(functools.partial(torch.ops.gander.rotary_bwd, **options))


def _gander_qk_norm_rotary(q, k, cos, sin, q_weight, k_weight):
    def normed(q, k, cos, sin):
        return gander.qk_norm_rotary(q, k, q_weight, k_weight, cos, sin, EPS)

    return _as_in_models(normed)(q, k, cos, sin)


def _gander_qk_norm_rotary_backward(q, k, cos, sin, q_weight, k_weight, dq, dk):
    more = {
        "per_element": True,
        "eps": EPS,
        **dict.fromkeys(("needs_dk", "needs_dq_weight", "needs_dk_weight"), True),
    }
    operands = q, k, q_weight, k_weight, cos, sin, None, None, dq, dk
    return torch.ops.gander.qk_norm_rotary_bwd(*operands, **more)


def _gander_tokens(every=False, **how):
    outputs = ("log_prob", "entropy", *_OTHERS) if every else ("log_prob", "entropy")
    how["outputs"] = outputs
    return _direct(
        lambda x, index, row_mask=None: gander.token_statistics(x, index, row_mask=row_mask, **how)
    )


_OTHERS = ("log_sum_sq_probs", "mean_logit", "is_top1", "predicted")


def statistics_gradient(function):
    """The gradient of what function(x, index, row_mask) returns, log_prob and entropy."""

    def prepare(x, index, row_mask=None):
        leaf = _leaf(x)
        ones = torch.ones(x.shape[0], device=x.device)
        upstream = ones, OF_ENTROPY * ones
        return lambda: torch.autograd.grad(function(leaf, index, row_mask), leaf, upstream)

    return prepare


def _gander_tokens_gradient(**how):
    return statistics_gradient(
        lambda x, index, row_mask: gander.token_statistics(x, index, row_mask=row_mask, **how)
    )


def _trl():
    """TRL's fused kernel for logits in hand, and its head of chunks."""
    from trl.trainer import utils

    def of_head(x, weight, index, outputs=("log_prob", "entropy")):
        names = tuple(name.replace("log_prob", "log_probs") for name in outputs)
        columns = utils._CHUNKED_LOGPROB_CHUNK_SIZE  # of a chunk, as its trainers have it
        results = utils._ChunkedLogProbFunction.apply(x, weight, None, index, 1.0, columns, None, 1.0, names)
        return results[: len(outputs)]

    def function(x, index, row_mask=None, temperature=1.0):
        return utils._fused_logprob_entropy(x, index, temperature=temperature, row_mask=row_mask)

    def forward(**how):
        return _direct(functools.partial(function, **how))

    def gradient(**how):
        return statistics_gradient(functools.partial(function, **how))

    served = tuple(name for name in _DIFFERENTIATED if "softcap" not in name)
    operators = _of_tokens("forward", forward, served) | _of_tokens("gradient", gradient, served)
    return Provider({"token_statistics": function, "linear_token_statistics": of_head}, operators)


def _verl():
    """verl's head, in Triton."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def of_head(x, weight, index, outputs=("log_prob", "entropy")):
        return linear_cross_entropy(x, weight, index, 1.0, "none")[: len(outputs)]

    return Provider({"linear_token_statistics": of_head}, {})


def _gander_linear_tokens(x, weight, index, outputs=("log_prob", "entropy"), keep="nothing"):
    return gander.linear_token_statistics(x, weight, index, outputs=outputs, keep=keep)


def _gander():
    return Provider(
        {
            "softmax": gander.softmax,
            "rmsnorm": lambda x, weight: gander.rmsnorm(x, weight, eps=EPS),
            "cross_entropy": gander.cross_entropy,
            "linear_cross_entropy": gander.linear_cross_entropy,
            "token_statistics": gander.token_statistics,
            "linear_token_statistics": _gander_linear_tokens,
        },
        {
            "softmax_forward": _tuple(gander.softmax),
            "softmax_backward": _tuple(gander.softmax_bwd),
            "rmsnorm_forward": _direct(lambda x, weight: gander.rmsnorm_fwd(x, weight, eps=EPS)),
            "rmsnorm_backward": _direct(lambda *inputs: gander.rmsnorm_bwd(*inputs)[:2]),
            "cross_entropy_forward": _gander_losses(),
            "cross_entropy_loss_gradient": _gander_loss_gradient(),
            "cross_entropy_probabilities_forward": _gander_losses(),
            "cross_entropy_probabilities_backward": _probabilities_backward(gander.cross_entropy),
            "rmsnorm_backward_dx": _tuple(lambda x, dout, rstd: gander.rmsnorm_bwd(x, None, dout, rstd)[0]),
            "cross_entropy_backward": _tuple(gander.cross_entropy_bwd),
            "rmsnorm_residual_forward": _direct(
                lambda x, residual, weight: gander.rmsnorm_fwd(x, weight, residual=residual, eps=EPS)[:2]
            ),
            "rmsnorm_residual_backward": _direct(lambda *inputs: gander.rmsnorm_bwd(*inputs)[:2]),
            "layernorm_forward": _tuple(functools.partial(gander.layernorm_fwd, eps=EPS)),
            "layernorm_residual_forward": _direct(
                lambda x, residual, *more: gander.layernorm(x, *more, residual, prenorm=True, eps=EPS)
            ),
            "layernorm_backward": _direct(gander.layernorm_bwd),
            "swiglu_forward": _tuple(gander.swiglu),
            "swiglu_backward": _direct(torch.ops.gander.glu_bwd),
            "fused_add_rmsnorm": _in_place(functools.partial(gander.fused_add_rmsnorm, eps=EPS)),
            "qk_norm_rotary_forward": _direct(_gander_qk_norm_rotary),
            "qk_norm_rotary_backward": _direct(_gander_qk_norm_rotary_backward),
        }
        | _of_rotary("forward", lambda i: _direct(_as_in_models(gander.rotary, interleaved=i)))
        | _of_rotary("backward", _gander_rotary_backward)
        | _of_losses("forward", _gander_losses)
        | _of_losses("loss_gradient", _gander_loss_gradient)
        | _of_tokens("forward", _gander_tokens)
        | _of_tokens("gradient", _gander_tokens_gradient, _DIFFERENTIATED),
    )


def _gander_apart():
    """The norms of heads, then rotary: what qk_norm_rotary does in one pass."""

    def function(q, k, cos, sin, q_weight, k_weight):
        normed = [gander.rmsnorm(x, w, eps=EPS) for x, w in ((q, q_weight), (k, k_weight))]
        return _as_in_models(gander.rotary)(*normed, cos, sin)

    return Provider(
        {},
        {
            "qk_norm_rotary_forward": _direct(function),
            "qk_norm_rotary_backward": _qk_norm_rotary_gradient(function),
        },
    )


def _gander_plain():
    """Cross-entropy without options, for a time beside that with options."""
    return Provider(
        {},
        {
            "cross_entropy_forward": _gander_losses(),
            "cross_entropy_loss_gradient": _gander_loss_gradient(),
        },
    )


def _gander_compile():
    """gander in functions that torch.compile compiles."""
    return Provider(_compiled_functions(_gander().functions), {})


def _gander_two_passes():
    """Cross-entropy that reads x again in backward, and so keeps no gradient until then, as statistics do."""
    cross_entropy = functools.partial(gander.cross_entropy, one_pass=False)
    return Provider({"cross_entropy": cross_entropy, "token_statistics": gander.token_statistics}, {})


def _gander_one_pass_compile():
    """Compiled cross-entropy that makes its gradient along with the loss."""
    function = functools.partial(gander.cross_entropy, one_pass=True)
    return Provider(_compiled_functions({"cross_entropy": function}), {})


def _gander_upstream():
    """Cross-entropy that is told which gradient of the loss backward will bring."""
    return Provider({"cross_entropy": gander.cross_entropy}, {})


def _gander_remember():
    """Cross-entropy that expects what backward brought last."""
    return Provider({"cross_entropy": gander.nn.CrossEntropyLoss(remember=True)}, {})


def _gander_chunks(chunks):
    """The linear loss, with the logits of so many parts of the rows in turn."""

    def loss(x, weight, target):
        return gander.linear_cross_entropy(x, weight, target, chunk=-(-len(x) // chunks))

    return Provider({"linear_cross_entropy": loss}, {})


def _gander_kept():
    """Statistics of a head that keep the logits for backward."""
    return Provider({"linear_token_statistics": functools.partial(_gander_linear_tokens, keep="logits")}, {})


def _gander_float32():
    """The linear loss, with dw accumulated in float32."""
    loss = functools.partial(gander.linear_cross_entropy, accumulate="float32")
    return Provider({"linear_cross_entropy": loss}, {})


def _gander_outputs():
    """The linear loss with what it returns on request, which takes a read of the logits besides."""

    def loss(x, weight, target):
        outputs = ("loss", "lse", "predicted", "is_top1")
        return gander.linear_cross_entropy(x, weight, target, outputs=outputs).loss

    return Provider({"linear_cross_entropy": loss}, {})


def _gander_sharded():
    """Cross-entropy and statistics of a rank's slice of the classes."""
    functions = {
        "sharded_cross_entropy": gander.distributed.cross_entropy,
        "sharded_token_statistics": gander.distributed.token_statistics,
    }
    return Provider(functions, {})


def _gander_with(**how):
    """What takes `algorithm=` and `batch_invariant=`, with one of them."""
    return Provider(
        {
            "softmax": functools.partial(gander.softmax, **how),
            "rmsnorm": functools.partial(gander.rmsnorm, eps=EPS, **how),
        },
        {
            "softmax_forward": _tuple(functools.partial(gander.softmax_fwd, **how)),
            "softmax_backward": _tuple(functools.partial(gander.softmax_bwd, **how)),
            "rmsnorm_forward": _direct(functools.partial(gander.rmsnorm_fwd, eps=EPS, **how)),
            "rmsnorm_backward": _direct(lambda *inputs: gander.rmsnorm_bwd(*inputs, **how)[:2]),
        },
    )


def _gander_batch_invariant():
    """The same bits for a row, whatever rows come with it."""
    how = {"batch_invariant": True}
    some = _gander_with(**how)
    return Provider(
        some.functions,
        some.operators
        | {
            "cross_entropy_forward": _gander_losses(**how),
            "cross_entropy_loss_gradient": _gander_loss_gradient(**how),
            "token_statistics_forward": _gander_tokens(**how),
            "token_statistics_gradient": _gander_tokens_gradient(**how),
        },
    )


def _quack():
    from quack import cross_entropy, rmsnorm, softmax
    from quack.cross_entropy import cross_entropy_fwd
    from quack.linear_cross_entropy import chunked_linear_cross_entropy
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
    from quack.rotary import apply_rotary
    from quack.softmax import softmax_bwd, softmax_fwd

    def rmsnorm_residual(x, residual, weight):
        return rmsnorm_fwd(x, weight, residual=residual, eps=EPS)[:2]

    def linear_loss(x, weight, target):
        # It refuses chunks of as many rows as x has columns.
        chunk = 4096 if x.shape[1] != 4096 else 2048
        return chunked_linear_cross_entropy(x, weight, target, chunk_size=chunk)

    def layernorm_forward(x, weight, bias):
        # It takes weights and biases of float32 alone.
        return _tuple(functools.partial(layernorm_fwd, eps=EPS))(x, weight.float(), bias.float())

    def rotary(interleaved, **how):
        """Of q and of k in turn, with tables that have a number for each pair."""
        how |= {"interleaved": interleaved}

        def prepare(q, k, cos, sin):
            pairs = slice(None, None, 2) if interleaved else slice(cos.shape[-1] // 2)
            tables = [t[:, pairs].contiguous() for t in (cos, sin)]
            return lambda: tuple(apply_rotary(x[None], *tables, **how)[0] for x in (q, k))

        return prepare

    return Provider(
        {
            "softmax": softmax,
            "rmsnorm": lambda x, weight: rmsnorm(x, weight, eps=EPS),
            "cross_entropy": cross_entropy,
            "linear_cross_entropy": linear_loss,
        },
        {
            "softmax_forward": _tuple(softmax_fwd),
            "softmax_backward": _tuple(softmax_bwd),
            "rmsnorm_forward": _direct(lambda x, weight: rmsnorm_fwd(x, weight, eps=EPS)),
            "rmsnorm_backward": _direct(lambda *inputs: rmsnorm_bwd(*inputs)[:2]),
            "cross_entropy_forward": _tuple(cross_entropy_fwd),
            "cross_entropy_loss_gradient": _direct(
                lambda x, target: cross_entropy_fwd(x, target, return_dx=True)[::-1]
            ),
            "rmsnorm_residual_forward": _direct(rmsnorm_residual),
            "rmsnorm_residual_backward": _direct(lambda *inputs: rmsnorm_bwd(*inputs)[:2]),
            "layernorm_forward": layernorm_forward,
            "layernorm_backward": _direct(layernorm_bwd),
            "fused_add_rmsnorm": _direct(rmsnorm_residual),  # quack writes to new tensors
        }
        | _of_rotary("forward", rotary)
        | _of_rotary("backward", functools.partial(rotary, conjugate=True)),
    )


def _liger():
    from liger_kernel.ops.rope import rope_backward
    from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward
    from liger_kernel.ops.swiglu import swiglu_backward as ligers_backward
    from liger_kernel.transformers.functional import (
        liger_cross_entropy,
        liger_fused_add_rms_norm,
        liger_fused_linear_cross_entropy,
        liger_layer_norm,
        liger_rms_norm,
        liger_rope,
        liger_softmax,
        liger_swiglu,
    )

    def swiglu_backward(gate, up, dy):
        """Liger writes over gate and up, whose values are right for the first call only."""
        return functools.partial(ligers_backward, gate.clone(), up.clone(), dy)

    def rotary(function):
        """Liger writes over q and k, or their gradients, too."""
        return lambda q, k, cos, sin: functools.partial(
            _as_in_models(function), q.clone(), k.clone(), cos, sin
        )

    def rmsnorm(x, weight):
        return liger_rms_norm(x, weight, EPS, in_place=False)

    def rmsnorm_residual(x, residual, weight):
        return liger_fused_add_rms_norm(x, residual, weight, EPS, in_place=False)

    def layernorm(x, weight, bias):
        return liger_layer_norm(x, weight, bias, EPS)

    def softmax_backward(dy, y):
        _, *launch = _softmax_forward(y)
        return lambda: (_softmax_backward(dy, y, *launch),)

    def losses(reduction, z_loss=0.0, **how):
        return functools.partial(liger_cross_entropy, reduction=reduction, lse_square_scale=z_loss, **how)

    def head(x, weight, index, outputs=("log_prob", "entropy")):
        """On Hopper in CuTe DSL, elsewhere chunks of torch's operators."""
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction  # of 0.8.5

        function = LigerFusedLinearScaledCrossEntropyFunction.apply
        if "entropy" not in outputs:
            return (-function(x, weight, index),)
        losses, entropy = function(x, weight, index, return_entropy=True)
        return -losses, entropy

    def of_slice(x, target):
        from liger_kernel.transformers import LigerVocabParallelCrossEntropy  # of 0.8

        group = torch.distributed.group.WORLD
        return LigerVocabParallelCrossEntropy()(x.unsqueeze(1), target.unsqueeze(1), group).mean()

    with_options = ("smoothing", "z_loss", "softcap")

    return Provider(
        {
            "sharded_cross_entropy": of_slice,
            "softmax": liger_softmax,
            "rmsnorm": rmsnorm,
            "cross_entropy": liger_cross_entropy,
            "linear_cross_entropy": liger_fused_linear_cross_entropy,
            "linear_token_statistics": head,
        },
        {
            "softmax_forward": _tuple(liger_softmax),
            "softmax_backward": softmax_backward,
            "rmsnorm_forward": _tuple(rmsnorm),
            "rmsnorm_backward": _rmsnorm_gradient(rmsnorm),
            "cross_entropy_forward": _tuple(functools.partial(liger_cross_entropy, reduction="none")),
            "cross_entropy_loss_gradient": _loss_gradient_in_place(
                functools.partial(liger_cross_entropy, reduction="sum")
            ),
            "rmsnorm_residual_forward": _direct(rmsnorm_residual),
            "rmsnorm_residual_backward": _rmsnorm_residual_gradient(rmsnorm_residual),
            "layernorm_forward": _tuple(layernorm),
            "swiglu_forward": _tuple(liger_swiglu),
            "swiglu_backward": swiglu_backward,
            "layernorm_backward": _layernorm_gradient(layernorm),
            "rotary_forward": rotary(liger_rope),
            "rotary_backward": rotary(rope_backward),
            "rotary_partial_forward": rotary(liger_rope),
            "rotary_partial_backward": rotary(rope_backward),
        }
        | _of_losses("forward", lambda **how: _tuple(losses("none", **how)), with_options)
        | _of_losses(
            "loss_gradient", lambda **how: _loss_gradient_in_place(losses("sum", **how)), with_options
        ),
    )


def _liger_cutedsl():
    """Liger's kernels written in CuTe DSL, in place of those in Triton."""
    from liger_kernel import functional
    from liger_kernel.backends.dispatch import resolve_impl

    which = {"impl": "nvidia-cutedsl"}
    for name in ("rms_norm", "layer_norm", "fused_add_rms_norm", "softmax", "cross_entropy"):
        resolve_impl(name, which["impl"])  # raises where it cannot run
    # A shape that it does not serve is an error then, where it would quietly go to Triton.
    os.environ["LIGER_KERNEL_STRICT"] = "1"
    softmax = functools.partial(functional.softmax, **which)
    rmsnorm = functools.partial(functional.rms_norm, eps=EPS, **which)
    rmsnorm_residual = functools.partial(functional.fused_add_rms_norm, eps=EPS, **which)
    layernorm = functools.partial(functional.layer_norm, eps=EPS, **which)

    def cross_entropy(x, target, reduction="mean"):
        return functional.cross_entropy(x, target, reduction=reduction, **which)[0]

    return Provider(
        {"softmax": softmax, "rmsnorm": rmsnorm, "cross_entropy": cross_entropy},
        {
            "softmax_forward": _tuple(softmax),
            "rmsnorm_forward": _tuple(rmsnorm),
            "rmsnorm_backward": _rmsnorm_gradient(rmsnorm),
            "cross_entropy_forward": _tuple(functools.partial(cross_entropy, reduction="none")),
            "cross_entropy_loss_gradient": _loss_gradient_in_place(
                functools.partial(cross_entropy, reduction="sum")
            ),
            "rmsnorm_residual_forward": _direct(rmsnorm_residual),
            "rmsnorm_residual_backward": _rmsnorm_residual_gradient(rmsnorm_residual),
            "layernorm_forward": _tuple(layernorm),
            "layernorm_backward": _layernorm_gradient(layernorm),
        },
    )


def _flashinfer():
    from flashinfer.norm import fused_add_rmsnorm

    return Provider({}, {"fused_add_rmsnorm": _in_place(functools.partial(fused_add_rmsnorm, eps=EPS))})


def _cudnn():
    import cudnn

    handle = functools.cache(cudnn.create_handle)
    types = {
        torch.float16: cudnn.data_type.HALF,
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float32: cudnn.data_type.FLOAT,
    }

    def rmsnorm_forward(x, weight):
        """cuDNN's graph for rows as (M, N, 1, 1) tensors, made once for the shape."""
        m, n = x.shape
        rows, scale = x.view(m, n, 1, 1), weight.view(1, n, 1, 1)
        eps = torch.full((1, 1, 1, 1), EPS)
        graph = cudnn.pygraph(
            handle=handle(),
            io_data_type=types[x.dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
        )
        names = [graph.tensor_like(rows), graph.tensor_like(scale)]
        names.append(
            graph.tensor(
                name="epsilon",
                dim=[1] * 4,
                stride=[1] * 4,
                is_pass_by_value=True,
                data_type=cudnn.data_type.FLOAT,
            )
        )
        out, _ = graph.rmsnorm(
            name="rmsnorm",
            norm_forward_phase=cudnn.norm_forward_phase.INFERENCE,
            input=names[0],
            scale=names[1],
            epsilon=names[2],
        )
        out.set_output(True).set_data_type(types[x.dtype])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=x.device)

        def run():
            y = torch.empty_like(rows)
            graph.execute(
                {names[0]: rows, names[1]: scale, names[2]: eps, out: y}, workspace, handle=handle()
            )
            return (y.view(m, n),)

        return run

    return Provider({}, {"rmsnorm_forward": rmsnorm_forward})


# By name: how to get it, and the distribution whose version is recorded.
_PROVIDERS = {
    "torch": (_torch, "torch"),
    "torch.compile": (_torch_compile, "torch"),
    "gander": (_gander, None),
    "gander-apart": (_gander_apart, None),
    "gander-plain": (_gander_plain, None),
    "gander-two-passes": (_gander_two_passes, None),
    "gander-upstream": (_gander_upstream, None),
    "gander-remember": (_gander_remember, None),
    **{f"gander-{n}-chunks": (functools.partial(_gander_chunks, n), None) for n in (1, 2, 8)},
    "gander-float32": (_gander_float32, None),
    "gander-outputs": (_gander_outputs, None),
    "gander-kept": (_gander_kept, None),
    "gander-sharded": (_gander_sharded, None),
    "gander-batch-invariant": (_gander_batch_invariant, None),
    "gander.compile": (_gander_compile, None),
    "gander-one-pass.compile": (_gander_one_pass_compile, None),
    "quack": (_quack, "quack-kernels"),
    "liger": (_liger, "liger-kernel"),
    "liger-cutedsl": (_liger_cutedsl, "liger-kernel"),
    "cudnn": (_cudnn, "nvidia-cudnn-frontend"),
    "flashinfer": (_flashinfer, "flashinfer-python"),
    "trl": (_trl, "trl"),
    "verl": (_verl, "verl"),
}
DEFAULT_PROVIDERS = tuple(_PROVIDERS)[:3]
# All of gander.algorithms() but auto, which is "gander". They are listed because that call loads the library,
# also in processes that measure the first call of another provider.
_FORCED = ("warp", "block", "register", "medium", "extreme", "cluster", "arbitrary", "splitk")
_BY_ALGORITHM = {
    f"gander:{name}": (functools.partial(_gander_with, algorithm=name), None) for name in _FORCED
}
_PROVIDERS |= _BY_ALGORITHM
PROVIDERS = tuple(_PROVIDERS)
ALGORITHMS = ("gander", *_BY_ALGORITHM)  # auto and all that it chooses among


@functools.cache
def provider(name: str) -> Provider:
    """Raises ImportError where it is not installed."""
    return _PROVIDERS[name][0]()


def provider_version(name: str) -> str:
    distribution = _PROVIDERS[name][1]
    return gander.__version__ if distribution is None else importlib.metadata.version(distribution)
