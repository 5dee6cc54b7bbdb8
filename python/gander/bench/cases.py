"""What is measured: the operators, their inputs, a float64 reference, and how each provider computes them."""

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import gander
from gander import _operators_gen

EPS = 1e-6
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


# ---- Operators ----


@dataclass(frozen=True)
class Operator:
    """inputs(m, n, dtype, device) gives tensors, reference(*inputs) the results for float64 inputs, of which
    the first has the rows. traffic: how many of the (M, N) tensors have to be read and written, "r", "rw" or
    "rrw"; statistics, targets and weights are not counted. shared: the position of an input that is not split
    into rows."""

    traffic: str
    inputs: Callable[..., tuple]
    reference: Callable[..., tuple]
    shared: int | None = None


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
        "rw", _rmsnorm_inputs, lambda x, weight: (F.rms_norm(x, weight.shape, weight, EPS),), 1
    ),
    "rmsnorm_backward": Operator("rrw", _rmsnorm_backward_inputs, _rmsnorm_backward, 1),
    "cross_entropy_forward": Operator(
        "r", _cross_entropy_inputs, lambda x, target: (F.cross_entropy(x, target, reduction="none"),)
    ),
    "cross_entropy_loss_gradient": Operator("rw", _cross_entropy_inputs, _cross_entropy_gradient),
}


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
ALL = OPERATORS | PARTS


def double(tensors):
    """The same numbers in float64; targets stay as they are."""
    return [t.double() if t.is_floating_point() else t for t in tensors]


def rows_of(op: str, inputs, rows):
    """The same inputs for some of the M rows."""
    return [t if position == ALL[op].shared else t[rows] for position, t in enumerate(inputs)]


# ---- Providers ----


@dataclass(frozen=True)
class Provider:
    """functions: what people call, by name: softmax(x), rmsnorm(x, weight), cross_entropy(x, target),
    differentiable. operators: by name a function that takes the inputs and gives run(), which does the work
    anew at each call and returns its results, first the one that belongs to the rows. A provider need not
    have all of either."""

    functions: dict[str, Callable]
    operators: dict[str, Callable]


def _direct(function):
    return functools.partial(functools.partial, function)


def _tuple(function):
    """For functions that return a tensor: all results are tuples."""
    return _direct(lambda *inputs: (function(*inputs),))


def _leaf(x):
    return x.detach().requires_grad_()


def _rmsnorm_gradient(rmsnorm):
    """The backward pass alone: the graph is made once and kept."""

    def prepare(x, weight, dout, rstd):
        leaves = _leaf(x), _leaf(weight)
        out = rmsnorm(*leaves)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return prepare


def _loss_gradient(cross_entropy):
    def prepare(x, target):
        leaf = _leaf(x)
        return lambda: torch.autograd.grad(cross_entropy(leaf, target), leaf)

    return prepare


def _softmax(x):
    return F.softmax(x, -1)


def _rmsnorm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def _losses(x, target):
    return F.cross_entropy(x, target, reduction="none")


def _sum_of_losses(x, target):
    return F.cross_entropy(x, target, reduction="sum")


def _torch():
    return Provider(
        {"softmax": _softmax, "rmsnorm": _rmsnorm, "cross_entropy": F.cross_entropy},
        {
            "softmax_forward": _tuple(_softmax),
            "softmax_backward": _tuple(lambda dy, y: torch._softmax_backward_data(dy, y, -1, y.dtype)),
            "rmsnorm_forward": _tuple(_rmsnorm),
            "rmsnorm_backward": _rmsnorm_gradient(_rmsnorm),
            "cross_entropy_forward": _tuple(_losses),
            "cross_entropy_loss_gradient": _loss_gradient(_sum_of_losses),
        },
    )


def _float_softmax_backward(dy, y):
    (dx,) = _softmax_backward(dy.float(), y.float())
    return (dx.to(y.dtype),)


def _float_rmsnorm_backward(x, weight, dout, rstd):
    dx, dw = _rmsnorm_backward(x.float(), weight.float(), dout.float(), rstd)
    return dx.to(x.dtype), dw.to(weight.dtype)


def _float_loss_gradient(x, target):
    log_p = F.log_softmax(x.float(), -1)
    onehot = torch.arange(x.shape[-1], device=x.device) == target.unsqueeze(-1)
    return (log_p.exp() - onehot.float()).to(x.dtype), -log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)


# torch.compile at its best: for one shape, tuned.
_compile = functools.partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs")


def _compiled(function):
    """torch.compile at its best: compiled anew for each shape, tuned, and without autograd's bookkeeping."""

    def prepare(*inputs):
        torch.compiler.reset()  # or its limit of compilations per function is met
        return functools.partial(_compile(function), *inputs)

    return prepare


