"""The options of cross-entropy: losses and gradients beside torch's, on every way to the gradient."""

import math

import gander
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from losses import OPTIONS
from losses import cross_entropy as theirs
from tolerance import assert_accurate
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
ops = torch.ops.gander
dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=lambda d: str(d)[6:])
reductions = pytest.mark.parametrize("reduction", ["none", "sum", "mean"])


@pytest.fixture
def served(device, dtype):
    if device == "cuda" and dtype == DOUBLE:
        pytest.skip("float64 is served on the CPU only")
    return device


def given(m, n, dtype=SINGLE, device="cpu", weighted=True):
    """Logits, targets of which some are ignored, and class weights of which one is 0."""
    x = (3 * torch.randn(m, n, dtype=DOUBLE)).to(dtype)
    target = torch.randint(n, (m,))
    target[1::5] = -100
    weight = (torch.rand(n, dtype=DOUBLE) + 0.5).to(dtype)
    weight[target[0]] = 0
    return x.to(device), target.to(device), weight.to(device) if weighted else None


each = pytest.mark.parametrize("more", OPTIONS, ids="-".join)
few = pytest.mark.parametrize(
    "more", [{"label_smoothing": 0.2}, {"softcap": 4.0}, OPTIONS[-1]], ids=["smoothing", "cap", "all"]
)


def weighs(weighted, reduction, more):
    """Whether there may be class weights: a mean of z-losses has none."""
    return weighted and not (reduction == "mean" and "z_loss" in more)


def gradient(function, x):
    """The loss, and the gradient of a weighted sum of it."""
    x = x.detach().clone().requires_grad_()
    loss = function(x)
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    return loss.detach(), torch.autograd.grad(loss, x, upstream)[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7, 2), (40, 33), (9, 512), (6, 5000), (3, 50257)], ids=str)
@each
@reductions
@dtypes
def test_values_and_gradients(served, dtype, shape, more, weighted, reduction):
    x, target, weight = given(*shape, dtype, served, weighs(weighted, reduction, more))

    def of_torch(x):
        w = None if weight is None else weight.to(x.dtype)
        return theirs(x, target, w, reduction, **more)

    got, dx = gradient(
        lambda x: gander.cross_entropy(x, target, weight=weight, reduction=reduction, **more), x
    )
    wide = SINGLE if dtype in (HALF, BRAIN) else dtype
    exact, exact_dx = gradient(of_torch, x.double())
    single, _ = gradient(of_torch, x.to(wide))
    _, rounded_dx = gradient(of_torch, x)
    assert got.dtype == wide
    size = exact.abs() if reduction == "none" else exact.abs() + 1
    extra = size * 2**-21 if wide == SINGLE else size * 1e-14
    if served == "cuda" and dtype != wide and "softcap" in more:
        # tanh is off by 2^-23: that of lse, and that of the target's logit.
        extra = extra + 2 * 2**-23 * more["softcap"] / more.get("temperature", 1.0)
    assert_accurate(got, single, exact, "loss", extra=extra)
    # The terms of dx cancel where p is near w / W.
    assert_accurate(
        dx, rounded_dx, exact_dx, "dx", extra=exact_dx.abs().max() * (2**-22 if dtype != DOUBLE else 1e-15)
    )


def test_what_torch_gets_wrong(device):
    """A class of weight 0 counts for nothing, even if its logit is -inf: torch's loss is NaN."""
    x = torch.tensor([[0.0, -math.inf, 1.0]], device=device)
    target, weight = torch.tensor([2], device=device), torch.tensor([1.0, 0.0, 2.0], device=device)
    got, dx = gradient(lambda x: gander.cross_entropy(x, target, weight=weight, label_smoothing=0.3), x)
    keep = [0, 2]
    p = x.softmax(-1)[:, keep]
    nll = -p.log()
    want = (0.7 * 2 * nll[0, 1] + 0.3 / 3 * (nll[0] * weight[keep]).sum()) / 2
    torch.testing.assert_close(got, want)
    assert dx[0, 1] == 0 and dx.isfinite().all()
    # Of any other weight, the loss is +inf, as torch's is.
    for function in gander.cross_entropy, F.cross_entropy:
        assert function(x, target, label_smoothing=0.3).item() == math.inf


