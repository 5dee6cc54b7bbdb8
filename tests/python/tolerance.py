"""The tolerance of the tests of accuracy. It is derived from the error of torch's own operator.

Both errors are against the exact result (float64, of the same input). gander's root mean square error may be
1.1 times that of torch's operator in the same dtypes. Its maximum error may be 1.5 times torch's, or one ulp
of the output's dtype.
"""

import math

import torch

# What an error may be, in those of torch's operator.
RMS, MAXIMUM = 1.1, 1.5
# The same of the root mean square error of linear_cross_entropy's dw, by the number of chunks: each further
# one rounds the sum once more.
LINEAR_DW = {1: RMS, 4: 2.0, 8: 2.5}

# A root mean square of fewer effective errors than this is left to chance, because torch's operator may
# happen to be exact. Then only the maximum is checked.
ENOUGH = 100


def ulp(exact, dtype):
    """The distance between neighbouring numbers of dtype at each value of exact."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny))[1] - 1
    return torch.ldexp(torch.full_like(exact, info.eps), exponent)


def effective_count(error):
    """The effective number of errors in a root mean square: n if all are equal, 1 if one dominates."""
    squares = error.square()
    total = squares.sum()
    return float(total**2 / squares.square().sum()) if total > 0 else 0.0


def assert_accurate(got, theirs, exact, what="result", extra=0.0, slack=1.0):
    """got: gander's result. theirs: that of torch's operator in the same dtypes. exact: the result in
    float64.

    extra: an additional absolute tolerance for each element, for a documented reason (lse as an output:
    |lse| * 2^-24).
    slack: a factor of the bound of the maximum error.
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    exact, dtype = exact.double(), got.dtype
    got, theirs = got.double(), theirs.double()
    finite = exact.isfinite()
    special = ~finite
    torch.testing.assert_close(
        got[special], exact[special], rtol=0, atol=0, equal_nan=True, msg=f"{what}: not finite"
    )
    if not finite.any():
        return
    extra = torch.as_tensor(extra, dtype=torch.float64, device=exact.device).expand_as(exact)[finite]
    exact, error, theirs = exact[finite], (got - exact)[finite].abs(), (theirs - exact)[finite].abs()
    assert error.isfinite().all(), f"{what}: not finite where the exact result is"
    if dtype == torch.float64:  # exact has rounding errors too, of a few sums and products
        bound = 1e-13 * (exact.abs() + exact.abs().max())
    else:
        bound = torch.maximum(ulp(exact, dtype), MAXIMUM * theirs.max().expand_as(exact)) + extra
        bound *= slack
    excess = (error - bound).max()
    assert excess <= 0, (
        f"{what}: maximum error {error.max():.3g}, {excess:.3g} beyond its bound "
        f"(torch's maximum: {theirs.max():.3g})"
    )
    if dtype != torch.float64 and min(effective_count(error), effective_count(theirs)) >= ENOUGH:
        mine, torchs = error.square().mean().sqrt(), theirs.square().mean().sqrt()
        assert mine <= RMS * torchs + extra.max(), f"{what}: RMS error {mine:.4g}, torch's {torchs:.4g}"


def summing(m):
    """The relative rounding error of a tree sum of m losses and of the operations after it.

    A call has only one such sum. torch's may be exact by chance, so its error is no bound for gander's.
    """
    return (math.log2(m) + 2) * 2**-24


def assert_same(got, expected):
    """The same bits on the CPU. On CUDA another layout or other outputs may take another kernel, with another
    order of sums.
    """
    if got.is_cuda:
        torch.testing.assert_close(got, expected)
    else:
        assert torch.equal(got, expected)
