"""Gated linear units: their accuracy, and gradients that backward writes over gate and up."""

import gander
import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_accurate
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
MODIFIED = r"modified (by an )?inplace"
M, N = 5, 24

TWO = {
    "swiglu": gander.swiglu,
    "swiglu, llama": lambda gate, up, **how: gander.swiglu(gate, up, casting_mode="llama", **how),
    "geglu": gander.geglu,
    "geglu, tanh": lambda gate, up, **how: gander.geglu(gate, up, "tanh", **how),
}
PACKED = {
    "silu_and_mul": gander.silu_and_mul,
    "gelu_and_mul": gander.gelu_and_mul,
    "gelu_tanh_and_mul": gander.gelu_tanh_and_mul,
}
functions = pytest.mark.parametrize("name", [*TWO, *PACKED])


def leaves(name, shape=(M, N), dtype=SINGLE, device="cpu"):
    """The arguments of a function: gate and up, or a tensor with both."""
    given = [torch.randn(shape, dtype=DOUBLE).to(device, dtype) for _ in range(2)]
    if name in PACKED:
        given = [torch.cat(given, -1)]
    return [tensor.requires_grad_() for tensor in given]


def called(name, given, in_place=True):
    return {**TWO, **PACKED}[name](*given, inplace_backward=in_place)


def upstream(y):
    return torch.arange(y.numel(), dtype=DOUBLE, device=y.device).sin().to(y.dtype).view_as(y)


def gradients(y, of, **how):
    return torch.autograd.grad(y, of, upstream(y), **how)


def addresses(tensors):
    return [tensor.data_ptr() for tensor in tensors]


def check_in_place(name, make, of):
    """Gradients of tensors that `make` computes from `of` lie there, and have the bits of others."""
    given = make(*of)
    want = gradients(called(name, given, in_place=False), given)
    y = called(name, given)
    got = gradients(y, given, retain_graph=True)
    assert addresses(got) == addresses(given)
    for result in zip(got, given, want, strict=True):
        assert torch.equal(result[0], result[2]) and torch.equal(result[1].detach(), result[2])
    with pytest.raises(RuntimeError, match=MODIFIED):
        gradients(y, of)
    want = gradients(called(name, make(*of), in_place=False), of)
    assert all(map(torch.equal, gradients(called(name, make(*of)), of), want))


def check_ignored(name, make, of):
    """Nothing that `make` computes from `of` is written, and gradients are those without the option."""
    given = make(*of)
    before = [tensor.detach().clone() for tensor in given]
    y = called(name, given)
    for _ in range(2):
        got = gradients(y, of, retain_graph=True)
        assert all(map(torch.equal, given, before))
    assert all(map(torch.equal, got, gradients(called(name, make(*of), in_place=False), of)))


def products(*given):
    return [tensor * 1 for tensor in given]


@functions
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(M, N), (2, 3, 1001), (7,), (0, 4)], ids=str)
def test_gradients_are_written_over_the_arguments(name, dtype, shape, device):
    if device == "cuda" and dtype == DOUBLE:
        pytest.skip("float64 is served on the CPU only")
    check_in_place(name, products, leaves(name, shape, dtype, device))


@functions
def test_views_and_strides(name, device):
    """Of rows with gaps, of rows that do not collapse, and of transposed ones, which the library copies."""
    for shape, view in {
        (M, 2 * N): lambda x: x[:, :N] if x.shape[-1] == 2 * N else x[:, : 2 * N],
        (4, 6, 2 * N): lambda x: x[::2, 1:4],
        (N, M): lambda x: x.t(),
    }.items():
        check_in_place(
            name, lambda *of, view=view: [view(x * 1) for x in of], leaves(name, shape, device=device)
        )


def test_parts_of_one_tensor(device):
    """Those with addresses of their own are written over. Halves of rows are not, nor is one tensor twice."""
    (x,) = leaves("silu_and_mul", device=device)
    check_in_place("swiglu", lambda x: (x * 1).view(2, M, N).unbind(), [x])
    check_ignored("swiglu", lambda x: (x * 1).chunk(2, -1), [x])
    check_ignored("swiglu", lambda x: [x * 1] * 2, [x])
    for part in (lambda y: (y[:-1], y[1:])), (lambda y: (y[:, :-2], y[:, 2:])):
        check_ignored("swiglu", lambda x, part=part: part(x * 1), [x])


