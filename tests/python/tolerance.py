"""How close is close enough: derived from torch's own operator, never chosen.

Against the exact result (float64, on the very same input) gander may have a root mean square error of 1.1 times that of
torch's operator in the same dtypes, and a maximum error of 1.5 times torch's, or of one ulp of the output's dtype.
"""

import torch

# A root mean square that rests on fewer errors than this is luck (torch's operator may happen to be exact): there only
# the maximum counts.
ENOUGH = 100


def ulp(exact, dtype):
    """The distance between neighbours of dtype at each value of exact."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny))[1] - 1
    return torch.ldexp(torch.full_like(exact, info.eps), exponent)


def carriers(error):
    """How many errors a root mean square rests on: n where all are alike, 1 where one outweighs the others."""
    squares = error.square()
    total = squares.sum()
    return float(total**2 / squares.square().sum()) if total > 0 else 0.0


def assert_accurate(got, theirs, exact, what="result", extra=0.0):
    """got: gander's result. theirs: that of torch's operator in the same dtypes. exact: the result in float64.

    extra: an allowance for each element that a documented cause adds (lse as an output: |lse| * 2^-24).
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
    if dtype == torch.float64:  # exact is no more so: rounding of a few sums and products
        bound = 1e-13 * (exact.abs() + exact.abs().max())
    else:
        bound = torch.maximum(ulp(exact, dtype), 1.5 * theirs.max().expand_as(exact)) + extra
    excess = (error - bound).max()
    assert excess <= 0, (
        f"{what}: maximum error {error.max():.3g}, {excess:.3g} beyond its bound (torch's maximum: {theirs.max():.3g})"
    )
    if dtype != torch.float64 and min(carriers(error), carriers(theirs)) >= ENOUGH:
        mine, torchs = error.square().mean().sqrt(), theirs.square().mean().sqrt()
        assert mine <= 1.1 * torchs + extra.max(), f"{what}: RMS error {mine:.4g}, torch's {torchs:.4g}"