def test_rows_of_weight_0_count(device):
    x, target, weight = given(40, 33, device=device)
    losses = gander.cross_entropy(x, target, weight=weight, reduction="none", label_smoothing=0.2)
    assert losses[0] > 0 and losses[1] == 0
    assert gander.cross_entropy(x, target, weight=weight, reduction="none")[0] == 0


def test_targets_out_of_range(device):
    x = torch.randn(3, 8, device=device)
    losses, dx = gradient(
        lambda x: gander.cross_entropy(
            x, torch.tensor([8, 1, -1], device=device), reduction="none", label_smoothing=0.2
        ),
        x,
    )
    assert losses.isnan().tolist() == [True, False, True] == dx.isnan().all(-1).tolist()


@pytest.mark.parametrize(
    "more",
    [
        {"label_smoothing": 0.1},
        {"z_loss": 0.1},
        {"softcap": 5.0, "scale": 0.5, "temperature": 0.7},
        {"z_loss": 0.1, "outputs": ("loss", "lse", "predicted")},
    ],
    ids=lambda more: "-".join(more),
)
def test_the_gradient_is_the_only_tensor_of_the_logits_size(more):
    x, target, _ = given(256, 2048, BRAIN)
    x.requires_grad_()

    def step():
        found = gander.cross_entropy(x, target, **more)
        return torch.autograd.grad(found.loss if "outputs" in more else found, x)

    assert x.nbytes <= most_held(step) < 1.1 * x.nbytes


def test_memory_of_two_gradients():
    """That of the loss and that of the log-sum-exps, which are added up in one of them."""
    x, target, _ = given(256, 2048, BRAIN)
    x.requires_grad_()

    def step():
        found = gander.cross_entropy(x, target, outputs=("loss", "lse"))
        return torch.autograd.grad(found.loss + found.lse.square().mean(), x)

    assert 2 * x.nbytes <= most_held(step) < 2.1 * x.nbytes


def test_gradients_of_which_one_is_batched():
    x, target = torch.randn(6, 9, requires_grad=True), torch.arange(6)
    upstream = torch.randn(3, dtype=x.dtype)

    def batched(loss, lse):
        lse.register_hook(lambda dlse: torch.ones(6))  # of no batch
        seeds = upstream, torch.zeros(3, *lse.shape, dtype=lse.dtype)
        return torch.autograd.grad((loss, lse), x, seeds, is_grads_batched=True)[0]

    found = gander.cross_entropy(x, target, outputs=("loss", "lse"))
    want = batched(F.cross_entropy(x, target), x.logsumexp(-1))
    torch.testing.assert_close(batched(found.loss, found.lse), want)


