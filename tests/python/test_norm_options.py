"""Norms with a weight for each head, and RMSNorm that rounds the normalized row (casting_mode="llama").
Results and gradients on every path through PyTorch."""

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_same
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
NORMS = {"rmsnorm": gander.rmsnorm, "layernorm": gander.layernorm}


@pytest.fixture(params=NORMS)
def name(request):
    return request.param


def by_head(name, x, weight, bias=None, residual=None, offset=0.0):
    h = x if residual is None else x + residual
    function = F.layer_norm if name == "layernorm" else F.rms_norm
    y = function(h, h.shape[-1:], eps=1e-6) * (weight + offset)
    return y if bias is None else y + bias


def operands(device, shape=(4, 5, 3, 24), dtype=SINGLE, heads=3):
    """x, weight, bias, residual and the gradient of y."""
    shapes = shape, (heads, shape[-1]), (heads, shape[-1]), shape, shape
    return [torch.randn(s, device=device, dtype=dtype) for s in shapes]


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def gradients(function, tensors, upstream):
    """The result of a function and its gradients."""
    mine = leaves(tensors)
    y = function(*mine)
    y.backward(upstream)
    return [y.detach(), *(t.grad for t in mine)]


# ---- Heads ----


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("count", [2, 3, 4], ids=["weight", "bias", "residual"])
def test_heads(name, dtype, count, device):
    *tensors, upstream = operands(device, dtype=dtype)
    got = gradients(NORMS[name], tensors[:count], upstream)
    wide = [t.double() for t in tensors[:count]]
    want = gradients(lambda *t: by_head(name, *t), wide, upstream.double())
    tolerance = 4 * torch.finfo(dtype).eps
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (dtype, b.shape)
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def test_heads_in_float64(name):
    *tensors, upstream = operands("cpu", dtype=DOUBLE)
    got = gradients(NORMS[name], tensors, upstream)
    want = gradients(lambda *t: by_head(name, *t), tensors, upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "shape", [(3, 24), (1, 3, 24), (7, 3, 1), (2, 3, 5000), (2, 3, 140000), (0, 3, 8)], ids=str
)
def test_shapes_of_heads(name, shape, device):
    x, weight, bias, residual, upstream = operands(device, shape)
    got = gradients(NORMS[name], (x, weight, bias, residual), upstream)
    want = gradients(lambda *t: by_head(name, *t), (x, weight, bias, residual), upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_head_has_the_results_of_a_call_on_its_rows(name, device):
    x, weight, bias, _, upstream = operands(device, (40, 3, 24))
    got = gradients(NORMS[name], (x, weight, bias), upstream)
    for head in range(3):
        rows = x[:, head], weight[head], bias[head]
        y, dx, dw, db = gradients(NORMS[name], rows, upstream[:, head])
        assert_same(y, got[0][:, head])
        assert_same(dx, got[1][:, head])
        torch.testing.assert_close(dw, got[2][head])
        torch.testing.assert_close(db, got[3][head])


def test_one_head_is_a_weight_for_all_rows(name, device):
    x, weight, bias, _, upstream = operands(device, (4, 5, 1, 24), heads=1)
    got = gradients(NORMS[name], (x, weight, bias), upstream)
    want = gradients(NORMS[name], (x, weight[0], bias[0]), upstream)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.flatten(), b.flatten())


