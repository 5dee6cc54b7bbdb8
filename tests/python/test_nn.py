"""gander.nn against torch.nn: constructors, state_dict, repr, results and gradients."""

import copy
import inspect
import pickle

import gander
import pytest
import torch
from test_ops import rand
from tolerance import assert_accurate, summing
from torch import nn

NAMES = ["RMSNorm", "LayerNorm", "CrossEntropyLoss", "Softmax", "LogSoftmax"]


def both(name, *arguments, device="cpu", **options):
    return getattr(gander.nn, name)(*arguments, **options).to(device), getattr(nn, name)(
        *arguments, **options
    ).to(device)


def compare(mine, theirs, x, *rest, relative=0.0):
    """Results and gradients, against torch's module in float64. relative: an error more, for a reason."""

    def run(module, x, *rest):
        x = x.detach().requires_grad_()
        out = module(x, *rest)
        torch.manual_seed(1)
        dout = torch.randn(out.shape, dtype=torch.float64).to(out.device, out.dtype)
        return out.detach(), torch.autograd.grad(out, x, dout)[0]

    got, expected = run(mine, x, *rest), run(theirs, x, *rest)
    exact = run(theirs.double(), x.double(), *rest)
    for a, b, c in zip(got, expected, exact, strict=True):
        assert a.dtype == b.dtype
        assert_accurate(a, b, c, extra=relative * c.abs())


