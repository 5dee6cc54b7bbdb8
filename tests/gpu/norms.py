"""LayerNorm, and RMSNorm with residuals, biases and chosen dtypes: gander's operators against float64. The
bound is the error of torch's operators on float32 copies."""

from typing import NamedTuple

import torch
from grid import EPS, Inputs, aligned
from tolerance import assert_accurate

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
OTHER = {F16: BF16, BF16: F16, F32: BF16}


class Case(NamedTuple):
    """What a norm is given. dtypes: of x's dtype, functions that return another one."""

    center: bool
    weight: bool = True
    bias: bool = False
    residual: bool = False
    weight_offset: float = 0.0
    kinds: object = lambda x: (x, x, x, x)  # of residual, weight and bias, y, residual_out


CASES = {
    "layernorm": Case(True, bias=True),
    "layernorm-weight": Case(True),
    "layernorm-bias": Case(True, weight=False, bias=True),
    "layernorm-bare": Case(True, weight=False),
    "rmsnorm-bias": Case(False, bias=True),
    "rmsnorm-residual": Case(False, residual=True),
    "layernorm-residual": Case(True, bias=True, residual=True),
    "rmsnorm-offset": Case(False, residual=True, weight_offset=1.0),
    "rmsnorm-wide-residual": Case(False, residual=True, kinds=lambda x: (F32, F32, x, F32)),
    "layernorm-mixed": Case(True, bias=True, residual=True, kinds=lambda x: (OTHER[x], OTHER[x], F32, x)),
}
# Row lengths in 16-byte vectors: at and between the limits of the kernels' tiles.
VECTORS = (
    *(
        1,
        8,
        13,
        16,
        27,
        32,
        50,
        64,
        100,
        128,
        200,
        256,
        300,
        512,
        640,
        768,
        900,
        1024,
        1376,
        2048,
        2500,
        3000,
    ),
    *(3500, 4000, 5000, 6000, 7000, 8192, 8193, 9000, 12000, 14000, 16000, 20000, 40000),
)


