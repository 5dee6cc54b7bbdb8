"""Functions that write over their arguments, or to tensors that the caller allocates."""

import gander
import numpy as np
import pytest
import torch
from tolerance import assert_same

NORMS = {"rmsnorm": gander.rmsnorm, "layernorm": gander.layernorm}
BRAIN, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture(params=NORMS)
def norm(request):
    return NORMS[request.param]


def rows(device, dtype=SINGLE, shape=(4, 3, 64)):
    return torch.randn(shape, device=device, dtype=dtype)


# ---- fused_add_rmsnorm ----


@pytest.mark.parametrize(
    "dtypes", [(SINGLE, SINGLE), (BRAIN, BRAIN), (BRAIN, SINGLE), (SINGLE, BRAIN)], ids=str
)
def test_fused_add_rmsnorm(dtypes, device):
    x, residual, weight = rows(device, dtypes[0]), rows(device, dtypes[1]), rows(device, shape=64)
    want = gander.rmsnorm(x, weight, residual=residual, eps=1e-5, prenorm=True, weight_offset=1.0)
    versions = x._version, residual._version
    assert gander.fused_add_rmsnorm(x, residual, weight, 1e-5, 1.0) is None
    assert torch.equal(x, want[0])
    assert torch.equal(residual, want[1])
    assert (x._version, residual._version) == (versions[0] + 1, versions[1] + 1)


def test_fused_add_rmsnorm_of_strided_rows(device):
    """Rows that the kernels cannot take are copied, and copied back."""
    x, residual = rows(device, shape=(4, 128))[:, ::2], rows(device, shape=(64, 4)).t()
    want = gander.rmsnorm(x, residual=residual, prenorm=True)
    gander.fused_add_rmsnorm(x, residual, None)
    assert torch.equal(x, want[0])
    assert torch.equal(residual, want[1])


def test_operands_that_are_copied_and_share_memory(device):
    """Both would be copied back to the same memory. Regression test: one of the results was lost."""
    wide = rows(device, shape=(64, 13))
    for x, residual in (
        (wide.t(), wide.t()),
        (wide[:, :12].t(), wide[:, 1:].t()),
        (wide[:, :12].t()[..., None, :], wide[:, 1:].t()[..., None, :]),
        (wide[:, :12, None], wide[:, 1:, None]),
    ):
        before = wide.clone()
        with pytest.raises(ValueError, match="residual overlaps x, expected separate memory"):
            gander.fused_add_rmsnorm(x, residual, None)
        assert torch.equal(wide, before)
    side_by_side = rows(device, shape=(4, 5, 3, 32)).transpose(0, 1)
    for x, residual in (
        (rows(device, shape=(64, 12)).t(), rows(device, shape=(64, 12)).t()),
        side_by_side.chunk(2, -1),
        [part.transpose(1, 3) for part in side_by_side.chunk(2, -1)],
        (wide[:, :6].t(), wide[:, 7:].t()),
    ):
        want = gander.rmsnorm(x, residual=residual, prenorm=True)
        gander.fused_add_rmsnorm(x, residual, None)
        assert torch.equal(x, want[0])
        assert torch.equal(residual, want[1])


def test_negated_views(device):
    """They can be read, and are refused where they would be written, after which a later call crashed."""
    negated = torch.conj(torch.randn(4, 64, dtype=torch.cfloat, device=device)).imag
    assert negated.is_neg()
    x, before = rows(device, shape=(4, 64)), negated.clone()
    for write in (
        lambda: gander.rmsnorm(x, out=negated),
        lambda: gander.fused_add_rmsnorm(x, negated, None),
        lambda: gander.fused_add_rmsnorm(negated, x, None),
    ):
        with pytest.raises(RuntimeError, match="is a negated view, expected a tensor that can be written"):
            write()
    assert torch.equal(negated, before)
    out = torch.empty_like(x)
    gander.rmsnorm(negated, out=out)
    assert torch.equal(out, gander.rmsnorm(before))


