"""gander.rl, against stand-ins for TRL, verl and OpenRLHF that are written in plain torch (rl_packages).

tests/hf runs it with the packages themselves.
"""

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path

import gander
import gander.distributed
import gander.rl
import pytest
import torch
from gander.rl import _versions
from torch.utils.checkpoint import checkpoint

FOLDER = Path(__file__).with_name("rl_packages")
PACKAGES = {"trl": gander.rl.trl, "verl": gander.rl.verl, "openrlhf": gander.rl.openrlhf}
COLUMNS, WIDTH, SHAPE = 50, 24, (3, 7)
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def is_of_package(name):
    return name.partition(".")[0] in PACKAGES


@pytest.fixture(autouse=True)
def standins(monkeypatch):
    """The stand-ins as the installed packages, and as those whose source is known."""
    others = {name: sys.modules.pop(name) for name in [*sys.modules] if is_of_package(name)}
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    real, versions = importlib.metadata.version, _versions.CHECKED.copy()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or real(name))
    for path in _versions.SOURCES:
        monkeypatch.setitem(_versions.SOURCES, path, _versions.digest(at(path)))
    at("trl.trainer.utils")
    yield versions
    for name in [name for name in sys.modules if is_of_package(name)]:
        del sys.modules[name]
    sys.modules.update(others)


@pytest.fixture
def calls(monkeypatch):
    """The calls of gander's two functions, with their options."""
    made = []
    for function in "linear_token_statistics", "token_statistics":
        original = getattr(gander, function)

        def counted(*args, function=function, original=original, **options):
            made.append((function, options))
            return original(*args, **options)

        monkeypatch.setattr(gander, function, counted)
    return made


def at(path):
    """A module, or what one holds. Packages look it up for each call."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


# ---- What takes the place of each function ----


def trl_of_head(f, hidden, weight, bias, index, **_):
    return f.apply(hidden.flatten(0, 1), weight, bias, index.flatten(), 0.7, 2, 5.0, 0.5, OUTPUTS)


def trl_of_logits(f, logits, index, mask, **_):
    return f(logits, index, temperature=0.7, row_mask=mask)


def verl_layer(f, hidden, weight, index, impl_backend="torch", **_):
    return f(chunk_size=8, impl_backend=impl_backend)(hidden, weight, input_ids=index, temperature=0.7)


def verl_of_head(f, hidden, weight, index, **_):
    return f(hidden, weight, index, 0.7, "none", None)


def verl_log_prob(f, logits, index, **_):
    return (f(logits=logits, labels=index),)


def verl_entropy(f, logits, **_):
    return (f(logits),)


def verl_entropy_with_chunking(f, logits, **_):
    return (f(logits.flatten(0, 1), chunk_size=8),)


def openrlhf_log_prob(f, logits, index, temperature=0.7, **_):
    return (f(logits * 1, index, temperature=temperature),)  # it divides its argument


def openrlhf_entropy(f, logits, **_):
    return (f(logits),)


PLACES = {
    trl_of_head: "trl.trainer.utils._ChunkedLogProbFunction",
    trl_of_logits: "trl.trainer.utils._fused_logprob_entropy",
    verl_layer: "verl.utils.experimental.torch_functional.FusedLinearForPPO",
    verl_of_head: "verl.utils.kernel.linear_cross_entropy.linear_cross_entropy",
    verl_log_prob: "verl.utils.torch_functional.logprobs_from_logits",
    verl_entropy: "verl.utils.torch_functional.entropy_from_logits",
    verl_entropy_with_chunking: "verl.utils.torch_functional.entropy_from_logits_with_chunking",
    openrlhf_log_prob: "openrlhf.models.utils.log_probs_from_logits",
    openrlhf_entropy: "openrlhf.models.utils.compute_entropy",
}
OF_HEAD = (trl_of_head, verl_layer, verl_of_head)
OF_TOKENS = (*OF_HEAD, trl_of_logits, verl_log_prob, openrlhf_log_prob)  # the log-probability comes first


def of_each(functions=tuple(PLACES)):
    return pytest.mark.parametrize("function", functions, ids=lambda function: function.__name__)


def swapped(function):
    return PACKAGES[function.__name__.partition("_")[0]]()


def call(function, run=None, **given):
    found = at(PLACES[function])
    return (run or (lambda f: f()))(lambda: function(found, **given))


def operands(dtype=torch.float32):
    """Their values do not depend on the dtype."""
    torch.manual_seed(0)
    shapes = {"hidden": (*SHAPE, WIDTH), "weight": (COLUMNS, WIDTH), "bias": (COLUMNS,)}
    shapes["logits"] = (*SHAPE, COLUMNS)
    made = {name: torch.randn(shape).bfloat16().to(dtype) for name, shape in shapes.items()}
    made = {name: tensor.requires_grad_() for name, tensor in made.items()}
    return made | {"index": torch.randint(COLUMNS, SHAPE), "mask": torch.rand(SHAPE) > 0.3}


def results_and_gradients(function, dtype, run=None):
    given = operands(dtype)
    results = [result for result in call(function, run, **given) if result is not None]
    wide = [result for result in results if result.requires_grad]
    torch.manual_seed(1)
    torch.autograd.backward(wide, [torch.randn(result.shape).to(result.dtype) for result in wide])
    return results, [leaf.grad for leaf in given.values() if leaf.grad is not None]


def assert_close(found, expected, most):
    """most: of the root mean square of the difference, relative to that of what is expected."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other.double()).norm() <= most * other.double().norm()