def rows_of(vectors):
    """Too few rows to fill the device, a few more, and several rounds of a persistent grid."""
    return (40, 140, max(300, min(20000, (1 << 18) // vectors)))


def _norm(case, h, weight, bias):
    """y, mean and rstd of rows in the dtype of h. torch has no operator for rstd that takes float64."""
    mean = h.mean(-1) if case.center else torch.zeros_like(h[:, 0])
    rstd = ((h - mean[:, None]).square().mean(-1) + EPS).rsqrt()
    y = (h - mean[:, None]) * rstd[:, None]
    return (y if weight is None else y * weight) + (0 if bias is None else bias), mean, rstd


def _torchs(case, h, weight, bias):
    n = [h.shape[-1]]
    if case.center:
        y, mean, rstd = torch.native_layer_norm(h, n, weight, bias, EPS)
        return y, mean.view(-1), rstd.view(-1)
    y, rstd = torch.ops.aten._fused_rms_norm(h, n, weight, EPS)
    return y if bias is None else y + bias, None, rstd.view(-1)


def _gradients(case, h, weight, dout, mean, rstd):
    """dx, dw and db for given statistics, in the dtype of h."""
    xhat = (h - mean[:, None] if case.center else h) * rstd[:, None]
    g = dout if weight is None else dout * weight
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if case.center:
        dx = dx - g.mean(-1, keepdim=True)
    return dx * rstd[:, None], (dout * xhat).sum(0), dout.sum(0)


def _torchs_gradients(case, h, weight, dout, mean, rstd):
    n = [h.shape[-1]]
    ones = torch.ones_like(h[0]) if weight is None else weight
    if case.center:
        wanted = [True, True, True]
        return torch.ops.aten.native_layer_norm_backward(
            dout, h, n, mean[:, None], rstd[:, None], ones, torch.zeros_like(ones), wanted
        )
    dx, dw = torch.ops.aten._fused_rms_norm_backward(dout, h, n, rstd[:, None], ones, [True, True])
    return dx, dw, dout.sum(0)


def wide(tensor, dtype):
    return None if tensor is None else tensor.to(dtype)


def check(case, m, n, dtype, layout=aligned):
    """Compares forward and backward of one case."""
    a = Inputs(m, n, dtype, layout)
    residual_kind, weight_kind, out_kind, stored_kind = case.kinds(dtype)
    x, rows, columns = a.x, (m, n), (n,)
    weight = layout(a._random(2, columns, weight_kind)) if case.weight else None
    bias = layout(a._random(3, columns, weight_kind)) if case.bias else None
    residual = layout(a._random(4, rows, residual_kind)) if case.residual else None
    ops, name = torch.ops.gander, "layernorm" if case.center else "rmsnorm"
    options = {} if case.center else {"weight_offset": case.weight_offset}
    mean, scale = None, weight if case.weight_offset == 0 else weight.double() + case.weight_offset
    asked = {"needs_mean": True} if case.center else {}
    if case.residual:
        asked |= {"residual_dtype": stored_kind, "needs_residual_out": True}
    y, stored, *statistics = getattr(ops, name)(
        x, weight, bias, residual, out_dtype=out_kind, eps=EPS, needs_rstd=True, **asked, **options
    )
    stored = stored if case.residual else x
    rstd = statistics[-1]
    if case.center:
        mean = statistics[0]
    h = x.float() if residual is None else x.float() + residual.float()
    exact_h = x.double() if residual is None else x.double() + residual.double()
    assert torch.equal(stored, h.to(stored.dtype)), "residual_out"
    if case.center and stored.dtype != F32:  # its norm is that of residual_out
        h, exact_h = stored.float(), stored.double()
    theirs = _torchs(case, h, wide(scale, F32), wide(bias, F32))
    exact = _norm(case, exact_h, wide(scale, torch.double), wide(bias, torch.double))
    # What is said of rstd below is true of y too, where it has the digits to show it.
    extra = exact[0].abs() * 2**-24 if y.dtype == F32 else 0.0
    assert_accurate(y, theirs[0].to(y.dtype), exact[0], "y", extra=extra)
    # Rows of 16-bit elements are summed in float32. A mean near 0 is no more accurate than its elements. rstd
    # is that of the float32 sums: what their rounding does to a large one, torch's error may happen to undo.
    exact_rstd = _norm(case, h.double(), None, None)[2]
    assert_accurate(rstd.view(-1), theirs[2], exact_rstd, "rstd", extra=exact_rstd * 2**-24)
    if case.center:
        assert_accurate(mean.view(-1), theirs[1], exact[1], "mean", extra=2**-23 / exact[2])

    dout = layout(a._random(5, rows, out_kind))
    upstream = layout(a._random(6, rows, stored.dtype)) if case.residual else None
    split = case.residual and residual_kind != dtype
    wanted = {"dresidual": split, "dw": case.weight, "db": case.bias}
    dtypes = options | {"x_dtype": dtype} | {f"needs_{what}": want for what, want in wanted.items()}
    if split:
        dtypes["residual_dtype"] = residual_kind
    if case.bias:
        dtypes["bias_dtype"] = weight_kind
    saved = [mean, rstd] if case.center else [rstd]
    results = getattr(ops, f"{name}_bwd")(stored, weight, dout, upstream, *saved, **dtypes)
    results = dict(zip(("dx", *wanted), results, strict=True))
    for what, want in wanted.items():
        assert want or results.pop(what).shape == (0,), what
    mean = mean.view(-1) if case.center else None
    given = stored, scale, dout, mean, rstd.view(-1)
    theirs = _torchs_gradients(case, *(wide(t, F32) for t in given))
    exact_given = [wide(t, torch.double) for t in given]
    if case.center and stored.dtype == F32:  # backward knows the digits that the saved mean lost
        exact_given[3] = exact_given[0].mean(-1)
    exact = _gradients(case, *exact_given)
    more, exact_more = (0, 0) if upstream is None else (upstream.float(), upstream.double())
    for what, got in results.items():
        kind = 1 if what == "dw" else 2 if what == "db" else 0
        reference = theirs[kind] if kind else theirs[0] + more
        right = exact[kind] if kind else exact[0] + exact_more
        # A row of a few elements may have a large rstd, and one rounding decides. The float32 gradient of
        # 16-bit rows is as accurate as their float32 sums.
        extra = 2**-22 * (1 + right.abs()) if n <= 64 else 2**-23 if dtype != F32 and kind == 0 else 0.0
        assert_accurate(got, reference.to(got.dtype), right, what, extra)
