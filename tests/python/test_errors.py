"""Every wrong call raises the right exception, with a message that says what to do. Nothing is written."""

import contextlib
import gc
import weakref

import gander
import pytest
import torch
from gander._torch import fast as _fast
from torch.utils._python_dispatch import TorchDispatchMode

X = torch.randn(4, 6)
WEIGHT = torch.ones(6)
TARGET = torch.zeros(4, dtype=torch.long)
LSE = torch.zeros(4)
INTS = torch.zeros(4, 6, dtype=torch.int32)

CASES = {
    "rmsnorm of rank 0": (
        lambda: gander.rmsnorm(torch.tensor(1.0)),
        ValueError,
        r"rmsnorm_forward: x has rank 0, expected rows \(M, N\) of rank 1 or more",
    ),
    "softmax of no columns": (
        lambda: gander.softmax(torch.empty(3, 0)),
        ValueError,
        r"x has shape \(3, 0\), expected a last dimension of 1 or more",
    ),
    "softmax of integers": (
        lambda: gander.softmax(INTS),
        TypeError,
        "x has dtype int32, expected float16, bfloat16, float32 or float64; convert it",
    ),
    "softmax of complex numbers": (
        lambda: gander.softmax(X.cfloat()),
        TypeError,
        "x has dtype complex64, expected float16",
    ),
    "softmax of booleans": (lambda: gander.softmax(X > 0), TypeError, "x has dtype .*, expected float16"),
    "softmax of a float8": (
        lambda: gander.softmax(X.to(torch.float8_e4m3fn)),
        TypeError,
        "x has dtype float8_e4m3fn, expected float16",
    ),
    "softmax of a list": (
        lambda: gander.softmax([1.0]),
        TypeError,
        "x is a list, expected a torch.Tensor or an object",
    ),
    "softmax of a sparse tensor": (
        lambda: gander.softmax(X.to_sparse()),
        NotImplementedError,
        r"^x has layout sparse_coo, expected strided; pass x.to_dense\(\)$",
    ),
    "softmax_bwd, another shape": (
        lambda: gander.softmax_bwd(X, X[:, :5]),
        ValueError,
        r"y has shape \(4, 5\), expected \(4, 6\) as dy",
    ),
    "softmax_bwd, another dtype": (
        lambda: gander.softmax_bwd(X, X.half()),
        TypeError,
        "y has dtype float16, expected float32; convert it",
    ),
    "softmax_bwd of a list": (
        lambda: gander.softmax_bwd(X, [1.0]),
        TypeError,
        "y is a list, expected a torch.Tensor",
    ),
    "rmsnorm, a short weight": (
        lambda: gander.rmsnorm(X, WEIGHT[:5]),
        ValueError,
        r"weight has shape \(5,\), expected \(6,\): one for each column of x",
    ),
    "rmsnorm, a matrix of weights": (
        lambda: gander.rmsnorm(X, X[:2]),
        ValueError,
        r"weight has shape \(2, 6\), expected \(6,\): one for each column of x, or \(4, 6\): one for each "
        "column of each head",
    ),
    "rmsnorm, a weight of integers": (
        lambda: gander.rmsnorm(X, INTS[0]),
        TypeError,
        "weight has dtype int32, expected float16, bfloat16 or float32; convert it",
    ),
    "rmsnorm, a float64 weight": (
        lambda: gander.rmsnorm(X, WEIGHT.double()),
        TypeError,
        "weight has dtype float64, expected float16, bfloat16 or float32; convert it",
    ),
    "rmsnorm, a weight in a list": (
        lambda: gander.rmsnorm(X, [1.0] * 6),
        TypeError,
        r"weight is \[1.0, .*\], expected a tensor or None",
    ),
    "rmsnorm, a normalized_shape": (
        lambda: gander.rmsnorm(X, (6,)),
        TypeError,
        r"weight is \(6,\), expected a tensor or None; unlike torch's, .* has no normalized_shape",
    ),
    "rmsnorm, an eps in letters": (
        lambda: gander.rmsnorm(X, eps="a"),
        TypeError,
        "eps is 'a', expected None or a number",
    ),
    "rmsnorm, a residual_dtype without a meaning": (
        lambda: gander.rmsnorm(X, residual_dtype="int7", prenorm=True),
        TypeError,
        "residual_dtype is int7, expected float16, bfloat16, float32 or float64",
    ),
    "rmsnorm_bwd without rstd": (
        lambda: gander.rmsnorm_bwd(X, WEIGHT, X, None),
        ValueError,
        "rmsnorm_backward: rstd is None, expected a tensor",
    ),
    "rmsnorm of an array, a residual in a list": (
        lambda: gander.rmsnorm(X.numpy(), residual=[[1.0] * 6] * 4),
        TypeError,
        "residual is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "rmsnorm of an array, a bias in a list": (
        lambda: gander.rmsnorm(X.numpy(), bias=[1.0] * 6),
        TypeError,
        "bias is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "rmsnorm of a list, without eps": (
        lambda: gander.rmsnorm([1.0], eps=None),
        TypeError,
        "x is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "rmsnorm_bwd of an array, a gradient in a list": (
        lambda: gander.rmsnorm_bwd(X.numpy(), None, X.numpy(), LSE.numpy(), dresidual_out=[1.0]),
        TypeError,
        "dresidual_out is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "fused_add_rmsnorm of an array and a list": (
        lambda: gander.fused_add_rmsnorm(X.numpy(), [1.0], None),
        TypeError,
        "residual is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "softmax of a list, another dimension": (
        lambda: gander.softmax([1.0], dim=0),
        TypeError,
        "x is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "cross_entropy of a list, a divisor": (
        lambda: gander.cross_entropy([1.0], TARGET, reduction="sum", divisor=2.0),
        TypeError,
        "x is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "cross_entropy_fwd_out, a loss in a list": (
        lambda: gander.cross_entropy_fwd_out(X, TARGET, None, [1.0], None, None, None),
        TypeError,
        "loss is a list, expected a torch.Tensor as x",
    ),
    "cross_entropy_fwd_out with target_logit, no loss": (
        lambda: gander.cross_entropy_fwd_out(X, TARGET, LSE, None, LSE.clone(), None, None),
        ValueError,
        "loss is None, expected a tensor",
    ),
    "cross_entropy_bwd_out of a list": (
        lambda: gander.cross_entropy_bwd_out([1.0], TARGET, LSE, LSE, X.clone()),
        TypeError,
        "x is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "logsumexp, one dimension out of range": (
        lambda: gander.logsumexp(X, dim=(0, 5)),
        IndexError,
        r"dim is \(0, 5\), expected different dimensions of x of rank 2, ints of -2 to 1",
    ),
    "logsumexp, dimensions that are names": (
        lambda: gander.logsumexp(X, dim=("a", "b")),
        TypeError,
        r"dim is \('a', 'b'\), expected different dimensions of x of rank 2, ints of -2 to 1",
    ),
    "fused_add_rmsnorm without a residual": (
        lambda: gander.fused_add_rmsnorm(X.numpy(), None, None),
        TypeError,
        "residual is None, expected a tensor",
    ),
    "layernorm without eps": (
        lambda: gander.layernorm(X, WEIGHT, eps=None),
        TypeError,
        "eps is None, expected a number",
    ),
    "softmax, a dtype without a meaning": (
        lambda: gander.softmax(X, dtype="junk"),
        TypeError,
        "^dtype is junk, expected float16, bfloat16, float32 or float64",
    ),
    "softmax of an array, a wider dtype": (
        lambda: gander.softmax(X.numpy(), dtype="float64"),
        NotImplementedError,
        "dtype is float64 for x of float32, expected float32; cast x first",
    ),
    "logsumexp of an array, one dimension twice": (
        lambda: gander.logsumexp(X.numpy(), axis=(0, -2)),
        IndexError,
        r"axis is \(0, -2\), expected different dimensions of x of rank 2, ints of -2 to 1",
    ),
    "cross_entropy, an ignore_index of 65 bits": (
        lambda: gander.cross_entropy(X, TARGET, ignore_index=2**64),
        ValueError,
        "ignore_index is 18446744073709551616, expected an integer of 64 bits",
    ),
    "a linear layer and its loss in no chunks": (
        lambda: gander.nn.LinearCrossEntropy(6, 4, chunk=0),
        ValueError,
        "chunk is 0, expected a number of rows of 1 or more, or None",
    ),
    "rmsnorm, an out_dtype of integers": (
        lambda: gander.rmsnorm(X, out_dtype=torch.int32),
        TypeError,
        "^out_dtype is int32, expected float16, bfloat16, float32 or float64$",
    ),
    "rmsnorm, a negative eps": (
        lambda: gander.rmsnorm(X, eps=-1.0),
        ValueError,
        "eps is -1, expected a finite number of 0 or more",
    ),
    "rmsnorm_bwd, another shape": (
        lambda: gander.rmsnorm_bwd(X, WEIGHT, X[:3], LSE),
        ValueError,
        r"dout has shape \(3, 6\), expected \(4, 6\) as x",
    ),
    "rmsnorm_bwd, a short rstd": (
        lambda: gander.rmsnorm_bwd(X, WEIGHT, X, LSE[:3]),
        ValueError,
        r"rstd has shape \(3,\), which is 3 elements, expected 4: one for each row of x",
    ),
    "rmsnorm_bwd, an rstd of halves": (
        lambda: gander.rmsnorm_bwd(X, WEIGHT, X, LSE.half()),
        TypeError,
        "rstd has dtype float16, expected float32; convert it",
    ),
    "cross_entropy, a short target": (
        lambda: gander.cross_entropy(X, TARGET[:3]),
        ValueError,
        r"cross_entropy_forward: target has shape \(3,\), expected \(4,\), the leading dimensions of x",
    ),
    "cross_entropy, a transposed target": (
        lambda: gander.cross_entropy(
            X.view(2, 2, 6).expand(3, 2, 2, 6)[:, 0], torch.zeros(2, 3, dtype=torch.long)
        ),
        ValueError,
        r"target has shape \(2, 3\), expected \(3, 2\), the leading dimensions of x",
    ),
    "cross_entropy, a floating target": (
        lambda: gander.cross_entropy(X, LSE),
        TypeError,
        "target has dtype float32, expected int32 or int64; convert it",
    ),
    "cross_entropy, an array of targets": (
        lambda: gander.cross_entropy(X, TARGET.numpy()),
        TypeError,
        "target is a ndarray, expected a torch.Tensor as x",
    ),
    "cross_entropy, a short weight": (
        lambda: gander.cross_entropy(X, TARGET, weight=WEIGHT[:5]),
        ValueError,
        r"weight has shape \(5,\), expected \(6,\): one for each column of x",
    ),
    "cross_entropy, an unknown reduction": (
        lambda: gander.cross_entropy(X, TARGET, reduction="avg"),
        ValueError,
        "reduction is 'avg', expected 'none', 'mean' or 'sum'",
    ),
    "cross_entropy, a weight with a gradient": (
        lambda: gander.cross_entropy(X, TARGET, weight=torch.ones(6, requires_grad=True)),
        NotImplementedError,
        "weight requires a gradient, but .*; detach it",
    ),
    "cross_entropy_bwd, a short dloss": (
        lambda: gander.cross_entropy_bwd(X, TARGET, LSE[:3], LSE),
        ValueError,
        r"dloss has shape \(3,\), which is 3 elements, expected 4: one for each row of x, or 1: one for all "
        "rows",
    ),
    "cross_entropy_bwd, a short lse": (
        lambda: gander.cross_entropy_bwd(X, TARGET, LSE, LSE[:3]),
        ValueError,
        r"lse has shape \(3,\), which is 3 elements, expected 4",
    ),
    "cross_entropy_bwd in place over an expanded tensor": (
        lambda: gander.cross_entropy_bwd(X[:1].expand(4, 6), TARGET, LSE, LSE, inplace_backward=True),
        ValueError,
        r"x has rows of 6 elements 0 apart, expected an output whose rows do not overlap; make it "
        "contiguous",
    ),
    "a bias of another length": (
        lambda: gander.layernorm(X, bias=WEIGHT[:2]),
        ValueError,
        r"bias has shape \(2,\), expected \(6,\): one for each column of x",
    ),
    "a bias that is a number": (
        lambda: gander.rmsnorm(X, bias=1.0),
        TypeError,
        r"bias is a float, expected a torch\.Tensor",
    ),
    "a bias of another dtype": (
        lambda: gander.rmsnorm(X, bias=WEIGHT.double()),
        TypeError,
        "bias has dtype float64, expected float16, bfloat16 or float32; convert it",
    ),
    "a residual of another shape": (
        lambda: gander.rmsnorm(X, residual=X[:1]),
        ValueError,
        r"residual has shape \(1, 6\), expected \(4, 6\) as x",
    ),
    "a residual with as many rows": (
        lambda: gander.layernorm(X, residual=X.view(2, 2, 6)),
        ValueError,
        r"residual has shape \(2, 2, 6\), expected \(4, 6\) as x",
    ),
    "a residual of another dtype": (
        lambda: gander.layernorm(X, residual=X.double()),
        TypeError,
        "residual has dtype float64, expected float16, bfloat16 or float32; convert it",
    ),
    "a residual dtype": (
        lambda: gander.rmsnorm_fwd(X, residual_dtype=torch.float64),
        TypeError,
        "residual_dtype is float64, expected float16, bfloat16 or float32$",
    ),
    "an algorithm": (
        lambda: gander.rmsnorm(X, residual=X, algorithm="warp"),
        NotImplementedError,
        'algorithm is "warp" on cpu, expected "auto"',
    ),
    "layernorm in torch's order": (
        lambda: gander.layernorm(X, (6,), WEIGHT, WEIGHT),
        TypeError,
        r"weight is \(6,\), expected a tensor or None; unlike torch's, layernorm\(x, weight\) has",
    ),
    "layernorm with a negative eps": (
        lambda: gander.layernorm(X, WEIGHT, eps=-1.0),
        ValueError,
        "eps is -1, expected a finite number of 0 or more",
    ),
    "layernorm with an eps that is a tensor": (
        lambda: gander.layernorm_fwd(X, WEIGHT, eps=torch.tensor(1e-6), return_mean=True),
        TypeError,
        "eps is a Tensor, expected a number",
    ),
    "a weight offset": (
        lambda: gander.rmsnorm(X, weight_offset=1.0),
        ValueError,
        "weight_offset is 1 without a weight, expected 0; pass the weight or drop weight_offset",
    ),
    "a weight offset that is a parameter": (
        lambda: gander.rmsnorm(X, WEIGHT, weight_offset=torch.tensor(1.0, requires_grad=True)),
        TypeError,
        r"weight_offset is a Tensor, expected a number, which has no gradient; pass float\(weight_offset\)",
    ),
    "an eps that is a tensor": (
        lambda: gander.rmsnorm_fwd(X, WEIGHT, eps=torch.tensor(1e-6)),
        TypeError,
        r"eps is a Tensor, expected None or a number, which has no gradient; pass float\(eps\)",
    ),
    "the gradient with a weight offset that is a tensor": (
        lambda: gander.rmsnorm_bwd(X, WEIGHT, X, LSE, weight_offset=torch.tensor(1.0)),
        TypeError,
        "weight_offset is a Tensor, expected a number",
    ),
    "the gradient of a sum of another shape": (
        lambda: gander.rmsnorm_bwd(X, WEIGHT, X, LSE, dresidual_out=X[:2]),
        ValueError,
        r"dresidual_out has shape \(2, 6\), expected \(4, 6\) as x",
    ),
    "the gradient of layernorm with a short mean": (
        lambda: gander.layernorm_bwd(X, WEIGHT, X, LSE, LSE[:3]),
        ValueError,
        r"mean has shape \(3,\), which is 3 elements, expected 4: one for each row of x",
    ),
    "cross_entropy in torch's order": (
        lambda: gander.cross_entropy(X, TARGET, WEIGHT),
        ValueError,
        r"lse_partial has shape \(6,\), expected \(4,\) and one dimension more; class weights, which are "
        "third in torch, are weight=",
    ),
    "cross_entropy_fwd in torch's order": (
        lambda: gander.cross_entropy_fwd(X, TARGET, WEIGHT),
        ValueError,
        r"target_logit has shape \(6,\), expected \(4,\), or one dimension more; class weights, which are "
        "third in torch, are weight=",
    ),
    "rmsnorm in torch's order": (
        lambda: gander.rmsnorm(X, (6,), WEIGHT),
        TypeError,
        r"weight is \(6,\), expected a tensor or None; unlike torch's, rmsnorm\(x, weight\) has no "
        "normalized_shape",
    ),
    "rmsnorm, an unknown out_dtype": (
        lambda: gander.rmsnorm(X, out_dtype="quad"),
        TypeError,
        "out_dtype is quad, expected float16, bfloat16, float32 or float64",
    ),
    "an algorithm that is not a name": (
        lambda: gander.softmax(X, algorithm=["warp"]),
        ValueError,
        r"algorithm is \['warp'\], expected 'auto', 'warp', .* or 'splitk'",
    ),
    "explain of an unknown op": (
        lambda: gander.explain("conv", X),
        ValueError,
        'op is "conv", expected cross_entropy, cross_entropy_fwd_dx, glu, l2norm, layernorm, ',
    ),
    "explain of no op": (
        lambda: gander.explain(None, X),
        TypeError,
        "op is None, expected an operator's name, such as 'softmax' or 'rmsnorm_bwd'",
    ),
    "explain of a tensor": (
        lambda: gander.explain(X, "softmax"),
        TypeError,
        "op is a Tensor, expected an operator's name",
    ),
    "algorithms of no op": (
        lambda: gander.algorithms(None),
        TypeError,
        "op is None, expected an operator's name",
    ),
    "explain of a list": (
        lambda: gander.explain("softmax", [1.0]),
        TypeError,
        "x is a list, expected a torch.Tensor or an object with __dlpack__",
    ),
    "explain of nothing": (
        lambda: gander.explain("softmax", shape=(4, 6), dtype="float32"),
        TypeError,
        "device is None, expected x, or shape, dtype and device",
    ),
    "explain for an unknown device": (
        lambda: gander.explain("softmax", X, device="tpu"),
        ValueError,
        'device is "tpu", expected a device of this machine or a10, a100, b200, h100',
    ),
    "explain of integers": (
        lambda: gander.explain("softmax", INTS),
        TypeError,
        "the dtype of x is int32, expected float16, bfloat16, float32 or float64",
    ),
    "explain of rank 0": (
        lambda: gander.explain("softmax", X[0, 0]),
        ValueError,
        "x has rank 0, expected rank 1 or more",
    ),
    "warmup of an unknown device": (
        lambda: gander.warmup("tpu"),
        ValueError,
        "device is 'tpu', expected 'cpu', 'cuda' or 'cuda:<index>'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refusals(name):
    call, exception, message = CASES[name]
    with pytest.raises(exception, match=message) as caught:
        call()
    assert caught.type is exception


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
def test_operands_on_the_cpu_and_on_cuda():
    with pytest.raises(RuntimeError, match="weight is on cpu, expected cuda:0 as x; move one of them"):
        gander.rmsnorm(X.cuda(), WEIGHT)
    with pytest.raises(RuntimeError, match="target is on cpu, expected cuda:0 as x; move one of them"):
        gander.cross_entropy(X.cuda(), TARGET)


@pytest.mark.parametrize("name", ["rmsnorm, a short weight", "cross_entropy, a short target"])
def test_ops_of_torch_refuse_too(name):
    """Through torch.ops the message is the same. The exception's type is one that torch's C ABI can raise."""
    call = {
        "rmsnorm, a short weight": lambda: torch.ops.gander.rmsnorm(X, WEIGHT[:5]),
        "cross_entropy, a short target": lambda: torch.ops.gander.cross_entropy(X, TARGET[:3]),
    }[name]
    with pytest.raises((RuntimeError, ValueError), match=CASES[name][2]):
        call()


def test_errors_of_torch_pass_unchanged():
    """An error of torch is not replaced by gander's last error."""
    with pytest.raises(ValueError, match="weight has shape"):
        gander.rmsnorm(X, WEIGHT[:5])

    class Broken(TorchDispatchMode):
        def __torch_dispatch__(self, *_):
            raise RuntimeError("a mode is broken")

    with Broken(), pytest.raises(RuntimeError, match=r"^a mode is broken$"):
        gander.softmax(X)


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: gander.rmsnorm(x, WEIGHT[:5]),
        lambda x: gander.rmsnorm(x, (6,)),
        lambda x: gander.layernorm(x, (6,)),
        lambda x: gander.rmsnorm(x, WEIGHT, out=x[:3]),
        lambda x: gander.rmsnorm(x, WEIGHT[:5], out=torch.empty(4, 6)),
        lambda x: gander.fused_add_rmsnorm(x, x.clone(), WEIGHT[:5]),
        lambda x: gander.softmax(x.int()),
        lambda x: gander.cross_entropy(x, x, ignore_index=0),
        lambda x: gander.linear_cross_entropy(x, x, x),
        lambda x: gander.linear_token_statistics(x, x, x),
    ],
)
def test_a_refusal_keeps_no_tensor_alive(refused):
    """Not even until the garbage collector runs: who runs out of memory and frees something gets it back."""
    gc.collect()
    gc.disable()
    try:
        x = X.clone()
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            refused(x)
            pytest.fail("was not refused")
        alive = weakref.ref(x)
        del x
        assert alive() is None
    finally:
        gc.enable()