def compiled(f):
    torch._dynamo.reset()  # it counts recompilations of a function, which here is each time another one
    return torch.compile(f, backend="aot_eager", fullgraph=True)()


def checkpointed(f):
    return checkpoint(f, use_reentrant=False)


@pytest.mark.parametrize("run", [None, compiled, checkpointed])
@of_each()
def test_like_the_function_in_float64(function, run, calls):
    expected = results_and_gradients(function, torch.float64)
    assert not calls
    with swapped(function):
        found = results_and_gradients(function, torch.float32, run)
    name = "linear_token_statistics" if function in OF_HEAD else "token_statistics"
    assert {called for called, _ in calls} == {name}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours
        assert_close(ours, theirs, 1e-5)


@of_each()
def test_16_bits(function, calls):
    """The results are float32."""
    exact = results_and_gradients(function, torch.float64)
    with swapped(function):
        results, gradients = results_and_gradients(function, torch.bfloat16)
    assert calls
    assert {result.dtype for result in results} <= {torch.float32, torch.bool}
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}
    assert_close(results[:2], exact[0][:2], 1e-2)
    assert_close(gradients, exact[1], 1e-2)


@of_each(OF_HEAD)
def test_autocast(function, calls):
    exact = results_and_gradients(function, torch.float64)
    with swapped(function), torch.autocast("cpu", torch.bfloat16):
        results, gradients = results_and_gradients(function, torch.float32)
    assert calls
    assert_close(results[:2], exact[0][:2], 1e-2)
    assert_close(gradients, exact[1], 1e-2)


@of_each()
def test_no_rows(function):
    given = operands()
    rows = {name: given[name][:0] for name in ("hidden", "logits", "index", "mask")}
    with swapped(function):
        results = call(function, **given | rows)
    assert all(result is None or result.numel() == 0 for result in results)


# ---- What is wrong is refused, or becomes NaN ----


@pytest.mark.parametrize("index", [-100, -1, COLUMNS])
@of_each(OF_TOKENS)
def test_an_index_outside_the_vocabulary_is_nan(function, index):
    """Also the one that gander's functions leave out by default."""
    given = operands()
    given["index"][0, 0] = index
    given["mask"][:] = True
    with swapped(function):
        log_prob = call(function, **given)[0].flatten()
    assert log_prob.isnan().nonzero().tolist() == [[0]]


def test_liger_leaves_out_minus_100():
    given = operands()
    given["index"][0, 0] = -100
    with gander.rl.verl():
        log_prob, entropy = call(verl_layer, impl_backend="liger", **given)
    assert log_prob[0, 0] == entropy[0, 0] == 0 and not log_prob.isnan().any()


@of_each(OF_TOKENS)
def test_other_shapes_and_dtypes_are_refused(function):
    given = operands()
    with swapped(function):
        with pytest.raises(ValueError, match=r"index has shape \S+"):
            call(function, **given | {"index": given["index"].t().contiguous()[:, 1:]})
        with pytest.raises(TypeError, match=r"index has dtype int16"):
            call(function, **given | {"index": given["index"].short()})


