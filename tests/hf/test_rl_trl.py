"""gander.rl.trl: TRL's trainers log the same numbers, and its functions return the same results."""

import importlib.metadata
import sys
import types
from pathlib import Path

import datasets
import gander.rl
import models
import peft
import pytest
import torch
import trl
import trl.kernels
import trl.trainer.utils as utils
from test_trl import tokenizer

STEPS = 5
HOLDERS = {
    "trl.trainer.utils": ("_ChunkedLogProbFunction", "_fused_logprob_entropy"),
    "trl.kernels": ("ChunkedLogProbFunction", "selective_log_softmax_and_entropy"),
    "trl.kernels.chunked_logprob": ("ChunkedLogProbFunction",),
    "trl.kernels.logprob_entropy": ("selective_log_softmax_and_entropy",),
}
PLACES = {f"{module}.{name}" for module, names in HOLDERS.items() for name in names}
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="gander.rl needs TRL 1.16, which is for Python 3.11 and newer"
)


def held():
    return [getattr(sys.modules[module], name) for module, names in HOLDERS.items() for name in names]


@pytest.fixture(autouse=True)
def originals():
    """TRL's own functions, which every test leaves where they were."""
    before = held()
    yield before
    assert all(one is other for one, other in zip(held(), before, strict=True))


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


# ---- Trainers ----


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Trainers with a reference model load it again, from where the model was."""
    folder = tmp_path_factory.mktemp("model")
    models.model("Llama", torch.float32, hidden_size=32, intermediate_size=48).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def sentences(count=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(3, 120, (6 + k % 5,), generator=generator).tolist() for k in range(count)]
    return [" ".join(f"w{word}" for word in row) for row in words]


def different_words(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


PROMPTS = dict(prompt=sentences())
PAIRS = PROMPTS | dict(chosen=sentences(seed=1), rejected=sentences(seed=2))
LABELED = PROMPTS | dict(completion=sentences(seed=1), label=[True, False] * 8)
SAMPLES = dict(num_generations=4, max_completion_length=8, temperature=0.9, beta=0.04)
REWARDED = dict(reward_funcs=different_words)
# The trainer, its data, what its configuration has besides COMMON, what it takes, what it logs.
TRAINERS = {
    "SFT": (dict(text=sentences()), dict(max_length=32), {}, {"entropy", "mean_token_accuracy"}),
    "DPO": (PAIRS, {}, {}, {"rewards/margins", "entropy"}),
    "KTO": (LABELED, {}, {}, {"kl", "rewards/margins"}),
    "GRPO": (PROMPTS, SAMPLES, REWARDED, {"kl", "entropy", "reward"}),
    "RLOO": (PROMPTS, SAMPLES, REWARDED, {"kl", "entropy", "reward"}),
}
COMMON = dict(
    max_steps=STEPS,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    seed=7,
)
OF_TIME = ("runtime", "per_second", "step_time", "throughput", "mfu", "tokens_per", "epoch", "total_flos")


def logs(name, lora, folder, output):
    """What a trainer logs at each step."""
    rows, more, given, expected = TRAINERS[name]
    if lora:
        given = given | dict(peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    torch.manual_seed(0)
    trainer = getattr(trl, f"{name}Trainer")(
        folder,
        args=getattr(trl, f"{name}Config")(str(output), **COMMON, **more),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=tokenizer(),
        **given,
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == STEPS and all({"loss", "grad_norm"} | expected <= set(step) for step in steps)
    return [
        {key: value for key, value in step.items() if not any(word in key for word in OF_TIME)}
        for step in steps
    ]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", TRAINERS)
def test_it_logs_the_same(name, lora, folder, tmp_path, calls):
    expected = logs(name, lora, folder, tmp_path)
    assert not calls
    with gander.rl.trl():
        found = logs(name, lora, folder, tmp_path)
    assert len(calls) >= STEPS and {function for function, _ in calls} == {"linear_token_statistics"}
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    norms = [step["grad_norm"] for step in found]  # small where all rewards of a group are equal
    assert max(norms) > 1e-3 and len(set(norms)) == STEPS


# ---- The function of a head ----


def of_head(
    *,
    rows=33,
    dtype=torch.float32,
    weight_dtype=None,
    bias=True,
    temperature=1.0,
    softcap=None,
    scale=1.0,
    outputs=OUTPUTS,
    chunk_size=16,
    columns=50,
):
    """TRL's results, and the gradients through those that have one."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, 24, dtype=dtype, requires_grad=True)
    weight = torch.randn(columns, 24, dtype=weight_dtype or dtype, requires_grad=True)
    bias = torch.randn(columns, dtype=weight_dtype or dtype, requires_grad=True) if bias else None
    index = torch.randint(columns, (rows,))
    results = utils._ChunkedLogProbFunction.apply(
        hidden, weight, bias, index, temperature, chunk_size, softcap, scale, outputs
    )
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    upstream = torch.randn(2, rows)
    total = sum((g * r).sum() for g, r in zip(upstream, results, strict=False) if r is not None)
    return [*results, *torch.autograd.grad(total, leaves)]


