"""cross_entropy with outputs: each beside torch's formulas in float64, and its gradients on every way."""

import math
import pickle

import gander
import numpy as np
import pytest
import torch
from gander._functions.cross_entropy import OUTPUTS
from gander._torch import cross_entropy_outputs, inductor, operators_gen
from losses import OPTIONS
from losses import cross_entropy as theirs
from tolerance import assert_accurate
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = math.inf, math.nan
dtypes = pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=lambda d: str(d)[6:])
reductions = pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
each = pytest.mark.parametrize("more", [{}, *OPTIONS], ids="-".join)
few = pytest.mark.parametrize("more", [{}, {"z_loss": 0.1, "softcap": 4.0}, OPTIONS[-1]], ids="-".join)


@pytest.fixture
def served(device, dtype):
    if device == "cuda" and dtype == DOUBLE:
        pytest.skip("float64 is served on the CPU only")
    return device


def given(m, n, dtype=SINGLE, device="cpu", weighted=False):
    """Logits, targets of which some are ignored and some the largest, and class weights of which one is 0."""
    x = (3 * torch.randn(m, n, dtype=DOUBLE)).to(dtype)
    target = torch.randint(n, (m,))
    target[::2] = x[::2].argmax(-1)
    target[1::5] = -100
    weight = (torch.rand(n, dtype=DOUBLE) + 0.5).to(dtype)
    weight[target[0]] = 0
    return x.to(device), target.to(device), weight.to(device) if weighted else None


def weighs(weighted, reduction, more):
    """Whether there may be class weights: a mean of z-losses has none."""
    return weighted and not (reduction == "mean" and "z_loss" in more)


def of_torch(x, target, weight=None, reduction="mean", divisor=1, **more):
    """All outputs in torch's operators."""
    z = x * more.get("scale", 1)
    z = more["softcap"] * (z / more["softcap"]).tanh() if "softcap" in more else z
    counts = target != -100
    lse = (z / more.get("temperature", 1)).logsumexp(-1).where(counts, 0)
    z_loss = more.get("z_loss", 0) * lse**2
    if reduction != "none":
        z_loss = z_loss.sum() / (counts.sum() if reduction == "mean" else divisor)
    loss = theirs(x, target, weight, reduction, **more) / divisor
    predicted = z.argmax(-1).where(counts, -1)
    return {
        "loss": loss,
        "z_loss": z_loss,
        "lse": lse,
        "predicted": predicted,
        "is_top1": predicted == target,
    }


def gradients(found, x, names):
    """The gradient of a weighted sum of these outputs."""
    found = found if isinstance(found, dict) else found._asdict()
    total = 0
    for i, name in enumerate(names):
        value = found[name]
        upstream = torch.linspace(0.5, 2 + i, value.numel(), dtype=value.dtype, device=x.device)
        total = total + (value * upstream.view(value.shape)).sum()
    return torch.autograd.grad(total, x, retain_graph=True)[0]


def leaf(x):
    return x.detach().clone().requires_grad_()