def parameters(function):
    """The parameters without their annotations, which differ between versions of torch."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
def test_signature_and_type(name):
    mine, theirs = getattr(gander.nn, name), getattr(nn, name)
    more = {"z_loss": 0.0, "scale": 1.0, "softcap": None, "temperature": 1.0, "remember": False}
    more |= {"outputs": None}
    more = more if name == "CrossEntropyLoss" else {}
    own = [(option, inspect.Parameter.KEYWORD_ONLY, default) for option, default in more.items()]
    assert parameters(mine) == parameters(theirs) + own
    more = parameters(mine.forward)[len(parameters(theirs.forward)) :]  # all with a default
    assert parameters(mine.forward) == parameters(theirs.forward) + more
    assert [name for name, *_ in more] == ["divisor", "upstream"] * (name == "CrossEntropyLoss")
    assert all(default is None for _, _, default in more)
    assert issubclass(mine, theirs)


@pytest.mark.parametrize(
    "kept", [lambda module: module, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("RMSNorm", (33,), {}),
        ("RMSNorm", ((3, 11),), {"eps": 1e-4, "dtype": torch.bfloat16}),
        ("RMSNorm", (33,), {"elementwise_affine": False}),
        ("LayerNorm", ((3, 11),), {"eps": 1e-4, "dtype": torch.bfloat16}),
        ("LayerNorm", (33,), {"bias": False}),
        ("LayerNorm", (33,), {"elementwise_affine": False}),
        ("CrossEntropyLoss", (), {"weight": torch.ones(3), "ignore_index": 2, "reduction": "sum"}),
        ("Softmax", (1,), {}),
        ("LogSoftmax", (-1,), {}),
    ],
)
def test_state_and_repr(name, arguments, options, kept):
    mine, theirs = map(kept, both(name, *arguments, **options))
    assert type(mine) is getattr(gander.nn, name)
    assert repr(mine) == repr(theirs) and mine.extra_repr() == theirs.extra_repr()
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    mine.load_state_dict(theirs.state_dict())


def test_on_the_meta_device():
    with torch.device("meta"):
        norm = gander.nn.RMSNorm(33)
    assert norm(torch.empty(4, 33, device="meta")).shape == (4, 33)
    assert norm.to_empty(device="cpu").weight.shape == (33,)


@pytest.mark.parametrize(
    ("construct", "exception", "message"),
    [
        (
            lambda: gander.nn.RMSNorm(0),
            ValueError,
            r"normalized_shape is 0, expected one or more integers of 1 or more",
        ),
        (lambda: gander.nn.RMSNorm(()), ValueError, r"normalized_shape is \(\), expected one or more"),
        (
            lambda: gander.nn.RMSNorm(8, eps=-1.0),
            ValueError,
            "eps is -1.0, expected None or a finite number of 0 or more",
        ),
        (
            lambda: gander.nn.RMSNorm(8, dtype=torch.complex64),
            TypeError,
            "dtype is complex64, expected torch.float16, torch.bfloat16, torch.float32 or torch.float64",
        ),
        (
            lambda: gander.nn.LayerNorm((3, 0)),
            ValueError,
            r"normalized_shape is \(3, 0\), expected one or more integers of 1 or more",
        ),
        (
            lambda: gander.nn.LayerNorm(8, eps=float("nan")),
            ValueError,
            "eps is nan, expected a finite number of 0 or more",
        ),
        (lambda: gander.nn.RMSNorm(8, eps="a"), TypeError, "eps is 'a', expected None or a number"),
        (lambda: gander.nn.LayerNorm(8, eps=None), TypeError, "eps is None, expected a number"),
        (
            lambda: gander.nn.RMSNorm(("a",), elementwise_affine=False),
            ValueError,
            r"normalized_shape is \('a',\), expected one or more integers of 1 or more",
        ),
        (
            lambda: gander.nn.CrossEntropyLoss(ignore_index=0.5),
            TypeError,
            "ignore_index is 0.5, expected an integer",
        ),
        (
            lambda: gander.nn.CrossEntropyLoss(weight=[1.0]),
            TypeError,
            "^weight is a list, expected a torch.Tensor or None",
        ),
        (
            lambda: gander.nn.LinearCrossEntropy(8, 4, weight_ce=[1.0]),
            TypeError,
            "weight_ce is a list, expected a torch.Tensor or None",
        ),
        (lambda: gander.nn.Softmax("rows"), TypeError, "dim is 'rows', expected an int or None"),
        (lambda: gander.nn.LogSoftmax(1.0), TypeError, "dim is 1.0, expected an int or None"),
        (
            lambda: gander.nn.CrossEntropyLoss(reduction="avg"),
            ValueError,
            "reduction is 'avg', expected 'none', 'mean' or 'sum'",
        ),
        (
            lambda: gander.nn.CrossEntropyLoss(label_smoothing=1.1),
            ValueError,
            "label_smoothing is 1.1, expected 0 to 1",
        ),
        (
            lambda: gander.nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.int64)),
            TypeError,
            "weight has dtype int64, expected float16, bfloat16, float32 or float64",
        ),
    ],
)
def test_constructors_refuse(construct, exception, message):
    with pytest.raises(exception, match=message):
        construct()


@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("shape", [(33,), (3, 11)])
def test_rmsnorm(device, shape, eps):
    mine, theirs = both("RMSNorm", shape, eps=eps, device=device)
    with torch.no_grad():
        theirs.weight.copy_(rand(shape, torch.float32, device))
    mine.load_state_dict(theirs.state_dict())
    x = rand((5, 40, *shape), torch.float32, device)
    theirs.eps = torch.finfo(torch.float32).eps if eps is None else eps  # float64 has another default
    compare(mine, theirs, x)
    out = mine(x)
    out.backward(torch.ones_like(out))
    assert mine.weight.grad.shape == torch.Size(shape)


def test_quacks_rmsnorm(device):
    norm, x = gander.nn.QuackRMSNorm(33, device=device), rand((5, 33), torch.float32, device)
    assert torch.equal(norm(x), gander.rmsnorm(x, norm.weight))
    assert (norm.eps, [*norm.state_dict()]) == (1e-6, ["weight"])
    assert gander.nn.QuackRMSNorm(33, 1e-3, False).weight is None


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
@pytest.mark.parametrize("shape", [(33,), (3, 11)])
def test_layernorm(device, shape, options):
    mine, theirs = both("LayerNorm", shape, **options, device=device)
    for parameter in theirs.parameters():
        with torch.no_grad():
            parameter.copy_(rand(shape, torch.float32, device))
    mine.load_state_dict(theirs.state_dict())
    compare(mine, theirs, rand((5, 40, *shape), torch.float32, device))
    mine(rand((2, *shape), torch.float32, device).requires_grad_()).sum().backward()
    assert all(parameter.grad.shape == torch.Size(shape) for parameter in mine.parameters())
    with pytest.raises(ValueError, match=r"input has shape \(2, 32\), expected last dimensions \("):
        mine(torch.empty(2, 32, device=device))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rmsnorm_of_small_values_follows_torch(device, dtype):
    """eps=None matters for small values. The result has x's dtype, also with float32 weights."""
    mine, theirs = both("RMSNorm", 33, device=device)
    x = (rand((4, 33), torch.float32, device) * 1e-2).to(dtype)
    torch.testing.assert_close(mine(x), theirs(x))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rmsnorm_of_mixed_dtypes_follows_torch(dtype, weight_dtype, eps):
    """The result has x's dtype, and gradients have that of their tensors, also with float64."""
    mine, theirs = both("RMSNorm", 33, eps=eps, dtype=weight_dtype)
    with torch.no_grad():
        theirs.weight.copy_(rand((33,), weight_dtype, "cpu"))
    mine.load_state_dict(theirs.state_dict())
    data, results = rand((4, 33), torch.float64, "cpu").mul(1e-2).to(dtype), []
    for module in (mine, theirs):
        x = data.clone().requires_grad_()
        out = module(x)
        out.sum().backward()
        results.append((out.detach(), x.grad, module.weight.grad))
    tolerance = 32 * max(torch.finfo(kind).eps for kind in (dtype, weight_dtype))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_rmsnorm_of_another_shape():
    with pytest.raises(
        ValueError, match=r"x has shape \(4, 32\), expected last dimensions \(33,\): normalized_shape"
    ):
        gander.nn.RMSNorm(33)(torch.ones(4, 32))


by_softmax = pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])


@by_softmax
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_softmax(device, name, dim):
    compare(*both(name, dim), rand((5, 7, 31), torch.float32, device))