def most_held(step):
    """The bytes that torch's allocator has given away at the peak of a step, besides what there is before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()


def test_large_logits(device):
    """Sums of max - x keep the digits that n * lse - sum(x) would lose."""
    x = torch.randn(4, 4096, device=device) + 1e4
    target = torch.tensor([0, 1, 2, 3], device=device)
    got = gander.cross_entropy(x, target, reduction="none", label_smoothing=0.1)
    want = F.cross_entropy(x.double(), target, reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@few
@reductions
def test_every_way_to_the_gradient(device, reduction, more, weighted):
    """In place, in one pass, compiled, exported, checkpointed, by torch.func."""
    x, target, weight = given(40, 96, device=device, weighted=weighs(weighted, reduction, more))
    options = {"weight": weight, "reduction": reduction, **more}
    want, want_dx = gradient(lambda x: theirs(x, target, **options), x)

    def loss(x, **more):
        return gander.cross_entropy(x, target, **options, **more)

    class Model(torch.nn.Module):
        def forward(self, x):
            return loss(x)

    torch._dynamo.reset()
    ways = {
        "plain": loss,
        "in place": lambda x: loss(x * 1, inplace_backward=True),
        "one pass": lambda x: loss(x, one_pass=reduction != "none"),
        "two passes": lambda x: loss(x, one_pass=False),
        "compiled": torch.compile(loss, fullgraph=True),
        "checkpoint": lambda x: checkpoint(loss, x, use_reentrant=False),
        "exported": torch.export.export(Model(), (x,)).module(),
    }
    for name, way in ways.items():
        got, dx = gradient(way, x)
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(dx, want_dx, msg=lambda text, name=name: f"{name}: {text}")
    if reduction != "none":
        dx = torch.func.grad(loss)(x) * 0.5
        torch.testing.assert_close(dx, want_dx)
        batch = torch.stack([x, x.flip(0)])
        each = torch.vmap(torch.func.grad(loss))(batch)
        torch.testing.assert_close(each[0] * 0.5, want_dx)
        torch.testing.assert_close(each[1], torch.func.grad(loss)(batch[1]))


@few
def test_opcheck(device, more):
    x, target, weight = given(5, 8, device=device, weighted=weighs(True, "mean", more))
    x.requires_grad_()
    torch.library.opcheck(ops.cross_entropy.default, (x, target, weight), more)
    dloss, lse = torch.rand(5, device=device), torch.rand(2, 5, device=device)
    torch.library.opcheck(
        ops.cross_entropy_bwd.default,
        (x.detach(), target, weight, dloss, lse),
        {"reduction": 0, **more},
    )


@few
@pytest.mark.parametrize("weighted", [False, True])
def test_forward_and_backward_by_name(device, weighted, more):
    x, target, weight = given(40, 96, device=device, weighted=weighted)
    options = {"weight": weight, **more}
    want, want_dx = gradient(lambda x: theirs(x, target, weight, "sum", **more), x)
    want_dx = want_dx * 2  # linspace of one number begins with 0.5
    loss, lse, dx = gander.cross_entropy_fwd(x, target, **options, return_lse=True, return_dx=True)
    torch.testing.assert_close(loss.sum(), want)
    z = x * more.get("scale", 1)
    z = more["softcap"] * (z / more["softcap"]).tanh() if "softcap" in more else z
    torch.testing.assert_close(lse, (z / more.get("temperature", 1)).logsumexp(-1))
    torch.testing.assert_close(dx, want_dx)
    one = torch.ones((), device=device)
    torch.testing.assert_close(gander.cross_entropy_bwd(x, target, one, lse, **options), want_dx)
    y = x.clone()
    assert gander.cross_entropy_bwd(y, target, one, lse, inplace_backward=True, **options) is y
    torch.testing.assert_close(y, want_dx)
    y = x.clone()
    gander.cross_entropy_fwd(y, target, return_dx=True, inplace_backward=True, **options)
    torch.testing.assert_close(y, want_dx)


@few
def test_divisor_and_upstream(device, more):
    x, target, weight = given(40, 96, device=device)
    got, dx = gradient(
        lambda x: gander.cross_entropy(
            x, target, weight=weight, reduction="sum", divisor=7, upstream=0.5, **more
        ),
        x,
    )
    want, want_dx = gradient(lambda x: theirs(x, target, weight, "sum", **more) / 7, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dx, want_dx)


def by_module(module):
    return lambda x, target, **options: module(**options)(x, target)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (gander.nn.functional.cross_entropy, F.cross_entropy),
        (by_module(gander.nn.CrossEntropyLoss), by_module(torch.nn.CrossEntropyLoss)),
    ],
    ids=["functional", "module"],
)
def test_modules_and_functional(ours, theirs, images, weighted, device):
    x, target, weight = given(6, 9, device=device, weighted=weighted)
    if images:
        x = torch.randn(2, 9, 4, 5, device=device)
        target = torch.randint(9, (2, 4, 5), device=device)
    got, dx = gradient(lambda x: ours(x, target, weight=weight, label_smoothing=0.2), x)
    want, want_dx = gradient(lambda x: theirs(x, target, weight=weight, label_smoothing=0.2), x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dx, want_dx)


def test_a_module_whose_attribute_changes(device):
    x, target, _ = given(6, 9, device=device)
    module = gander.nn.CrossEntropyLoss(label_smoothing=0.2)
    module.label_smoothing = 0.5
    torch.testing.assert_close(module(x, target), F.cross_entropy(x, target, label_smoothing=0.5))


@each
def test_the_module_has_every_option(device, more):
    x, target, _ = given(6, 9, device=device)
    module = gander.nn.CrossEntropyLoss(**more)
    got, dx = gradient(lambda x: module(x, target), x)
    want, want_dx = gradient(lambda x: theirs(x, target, **more), x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dx, want_dx)
    assert all(f"{name}={value}" in repr(module) for name, value in more.items())


@each
@reductions
@pytest.mark.parametrize("weighted", [False, True])
def test_of_a_linear_layer(device, weighted, reduction, more):
    """Its losses and all gradients, eager, compiled and with all logits."""
    weighted = weighs(weighted, reduction, more)
    _, target, class_weights = given(40, 33, device=device, weighted=weighted)
    hidden, matrix, bias = (torch.randn(*shape, device=device) for shape in ((40, 16), (33, 16), (33,)))
    module = gander.nn.LinearCrossEntropy(16, 33, weight_ce=class_weights, reduction=reduction, **more)
    module.to(device)

    def run(function, h, w):
        return gradient(
            lambda flat: function(flat[: h.numel()].view_as(h), flat[h.numel() :].view_as(w)), both
        )

    both = torch.cat([hidden.flatten(), matrix.flatten()])

    def ours(h, w):
        return gander.linear_cross_entropy(
            h, w, target, bias, class_weights, reduction=reduction, chunk=7, **more
        )

    want = run(
        lambda h, w: theirs(F.linear(h, w, bias), target, class_weights, reduction, **more), hidden, matrix
    )
    torch._dynamo.reset()
    ways = {"eager": ours, "compiled": torch.compile(ours, fullgraph=True, backend="aot_eager")}
    if reduction != "none":
        ways["torch.func"] = lambda h, w: torch.func.vjp(lambda h: ours(h, w), h)[0]
    for name, way in ways.items():
        for a, b in zip(run(way, hidden, matrix), want, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    with torch.no_grad():
        module.weight.copy_(matrix)
    loss = theirs(F.linear(hidden, matrix), target, class_weights, reduction, **more)
    torch.testing.assert_close(module(hidden, target), loss, rtol=1e-4, atol=1e-5)


@each
def test_arrays(more):
    x, target, weight = given(6, 9)
    want = theirs(x, target, weight, "sum", **more)
    got = gander.cross_entropy(x.numpy(), target.numpy(), weight=weight.numpy(), reduction="sum", **more)
    assert isinstance(got, (np.ndarray, np.generic))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


def test_a_sure_target_keeps_its_digits(device):
    """Of a loss near 0, and of the gradient there, where torch has 0."""
    x = torch.zeros(1, 512, device=device)
    x[0, 7] = 40
    target = torch.tensor([7], device=device)
    got, dx = gradient(lambda x: gander.cross_entropy(x, target, temperature=1.25), x)
    others = 511 * math.exp(-32)  # beside 1, of the target
    assert got.item() == pytest.approx(math.log1p(others), rel=1e-5)
    assert dx[0, 7].item() == pytest.approx(-0.5 * others / (1 + others) / 1.25, rel=1e-5)


def test_capped_infinities_are_finite(device):
    x = torch.randn(2, 9, device=device)
    x[0, 3], x[1, 4] = -math.inf, math.inf
    target = torch.tensor([3, 5], device=device)
    got = gradient(lambda x: gander.cross_entropy(x, target, softcap=5.0, reduction="none"), x)
    want = gradient(lambda x: theirs(x, target, softcap=5.0, reduction="none"), x)
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b)


def test_what_is_neutral_is_the_plain_loss(device):
    """Options at their defaults, given by other numbers, have the bits of a call without."""
    x, target, _ = given(40, 96, device=device)
    neutral = {"label_smoothing": 0, "z_loss": np.float32(0), "scale": 1, "softcap": None, "temperature": 1}
    got = gradient(lambda x: gander.cross_entropy(x, target, **neutral), x)
    want = gradient(lambda x: gander.cross_entropy(x, target), x)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("e", [-0.1, 1.1, math.nan])
def test_refused_values(e, device):
    x, target, _ = given(6, 9, device=device)
    with pytest.raises(ValueError, match=r"label_smoothing is .*, expected 0 to 1"):
        gander.cross_entropy(x, target, label_smoothing=e)
    x, target, _ = given(6, 9)
    with pytest.raises(ValueError, match=r"label_smoothing is .*, expected 0 to 1"):
        gander.cross_entropy(x.numpy(), target.numpy(), label_smoothing=e)
    with pytest.raises(ValueError, match=r"label_smoothing is .*, expected 0 to 1"):
        gander.nn.CrossEntropyLoss(label_smoothing=e)


@pytest.mark.parametrize(
    ("option", "values", "expected"),
    [
        ("z_loss", [-1, math.inf, math.nan], "a finite number of at least 0"),
        ("scale", [0, -1, math.inf, math.nan], "1e-18 to 1e"),
        ("softcap", [-1, math.inf, math.nan], "1e-18 to 1e"),
        ("softcap", [0], "more than 0, or None"),
        ("temperature", [0, -1, math.inf, math.nan], "1e-18 to 1e"),
    ],
)
def test_other_refused_values(option, values, expected, device):
    x, target, _ = given(6, 9, device=device)
    for value in values:
        for function in gander.cross_entropy, gander.cross_entropy_fwd:
            with pytest.raises(ValueError, match=rf"{option} is .*, expected {expected}"):
                function(x, target, **{option: value})


@each
def test_refused_combinations(device, more):
    x, target, _ = given(6, 9, device=device)
    said = rf"{next(iter(more))} is .*, expected .*: it is not supported"
    with pytest.raises(NotImplementedError, match=rf"{said} with lse_partial"):
        gander.cross_entropy(x, target, x.logsumexp(-1, keepdim=True), **more)
    with pytest.raises(NotImplementedError, match=rf"{said} with target_logit"):
        gander.cross_entropy_fwd(x, target, x, **more)


def test_other_refused_combinations(device):
    x, target, weight = given(6, 9, device=device)
    dloss, lse = torch.ones(6, device=device), torch.ones(2, 6, device=device)
    with pytest.raises(RuntimeError, match=r"label_smoothing is 0.1 with slice"):
        ops.cross_entropy_bwd(x, target, None, dloss, lse, reduction=0, label_smoothing=0.1, slice=True)
    with pytest.raises(RuntimeError, match=r"z_loss is 0.1 with weight and reduction mean"):
        gander.cross_entropy(x, target, weight=weight, z_loss=0.1)
    with pytest.raises(NotImplementedError, match=r"z_loss is 0.1 with weight_ce and reduction 'mean'"):
        gander.linear_cross_entropy(x, x.new_ones(9, 9), target, weight_ce=weight, z_loss=0.1)


def test_graphs_have_the_defaults_of_the_table():
    from gander._table import LOSS_OPTIONS
    from gander._torch.cross_entropy import loss_values

    assert loss_values({}) == tuple(LOSS_OPTIONS.values())
    assert loss_values(dict(zip(LOSS_OPTIONS, range(5), strict=True))) == tuple(range(5))


@each
@reductions
def test_the_formula_of_graphs(reduction, more):
    """What Inductor gets on a GPU in place of the operator, on the CPU."""
    from gander._torch.inductor import formula

    for weighted in False, True:
        x, target, weight = given(8, 33, dtype=DOUBLE, weighted=weighs(weighted, reduction, more))
        code = ["none", "mean", "sum"].index(reduction)
        _, lse = ops.cross_entropy(x, target, weight, reduction=code, needs_lse=True, **more)
        dloss = torch.rand(8 if reduction == "none" else (), dtype=DOUBLE)
        got = formula(x, target, weight, dloss, lse, None, -100, code, **more)
        want = ops.cross_entropy_bwd(x, target, weight, dloss, lse, reduction=code, **more)
        torch.testing.assert_close(got, want)