def test_a_bias_for_each_head_without_a_weight(name, device):
    x, weight, bias, _, upstream = operands(device)
    got = gradients(lambda x, b: NORMS[name](x, None, b), (x, bias), upstream)
    want = gradients(lambda x, b: by_head(name, x, torch.ones_like(weight), b), (x, bias), upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    y = NORMS[name](x.cpu().numpy(), None, bias.cpu().numpy())
    torch.testing.assert_close(torch.from_numpy(y), want[0].cpu())
    operator = getattr(torch.ops.gander, name)
    for given in (x, None, bias), (x.to("meta"), None, bias.to("meta")):
        with pytest.raises((ValueError, RuntimeError), match="one for each column of x without a weight"):
            operator(*given)


def test_heads_with_an_offset(device):
    x, weight, _, _, upstream = operands(device)
    got = gradients(lambda *t: gander.rmsnorm(*t, weight_offset=1.0), (x, weight), upstream)
    want = gradients(lambda *t: by_head("rmsnorm", *t, offset=1.0), (x, weight), upstream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_functions_without_a_gradient(device):
    x, weight, bias, residual, dout = operands(device)
    out, h, rstd = gander.rmsnorm_fwd(x, weight, bias, residual, store_rstd=True)
    torch.testing.assert_close(out, by_head("rmsnorm", x, weight, bias, residual))
    dx, dw, db, _ = gander.rmsnorm_bwd(h, weight, dout, rstd, has_bias=True)
    want = gradients(lambda *t: by_head("rmsnorm", *t), (h, weight, bias), dout)
    for a, b in zip((dx, dw, db), want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    out, rstd, mean = gander.layernorm_fwd(x, weight, bias, return_rstd=True, return_mean=True)
    torch.testing.assert_close(out, by_head("layernorm", x, weight, bias))
    dx, dw, db = gander.layernorm_bwd(x, weight, dout, rstd, mean)
    want = gradients(lambda *t: by_head("layernorm", *t), (x, weight, bias), dout)
    for a, b in zip((dx, dw, db), want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    mine, other = x.clone(), residual.clone()
    gander.fused_add_rmsnorm(mine, other, weight)
    torch.testing.assert_close(mine, by_head("rmsnorm", x, weight, None, residual))


def test_heads_in_numpy(name):
    x, weight, bias, residual, _ = (t.numpy() for t in operands("cpu"))
    got = NORMS[name](x, weight, bias, residual)
    want = NORMS[name](*(torch.from_numpy(t) for t in (x, weight, bias, residual)))
    assert np.array_equal(got, want.numpy())
    h, rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)[1:]
    assert gander.rmsnorm_bwd(h, weight, x, rstd, has_bias=True)[2].shape == weight.shape


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refused_heads(name, device):
    x, weight, bias, *_ = operands(device)
    norm, expected = NORMS[name], r"expected \(24,\): one for each column of x"
    for given, words in (
        (
            (x, weight[:2]),
            rf"weight has shape \(2, 24\), {expected}, or \(3, 24\): one for each column of each h",
        ),
        ((x, weight[:, :8]), r"weight has shape \(3, 8\), expected"),
        ((x[0, 0, 0], weight), rf"weight has shape \(3, 24\), {expected}$"),
        ((x, weight[None]), rf"weight has shape \(1, 3, 24\), {expected}, or"),
        ((x, weight[0], bias), r"bias has shape \(3, 24\), expected \(24,\) as weight"),
        ((x, weight, bias[0]), r"bias has shape \(24,\), expected \(3, 24\) as weight"),
        ((x, None, bias[:2]), rf"bias has shape \(2, 24\), {expected} without a weight"),
    ):
        with pytest.raises(ValueError, match=words):
            norm(*given)
    for function in gander.rmsnorm, gander.rmsnorm_fwd:
        with pytest.raises(ValueError, match=rf"bias has shape \(3, 24\), {expected} without a weight"):
            function(x, bias=bias, weight_offset=1)


# ---- Rounding ----


def llama(x, weight, bias=None, residual=None, offset=0.0):
    """Hugging Face's LlamaRMSNorm, with the product in float32. The gradient passes through the rounding."""
    h = x.float() if residual is None else x.float() + residual.float()
    normed = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype).float()
    y = normed * (weight.float() + offset)
    return y if bias is None else y + bias.float()


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("count", [2, 3, 4], ids=["weight", "bias", "residual"])
@pytest.mark.parametrize("columns", [24, 5000, 140000])
def test_llama(dtype, count, columns, device):
    x, weight, bias, residual, upstream = operands(device, (6, 1, columns), dtype)
    tensors = [x, weight[0] if len(weight) == 1 else weight.mean(0), bias.mean(0), residual][:count]
    options = {"weight_offset": 0.5, "out_dtype": SINGLE}
    got = gradients(lambda *t: gander.rmsnorm(*t, casting_mode="llama", **options), tensors, upstream.float())
    want = gradients(lambda *t: llama(*t, offset=0.5), tensors, upstream.float())
    # A number that lies between two of x's type may be rounded to either of them.
    tied = 2 * torch.finfo(dtype).eps
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        off = (a.float() - b.float()).abs() > 1e-5 * b.float().abs() + 1e-5
        if number == 0:
            assert off.float().mean() < 0.01
        torch.testing.assert_close(a.float(), b.float(), rtol=tied, atol=tied * float(b.abs().max()))


def test_llama_rounds(device):
    """The result is another one than without rounding, and so is the gradient of the weight."""
    x, weight, _, _, upstream = operands(device, (40, 1, 128), BRAIN)
    tensors = x, weight[0].float().abs() + 0.5
    mode = {"out_dtype": SINGLE, "casting_mode": "llama"}
    rounded = gradients(lambda *t: gander.rmsnorm(*t, **mode), tensors, upstream.float())
    plain = gradients(lambda *t: gander.rmsnorm(*t, out_dtype=SINGLE), tensors, upstream.float())
    assert torch.equal(rounded[1], plain[1])
    for a, b in (rounded[0], plain[0]), (rounded[2], plain[2]):
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.05)
    normed = rounded[0] / tensors[1]
    torch.testing.assert_close(normed.bfloat16().float(), normed, rtol=1e-6, atol=0)


def test_llama_without_a_gradient(device):
    x, weight, bias, residual, dout = operands(device, (5, 1, 64), BRAIN)
    weight, bias = weight[0], bias[0]
    for given in (x, weight), (x, weight, bias), (x, weight, bias, residual):
        want = gander.rmsnorm(*given, casting_mode="llama")
        for store_rstd in False, True:
            got = gander.rmsnorm_fwd(*given, store_rstd=store_rstd, casting_mode="llama")
            assert torch.equal(got[0], want)
    mine = leaves((x, weight))
    gander.rmsnorm(*mine, casting_mode="llama").backward(dout)
    rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)[2]
    dx, dw, db, _ = gander.rmsnorm_bwd(x, weight, dout, rstd, casting_mode="llama")
    assert torch.equal(dx, mine[0].grad)
    assert torch.equal(dw, mine[1].grad)
    assert db is None
    out = torch.empty_like(x)
    assert torch.equal(gander.rmsnorm(x, weight, casting_mode="llama", out=out), want_of(x, weight))