@functions
def test_leaves_are_not_written_over(name, device):
    """An optimizer would take the gradient for a leaf's value."""
    of = leaves(name, device=device)
    check_ignored(name, lambda *of: of, of)
    check_ignored(name, lambda *of: [x.view(M * x.shape[-1]) for x in of], of)


def test_an_expanded_argument_is_not_written_over(device):
    gate, up = leaves("swiglu", (1, N), device=device)
    check_ignored("swiglu", lambda gate, up: [(x * 1).expand(M, N) for x in (gate, up)], [gate, up])


@pytest.mark.parametrize("needed", [0, 1])
def test_a_constant_is_not_written_over(needed, device):
    of = leaves("swiglu", device=device)
    other = torch.randn(M, N, device=device)

    def make(x):
        return [x * 1, other] if needed == 0 else [other, x * 1]

    check_ignored("swiglu", make, [of[needed]])


def test_the_gradient_of_one_argument_alone(device):
    """Both are written over, so that the other's gradient is refused afterwards."""
    gate, up = products(*leaves("swiglu", device=device))
    want = gradients(gander.swiglu(gate, up), [gate, up])
    y = gander.swiglu(gate, up, inplace_backward=True)
    (got,) = gradients(y, [gate], retain_graph=True)
    assert torch.equal(got, want[0]) and got.data_ptr() == gate.data_ptr()
    with pytest.raises(RuntimeError, match=MODIFIED):
        gradients(y, [up])


@functions
def test_others_that_saved_an_argument_refuse_their_backward(name, device):
    given = products(*leaves(name, device=device))
    others = [called(name, given), *(tensor.square() for tensor in given)]
    gradients(called(name, given), given)
    for other in others:
        with pytest.raises(RuntimeError, match=MODIFIED):
            other.sum().backward()


def test_other_gradients_of_an_argument_are_added(device):
    """An operation that did not save gate adds its gradient to the one that lies there."""
    (x,), up = leaves("silu_and_mul", device=device), torch.randn(M, 2 * N, device=device).requires_grad_()

    def total(how):
        gate = x * 1
        return gander.swiglu(gate, up * 1, **how) + 3 * gate

    got, want = (gradients(total(how), [x, up]) for how in ({"inplace_backward": True}, {}))
    assert all(map(torch.equal, got, want))


def test_an_upstream_gradient_that_is_an_argument_is_refused(device):
    gate, up = products(*leaves("swiglu", device=device))
    y = gander.swiglu(gate, up, inplace_backward=True)
    with pytest.raises(RuntimeError, match="overlap"):
        torch.autograd.grad(y, [gate, up], gate.detach())