def test_nothing_is_written_on_refusal():
    x = X.clone()
    with pytest.raises(ValueError, match="weight has shape"):
        gander.cross_entropy_fwd(x, TARGET, weight=WEIGHT[:5], return_dx=True, inplace_backward=True)
    assert torch.equal(x, X)


def test_nothing_is_written_if_one_of_two_results_cannot_be():
    loss = LSE.clone()
    with pytest.raises(TypeError, match=r"lse is a ndarray, expected a torch\.Tensor"):
        gander.cross_entropy_fwd_out(X, TARGET, LSE + 1, loss, LSE.numpy(), None, None)
    assert torch.equal(loss, LSE)


def test_the_fast_path_is_not_called_checked_where_it_was_not(monkeypatch):
    monkeypatch.setattr(_fast, "_checked", set())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert "not checked: " in gander.info()["fast_path"]
    assert gander.info()["fast_path"] is True


def test_errors_in_backward():
    leaf = X.clone().requires_grad_()
    y = gander.softmax(leaf)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        y.backward(torch.ones(3, 6))


def test_debug_checks_targets():
    target = torch.tensor([0, 6, -100, 2])
    assert gander.cross_entropy(X, target).isnan()
    gander.set_debug(True)
    try:
        message = "target has the class 6, expected 0 to 5, or ignore_index = -100"
        for call in (
            lambda: gander.cross_entropy(X, target),
            lambda: gander.cross_entropy_fwd(X, target),
            lambda: gander.cross_entropy_bwd(X, target, LSE, LSE),
        ):
            with pytest.raises(IndexError, match=message):
                call()
        assert gander.cross_entropy(X, target.clamp(max=5)).isfinite()
        with pytest.raises(TypeError, match="target is a list, expected a"):
            gander.cross_entropy(X, [0, 6, -100, 2])
        with pytest.raises(ValueError, match="x has rank 0, expected rows"):
            gander.cross_entropy(X[0, 0], target[0])
        with pytest.raises(IndexError, match="target has the class 6"):  # 6 is the low half of 2^32 + 6
            gander.cross_entropy(X, target.int(), ignore_index=2**32 + 6)
        assert gander.cross_entropy(X.to("meta"), target.to("meta")).is_meta
        torch.vmap(gander.cross_entropy)(X[None], target[None])
        torch.compile(gander.cross_entropy, fullgraph=True, backend="eager")(X, target)
    finally:
        gander.set_debug(False)
    assert gander.cross_entropy(X, target).isnan()