def test_fused_add_rmsnorm_refuses():
    x, weight = rows("cpu"), rows("cpu", shape=64)
    for given, error, words in (
        ((x, x[:1], weight), ValueError, r"residual has shape \(1, 3, 64\), expected \(4, 3, 64\) as x"),
        ((x, x, weight), ValueError, r"x overlaps residual, expected separate memory; allocate x separately"),
        ((x.clone().requires_grad_(), x, weight), NotImplementedError, "x requires one; detach it"),
        ((x, x.clone(), weight.clone().requires_grad_()), NotImplementedError, "weight requires one"),
        ((x, x.clone(), 64), TypeError, "weight is 64"),
        ((x[:1].expand(4, 3, 64), x.clone(), None), ValueError, r"x has .* strides \(0, 64, 1\), expected"),
    ):
        before = [t.detach().clone() for t in given if isinstance(t, torch.Tensor)]
        with pytest.raises(error, match=words):
            gander.fused_add_rmsnorm(*given)
        given = [t for t in given if isinstance(t, torch.Tensor)]
        assert all(map(torch.equal, before, given)), "something was written"


def test_fused_add_rmsnorm_without_a_gradient(device):
    """A model's parameters require gradients. Under no_grad that does not matter."""
    x, residual, weight = rows(device), rows(device), rows(device, shape=64).requires_grad_()
    want = gander.rmsnorm(x, weight.detach(), residual=residual)
    for mode in torch.no_grad, torch.inference_mode:
        mine, other = x.clone(), residual.clone()
        with mode():
            gander.fused_add_rmsnorm(mine, other, weight)
        assert torch.equal(mine, want)


# ---- out ----


def test_norm_into(norm, device):
    x, residual, weight = rows(device), rows(device, BRAIN), rows(device, shape=64)
    for given in {}, {"bias": weight}, {"residual": residual}, {"residual_dtype": BRAIN}:
        out = torch.empty_like(x, dtype=torch.float16)
        want = norm(x, weight, out_dtype=torch.float16, prenorm=True, **given)
        assert norm(x, weight, out=out, **given) is out
        assert torch.equal(out, norm(x, weight, out_dtype=torch.float16, **given))
        out.zero_()
        got = norm(x, weight, out=out, prenorm=True, **given)
        assert got[0] is out
        assert all(map(torch.equal, got, want))
        assert got[1].dtype == want[1].dtype
    want = norm(x, weight)
    given = x.clone()
    assert norm(x, weight, out=x) is x
    assert torch.equal(x, want)
    # The sum is x, which the norm is written over.
    for target in (lambda x: x), (lambda x: x[:]), torch.from_dlpack:
        x = given.clone()
        y, h = norm(x, weight, out=target(x), prenorm=True)
        assert_same(y, want)
        assert torch.equal(x, y)
        assert torch.equal(h, given)


def test_the_sum_of_a_batch_that_is_written_over(norm):
    x, out = rows("cpu"), rows("cpu")
    want = norm(x, prenorm=True)
    got = torch.vmap(lambda x, out: norm(x, out=out, prenorm=True))(x.clone(), out)
    assert all(map(torch.equal, got, want))
    assert torch.equal(out, want[0])


def test_the_sum_of_arrays_that_are_written_over(norm):
    x = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    given = x.copy()
    y, h = norm(x, out=x, prenorm=True)
    assert y is x
    assert (h == given).all()

    class Mine(np.ndarray):
        pass

    assert (norm(given.view(Mine), out=np.empty_like(x), prenorm=True)[1] == given).all()
    assert norm(given, out=np.empty_like(x), prenorm=True)[1] is given