# ---- Values and gradients ----


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(40, 33), (6, 5000)], ids=str)
@each
@reductions
@dtypes
def test_values_and_gradients(served, dtype, shape, more, weighted, reduction):
    x, target, weight = given(*shape, dtype, served, weighs(weighted, reduction, more))
    wide = SINGLE if dtype in (HALF, BRAIN) else dtype
    options = {"reduction": reduction, **more}

    def by_torch(x):
        x = leaf(x)
        found = of_torch(x, target, None if weight is None else weight.to(x.dtype), **options)
        dx = gradients(found, x, ["loss"])
        return {name: value.detach() for name, value in found.items()}, dx

    x.requires_grad_()
    got = gander.cross_entropy(x, target, weight=weight, outputs=OUTPUTS, **options)
    (exact, exact_dx), (single, _), (_, rounded_dx) = map(by_torch, (x.double(), x.to(wide), x))
    size = exact["loss"].abs() + (reduction != "none")
    extra = size * (2**-21 if wide == SINGLE else 1e-14)
    cap = 0.0
    if served == "cuda" and dtype != wide and "softcap" in more:
        # tanh is off by 2^-23: that of lse, and that of the target's logit.
        cap = 2 * 2**-23 * more["softcap"] / more.get("temperature", 1.0)
    assert_accurate(got.loss.detach(), single["loss"], exact["loss"], "loss", extra=extra + cap)
    lse = exact["lse"]
    assert_accurate(got.lse.detach(), single["lse"], lse, "lse", extra=lse.abs() * 2**-23 + cap)
    torch.testing.assert_close(got.z_loss.detach().double(), exact["z_loss"], rtol=1e-5, atol=1e-6)
    assert torch.equal(got.predicted, exact["predicted"]) and torch.equal(got.is_top1, exact["is_top1"])
    assert [of.dtype for of in got] == [wide, wide, wide, torch.int64, torch.bool]
    slack = exact_dx.abs().max() * (2**-22 if dtype != DOUBLE else 1e-15)
    assert_accurate(gradients(got, x, ["loss"]), rounded_dx, exact_dx, "dx", extra=slack)


@pytest.mark.parametrize("names", [["lse"], ["z_loss"], ["loss", "lse"], ["loss", "z_loss", "lse"]], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@each
@reductions
def test_gradients_of_the_others(device, names, weighted, reduction, more):
    if names == ["z_loss"] and "z_loss" not in more:
        more = {**more, "z_loss": 0.02}
    x, target, weight = given(40, 33, device=device, weighted=weighs(weighted, reduction, more))
    x, exact = leaf(x), leaf(x.double())
    options = {"reduction": reduction, **more}
    got = gander.cross_entropy(x, target, weight=weight, outputs=OUTPUTS, **options)
    want = of_torch(exact, target, None if weight is None else weight.double(), **options)
    dx = gradients(want, exact, names).float()
    torch.testing.assert_close(gradients(got, x, names), dx)
    assert not dx[target == -100].any()


@pytest.mark.parametrize("weighted", [False, True])
@each
@reductions
def test_the_loss_is_that_of_a_plain_call(device, reduction, more, weighted):
    x, target, weight = given(40, 700, device=device, weighted=weighs(weighted, reduction, more))
    a, b, options = leaf(x), leaf(x), {"weight": weight, "reduction": reduction, **more}
    want = gander.cross_entropy(a, target, **options)
    for outputs in OUTPUTS, ("loss", "lse"):
        got = gander.cross_entropy(b, target, outputs=outputs, **options)
        torch.testing.assert_close(got.loss, want, rtol=3e-7, atol=1e-7)
        dx = gradients({"loss": want}, a, ["loss"])
        torch.testing.assert_close(gradients(got, b, ["loss"]), dx)
    with torch.no_grad():
        again = gander.cross_entropy(b, target, outputs=outputs, **options)
    assert torch.equal(again.loss, got.loss) and not again.loss.requires_grad


def test_a_certain_target_keeps_its_digits(device):
    sure = torch.zeros(1, 4096, device=device)
    sure[0, 7] = 40
    found = gander.cross_entropy(sure, torch.tensor([7], device=device), outputs=("loss", "is_top1"))
    torch.testing.assert_close(found.loss.double().item(), 4095 * math.exp(-40), rtol=1e-5, atol=0)
    assert found.is_top1.all()


def test_large_logits_with_smoothing(device):
    """Sums of max - x keep the digits that lse minus the mean of x would lose."""
    x = torch.randn(4, 4096, device=device) + 1e4
    target = torch.tensor([0, 1, 2, 3], device=device)
    how = {"reduction": "none", "label_smoothing": 0.1}
    got = gander.cross_entropy(x, target, outputs=OUTPUTS, **how)
    torch.testing.assert_close(got.loss.double(), theirs(x.double(), target, **how), rtol=1e-6, atol=0)
    assert torch.equal(got.predicted, x.argmax(-1))


def test_divisor(device):
    x, target, _ = given(40, 33, device=device)
    for divisor in 7, torch.tensor(7, device=device):
        how = {"reduction": "sum", "z_loss": 0.1}
        a = leaf(x)
        got = gander.cross_entropy(a, target, divisor=divisor, outputs=OUTPUTS, **how)
        exact = leaf(x.double())
        want = of_torch(exact, target, divisor=7, **how)
        for name in "loss", "z_loss":
            torch.testing.assert_close(getattr(got, name), want[name].float())
        torch.testing.assert_close(gradients(got, a, ["loss"]), gradients(want, exact, ["loss"]).float())


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE], ids=str)
def test_rows_have_the_same_bits_in_any_batch(dtype, device):
    x, target, _ = given(257, 1000, dtype, device)
    how = {"outputs": OUTPUTS, "batch_invariant": True, "reduction": "none", "z_loss": 0.1}
    whole = gander.cross_entropy(x, target, **how)
    for rows in slice(0, 1), slice(3, 10):
        part = gander.cross_entropy(x[rows], target[rows], **how)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))