def test_hooks_on_saved_tensors(device):
    """Autograd does not compare versions there."""
    of = leaves("swiglu", device=device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        check_ignored("swiglu", products, of)


@pytest.mark.parametrize("use_reentrant", [False, True])
@functions
def test_checkpoints(name, use_reentrant, device):
    """One that is recomputed by hooks ignores the option. The other's inputs are leaves in its backward."""

    def part(in_place, *given):
        return called(name, given, in_place) + called(name, products(*given), in_place)

    def run(in_place):
        of = [tensor.detach().requires_grad_() for tensor in constants]
        y = checkpoint(part, in_place, *products(*of), use_reentrant=use_reentrant)
        y.backward(upstream(y))
        return [tensor.grad for tensor in of]

    constants = leaves(name, device=device)
    assert all(map(torch.equal, run(True), run(False)))


@functions
def test_transforms_and_graphs_ignore_it(name, device):
    of = leaves(name, device=device)
    constants = [tensor.detach() for tensor in of]

    def loss(*given, in_place=True):
        y = called(name, products(*given), in_place)
        return (y * upstream(y)).sum()

    places = tuple(range(len(of)))
    want = torch.func.grad(lambda *given: loss(*given, in_place=False), places)(*constants)
    assert all(map(torch.equal, torch.func.grad(loss, places)(*constants), want))
    batched = torch.vmap(torch.func.grad(loss, places))(*(tensor[None] for tensor in constants))
    assert all(torch.equal(got[0], one) for got, one in zip(batched, want, strict=True))

    for backend in "aot_eager", "inductor":
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        got = torch.autograd.grad(compiled(*of), of)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


@functions
def test_compiled_autograd(name, device):
    of = leaves(name, device=device)
    want = gradients(called(name, products(*of), in_place=False), of)
    y = called(name, products(*of))
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y.backward(upstream(y))
    for leaf, one in zip(of, want, strict=True):
        torch.testing.assert_close(leaf.grad, one)


@pytest.mark.parametrize("by_func", [False, True])
def test_batches_of_upstream_gradients(by_func, device):
    of = leaves("swiglu", device=device)

    def jacobian(y):
        several = torch.stack([upstream(y), upstream(y).cos()])
        if by_func:
            return torch.func.vmap(lambda dy: torch.autograd.grad(y, of, dy, retain_graph=True))(several)
        return torch.autograd.grad(y, of, several, is_grads_batched=True, retain_graph=True)

    given = products(*of)
    y, want = called("swiglu", given), called("swiglu", products(*of), in_place=False)
    assert all(map(torch.equal, jacobian(y), jacobian(want)))
    assert all(map(torch.equal, gradients(y, of), gradients(want, of)))


@functions
def test_second_derivatives(name, device):
    of = leaves(name, device=device)
    got = gradients(called(name, products(*of)), of, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        got[0].square().sum().backward()


@functions
def test_training_step(name, device):
    """The result of a linear layer is written over, in a model that an optimizer trains."""
    torch.manual_seed(1)
    width = 1 if name in TWO else 2
    layers = [torch.nn.Linear(N, width * N, device=device) for _ in range(3 - width)]
    x = torch.randn(M, N, device=device)

    def step(in_place):
        copies = [torch.nn.Linear(N, width * N, device=device) for _ in layers]
        for copy, layer in zip(copies, layers, strict=True):
            copy.load_state_dict(layer.state_dict())
        optimizer = torch.optim.SGD([p for copy in copies for p in copy.parameters()], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(called(name, [copy(x) for copy in copies], in_place), x).backward()
            optimizer.step()
        return [p for copy in copies for p in copy.parameters()]

    assert all(map(torch.equal, step(True), step(False)))


ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu, tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_accuracy(name, dtype, scale, device):
    """Beside torch's activation and product. Gates have the sizes of early and of trained layers."""
    gate, up, dy = (torch.randn(70, 333, dtype=DOUBLE).to(device, dtype) for _ in range(3))
    gate = gate * scale

    def results(function, dtype):
        given = [tensor.to(dtype).detach().requires_grad_() for tensor in (gate, up)]
        y = function(*given)
        return y.detach(), *torch.autograd.grad(y, given, dy.to(dtype))

    def theirs(gate, up):
        return ACTIVATIONS[name](gate) * up

    got, torchs, exact = results(TWO[name], dtype), results(theirs, dtype), results(theirs, DOUBLE)
    for what, *three in zip(("y", "dgate", "dup"), got, torchs, exact, strict=True):
        assert_accurate(*three, what)


@pytest.mark.parametrize("name", ["silu_and_mul", "swiglu", "cross_entropy"])
def test_compiled_autograd_overwrites_nothing(name):
    """It unpacks all saved tensors before any node runs, so no node would notice.

    An eager backward pass comes first, as in a process that trains.
    """

    def loss(x, inplace_backward):
        if name == "cross_entropy":
            return gander.cross_entropy(x, torch.arange(4), inplace_backward=inplace_backward)
        given = (x, x + 1) if name == "swiglu" else (x,)
        return getattr(gander, name)(*given, inplace_backward=inplace_backward).sum()

    leaf = torch.randn(4, 16, requires_grad=True)
    loss(leaf * 1, True).backward()
    want = torch.autograd.grad(loss(leaf.exp(), False), leaf)[0]
    leaf.grad = None
    value = loss(leaf.exp(), True)  # whose backward needs the result of exp, too
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        value.backward()
    torch.testing.assert_close(leaf.grad, want)