def test_norm_fwd_into(device):
    x, residual, weight = rows(device), rows(device, BRAIN), rows(device, shape=64)
    out = torch.empty_like(x)
    got = gander.rmsnorm_fwd(x, weight, None, residual, store_rstd=True, out=out)
    assert got[0] is out
    assert all(map(torch.equal, got, gander.rmsnorm_fwd(x, weight, None, residual, store_rstd=True)))
    got = gander.rmsnorm_fwd(x, weight, store_rstd=True, out=out)
    assert got[1] is x
    given = x.clone()
    assert torch.equal(gander.rmsnorm_fwd(given, weight, out=given)[1], x)
    got = gander.layernorm_fwd(x, weight, return_rstd=True, return_mean=True, out=out)
    assert got[0] is out
    assert all(map(torch.equal, got, gander.layernorm_fwd(x, weight, return_rstd=True, return_mean=True)))
    assert gander.layernorm_fwd(x, weight, out=out) is out


def test_norm_into_refuses(norm):
    x, weight = rows("cpu"), rows("cpu", shape=64)
    for given, error, words in (
        ({"out": x[:1].clone()}, ValueError, r"out has shape \(1, 3, 64\), expected \(4, 3, 64\) as x"),
        ({"out": x.int()}, TypeError, "out has dtype int32, expected float16, bfloat16 or float32"),
        ({"out": x.clone(), "out_dtype": BRAIN}, TypeError, "expected out_dtype = torch.bfloat16"),
        ({"out": [1.0]}, TypeError, "out is a list"),
        ({"out": x.flatten()[1:].new_empty(4, 3, 64).requires_grad_()}, NotImplementedError, "requires one"),
    ):
        with pytest.raises(error, match=words):
            norm(x, weight, **given)
    with pytest.raises(NotImplementedError, match="x requires one; detach it"):
        norm(x.clone().requires_grad_(), weight, out=x.clone())


def test_cross_entropy_into(device):
    x, target = rows(device, shape=(6, 100)), torch.randint(0, 100, (6,), device=device)
    weight = torch.rand(100, device=device)
    want = gander.cross_entropy_fwd(x, target, weight=weight, return_lse=True, return_dx=True)
    got = [torch.empty_like(t) for t in want]
    assert gander.cross_entropy_fwd_out(x, target, None, *got, weight) is None
    assert all(map(torch.equal, got, want))
    for parts in torch.empty(2, 6, device=device), torch.empty(13, device=device), torch.empty(1, 13):
        parts = parts.to(device)
        torch.ops.gander.cross_entropy_fwd_out(x, target, weight, got[0], parts, None)
        torch.testing.assert_close(parts.flatten()[:12].view(2, 6).sum(0), want[1])
    loss = torch.empty_like(want[0])
    gander.cross_entropy_fwd_out(x, target, None, loss, None, None, weight, ignore_index=int(target[0]))
    assert loss[0] == 0
    gander.cross_entropy_fwd_out(x, target % 7, x[:, :7], loss, got[1], None, None)
    assert torch.equal(loss, gander.cross_entropy_fwd(x, target % 7, x[:, :7]))
    dx, dloss, lse = torch.empty_like(x), torch.rand(6, device=device), want[1]
    want = gander.cross_entropy_bwd(x, target, dloss, lse, weight)
    gander.cross_entropy_bwd_out(x, target, dloss, lse, dx, weight)
    assert torch.equal(dx, want)
    gander.cross_entropy_bwd_out(x, target, dloss, lse, x, weight)
    assert torch.equal(x, want)
    with pytest.raises(ValueError, match=r"loss has shape \(5,\), expected \(6,\), the leading dimensions"):
        gander.cross_entropy_fwd_out(x, target, None, loss[:5], None, None, None)
    with pytest.raises(ValueError, match=r"dx has shape \(3, 100\), expected \(6, 100\) as x"):
        gander.cross_entropy_bwd_out(x, target, dloss, got[1], dx[:3])


# ---- Through PyTorch's transforms ----


def in_place(x, residual, weight):
    gander.fused_add_rmsnorm(x, residual, weight)
    return x * 2 + residual