def assert_like(found, expected, most=1e-5):
    """most: of the root mean square of the difference, relative to that of what is expected."""
    for one, other in zip(found, expected, strict=True):
        if other is None or other.dtype == torch.bool:
            assert one is other is None or torch.equal(one, other)
            continue
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        assert one.shape == other.shape
        assert (one - other).float().norm() <= most * other.float().norm()


HEADS = {
    "plain": (dict(bias=False), 1e-5),
    "mapped": (dict(softcap=5.0, scale=0.5, temperature=0.7), 1e-5),
    "an integer": (dict(temperature=2), 1e-5),
    "log_probs": (dict(outputs=("log_probs",)), 1e-5),
    "unnamed": (dict(outputs=("is_top1",)), 1e-5),  # TRL computes log_probs always
    "no rows": (dict(rows=0), 0),
    # TRL rounds before it adds a bias, and again after that.
    "bfloat16": (dict(dtype=torch.bfloat16, bias=False), 5e-3),
    "a head in float32": (dict(weight_dtype=torch.bfloat16), 1e-2),
}


@pytest.mark.parametrize("name", HEADS)
def test_of_head(name, calls):
    options, most = HEADS[name]
    expected = of_head(**options)
    with gander.rl.trl():
        found = of_head(**options)
    assert [function for function, _ in calls] == ["linear_token_statistics"]
    assert_like(found, expected, most)


def test_of_head_under_autocast(calls):
    with torch.autocast("cpu", torch.bfloat16):
        expected = of_head(bias=False)
        with gander.rl.trl():
            found = of_head(bias=False)
    assert calls
    assert_like(found, expected, 5e-3)


def test_entropy_that_is_only_logged(calls):
    """Its gradient is not asked for."""
    gradients = []
    for swapped in False, True:
        torch.manual_seed(0)
        hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8)
        arguments = hidden, weight, None, torch.arange(5), 1.0, 16, None, 1.0, ("log_probs", "entropy")
        swap = gander.rl.trl() if swapped else None
        utils._ChunkedLogProbFunction.apply(*arguments)[0].sum().backward()
        if swap is not None:
            swap.undo()
        gradients.append(hidden.grad)
    assert len(calls) == 1
    torch.testing.assert_close(*gradients)


def test_parameters_without_gradients(calls):
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.nn.Parameter(torch.randn(9, 8))
    with gander.rl.trl(), torch.no_grad():
        results = utils._ChunkedLogProbFunction.apply(hidden, weight, None, torch.arange(5), 1.0, 16)
    assert calls and all(result.grad_fn is None and not result.requires_grad for result in results)


def test_a_tie_is_the_first_token():
    arguments = torch.zeros(2, 8), torch.ones(9, 8), None, torch.tensor([0, 3]), 1.0, 16
    with gander.rl.trl():
        assert utils._ChunkedLogProbFunction.apply(*arguments)[-1].tolist() == [True, False]


def test_as_many_logits_are_held_as_by_trl(calls):
    """Its tiles have 4096 rows and chunk_size columns."""
    with gander.rl.trl():
        of_head(chunk_size=16)
        of_head(columns=300, chunk_size=1, rows=20)
    assert [options["chunk"] for _, options in calls] == [4096 * 16 // 50, 4096 // 300]


def test_weights_that_zero3_divides_stay_with_trl(calls):
    hidden, weight = torch.randn(5, 8), torch.nn.Parameter(torch.randn(9, 8))
    arguments = hidden, weight, None, torch.arange(5), 0.7, 16, None, 1.0, OUTPUTS
    expected = utils._ChunkedLogProbFunction.apply(*arguments)
    weight.ds_id = 0
    with gander.rl.trl():
        found = utils._ChunkedLogProbFunction.apply(*arguments)
    assert not calls
    assert "ChunkedLogProb" in str(found[0].grad_fn)
    assert_like(found, expected, 0)


def test_compiled(calls):
    def log_probs(hidden, weight, index):
        return utils._ChunkedLogProbFunction.apply(hidden, weight, None, index, 0.7, 16, None, 1.0, OUTPUTS)

    arguments = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8), torch.arange(5)
    with gander.rl.trl():
        expected = log_probs(*arguments)
        found = torch.compile(log_probs, backend="aot_eager", fullgraph=True)(*arguments)
    assert len(calls) == 2
    assert_like(found, expected)
    (grads, others) = (
        [torch.autograd.grad(r[0].sum() + r[1].sum(), arguments[0])[0]] for r in (found, expected)
    )
    torch.testing.assert_close(grads, others)