# ---- Rows that are special ----


@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1}], ids="-".join)
@pytest.mark.parametrize("outputs", [OUTPUTS, ("loss", "z_loss", "lse")], ids=len)
def test_special_rows(device, outputs, more):
    """The loss and its gradient are those of a call without outputs."""
    x, target, _ = given(10, 33, device=device)
    target[:] = 3
    x[0, 5], x[1, 5], x[2], x[3, 3], x[4, 2:] = NAN, INF, -INF, -INF, -INF
    target[5], target[6], target[7] = 33, -1, -100
    x[7] = NAN
    how = {"reduction": "none", "z_loss": 0.1, **more}
    a, b = leaf(x), leaf(x)
    want, got = (
        gander.cross_entropy(a, target, **how),
        gander.cross_entropy(b, target, outputs=outputs, **how),
    )
    torch.testing.assert_close(got.loss, want, equal_nan=True)
    assert got.loss[[0, 1, 2, 5, 6]].isnan().all() and got.loss[7] == 0
    torch.testing.assert_close(
        gradients(got, b, ["loss"]), gradients({"loss": want}, a, ["loss"]), equal_nan=True
    )
    assert got.lse[:2].isnan().all() and got.lse[2] == -INF and got.lse[7] == 0
    torch.testing.assert_close(got.lse[8:], x[8:].logsumexp(-1))
    assert got.z_loss[2] == INF and got.z_loss[7] == 0
    mean = gander.cross_entropy(x[4:], target[4:], z_loss=0.1, outputs=outputs, **more)
    assert mean.loss.isnan() and mean.z_loss.isnan()  # with targets that are no classes
    if outputs == OUTPUTS:
        assert got.predicted.tolist()[:3] == [-1, -1, 0] and got.predicted[7] == -1
        assert torch.equal(got.predicted[8:], x[8:].argmax(-1)) and not got.is_top1[[0, 1, 5, 6, 7]].any()


def test_ties_are_the_lowest_class(device):
    x = torch.zeros(3, 4097, device=device)
    x[0, [5, 3000]] = 9.0
    target = torch.tensor([3000, 0, 1], device=device)
    found = gander.cross_entropy(x, target, outputs=("predicted", "is_top1"))
    assert found.predicted.tolist() == [5, 0, 0] and found.is_top1.tolist() == [False, True, False]


def test_rows_of_weight_0(device):
    """What their logits are does not matter to the loss, even if a graph brings zeros as lse's gradient."""
    x, target, weight = given(6, 33, device=device, weighted=True)
    weight[target[2]] = 0
    x[2] = NAN
    a, b = leaf(x), leaf(x)
    want = gander.cross_entropy(a, target, weight=weight)
    got = gander.cross_entropy(b, target, weight=weight, outputs=OUTPUTS)
    torch.testing.assert_close(got.loss, want)
    dx = gradients({"loss": want}, a, ["loss"])
    torch.testing.assert_close(gradients(got, b, ["loss"]), dx)
    total = got.loss * 0.5 + (got.lse * 0).nan_to_num().sum()
    assert not torch.autograd.grad(total, b, torch.ones_like(total))[0][2].any()