def want_of(x, weight):
    return gander.rmsnorm(x, weight, casting_mode="llama")


def test_casting_mode_is_checked():
    x = torch.randn(2, 8)
    for function in gander.rmsnorm, gander.rmsnorm_fwd, lambda x, **o: gander.rmsnorm_bwd(x, None, x, x, **o):
        with pytest.raises(ValueError, match="casting_mode is 'gemma', expected None or 'llama'"):
            function(x, casting_mode="gemma")


# ---- Paths through PyTorch ----


def special(x, weight, bias):
    return gander.rmsnorm(x, weight, bias, casting_mode="llama", weight_offset=1.0)


def of_heads(x, weight, bias):
    return gander.layernorm(x, weight, bias)


@pytest.mark.parametrize("function", [special, of_heads])
@pytest.mark.parametrize("path", ["compile", "dynamic", "export", "func", "checkpoint"])
def test_gradients_on_every_path(function, path):
    x, weight, bias, _, upstream = operands("cpu", dtype=BRAIN)
    want = gradients(function, (x, weight, bias), upstream)
    if path == "func":

        def loss(*given):
            return (function(*given) * upstream).sum()

        y = function(x, weight, bias)
        got = [y, *torch.func.grad(loss, argnums=(0, 1, 2))(x, weight, bias)]
    elif path == "checkpoint":
        got = gradients(lambda *t: checkpoint(function, *t, use_reentrant=False), (x, weight, bias), upstream)
    elif path == "export":
        model = torch.nn.Module()
        model.forward = function
        program = torch.export.export(model, (x, weight, bias))
        got = gradients(program.module(), (x, weight, bias), upstream)
    else:
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=path == "dynamic")
        got = gradients(compiled, (x, weight, bias), upstream)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("function", [special, of_heads])
def test_vmap(function):
    x, weight, bias, _, upstream = operands("cpu")
    torch.testing.assert_close(
        torch.vmap(function, in_dims=(0, None, None))(x, weight, bias), function(x, weight, bias)
    )
    torch.testing.assert_close(
        torch.vmap(function, in_dims=(2, 0, 0), out_dims=2)(x, weight, bias), function(x, weight, bias)
    )
    each = torch.func.grad(lambda w, x, u: (function(x, w, bias) * u).sum())
    got = torch.vmap(each, in_dims=(None, 0, 0))(weight, x, upstream)
    for sample in range(len(x)):
        torch.testing.assert_close(
            got[sample], each(weight, x[sample], upstream[sample]), rtol=1e-4, atol=1e-4
        )


def test_opcheck():
    x, weight, bias, residual, _ = leaves(operands("cpu", (4, 3, 24)))
    rounds = {"round_normalized": True}
    for operator, given, options in (
        (torch.ops.gander.rmsnorm, (x, weight), {}),
        (torch.ops.gander.rmsnorm, (x, weight), rounds),
        (torch.ops.gander.rmsnorm, (x, weight, bias, residual), {"weight_offset": 0.5} | rounds),
        (torch.ops.gander.layernorm, (x, weight, bias), {}),
    ):
        torch.library.opcheck(operator.default, given, options)