def _compiled_functions(functions):
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
            }
        ),
        {
            "softmax_forward": _compiled(lambda x: (_softmax(x),)),
            "softmax_backward": _compiled(_float_softmax_backward),
            "rmsnorm_forward": _compiled(lambda x, weight: (_rmsnorm(x, weight),)),
            "rmsnorm_backward": _compiled(_float_rmsnorm_backward),
            "cross_entropy_forward": _compiled(lambda x, target: (_losses(x, target),)),
            "cross_entropy_loss_gradient": _compiled(_float_loss_gradient),
        },
    )


def _gander():
    return Provider(
        {
            "softmax": gander.softmax,
            "rmsnorm": lambda x, weight: gander.rmsnorm(x, weight, eps=EPS),
            "cross_entropy": gander.cross_entropy,
        },
        {
            "softmax_forward": _tuple(gander.softmax),
            "softmax_backward": _tuple(gander.softmax_bwd),
            "rmsnorm_forward": _direct(lambda x, weight: gander.rmsnorm_fwd(x, weight, eps=EPS)),
            "rmsnorm_backward": _direct(lambda *inputs: gander.rmsnorm_bwd(*inputs)[:2]),
            "cross_entropy_forward": _tuple(functools.partial(gander.cross_entropy, reduction="none")),
            "cross_entropy_loss_gradient": _direct(
                lambda x, target: gander.cross_entropy_fwd(x, target, return_dx=True)[::-1]
            ),
            "rmsnorm_backward_dx": _tuple(lambda x, dout, rstd: gander.rmsnorm_bwd(x, None, dout, rstd)[0]),
            "cross_entropy_backward": _tuple(gander.cross_entropy_bwd),
        },
    )


def _gander_compile():
    """gander in functions that torch.compile compiles."""
    return Provider(_compiled_functions(_gander().functions), {})


def _gander_two_passes():
    """Cross-entropy that reads x again in backward, and so keeps no gradient until then."""
    return Provider({"cross_entropy": functools.partial(gander.cross_entropy, one_pass=False)}, {})


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
            "cross_entropy_forward": _tuple(functools.partial(gander.cross_entropy, reduction="none", **how)),
            "cross_entropy_loss_gradient": _direct(
                lambda x, target: gander.cross_entropy_fwd(x, target, return_dx=True, **how)[::-1]
            ),
        },
    )


def _quack():
    from quack import cross_entropy, rmsnorm, softmax
    from quack.cross_entropy import cross_entropy_fwd
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
    from quack.softmax import softmax_bwd, softmax_fwd

    return Provider(
        {
            "softmax": softmax,
            "rmsnorm": lambda x, weight: rmsnorm(x, weight, eps=EPS),
            "cross_entropy": cross_entropy,
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
        },
    )


def _liger():
    from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward
    from liger_kernel.transformers.functional import liger_cross_entropy, liger_rms_norm, liger_softmax

    def rmsnorm(x, weight):
        return liger_rms_norm(x, weight, EPS, in_place=False)

    def softmax_backward(dy, y):
        _, *launch = _softmax_forward(y)
        return lambda: (_softmax_backward(dy, y, *launch),)

    def loss_gradient(x, target):
        # The gradient is written over the logits: a copy, whose values are right for the first call only.
        return _loss_gradient(functools.partial(liger_cross_entropy, reduction="sum"))(x.clone(), target)

    return Provider(
        {"softmax": liger_softmax, "rmsnorm": rmsnorm, "cross_entropy": liger_cross_entropy},
        {
            "softmax_forward": _tuple(liger_softmax),
            "softmax_backward": softmax_backward,
            "rmsnorm_forward": _tuple(rmsnorm),
            "rmsnorm_backward": _rmsnorm_gradient(rmsnorm),
            "cross_entropy_forward": _tuple(functools.partial(liger_cross_entropy, reduction="none")),
            "cross_entropy_loss_gradient": loss_gradient,
        },
    )


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
    "gander-two-passes": (_gander_two_passes, None),
    "gander-batch-invariant": (_gander_batch_invariant, None),
    "gander.compile": (_gander_compile, None),
    "quack": (_quack, "quack-kernels"),
    "liger": (_liger, "liger-kernel"),
    "cudnn": (_cudnn, "nvidia-cudnn-frontend"),
}
DEFAULT_PROVIDERS = tuple(_PROVIDERS)[:3]
_BY_ALGORITHM = {
    f"gander:{name}": (functools.partial(_gander_with, algorithm=name), None)
    for name in _operators_gen.ALGORITHMS[1:]
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