@reductions
@pytest.mark.parametrize("outputs", [OUTPUTS, ("loss", "z_loss", "lse")], ids=len)
def test_no_rows(device, outputs, reduction):
    x = torch.randn(0, 4, device=device).requires_grad_()
    target = torch.zeros(0, dtype=torch.int64, device=device)
    found = gander.cross_entropy(x, target, reduction=reduction, z_loss=0.1, outputs=outputs)
    for name in "loss", "z_loss":
        value = getattr(found, name)
        assert value.shape == ((0,) if reduction == "none" else ())
        assert reduction == "none" or (value.isnan() if reduction == "mean" else value == 0)
    assert all(value.shape == (0,) for value in found[2:])
    assert torch.autograd.grad(found.loss.sum() + found.lse.sum(), x)[0].shape == (0, 4)


def test_all_rows_are_ignored(device):
    x, target = torch.randn(3, 4, device=device).requires_grad_(), torch.full((3,), -100, device=device)
    found = gander.cross_entropy(x, target, z_loss=0.1, outputs=OUTPUTS)
    assert found.loss.isnan() and found.z_loss.isnan() and not found.lse.any()
    assert not torch.autograd.grad(found.loss, x)[0].any()


@pytest.mark.parametrize("to", [torch.uint8, torch.int32], ids=str)
def test_shapes_and_targets(device, to):
    x = torch.randn(2, 3, 50, device=device)
    target = torch.randint(50, (2, 3), device=device)
    want = gander.cross_entropy(x, target, reduction="none", outputs=OUTPUTS)
    got = gander.cross_entropy(x, target.to(to), reduction="none", outputs=OUTPUTS)
    assert all(map(torch.equal, got, want)) and want.predicted.shape == (2, 3)
    wide = torch.stack([x, x], -1)[..., 0]  # whose last stride is 2
    assert all(map(torch.equal, gander.cross_entropy(wide, target, outputs=OUTPUTS)[2:], want[2:]))
    one = gander.cross_entropy(x[0, 0], target[0, 0], outputs=OUTPUTS)
    assert one.predicted == want.predicted[0, 0] and one.lse.shape == ()


# ---- What is read and kept ----


def test_the_logits_are_read_once(monkeypatch):
    calls = []

    def counted(name):
        function = getattr(operators_gen, name)

        def call(*given, **options):
            calls.append(name)
            return function(*given, **options)

        return call

    for name in "cross_entropy", "token_statistics", "cross_entropy_bwd":
        monkeypatch.setattr(operators_gen, name, counted(name))
    x, target, _ = given(4, 33)
    x.requires_grad_()
    for outputs, more, read in (
        (("loss", "z_loss", "lse"), {"label_smoothing": 0.1}, ["cross_entropy"]),
        (OUTPUTS, {"z_loss": 0.1}, ["token_statistics"]),
        (OUTPUTS, {"label_smoothing": 0.1}, ["cross_entropy", "token_statistics"]),
    ):
        calls.clear()
        found = gander.cross_entropy(x, target, outputs=outputs, **more)
        assert calls == read
        found.loss.backward(retain_graph=True)
        assert calls == [*read, "cross_entropy_bwd"]


def test_no_tensor_of_the_size_of_the_logits_is_kept():
    x, target, _ = given(4, 4096)
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gander.cross_entropy(x, target, softcap=3.0, outputs=OUTPUTS)
    assert max(t.numel() for t in saved if t.data_ptr() != x.data_ptr()) == 9