@by_softmax
@pytest.mark.parametrize("dim", [0, 1, 2, -3])
def test_softmax_is_contiguous(device, name, dim):
    mine, theirs = both(name, dim)
    for x in (torch.randn(5, 7, 31, device=device), torch.randn(31, 5, 7, device=device).permute(1, 2, 0)):
        assert mine(x).stride() == theirs(x).stride() == (217, 31, 1)


def test_keywords_are_those_of_torch():
    x, target = torch.randn(4, 33), torch.randint(33, (4,))
    torch.testing.assert_close(gander.nn.Softmax(-1)(input=x), nn.Softmax(-1)(input=x))
    torch.testing.assert_close(gander.nn.RMSNorm(33)(x=x), nn.RMSNorm(33)(x=x))
    mine, theirs = both("CrossEntropyLoss")
    torch.testing.assert_close(mine(input=x, target=target), theirs(input=x, target=target))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
    for call, name in (
        (gander.nn.RMSNorm(8), "x"),
        (gander.nn.LayerNorm(8), "input"),
        (gander.nn.Softmax(-1), "input"),
        (gander.nn.LogSoftmax(-1), "input"),
        (lambda x: gander.nn.CrossEntropyLoss()(x, torch.tensor([1, 2])), "input"),
        (gander.rmsnorm, "x"),
        (gander.softmax, "x"),
        (lambda x: gander.rmsnorm(torch.randn(2, 3, 8), residual=x), "residual"),
        (lambda x: gander.cross_entropy(x, torch.tensor([1, 2]), reduction="sum", divisor=2.0), "x"),
        (lambda x: gander.linear_cross_entropy(x, torch.randn(5, 8), torch.tensor([1, 2])), "x"),
    ):
        with pytest.raises(NotImplementedError, match=rf"{name} is a nested tensor, .* {name}\.unbind\(\)"):
            call(x)


@by_softmax
def test_softmax_of_a_number_and_of_nothing(device, name):
    mine, theirs = both(name, 0)
    empty, number = torch.randn(0, 8, device=device, requires_grad=True), torch.tensor(2.0, device=device)
    assert mine(empty).shape == theirs(empty).shape and mine(empty).requires_grad
    assert mine(number) == theirs(number)
    with pytest.raises(IndexError, match="dim is 5, expected -1 to 0"):
        both(name, 5)[0](number)


@by_softmax
def test_traced_softmax(device, name):
    mine, theirs = both(name, -1)
    x, other = torch.randn(4, 8, device=device), torch.randn(7, 8, device=device)
    torch.testing.assert_close(torch.jit.trace(mine, x)(other), theirs(other))
    array = x.cpu().numpy()
    torch.testing.assert_close(torch.from_numpy(mine(array)), theirs(x.cpu()))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@by_softmax
@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
def test_softmax_without_dim_follows_torch(device, name, rank):
    mine, theirs = both(name)
    x = rand((3, 4, 5, 6)[:rank], torch.float32, device)
    torch.testing.assert_close(mine(x), theirs(x))


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum", "ignore_index": 3}])
@pytest.mark.parametrize("shape", [(31,), (20, 31), (4, 31, 5), (2, 31, 3, 4)])
def test_cross_entropy_loss(device, shape, options):
    mine, theirs = both("CrossEntropyLoss", **options)
    x = rand(shape, torch.float32, device)
    target = torch.randint(31, shape[:1] * (len(shape) > 1) + shape[2:], device=device)
    compare(mine, theirs, x, target, relative=summing(target.numel()))


def test_cross_entropy_loss_with_class_weights(device):
    mine, theirs = both("CrossEntropyLoss", weight=torch.rand(31), device=device)
    x, target = rand((20, 31), torch.float32, device), torch.randint(31, (20,), device=device)
    compare(mine, theirs, x, target, relative=summing(20))


def test_cross_entropy_loss_refuses():
    x, loss = torch.randn(4, 6), gander.nn.CrossEntropyLoss()
    with pytest.raises(NotImplementedError, match="target requires a gradient"):
        loss(x, x.clone().requires_grad_())
    loss.label_smoothing = 1.1
    with pytest.raises(ValueError, match=r"label_smoothing is 1.1, expected 0 to 1"):
        loss(x, torch.zeros(4, dtype=torch.long))


def test_deprecated_arguments_of_cross_entropy_loss():
    with pytest.warns(UserWarning, match="size_average and reduce"):
        assert gander.nn.CrossEntropyLoss(size_average=False).reduction == "sum"


def test_compile_fullgraph(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.softmax, self.loss = (
                gander.nn.LayerNorm((7, 33)),
                gander.nn.RMSNorm((7, 33)),
                gander.nn.Softmax(1),
                gander.nn.CrossEntropyLoss(),
            )

        def forward(self, x, target):
            return self.loss(self.softmax(self.norm(self.first(x))).movedim(-1, 1), target)

    model, x = Model().to(device), rand((4, 7, 33), torch.float32, device)
    target = torch.randint(33, (4, 7), device=device)
    expected = model(x, target)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x, target), expected)