def test_an_option_that_is_wrong_is_refused():
    given = operands()
    with gander.rl.trl(), pytest.raises(ValueError, match="scale is 0, expected"):
        at(PLACES[trl_of_head]).apply(
            given["hidden"][0], given["weight"], None, given["index"][0], 1.0, 16, None, 0.0
        )
    with gander.rl.verl(), pytest.raises(ValueError, match="temperature is 0, expected"):
        at(PLACES[verl_of_head])(given["hidden"], given["weight"], given["index"], 0.0)


@pytest.mark.parametrize("flash", [False, True])
def test_verl_writes_over_logits_only_with_flash_attn(flash, monkeypatch, calls):
    monkeypatch.setattr(at("verl.utils.torch_functional"), "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", flash)
    given = operands()
    leaf, index = given["logits"], given["index"]
    with gander.rl.verl():
        logits = leaf * 1
        before = logits.detach().clone()
        (log_prob,) = call(verl_log_prob, logits=logits, index=index)
        (entropy,) = call(verl_entropy, logits=logits)
        log_prob.sum().backward(retain_graph=True)
        assert torch.equal(logits, before) != flash
        if flash:  # the entropy's gradient needs them: an error, not another number
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                entropy.sum().backward()
        else:
            entropy.sum().backward()
    assert len(calls) == 2


def test_openrlhf_divides_the_logits_in_place():
    given = operands()
    for swap in False, True:
        undo = gander.rl.openrlhf().undo if swap else lambda: None
        logits = given["logits"].detach().clone()
        at(PLACES[openrlhf_log_prob])(logits, given["index"], temperature=2.0)
        undo()
        assert torch.equal(logits, given["logits"] / 2)