def test_in_place(device):
    x, target, _ = given(40, 33, device=device)
    a = leaf(x)
    for outputs in OUTPUTS, ("loss", "lse"):
        dx = gradients(gander.cross_entropy(a, target, outputs=outputs), a, ["loss"])
        logits = a * 1
        found = gander.cross_entropy(logits, target, inplace_backward=True, outputs=outputs)
        (got,) = torch.autograd.grad(found.loss, logits)
        assert torch.equal(got * 0.5, dx) and got.data_ptr() == logits.data_ptr()
        again = leaf(x)
        found = gander.cross_entropy(again * 1, target, inplace_backward=True, outputs=outputs)
        both = gradients(gander.cross_entropy(a, target, outputs=outputs), a, ["loss", "lse"])
        torch.testing.assert_close(gradients(found, again, ["loss", "lse"]), both)


# ---- torch's paths ----


def total_of(found, names):
    """A number of which all of these outputs take part."""
    return sum((getattr(found, name) * (2 + i)).sum() for i, name in enumerate(names))


@pytest.mark.parametrize(
    ("names", "reduction", "more"),
    [
        (("loss",), "mean", {}),
        (("loss",), "none", {"z_loss": 0.1, "softcap": 4.0}),
        (("loss", "z_loss", "lse"), "sum", OPTIONS[-1]),
        (("loss", "z_loss", "lse"), "mean", {"z_loss": 0.1, "softcap": 4.0}),
    ],
    ids=["loss", "losses", "all, smoothed", "all"],
)
def test_every_way_to_the_gradient(device, names, reduction, more):
    """Compiled, checkpointed, exported, by torch.func."""
    x, target, weight = given(40, 96, device=device, weighted=weighs(True, reduction, more))

    def compute(x, target):
        found = gander.cross_entropy(
            x * 1, target, weight=weight, reduction=reduction, outputs=OUTPUTS, **more
        )
        return total_of(found, names), *found

    class Model(torch.nn.Module):
        def forward(self, x, target):
            return compute(x, target)

    def results(function):
        a = leaf(x)
        total, *found = function(a, target)
        total.backward()
        return [*found, a.grad]

    want = results(compute)
    torch.compiler.reset()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Model(), (x, target), dynamic_shapes=({0: rows}, {0: rows}))
    ways = {
        "compiled": torch.compile(compute, fullgraph=True),
        "dynamic": torch.compile(compute, fullgraph=True, dynamic=True),
        "aot_eager": torch.compile(compute, fullgraph=True, backend="aot_eager"),
        "checkpoint": lambda *given: checkpoint(compute, *given, use_reentrant=False),
        "reentrant": lambda *given: checkpoint(compute, *given, use_reentrant=True),
        "exported": program.module(),
        "decomposed": program.run_decompositions().module(),
    }
    for name, way in ways.items():
        for a, b in zip(results(way), want, strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
    few_rows = program.module()(x[:3], target[:3])
    torch.testing.assert_close(few_rows, compute(x[:3], target[:3]))
    loss = lambda x, target: compute(x, target)[0]  # noqa: E731
    torch.testing.assert_close(torch.func.grad(loss)(x, target), want[-1])
    batch = torch.stack([x, x.flip(0)]), torch.stack([target, target.flip(0)])
    dx = torch.vmap(torch.func.grad(loss))(*batch)
    torch.testing.assert_close(dx, torch.stack([want[-1], want[-1].flip(0)]))
    found = torch.vmap(lambda x, t: gander.cross_entropy(x, t, outputs=OUTPUTS, **more))(*batch)
    alone = gander.cross_entropy(x, target, outputs=OUTPUTS, **more)
    for a, b in zip(found, alone, strict=True):
        torch.testing.assert_close(a[0], b)


def test_outer_derivatives():
    """Inside several transforms the gradient is that of each, and a second derivative is refused."""
    x, target, _ = given(5, 8)

    def losses(x):
        return gander.cross_entropy(x, target, reduction="none", outputs=("predicted", "loss")).loss

    jacobian = torch.func.jacrev(losses)(x)
    want = torch.func.jacrev(lambda x: theirs(x, target, reduction="none"))(x)
    torch.testing.assert_close(jacobian, want)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: losses(x).sum())(x).sum())(x)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(losses, (x,), (x,))


