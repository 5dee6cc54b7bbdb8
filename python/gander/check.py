"""`python -m gander check`: compares the operators with float64, on the CPU and on a GPU that torch sees.

It is for the time after an installation: it shows that the library loads and computes right on this machine.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import gander

SHAPES = (33, 1000), (5, 8192), (2, 50257)  # rows of the last are no whole 16-byte vectors
DTYPES = {"cpu": ("float32", "bfloat16", "float16", "float64"), "cuda": ("float32", "bfloat16", "float16")}
# The largest error that passes, by the result's dtype. On the CPU at most 0.6 of it is reached.
BOUNDS = {"float64": 1e-12, "float32": 5e-6, "bfloat16": 3e-2, "float16": 5e-3}


def cases(xp: Any) -> dict[str, tuple[str, Any, Any]]:
    """Operands, gander's function, and a reference in what torch and NumPy have in common: xp is either."""

    def log_softmax(x, mask=None):
        x = x if mask is None else xp.where(mask != 0, 0.5 * x, -xp.inf)
        return x - xp.log(xp.exp(x).sum(-1, keepdims=True))

    def rmsnorm(x, weight):
        return x / xp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def l2norm(x):
        return x / xp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    def layernorm(x, weight, bias):
        return rmsnorm(x - x.mean(-1, keepdims=True), weight) + bias

    erf = xp.erf if hasattr(xp, "erf") else xp.vectorize(math.erf)

    def swiglu(gate, up):
        return gate / (1 + xp.exp(-gate)) * up

    def geglu(gate, up):
        return 0.5 * gate * (1 + erf(gate / 2**0.5)) * up

    def geglu_tanh(gate, up):
        return 0.5 * gate * (1 + xp.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up

    def of_halves(function):
        return lambda pair: function(pair[:, : pair.shape[-1] // 2], pair[:, pair.shape[-1] // 2 :])

    def tables(x, mask):
        """For 16 pairs of columns. Every dtype has these numbers."""
        return [cast(0.75 * mask[:, i : i + 16] - 0.25, xp, str(x.dtype).split(".")[-1]) for i in (0, 16)]

    def rotary(x, mask):
        (cos, sin), (a, b, rest) = tables(x, mask), (x[:, :16], x[:, 16:32], x[:, 32:])
        return xp.concatenate((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def rotary_of_two(q, k, mask):
        return xp.stack((rotary(q, mask), rotary(k, mask)))

    def qk_norm_rotary(q, k, q_weight, k_weight, mask):
        return rotary_of_two(rmsnorm(q, q_weight), rmsnorm(k, k_weight), mask)

    def of_heads(function, **options):
        """Of a head each of queries and keys."""
        return lambda q, k, *more: xp.concatenate(
            function(q[None], k[None], *more[:-1], *tables(q, more[-1]), **options)
        )

    def losses(x, target):
        return -log_softmax(x)[list(range(len(x))), target]

    def shares(x):
        """A 64th for each positive logit, as all dtypes have it, with gradients that are normal numbers."""
        return cast(x > 0, xp, str(x.dtype).rpartition(".")[2]) / 64

    def entropies(x, target):
        total = xp.exp(x).sum(-1)
        return xp.log(total) - (x * xp.exp(x)).sum(-1) / total

    def of_tokens(output):
        return lambda *given: gander.token_statistics(*given, outputs=(output,))[0]

    def linear_loss(x, head, target):
        return losses(x @ head.T, target).mean()

    def masked(function):
        return lambda x, mask: function(x, scale=0.5, mask=mask)

    def linear_entropies(x, head, target):
        return entropies(x @ head.T, target)

    def of_head(x, head, target):
        return gander.linear_token_statistics(x, head, target, outputs=("entropy",))[0]

    linear = {
        "linear_cross_entropy": ("hidden head target", gander.linear_cross_entropy, linear_loss),
        "linear_token_statistics": ("hidden head target", of_head, linear_entropies),
    }
    return {
        "softmax": ("x", gander.softmax, lambda x: xp.exp(log_softmax(x))),
        "softmax, masked": ("x mask", masked(gander.softmax), lambda *given: xp.exp(log_softmax(*given))),
        "log_softmax, masked": ("x mask", masked(gander.log_softmax), log_softmax),
        "rmsnorm": ("x weight", gander.rmsnorm, rmsnorm),
        "l2norm": ("x", gander.l2norm, l2norm),
        "layernorm": ("x weight bias", gander.layernorm, layernorm),
        "swiglu": ("x mate", gander.swiglu, swiglu),
        "geglu": ("x mate", gander.geglu, geglu),
        "geglu, tanh": ("x mate", partial(gander.geglu, approximate="tanh"), geglu_tanh),
        "silu_and_mul": ("pair", gander.silu_and_mul, of_halves(swiglu)),
        "gelu_and_mul": ("pair", gander.gelu_and_mul, of_halves(geglu)),
        "gelu_tanh_and_mul": ("pair", gander.gelu_tanh_and_mul, of_halves(geglu_tanh)),
        "apply_rotary_emb": (
            "x mask",  # a head of each token
            lambda x, mask: gander.apply_rotary_emb(x[:, None], *tables(x, mask))[:, 0],
            rotary,
        ),
        "rotary": ("x mate mask", of_heads(gander.rotary), rotary_of_two),
        "qk_norm_rotary": (
            "query key query_weight key_weight mask",
            of_heads(gander.qk_norm_rotary, eps=1e-6),
            qk_norm_rotary,
        ),
        "token_statistics": ("x target", of_tokens("log_prob"), lambda *given: -losses(*given)),
        "entropy of tokens": ("x target", of_tokens("entropy"), entropies),
        "logsumexp": ("x", gander.logsumexp, lambda x: xp.log(xp.exp(x).sum(-1))),
        "cross_entropy": ("x target", partial(gander.cross_entropy, reduction="none"), losses),
        "soft cross_entropy": (
            "x",
            lambda x: gander.cross_entropy(x, shares(x), reduction="none"),
            lambda x: -(log_softmax(x) * shares(x)).sum(-1),
        ),
        "cross_entropy, mean": ("x target", gander.cross_entropy, lambda *given: losses(*given).mean()),
    } | (linear if xp.__name__ == "torch" else {})


def cast(tensor: Any, xp: Any, dtype: str) -> Any:
    return tensor.to(getattr(xp, dtype)) if xp.__name__ == "torch" else tensor.astype(dtype)


def operands(xp: Any, names: str, m: int, n: int, dtype: str, device: str) -> Iterator[Any]:
    sizes = {"x": (m, n), "mate": (m, n), "pair": (m, 2 * n), "mask": (m, n), "target": (m,)}
    sizes |= {"hidden": (m, 64), "head": (n, 64), "query": (m, 96), "key": (m, 96)}
    sizes |= {"query_weight": (96,), "key_weight": (96,)}
    change = {"mask": lambda v: v > 0, "target": lambda v: abs(v) * n % n, "head": lambda v: v / 64}
    for seed, name in enumerate(names.split()):
        shape = sizes.get(name, (n,))
        values = 3 * xp.sin(xp.arange(math.prod(shape), dtype=xp.float64) ** 2 + seed).reshape(shape)
        values = change[name](values) if name in change else values
        tensor = cast(values, xp, {"mask": "uint8", "target": "int64"}.get(name, dtype))
        yield tensor.to(device) if xp.__name__ == "torch" else tensor


def results(xp: Any, function: Any, reference: Any, given: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Gander's result and the exact one, and with torch each gradient and the exact one."""
    exact = [cast(t, xp, "float64") if "float" in str(t.dtype) else t for t in given]
    if xp.__name__ != "torch":
        yield "", function(*given), reference(*exact)
        return
    leaves = [[t.requires_grad_() for t in each if t.is_floating_point()] for each in (given, exact)]
    got, want = function(*given), reference(*exact)
    yield "", got.detach(), want.detach()
    upstream = xp.arange(want.numel(), device=want.device).cos().view_as(want)  # 1 for a mean
    upstream = xp.where(want.isfinite(), upstream, 0.0).to(got.dtype)
    mine = xp.autograd.grad(got, leaves[0], upstream)
    theirs = xp.autograd.grad(want, leaves[1], upstream.double())
    yield from ((" gradient", *pair) for pair in zip(mine, theirs, strict=True))


def error_of(xp: Any, got: Any, want: Any) -> float:
    """The largest difference, over the exact number's size and the root mean square of all."""
    if got.shape != want.shape:
        raise ValueError(f"the result has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    size = abs(xp.where(xp.isfinite(want), want, 0.0))
    same = got == want  # infinities too
    apart = abs(xp.where(same, 0.0, cast(got, xp, "float64")) - xp.where(same, 0.0, want))
    return float(xp.nan_to_num(apart / (size + xp.sqrt((size * size).mean())), nan=xp.inf).max())


def main(xp: Any) -> int:
    """Prints a line for each comparison. Returns 1 if one of them failed, else 0. xp is torch or NumPy."""
    devices = ["cpu", "cuda"] if xp.__name__ == "torch" and xp.cuda.is_available() else ["cpu"]
    kinds = [(device, dtype) for device in devices for dtype in DTYPES[device] if hasattr(xp, dtype)]
    failed = 0
    print(f"{'operator':34} device dtype   largest error, bound")
    for (device, dtype), (name, (names, function, reference)) in itertools.product(kinds, cases(xp).items()):
        errors: dict[str, tuple[float, float]] = {}
        try:
            for m, n in SHAPES:
                given = list(operands(xp, names, m, n, dtype, device))
                for what, got, want in results(xp, function, reference, given):
                    # Functions of a head round logits and their gradient to the operands' dtype.
                    bound = 4 * BOUNDS[dtype] if "head" in names else BOUNDS[str(got.dtype).split(".")[-1]]
                    errors[what] = max(errors.get(what, (0.0, bound)), (error_of(xp, got, want), bound))
            lines = [(name + what, f"{e:.1e} {bound:.0e}", e <= bound) for what, (e, bound) in errors.items()]
        except Exception as error:  # a broken installation may raise anything
            lines = [(name, f"{type(error).__name__}: {error}", False)]
        for line, said, right in lines:
            print(f"{line:34} {device:6} {dtype:8} {said} {'ok' if right else 'FAILED'}", flush=True)
            failed += not right
    print(f"{failed} comparisons FAILED" if failed else "all comparisons are right")
    return int(failed > 0)