# ---- The function of logits, which TRL asks on a GPU alone ----


def of_logits(function, shape, dtype, index_dtype, mask_dtype, **options):
    torch.manual_seed(0)
    logits = torch.randn(shape).bfloat16().to(dtype).requires_grad_()
    index = torch.randint(shape[-1], shape[:-1], dtype=index_dtype)
    if mask_dtype is not None:
        options["row_mask"] = (torch.rand(shape[:-1]) > 0.3).to(mask_dtype)
    results = function(logits, index, **options)
    results = results if isinstance(results, tuple) else (results,)
    wide = [result for result in results if result.requires_grad]
    return [*results, *torch.autograd.grad(wide, logits, [torch.randn(r.shape) for r in wide])]


LOGITS = {
    "rows": ((7, 50), torch.float32, torch.int64, None),
    "sequences, a mask": ((3, 5, 50), torch.float32, torch.int64, torch.bool),
    "int32": ((3, 5, 50), torch.float32, torch.int32, torch.int32),
    "int64": ((3, 5, 50), torch.float32, torch.int64, torch.int64),
    "bfloat16": ((3, 5, 50), torch.bfloat16, torch.int64, torch.bool),
}


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_of_logits(name, temperature, calls, monkeypatch):
    case = LOGITS[name]
    functions = [
        (utils.selective_log_softmax, {}),
        (utils.selective_log_softmax_and_entropy, {}),
        (utils.selective_log_softmax_and_entropy, dict(entropy_requires_grad=False)),
    ]
    wide = (case[0], torch.float32, torch.int64, case[3])  # what TRL computes from logits in float32
    expected = [of_logits(f, *wide, temperature=temperature, **options) for f, options in functions]
    monkeypatch.setattr(utils, "_supports_trl_loss_kernel", lambda *arguments: True)
    with gander.rl.trl():
        found = [of_logits(f, *case, temperature=temperature, **options) for f, options in functions]
    assert [function for function, _ in calls] == ["token_statistics"] * len(functions)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[-1].dtype == case[1]
        assert_like([*ours[:-1], ours[-1].float()], theirs, 1e-5 if case[1] == torch.float32 else 5e-3)


def test_entropy_of_logits(calls, monkeypatch):
    for shape in (50,), (7, 50), (3, 5, 50):
        logits = torch.randn(shape)
        expected = -(torch.log_softmax(logits, -1) * torch.softmax(logits, -1)).sum(-1)
        with gander.rl.trl(), monkeypatch.context() as patch:
            patch.setattr(utils, "_supports_trl_loss_kernel", lambda *arguments: True)
            torch.testing.assert_close(utils.entropy_from_logits(logits), expected)
    assert len(calls) == 3


# ---- What is replaced, and undone ----


def test_every_holder_and_every_order(originals, monkeypatch):
    """A module may have imported a function before the call, or do so after it."""
    source = (
        "from trl.trainer.utils import _ChunkedLogProbFunction as function, _fused_logprob_entropy as other"
    )
    before, after = types.ModuleType("rl_before"), types.ModuleType("rl_after")
    for module in before, after:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source, vars(before))
    names = before.function, before.other
    swap = gander.rl.trl()
    exec(source, vars(after))
    assert set(swap.places) - PLACES == {"rl_before.function", "rl_before.other"}
    assert (before.function, before.other) == (after.function, after.other)
    assert before.function is not names[0] and before.other is not names[1]
    assert not any(one is other for one, other in zip(held(), originals, strict=True))
    swap.undo()
    assert (before.function, before.other) == (after.function, after.other) == names
    assert repr(swap) == f"<gander in {', '.join(swap.places)}: undone>"


def test_without_triton(monkeypatch):
    """Then TRL has no function for logits."""
    for module, name in (utils, "_fused_logprob_entropy"), (trl.kernels, "selective_log_softmax_and_entropy"):
        with monkeypatch.context() as patch:
            patch.delattr(module, name)
            patch.setattr(trl.kernels.chunked_logprob, "is_triton_available", lambda: False)
            with gander.rl.trl() as swap:
                assert set(swap.places) == {place for place in PLACES if place.endswith("Function")}


# ---- Versions ----


def test_the_versions_that_are_named_are_those_of_the_lock_files_and_of_the_extra():
    root = Path(__file__).parents[2]
    named = gander.rl.CHECKED
    assert importlib.metadata.version("trl") == named["trl"]
    assert f'\nrl = ["trl=={named["trl"]}"]\n' in (root / "pyproject.toml").read_text()
    locked = (root / "requirements-rl.txt").read_text()
    assert f"verl=={named['verl']} " in locked and f"openrlhf=={named['openrlhf']} " in locked