def into(x, residual, weight):
    y = torch.empty_like(x)
    gander.rmsnorm(x, weight, residual=residual, out=y)
    return y + residual


@pytest.mark.parametrize("function", [in_place, into])
@pytest.mark.parametrize("how", ["compile", "export", "vmap"])
def test_transforms(function, how):
    x, residual, weight = rows("cpu"), rows("cpu"), rows("cpu", shape=64)
    copies = x.clone(), residual.clone()
    want = function(x, residual, weight)
    if how == "compile":
        got = torch.compile(function, backend="aot_eager", fullgraph=True)(*copies, weight)
    elif how == "vmap":
        got = torch.vmap(function, in_dims=(0, 0, None))(*copies, weight)
    else:
        model = torch.nn.Module()
        model.forward = function
        example = tuple(t.clone() for t in copies)
        got = torch.export.export(model, (*example, weight)).module()(*copies, weight)
    assert torch.equal(got, want)
    assert torch.equal(copies[1], residual)


def test_vmap_refuses_one_tensor_for_all_samples():
    x, residual = rows("cpu"), rows("cpu", shape=(3, 64))
    with pytest.raises(ValueError, match="the results of all samples over the same residual; batch it too"):
        torch.vmap(gander.fused_add_rmsnorm, in_dims=(0, None, None))(x, residual, None)


# ---- NumPy ----


def test_numpy():
    x, residual, weight = (
        np.float32(np.random.default_rng(0).normal(size=s)) for s in ((5, 64), (5, 64), 64)
    )
    want = gander.rmsnorm(x, weight, residual=residual, prenorm=True)
    for norm in NORMS.values():
        out = np.empty((5, 64), np.float16)
        got = norm(x, weight, residual=residual, prenorm=True, out=out)
        assert got[0] is out
        other = norm(x, weight, residual=residual, prenorm=True, out_dtype="float16")
        assert all(map(np.array_equal, got, other))
    gander.fused_add_rmsnorm(x, residual, weight)
    assert np.array_equal(x, want[0])
    assert np.array_equal(residual, want[1])
    residual.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match=r"read-?only"):
        gander.fused_add_rmsnorm(x, residual, weight)
    with pytest.raises(TypeError, match="out is a list"):
        gander.rmsnorm(x, weight, out=[1.0])


def test_immutable_arrays():
    class Immutable:
        """An array of a library whose arrays are immutable, as JAX's are."""

        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

    x = Immutable(np.ones((2, 8), np.float32))
    with pytest.raises(TypeError, match="expected an array of NumPy or CuPy"):
        gander.fused_add_rmsnorm(x, Immutable(np.ones((2, 8), np.float32)), None)
    assert (x.array == 1).all()


# ---- Messages ----


class Rows(np.ndarray):
    """A class of its own, as libraries define them."""


def test_messages_call_the_argument_out(norm, device):
    x = rows(device, shape=(6, 8))
    with pytest.raises(ValueError, match=r"out overlaps x, .*; allocate out separately"):
        norm(x[:4], out=x[1:5])
    with pytest.raises(TypeError, match="out has dtype int32, expected float16"):
        norm(x, out=torch.empty(6, 8, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match=r"out is an int, expected a torch\.Tensor as x"):
        norm(x, out=3)
    with pytest.raises(TypeError, match=r"out is a ndarray, expected a torch\.Tensor"):
        norm(x, out=np.empty((6, 8), np.float32))
    with pytest.raises(TypeError, match="eps is 'y'"):
        norm(x, eps="y", out=torch.empty_like(x))


def test_arrays_to_write_to(norm):
    x = np.ones((4, 8), np.float32)
    out = np.empty_like(x).view(Rows)
    assert norm(x, out=out) is out
    np.testing.assert_array_equal(out, norm(x))
    with pytest.raises(TypeError, match="out is a Tensor, expected a ndarray as x"):
        norm(x, out=torch.empty(4, 8))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        norm(x, out=out)
