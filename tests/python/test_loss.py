"""cross_entropy as training loops call it: with a divisor, and with the upstream gradient that will come."""

import math
import re
from functools import partial

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gander._torch import cross_entropy as _cross_entropy
from gander._torch import inductor as _inductor
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


@pytest.fixture
def single_pass(monkeypatch):
    """Takes the single pass, which is for large CUDA tensors, on the CPU too."""
    monkeypatch.setattr(_cross_entropy, "_has_one_pass", lambda x: True)


def given(device, dtype=torch.float32, m=6, n=33):
    x = torch.randn(m, n, device=device).to(dtype)
    target = torch.randint(0, n, (m,), device=device)
    target[1] = -100
    return x, target


def gradient(x, loss_of, scale=1.0):
    leaf = x.detach().clone().requires_grad_()
    loss = loss_of(leaf)
    (loss * scale).backward()
    return loss.detach(), leaf.grad


def expected(x, target, divisor, scale=1.0, weight=None):
    loss, dx = gradient(
        x.double(),
        lambda x: F.cross_entropy(x, target, weight if weight is None else weight.double(), reduction="sum"),
        scale / divisor,
    )
    return loss / divisor, dx


TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 1e-12}


def check(got, want, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        got[0].double(), want[0], rtol=1e-5 if dtype != torch.float64 else 1e-12, atol=0
    )
    torch.testing.assert_close(got[1].double(), want[1], rtol=tolerance, atol=tolerance * want[1].abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", [{}, {"inplace_backward": True}, {"one_pass": True}], ids=str)
def test_divisor(device, dtype, how, single_pass):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is served on the CPU only")
    x, target = given(device, dtype)
    weight = (torch.rand(33, device=device) + 0.5).to(dtype)
    kinds = [7, 7.0, *(torch.tensor(7, dtype=kind, device=device) for kind in REAL)]
    for divisor in kinds:
        got = gradient(
            x,
            lambda x, d=divisor: gander.cross_entropy(
                x * 1, target, weight=weight, reduction="sum", divisor=d, **how
            ),
        )
        check(got, expected(x, target, 7, weight=weight), dtype)


def test_divisor_without_autograd(device):
    x, target = given(device)
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    four, scaled_lse, quarter = gander.cross_entropy_fwd(
        x, target, return_lse=True, return_dx=True, divisor=4
    )
    assert torch.equal(four, loss / 4) and torch.equal(scaled_lse, lse)
    torch.testing.assert_close(quarter, dx / 4)
    assert torch.equal(gander.cross_entropy_fwd(x, target, divisor=4), loss / 4)
    assert torch.equal(gander.cross_entropy_fwd(x, target, return_lse=True, divisor=4)[0], loss / 4)
    assert torch.equal(
        gander.cross_entropy_fwd(x, target, x, divisor=4), gander.cross_entropy_fwd(x, target, x) / 4
    )
    written = x.clone()
    gander.cross_entropy_fwd(written, target, return_dx=True, inplace_backward=True, divisor=4)
    assert torch.equal(written, quarter)


def test_division_by_zero(device):
    x, target = given(device)
    got = gradient(x, lambda x: gander.cross_entropy(x, target, reduction="sum", divisor=0))
    assert got[0] == float("inf")
    assert got[1].isinf().any() and torch.equal(got[1][1], torch.zeros_like(x[1]))  # an ignored row


def test_divisor_elsewhere(device):
    """lse_partial, nn.CrossEntropyLoss, a graph, torch.func.grad and vmap."""
    x, target = given(device)
    want, module = expected(x, target, 7), gander.nn.CrossEntropyLoss(reduction="sum")

    def summed(x, divisor):
        return gander.cross_entropy(x, target, reduction="sum", divisor=divisor)

    compiled = torch.compile(summed, backend="aot_eager", fullgraph=True)
    for loss_of in (
        summed,
        compiled,
        lambda x, divisor: gander.cross_entropy(x, target, x, reduction="sum", divisor=divisor),
        lambda x, divisor: module(x, target, divisor),
        lambda x, divisor: module(x, target, divisor=divisor, upstream=2.0),
    ):
        for divisor in 7, torch.tensor(7, device=device):
            check(gradient(x, partial(loss_of, divisor=divisor)), want, x.dtype)
    torch.testing.assert_close(torch.func.grad(summed)(x, 7), want[1].float())
    counts = torch.tensor([2.0, 5.0], device=device)
    got = torch.vmap(lambda d: gander.cross_entropy(x, target, reduction="sum", divisor=d))(counts)
    torch.testing.assert_close(got, F.cross_entropy(x, target, reduction="sum") / counts)


def test_numpy():
    x, target = given("cpu")
    want = gander.cross_entropy(x, target, reduction="sum", divisor=7)
    for divisor in 7, np.int64(7), np.array(7.0):
        got = gander.cross_entropy(x.numpy(), target.numpy(), reduction="sum", divisor=divisor)
        assert float(got) == float(want)


BAD = {
    "a mean": (
        lambda x, t: gander.cross_entropy(x, t, divisor=2),
        ValueError,
        "divisor is given with reduction 'mean'",
    ),
    "no reduction": (
        lambda x, t: gander.cross_entropy(x, t, reduction="none", upstream=2),
        ValueError,
        "upstream is given with reduction 'none'",
    ),
    "one dimension": (
        lambda x, t: gander.cross_entropy(x, t, reduction="sum", divisor=torch.ones(1)),
        ValueError,
        r"divisor has shape \(1,\), expected \(\); pass divisor.squeeze\(\)",
    ),
    "a gradient": (
        lambda x, t: gander.cross_entropy(x, t, reduction="sum", divisor=torch.ones((), requires_grad=True)),
        ValueError,
        "divisor requires a gradient, but has none, expected a constant; detach it",
    ),
    "a bool": (
        lambda x, t: gander.cross_entropy(x, t, reduction="sum", divisor=True),
        TypeError,
        "divisor is True, expected a number or a 0-dim tensor",
    ),
    "a complex tensor": (
        lambda x, t: gander.cross_entropy(x, t, upstream=torch.tensor(1j)),
        TypeError,
        "upstream has dtype complex64, expected a real number",
    ),
    "another device": (
        lambda x, t: gander.cross_entropy(x, t, reduction="sum", divisor=torch.ones((), device="meta")),
        RuntimeError,
        "divisor is on meta, expected cpu as x",
    ),
    "an operator's mean": (
        lambda x, t: torch.ops.gander.cross_entropy(x, t, divisor=torch.ones(())),
        RuntimeError,
        "divisor is given with reduction mean, expected sum or none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call(*given("cpu"))


def test_upstream_changes_no_result(device, single_pass):
    """Whatever was expected, and whatever comes: also after a first backward pass."""
    x, target = given(device)
    for reduction in "mean", "sum":
        for expects in None, 1.0, 0.25, torch.tensor(0.25, device=device):
            for scale in 1.0, 0.25, 65536.0:
                leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                loss = gander.cross_entropy(
                    leaf, target, reduction=reduction, one_pass=True, upstream=expects
                )
                assert "OnePass" in type(loss.grad_fn).__name__
                want = F.cross_entropy(other, target, reduction=reduction) * scale
                for _ in range(2):
                    (loss * scale).backward(retain_graph=True)
                    want.backward(retain_graph=True)
                    torch.testing.assert_close(leaf.grad, other.grad)


def test_upstream_is_copied(device, single_pass):
    x, target = given(device)
    scale = torch.tensor(8.0, device=device)
    leaf = x.clone().requires_grad_()
    loss = gander.cross_entropy(leaf, target, one_pass=True, upstream=scale) * 8
    scale.fill_(3)  # as GradScaler.update does
    loss.backward()
    torch.testing.assert_close(leaf.grad, 8 * gradient(x, lambda x: F.cross_entropy(x, target))[1])


def test_hit_leaves_the_gradient_alone(device, single_pass, monkeypatch):
    """With the upstream gradient that was expected, backward returns what forward has made."""
    x, target = given(device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        leaf = x.clone().requires_grad_()
        loss = gander.cross_entropy(leaf, target, reduction="sum", one_pass=True, upstream=0.5, divisor=3)
    dx = next(t for t in kept if t.shape == x.shape and t is not leaf and not torch.equal(t, x))
    dx.fill_(7)  # only a hit leaves it
    (loss * 0.5).backward()
    assert torch.equal(leaf.grad, torch.full_like(x, 7))


def test_checkpoint(device, single_pass):
    """The gradient is a saved tensor, so a checkpoint drops it, and a hook that moves tensors moves it."""
    x, target = given(device)
    head = torch.randn(33, 33, device=device)
    want = gradient(x, lambda x: F.cross_entropy(x @ head, target, reduction="sum") / 4)

    def run(x):
        return gander.cross_entropy(x @ head, target, reduction="sum", one_pass=True, upstream=0.25)

    leaf = x.clone().requires_grad_()
    loss = checkpoint(run, leaf, use_reentrant=False)
    assert not [value for value in vars(loss.grad_fn).values() if isinstance(value, torch.Tensor)]
    (loss / 4).backward()
    torch.testing.assert_close(leaf.grad, want[1])
    with torch.autograd.graph.save_on_cpu():
        got = gradient(x, run, 0.25)
    torch.testing.assert_close(got[1], want[1])


# ---- The loss and the gradient of a target that is nearly certain ----


def confident(k, n):
    """Logits of which the first is far above the others, or equal to one."""
    x = torch.zeros(n, dtype=torch.float64)
    x[0] = 20 + k
    return x


CONFIDENT = {
    "far": lambda n: torch.stack([confident(k, n) for k in range(0, 61, 5)]),
    "tie": lambda n: torch.stack([confident(k, n).roll(1).fill_(0) + 3 for k in range(3)]),
    "two": lambda n: torch.stack([confident(k, n) + confident(k, n).roll(1) for k in (0, 20, 60)]),
    "last": lambda n: torch.stack([confident(k, n).roll(-1) for k in (0, 20, 60)]),
    "not the maximum": lambda n: torch.stack([confident(k, n).roll(1) for k in (0, 20, 60)]),
}


def certain(case, n, dtype, device):
    """Logits, targets, and in float64 the losses and the gradients at the targets."""
    x = CONFIDENT[case](n).to(dtype).double()
    target = torch.full((len(x),), n - 1 if case == "last" else 0)
    others = x.clone()
    others.scatter_(1, target[:, None], float("-inf"))
    # log(1 + sum exp(x - target)): so no digit of a small loss is lost
    ratio = (others - x.gather(1, target[:, None])).logsumexp(-1)
    loss = torch.where(ratio > 0, ratio + (-ratio).exp().log1p(), ratio.exp().log1p())
    return x.to(dtype).to(device), target.to(device), loss.to(device), torch.expm1(-loss).to(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 2, 1000, 4097, 128256, 140000])
@pytest.mark.parametrize("case", CONFIDENT)
@pytest.mark.parametrize(
    "how", ["two passes", "one pass", "forward", "parts", "in place", "missed", "batched", "formula"]
)
def test_confident_token(device, how, case, n, dtype, single_pass):
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is served on the CPU only")
    if n == 1 and case in ("two", "last"):
        pytest.skip("one class has no other")
    x, target, loss, dx = certain(case, n, dtype, device)
    m, none = len(x), {"reduction": "none"}
    if how == "forward":
        got, gradient = gander.cross_entropy_fwd(x, target, return_dx=True)
    elif how == "parts":
        got, _, gradient = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    elif how == "formula":
        got, lse = torch.ops.gander.cross_entropy(x, target, reduction=0, needs_lse=True)
        options = {"divisor": None, "ignore_index": -100, "reduction": 0}
        gradient = _inductor.formula(x, target, None, dloss=torch.ones_like(got), lse=lse, **options)
    else:
        leaf = x.clone().requires_grad_()
        if how == "two passes":
            got = gander.cross_entropy(leaf, target, one_pass=False, **none)
            got.sum().backward()
        elif how == "in place":
            got = gander.cross_entropy(leaf * 1, target, inplace_backward=True, **none)
            got.sum().backward()
        else:
            rows = [gander.cross_entropy(leaf[i : i + 1], target[i : i + 1], one_pass=True) for i in range(m)]
            got = torch.stack(rows)
            if how == "batched":
                upstream = torch.tensor([4.0, 1.0], dtype=got.dtype, device=device)
                leaf.grad = torch.autograd.grad(got.sum(), leaf, upstream, is_grads_batched=True)[0][1]
            else:
                (got.sum() if how == "one pass" else got.sum() * 4).backward()
        gradient = leaf.grad / (4 if how == "missed" else 1)
    gradient = gradient.gather(1, target[:, None]).squeeze(1)
    smallest = torch.finfo(torch.float32).tiny  # float32 has fewer digits below
    if device == "cuda" and n <= 1024:
        smallest = 2e-7  # kernels of short rows sum all classes
    torch.testing.assert_close(got.double(), loss, rtol=1e-5, atol=smallest)
    ulp = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    tiny = max(smallest, 6e-8 if dtype == torch.float16 else 0)
    torch.testing.assert_close(gradient.double(), dx, rtol=max(ulp, 1e-12), atol=tiny)


@pytest.mark.parametrize("partial_lse", [False, True])
def test_inplace_backward_under_hooks_on_saved_tensors(device, partial_lse):
    """Regression test: autograd does not compare versions there, so x was overwritten without an error."""
    leaf, target = torch.randn(6, 5, device=device, requires_grad=True), torch.randint(5, (6,), device=device)
    lse = gander.logsumexp(leaf.detach().exp()).unsqueeze(-1) if partial_lse else None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = gander.cross_entropy(leaf.exp(), target, lse, inplace_backward=True)
    want = torch.autograd.grad(F.cross_entropy(leaf.exp(), target), leaf)[0]
    for _ in range(2):
        got = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        torch.testing.assert_close(got, want)


# ---- In a graph for Inductor ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("options", ["", "weight", "divisor"])
def test_formula(device, dtype, reduction, options):
    """It is the operator's gradient, also of rows that are ignored, out of range or not numbers."""
    if device == "cuda" and dtype == torch.float64:
        pytest.skip("float64 is served on the CPU only")
    x, target = torch.randn(3, 4, 33, device=device).to(dtype), torch.randint(33, (3, 4), device=device)
    target[0, 1], target[1, 0], target[1, 1], target[2, 2] = -100, 33, -1, 7
    x[0, 1, 3], x[0, 2, 3], x[0, 3, 3], x[1, 2, :30] = math.nan, math.nan, math.inf, -math.inf
    target[0, 3], target[1, 2] = 3, 31
    weight = divisor = None
    if options == "weight":
        weight = torch.rand(33, device=device).to(dtype)
        weight[7] = 0
    if options == "divisor":
        divisor = torch.tensor(7, device=device, dtype=dtype if dtype == torch.float64 else torch.float32)
    reduction = 2 if options == "divisor" else reduction
    if reduction == 1:  # rows out of range would make all rows NaN
        target[1] = 5
    arguments = {"weight": weight, "divisor": divisor, "reduction": reduction, "ignore_index": -100}
    loss, lse = torch.ops.gander.cross_entropy(x, target, **arguments, needs_lse=True)
    arguments |= {"dloss": torch.rand_like(loss), "lse": lse}
    got = _inductor.formula(x, target, **arguments)
    want = torch.ops.gander.cross_entropy_bwd(x, target, **arguments)
    assert got.dtype == want.dtype == dtype
    assert want.isnan().any() and not want[0, 1].any()
    torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("returned", ["loss", "logits too"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_fuses_the_gradient(device, returned, dynamic, monkeypatch):
    """Inductor gets a formula, which it writes over logits that nobody else has."""
    monkeypatch.setattr(_inductor, "FUSED_ON", (device,))
    torch.compiler.reset()
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((12, 8), (33, 8))]
    target = torch.randint(33, (12,), device=device)
    target[3] = -100

    def model(x, weight):
        logits = x @ weight.t()
        loss = gander.cross_entropy(logits, target)
        return (loss, logits) if returned == "logits too" else (loss,)

    def gradients(function):
        loss, *_ = function(*leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    want = gradients(model)
    with torch._inductor.config.patch(fx_graph_cache=False):
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
        got, (_, code) = run_and_get_code(lambda: gradients(compiled))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert "cross_entropy_bwd" not in code
    assert returned != "loss" or "in_out_ptr" in code


# From a product z, the logits z * 0.73 or so, and what the model returns besides the loss.
BEHIND = {
    "softcap": lambda z: (30 * torch.tanh(z / 30), z),
    "softcap, in float32": lambda z: ((x := 30 * torch.tanh(z / 30)).float(), x),
    "waves": lambda z: (z + z.sin(), z),
    "temperature": lambda z: (z / 0.7, z.float().logsumexp(-1)),
    "scaled, in float32": lambda z: ((x := z * 0.73).float(), x),
    "product": lambda z: (z, z),
    "product in float32": lambda z: (z.float(), z),
    "narrowed product": lambda z: ((z.float() @ torch.eye(128, device=z.device)).to(z.dtype), z),
    "checkpoint": lambda z: (z, z),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("behind", BEHIND)
def test_inductor_subtracts_what_forward_read(device, behind, dtype, monkeypatch):
    """Inductor does not round what it computes anew. Where a token is certain, half a unit in the last place
    of the logits is more than the whole gradient."""
    monkeypatch.setattr(_inductor, "FUSED_ON", (device,))
    used = []
    formula = _inductor.formula
    monkeypatch.setattr(_inductor, "formula", lambda **given: used.append(1) or formula(**given))
    torch.compiler.reset()
    rows, n = 32, 128
    target, to = torch.arange(rows, device=device), torch.eye(n, device=device, dtype=dtype)
    h = torch.randn(rows, n, device=device) * 2
    h[target, target] = 40 + 9 * torch.rand(rows, device=device)

    def of_rows(x):
        return gander.cross_entropy(x, target, reduction="sum")

    def model(h):
        z = h @ to
        if behind == "checkpoint":
            return checkpoint(lambda z: of_rows(z * 0.73), z, use_reentrant=False), z
        x, other = BEHIND[behind](z)
        return of_rows(x), other

    def at_target(function):
        leaf = h.to(dtype).requires_grad_()
        loss, _ = function(leaf)
        return torch.autograd.grad(loss * 1024, leaf)[0].float()[target, target]

    want = at_target(model)
    with torch._inductor.config.patch(fx_graph_cache=False):
        got = at_target(torch.compile(model, fullgraph=True))
    assert used or behind == "checkpoint"
    torch.testing.assert_close(got, want, rtol=0.3, atol=1e-6)


def test_inductor_gets_two_losses_of_the_same_logits(device, monkeypatch):
    monkeypatch.setattr(_inductor, "FUSED_ON", (device,))
    torch.compiler.reset()
    x, target = given(device)

    def model(x):
        y = x * 2
        return gander.cross_entropy(y, target) + 3 * gander.cross_entropy(y, target.clamp(0), reduction="sum")

    with torch._inductor.config.patch(fx_graph_cache=False):
        got, code = run_and_get_code(lambda: gradient(x, torch.compile(model, fullgraph=True)))
    torch.testing.assert_close(got, gradient(x, model))
    assert not any("cross_entropy_bwd" in each for each in code)


@pytest.mark.parametrize("index", [2**32, -(2**63), 2**32 - 100])
def test_formula_of_an_ignored_index_of_64_bits(index):
    """Regression test: an int32 target was compared with its low half."""
    x, target = given("cpu")
    target[0] = 0
    options = {"ignore_index": index, "reduction": 0}
    loss, lse = torch.ops.gander.cross_entropy(x, target.int(), **options, needs_lse=True)
    options |= {"weight": None, "dloss": torch.ones_like(loss), "lse": lse, "divisor": None}
    got = _inductor.formula(x, target.int(), **options)
    torch.testing.assert_close(
        got, torch.ops.gander.cross_entropy_bwd(x, target.int(), **options), equal_nan=True
    )


def test_others_get_the_operator(monkeypatch):
    monkeypatch.setattr(_inductor, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(_inductor, "formula", None)
    x, target = given("cpu")
    compiled = torch.compile(gander.cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        gradient(x, lambda x: compiled(x, target)), gradient(x, lambda x: gander.cross_entropy(x, target))
    )


# ---- In one pass in a graph for Inductor ----


@pytest.fixture
def inductor(device, single_pass, monkeypatch):
    """Inductor serves the device as it serves CUDA, and compiles everything anew."""
    monkeypatch.setattr(_inductor, "FUSED_ON", (device,))
    torch.compiler.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


def at_once(x, target, **options):
    return gander.cross_entropy(x, target, one_pass=True, **options)


WRITES = "cross_entropy_bwd_one_pass"  # what a compiled backward pass calls that takes forward's gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"upstream": 0.25}, {"upstream": -3.0}, {"reduction": "sum", "divisor": 7}, {"reduction": "sum"}],
    ids=str,
)
def test_one_pass_in_a_graph(device, inductor, dtype, dynamic, options):
    """It has the bits of an eager call, whether backward brings what was expected or not."""
    x, target = given(device, dtype, m=12)

    def model(x):
        return at_once(x * 2, target, **options)

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for scale in 0.25, 1.0, 3.0:
        got, codes = run_and_get_code(lambda scale=scale: gradient(x, compiled, scale))
        torch.testing.assert_close(got, gradient(x, model, scale), rtol=0, atol=0)
        assert scale != 0.25 or (WRITES in codes[-1] and "clone" not in codes[-1])


def test_one_pass_in_a_graph_takes_no_second_tensor(device, inductor):
    """The product behind reads the buffer that forward filled."""
    (h, _), weight = given(device, m=12), torch.randn(40, 33, device=device, requires_grad=True)
    target = torch.randint(40, (12,), device=device)
    compiled = torch.compile(lambda h: at_once(h @ weight.t(), target), fullgraph=True)
    _, (_, code) = run_and_get_code(lambda: compiled(h).backward())
    assert WRITES in code and not re.search(r"= empty_strided_\w+\(\(12, 40\)", code)


@pytest.mark.parametrize("expects", [1.0, 4.0])
def test_two_losses_share_a_gradient_in_a_graph(device, inductor, expects):
    """torch merges equal calls. Backward passes that differ must not write over the same tensor."""
    x, target = given(device, m=12)

    def model(x, loss_of=at_once):
        y = x * 2
        first, second = loss_of(y, target), loss_of(y, target)
        return expects * first + 3 * (second * y.mean())

    compiled = torch.compile(model, fullgraph=True)
    two_passes = partial(gander.cross_entropy, one_pass=False)
    torch.testing.assert_close(gradient(x, compiled), gradient(x, partial(model, loss_of=two_passes)))


def test_a_gradient_that_the_caller_sees_is_not_written(device, inductor):
    """Nor by a backward pass from torch's cache, of a function that does not return it."""
    x, target = given(device, m=12)
    forward = torch.ops.gander.cross_entropy_fwd_one_pass

    def model(x, visible):
        y = x * 2
        with torch.no_grad():
            dx = forward(y, target)[2] if visible else None
        return at_once(y, target), dx

    with torch._inductor.config.patch(fx_graph_cache=True):
        for visible in False, True:
            torch.compiler.reset()
            leaf = x.clone().requires_grad_()
            loss, dx = torch.compile(model, fullgraph=True)(leaf, visible)
            before = dx.clone() if visible else None
            (3 * loss).backward()
    assert torch.equal(dx, before)
    torch.testing.assert_close(leaf.grad, 6 * dx)


def test_a_graph_that_runs_backward_twice(device, inductor):
    """torch allows it without donated buffers only. Then nothing is written over, even if torch's cache has a
    backward pass that does that."""
    x, target = given(device, m=12)
    leaf = x.clone().requires_grad_()
    with torch._inductor.config.patch(fx_graph_cache=True):
        for donated in True, False:
            torch.compiler.reset()
            with torch._functorch.config.patch(donated_buffer=donated):
                loss = torch.compile(lambda x: at_once(x * 2, target), fullgraph=True)(leaf)
                first = torch.autograd.grad(3 * loss, leaf, retain_graph=not donated)[0]
        kept, second = first.clone(), torch.autograd.grad(loss, leaf)[0]
    assert torch.equal(first, kept)
    want = gradient(x, lambda x: at_once(x * 2, target))[1]
    torch.testing.assert_close((first, second), (3 * want, want))


def test_no_gradient_is_made_twice_behind_a_checkpoint(device, inductor):
    x, target = given(device, m=12)

    def model(x):
        return checkpoint(lambda x: at_once(x.sin(), target), x, use_reentrant=False)

    got, codes = run_and_get_code(lambda: gradient(x, torch.compile(model, fullgraph=True), 3.0))
    torch.testing.assert_close(got, gradient(x, model, 3.0))
    assert not any("one_pass" in code for code in codes)


def test_one_pass_in_a_graph_with_an_upstream_that_changes(device, inductor):
    """Backward would take forward's gradient for one that it is not."""
    x, target = given(device, m=12)
    upstream = torch.tensor(4.0, device=device)
    compiled = torch.compile(lambda x, u: at_once(x * 2, target, upstream=u), fullgraph=True)
    leaf = x.clone().requires_grad_()
    loss = compiled(leaf, upstream)
    upstream.fill_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_pass_in_a_graph_has_no_second_derivative(device, inductor):
    x, target = given(device, m=12)
    leaf = x.clone().requires_grad_()
    loss = torch.compile(lambda x: at_once(x * 2, target), fullgraph=True)(leaf)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, leaf, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"batch_invariant": True}], ids=str)
def test_graphs_that_take_two_passes(device, inductor, options):
    x, target = given(device, m=12)
    compiled = torch.compile(lambda x: at_once(x * 2, target, **options).sum(), fullgraph=True)
    got, codes = run_and_get_code(lambda: gradient(x, compiled))
    torch.testing.assert_close(got, gradient(x, lambda x: at_once(x * 2, target, **options).sum()))
    assert not any("one_pass" in code for code in codes)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_one_pass_with_other_backends(device, inductor, backend):
    x, target = given(device, m=12)
    compiled = torch.compile(lambda x: at_once(x * 2, target), fullgraph=True, backend=backend)
    for scale in 1.0, 3.0:
        torch.testing.assert_close(
            gradient(x, compiled, scale), gradient(x, lambda x: at_once(x * 2, target), scale)
        )


def test_an_expanded_x_is_not_written_over(device):
    """Its rows share memory, so inplace_backward is ignored."""
    one = torch.randn(1, 7, device=device, requires_grad=True)
    target = torch.tensor([0, 6, 3], device=device)
    got = torch.autograd.grad(gander.cross_entropy(one.expand(3, 7), target, inplace_backward=True), one)
    torch.testing.assert_close(got, torch.autograd.grad(F.cross_entropy(one.expand(3, 7), target), one))