def test_openrlhf_s_entropy_of_logits_that_are_divided_afterwards():
    given = operands()
    with gander.rl.openrlhf():
        logits = given["logits"] * 1
        (entropy,) = call(openrlhf_entropy, logits=logits)
        at(PLACES[openrlhf_log_prob])(logits, given["index"], temperature=2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            entropy.sum().backward()


# ---- What stays with the package ----


class Group:
    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def test_a_reduction_stays_with_verl(calls):
    given = operands()
    arguments = given["hidden"], given["weight"], given["index"], 1.0
    with gander.rl.verl():
        function = at(PLACES[verl_of_head])
        for more in ("mean",), ("sum", Group(2)):
            with pytest.raises(AssertionError):  # of the stand-in
                function(*arguments, *more)
        assert not calls
        function(*arguments, "none", Group(1))
    assert len(calls) == 1


def test_a_divided_vocabulary_of_verl(calls, monkeypatch):
    """test_distributed_head_statistics.py has process groups."""
    asked, group, given = [], Group(2), operands()

    def of_ranks(hidden, weight, labels, **options):
        asked.append(options)
        return hidden[:, 0], labels

    monkeypatch.setattr(gander.distributed, "linear_token_statistics", of_ranks)
    with gander.rl.verl():
        function = at(PLACES[verl_of_head])
        found = function(given["hidden"], given["weight"], given["index"], 0.7, "none", group)
    assert asked == [{"group": group, "temperature": 0.7, "ignore_index": -(2**63)}] and not calls
    assert torch.equal(found[0], given["hidden"].flatten(0, 1)[:, 0])
    assert torch.equal(found[1], given["index"].flatten())


def test_a_weight_that_zero3_divides_stays_with_trl(calls):
    given = operands()
    expected = call(trl_of_head, **given)
    given["weight"].ds_id = 0
    with gander.rl.trl():
        assert all(map(torch.equal, call(trl_of_head, **given), expected))
    assert not calls


# ---- Memory ----


@of_each((trl_of_head, verl_layer))
def test_the_logits_of_all_rows_are_never_held(function, calls):
    """TRL's chunk_size is the columns of a tile of 4096 rows, verl's the rows of whole tokens."""
    with swapped(function):
        call(function, **operands())
    expected = {trl_of_head: 4096 * 2 // COLUMNS, verl_layer: 8}
    assert [options["chunk"] for _, options in calls] == [expected[function]]


# ---- What is replaced, undone and refused ----


def held():
    return [vars(at(path.rpartition(".")[0]))[path.rpartition(".")[2]] for path in PLACES.values()]


@pytest.mark.parametrize("package", PACKAGES)
def test_apply_and_restore(package):
    before = held()
    forward = at(PLACES[verl_layer]).forward
    first = PACKAGES[package]()
    with pytest.raises(ZeroDivisionError), PACKAGES[package]() as second:
        assert first.package == second.package == package and first.places == second.places
        first.undo()
        first.undo()
        changed = [one is not other for one, other in zip(held(), before, strict=True)]
        changed[list(PLACES).index(verl_layer)] = at(PLACES[verl_layer]).forward is not forward
        assert changed == [path.startswith(f"{package}.") for path in PLACES.values()]
        raise ZeroDivisionError
    assert all(one is other for one, other in zip(held(), before, strict=True))
    assert at(PLACES[verl_layer]).forward is forward
    assert repr(second) == f"<gander in {', '.join(second.places)}: undone>"


def test_what_another_has_put_there_stays():
    utils, before = at("trl.trainer.utils"), held()

    def theirs():
        pass

    with gander.rl.trl():
        utils._fused_logprob_entropy = theirs
    assert utils._fused_logprob_entropy is theirs
    assert utils._ChunkedLogProbFunction is before[0]


def test_every_order(monkeypatch):
    """A module may have imported a function before the call, or do so after it."""
    source = "from verl.utils.torch_functional import entropy_from_logits as function"
    before, after = types.ModuleType("rl_before"), types.ModuleType("rl_after")
    for module in before, after:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(before))
    own = before.function
    with gander.rl.verl() as swap:
        exec(source, vars(after))
        assert before.function is after.function is not own
        assert "rl_before.function" in swap.places
    assert before.function is after.function is own


def refused(package, error, text):
    before = held(), at(PLACES[verl_layer]).forward
    with pytest.raises(error) as raised:
        PACKAGES[package]()
    assert str(raised.value) == text
    assert (held(), at(PLACES[verl_layer]).forward) == before


def advice(package):
    version = _versions.CHECKED[package]
    return (
        f"; gander.rl was checked with {package} {version}: pip install {package}=={version}, "
        "or a newer gander-kernels"
    )


@pytest.mark.parametrize("path", _versions.SOURCES)
def test_another_source_is_refused(path, monkeypatch, standins):
    package = path.partition(".")[0]
    standins[package] = "99.1"
    PACKAGES[package]().undo()  # a newer version with the same source is not
    monkeypatch.setitem(_versions.SOURCES, path, "another")
    said = f"{path} of {package} 99.1 has another source than that of {_versions.CHECKED[package]}"
    refused(package, NotImplementedError, said + advice(package))


def test_what_has_no_source_is_refused(monkeypatch):
    monkeypatch.setattr(at("openrlhf.models.utils"), "compute_entropy", torch.softmax)
    said = "openrlhf.models.utils.compute_entropy of openrlhf 0.11.2 has another source than that of 0.11.2"
    with pytest.raises(NotImplementedError) as raised:
        gander.rl.openrlhf()
    assert str(raised.value) == said + advice("openrlhf")


def test_a_missing_name_is_refused(monkeypatch):
    monkeypatch.delattr(at("verl.utils.torch_functional"), "entropy_from_logits_with_chunking")
    with pytest.raises(NotImplementedError) as raised:
        gander.rl.verl()
    said = "verl 0.9.1 has no verl.utils.torch_functional.entropy_from_logits_with_chunking"
    assert str(raised.value) == said + advice("verl")


def test_a_missing_module_is_refused(monkeypatch):
    at("trl.kernels.chunked_logprob")
    monkeypatch.setitem(sys.modules, "trl.kernels.chunked_logprob", None)  # as if it was not there
    with pytest.raises(NotImplementedError) as raised:
        gander.rl.trl()
    assert str(raised.value) == "trl 1.16.0 has no trl.kernels.chunked_logprob" + advice("trl")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_not_installed(package, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    how = f"pip install {package}=={_versions.CHECKED[package]}"
    refused(package, ImportError, f"gander.rl.{package} needs {package}, which is not installed: {how}")


def test_what_a_package_needs_is_named_by_python(monkeypatch):
    monkeypatch.delitem(sys.modules, "verl.utils.torch_functional", raising=False)
    monkeypatch.setattr(importlib, "import_module", lambda name: __import__("tensordict_that_is_missing"))
    with pytest.raises(ModuleNotFoundError, match="tensordict_that_is_missing"):
        gander.rl.verl()