@pytest.mark.parametrize("names", [("loss",), ("loss", "z_loss", "lse")], ids=len)
@few
def test_inductor_fuses_the_gradient(device, names, more, monkeypatch):
    monkeypatch.setattr(inductor, "FUSED_ON", (device,))
    torch.compiler.reset()
    x, target, weight = given(12, 33, device=device, weighted="z_loss" not in more)

    def model(x):
        found = gander.cross_entropy(x * 2, target, weight=weight, outputs=OUTPUTS, **more)
        return total_of(found, names), found

    def of(function):
        a = leaf(x)
        total, found = function(a)
        return total.detach(), torch.autograd.grad(total, a)[0], found.predicted

    want = of(model)
    with torch._inductor.config.patch(fx_graph_cache=False):
        got, code = run_and_get_code(lambda: of(torch.compile(model, fullgraph=True)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert not any("cross_entropy_bwd" in each for each in code)


def test_formula_of_rows_of_weight_0():
    x, target, weight = given(6, 33, weighted=True)
    weight[target[2]] = 0
    x[2] = NAN
    _, lse = torch.ops.gander.cross_entropy(x, target, weight, needs_lse=True)
    dlse = torch.rand(6)
    dlse[2] = 0
    one = torch.ones(())
    options = {"divisor": None, "ignore_index": -100, "reduction": 2}
    got = inductor.formula(x, target, weight, one, lse, **options, dlse=dlse)
    assert not got[2].any()
    mapping = {"scale": 1.0, "softcap": 0.0, "temperature": 1.0, "batch_invariant": False}
    values = {"x": x, "target": target, "lse": lse, **options, **mapping}
    want = torch.ops.gander.cross_entropy_bwd(x, target, weight, one, lse, reduction=2)
    torch.testing.assert_close(got, want + cross_entropy_outputs._of_lse(values, dlse))


# ---- Arrays ----


@pytest.mark.parametrize("weighted", [False, True])
@few
@reductions
def test_arrays(reduction, more, weighted):
    x, target, weight = given(40, 33, weighted=weighs(weighted, reduction, more))
    arrays = x.numpy(), target.numpy()
    how = {"reduction": reduction, "outputs": OUTPUTS, **more}
    if reduction == "sum":
        how["divisor"] = 3
    want = gander.cross_entropy(x, target, weight=weight, **how)
    got = gander.cross_entropy(*arrays, weight=None if weight is None else weight.numpy(), **how)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, np.ndarray)
        torch.testing.assert_close(torch.from_numpy(a), b)


def test_special_rows_of_arrays():
    x, target, _ = given(6, 9)
    x[0, 5], x[1, 5], x[2] = NAN, INF, -INF
    target[3], target[5] = 9, -100
    for reduction in "none", "mean", "sum":
        how = {"z_loss": 0.1, "reduction": reduction, "outputs": OUTPUTS}
        for rows in slice(0, 6), slice(3, 6), slice(4, 6):
            got = gander.cross_entropy(x[rows].numpy(), target[rows].numpy(), **how)
            want = gander.cross_entropy(x[rows], target[rows], **how)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(torch.from_numpy(a), b, equal_nan=True)


# ---- The named tuple, modules, refusals ----


def test_outputs():
    x, target, _ = given(4, 9)
    found = gander.cross_entropy(x, target, outputs=["predicted", "loss"])
    assert found._fields == ("predicted", "loss") and type(found).__name__ == "CrossEntropyOutput"
    again = pickle.loads(pickle.dumps(found))
    assert again._fields == found._fields and torch.equal(again.predicted, found.predicted)
    (loss,) = gander.cross_entropy(x, target, outputs=("loss",))
    torch.testing.assert_close(loss, gander.cross_entropy(x, target))
    with pytest.raises(AttributeError):
        found.lse  # noqa: B018 - it was not asked for


def test_module(device):
    x = torch.randn(2, 9, 4, 5, device=device)
    target = torch.randint(9, (2, 4, 5), device=device)
    module = gander.nn.CrossEntropyLoss(z_loss=0.1, remember=True, outputs=("loss", "predicted", "z_loss"))
    assert "outputs=('loss', 'predicted', 'z_loss')" in repr(module)
    found = module(x, target)
    exact = of_torch(x.movedim(1, -1).flatten(0, 2).double(), target.flatten(), z_loss=0.1)
    assert torch.equal(found.predicted, x.argmax(1))
    for name in "loss", "z_loss":
        torch.testing.assert_close(getattr(found, name), exact[name].float())
    again = pickle.loads(pickle.dumps(module))(x, target)
    assert torch.equal(again.loss, found.loss)
    with pytest.raises(NotImplementedError, match=r"z_loss is 0\.1, expected 0\.0: torch\.jit\.script"):
        torch.jit.script(module)
    del module.outputs  # of modules that were pickled without it
    torch.testing.assert_close(module(x, target), found.loss)


def test_refusals():
    x, target, weight = given(4, 9, weighted=True)
    loss = gander.cross_entropy
    names = "'loss', 'z_loss', 'lse', 'predicted', 'is_top1'"
    for kind, match, call in (
        (ValueError, rf"outputs is \(\), expected None or a tuple of different names out of {names}", ()),
        (ValueError, r"outputs is \('loss', 'loss'\), expected None or a tuple", ("loss", "loss")),
        (ValueError, r"outputs is \('accuracy',\), expected None", ("accuracy",)),
        (ValueError, "outputs is 'loss', expected None", "loss"),
    ):
        for function in lambda **o: loss(x, target, **o), gander.nn.CrossEntropyLoss:
            with pytest.raises(kind, match=match):
                function(outputs=call)
    for kind, match, given_ in (
        (NotImplementedError, r"outputs is \('loss',\) with lse_partial, expected None", {"lse_partial": x}),
        (
            NotImplementedError,
            "z_loss is 0.1 with weight and reduction 'mean'",
            {"weight": weight, "z_loss": 0.1},
        ),
        (NotImplementedError, "weight requires a gradient", {"weight": leaf(weight)}),
        (ValueError, "cross_entropy_forward: temperature is 0, expected 1e-18", {"temperature": 0}),
        (ValueError, "cross_entropy_forward: z_loss is -1, expected", {"z_loss": -1}),
        (ValueError, "cross_entropy_forward: label_smoothing is 2, expected 0 to 1", {"label_smoothing": 2}),
        (ValueError, "divisor is given with reduction 'mean'", {"divisor": 2}),
        (ValueError, r"weight has shape \(8,\), expected \(9,\)", {"weight": weight[:8]}),
        (TypeError, "weight has dtype int64", {"weight": weight.long()}),
    ):
        for outputs in ("loss",), ("predicted", "loss"):
            given_["outputs"] = outputs
            with pytest.raises(kind, match=match.replace(r"\('loss',\)", r"\(.*\)")):
                loss(x, target, **given_)
    for outputs in ("loss",), ("predicted",):
        with pytest.raises(
            ValueError, match=r"cross_entropy_forward: target has shape \(3,\), expected \(4,\)"
        ):
            loss(x, target[:3], outputs=outputs)
        with pytest.raises(TypeError, match="target has dtype float32, expected int32 or int64"):
            loss(x, x[:, 0], outputs=outputs)
        with pytest.raises(ValueError, match="cross_entropy_forward: target is None, expected a tensor"):
            loss(x, None, outputs=outputs)
        with pytest.raises(NotImplementedError, match="inplace_backward is supported for torch tensors only"):
            loss(x.numpy(), target.numpy(), inplace_backward=True, outputs=outputs)
    gander.set_debug(True)
    try:
        with pytest.raises(IndexError, match="target has the class 9"):
            loss(x, torch.full((4,), 9), outputs=("loss",))
    finally:
        gander.set_debug(False)
