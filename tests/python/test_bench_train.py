"""The training benchmark, on a model that is written in torch alone. No test checks a time."""

import dataclasses
import json
import math
import re
import sys
from pathlib import Path

import gander
import pytest
import torch
import torch.nn.functional as F
import typer
from gander_bench import cases, plots, records, report, results, stored, trace
from gander_bench import train as command
from gander_bench.demo import training
from gander_bench.train import child, contestants, kernels, models
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = child.Settings("torch", "stand-in", batch=2, sequence=16, steps=4, seed=0, device="cpu")


@pytest.fixture
def small_corpus(monkeypatch):
    text = training.corpus(0.1)
    monkeypatch.setattr(child, "corpus", lambda: text)


@pytest.fixture
def interpreted(monkeypatch):
    """torch.compile without a C++ compiler."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="eager", **options))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


def run(*arguments):
    from gander_bench.__main__ import app

    return CliRunner().invoke(app, ["bench", "train", *(str(argument) for argument in arguments)])


def trained(name, **changes):
    return child.measure(dataclasses.replace(SETTINGS, contestant=name, **changes))


def test_trains_each_contestant_in_a_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", "stand-in", "--device", "cpu", "--steps", 6, "--out", "a.jsonl"]
    first = run(*arguments, "--contestants", "torch,liger,gander+liger")
    assert first.exit_code == 0, first.output
    second = run(*arguments, "--contestants", "torch,gander", "--resume")
    assert second.exit_code == 0, second.output
    found = records.read(Path("a.jsonl"))
    assert [record["contestant"] for record in found] == ["torch", "liger", "gander+liger", "gander"]
    for record in found:
        assert {"device", "torch", "gander", "commit", "python"} <= set(record["environment"])
        assert record["date"] and (record["batch"], record["sequence"], record["steps"]) == (2, 64, 6)
    torchs, ligers, boths, ganders = (record["results"][record["contestant"]] for record in found)
    assert found[0]["versions"] == {"torch": cases.provider_version("torch")}
    assert "not_run" in ligers and "not_run" in boths
    for figures in torchs, ganders:
        assert figures["ms"] > 0 and figures["first_step_s"] > 0 and len(figures["losses"]) == 6
        assert figures["tokens_per_second"] == pytest.approx(2 * 64 / figures["ms"] * 1e3, rel=1e-3)
        assert figures["losses"][0] == pytest.approx(math.log(512), rel=0.1)
    assert ganders["losses"] == pytest.approx(torchs["losses"], abs=1e-4)
    assert "Training stand-in (0.1 M parameters), 2 x 64 tokens, 6 steps, float32" in second.output
    assert "liger not run:" in second.output
    assert Path("a-train-stand-in.png").read_bytes().startswith(b"\x89PNG")
    assert "Training stand-in" in results.document({"a.jsonl": found}, "a command")


def test_the_linear_loss_is_the_same_function(monkeypatch, small_corpus):
    calls = []

    def linear_cross_entropy(x, weight, target, ignore_index):
        calls.append((x.shape, weight.shape, target.shape))
        return F.cross_entropy(x @ weight.T, target, ignore_index=ignore_index)

    monkeypatch.setattr(gander, "linear_cross_entropy", linear_cross_entropy, raising=False)
    losses = trained("gander-linear")["losses"]
    assert calls == [((32, 64), (512, 64), (32,))] * 4
    assert losses == pytest.approx(trained("torch")["losses"], abs=1e-4)


def test_without_a_linear_loss_it_is_not_run(monkeypatch, small_corpus):
    monkeypatch.delattr(gander, "linear_cross_entropy", raising=False)
    with pytest.raises(contestants.NotRun, match="has no linear_cross_entropy"):
        trained("gander-linear")


@pytest.mark.parametrize("name", ["torch.compile", "gander.compile", "gander-one-pass.compile"])
def test_compiled_contestants(name, small_corpus, interpreted):
    figures = trained(name)
    assert (figures["graph_breaks"], figures["graphs"]) == (0, 1)
    assert figures["losses"] == pytest.approx(trained("torch")["losses"], abs=1e-4)


def test_seeds_decide_weights_and_batches(small_corpus):
    first, again, other = (trained("torch", seed=seed)["losses"] for seed in (0, 0, 1))
    assert first == again != other


def test_norms_are_replaced_and_keep_their_weights():
    model = models.build(models.PRESETS["stand-in"], "cpu", 0)
    weights = [m.weight for m in model.modules() if isinstance(m, models.StandInRMSNorm)]
    contestants.replace_norms(model)
    norms = [m for m in model.modules() if isinstance(m, gander.nn.RMSNorm)]
    assert not any(isinstance(m, models.StandInRMSNorm) for m in model.modules())
    assert len(norms) == 2 * 2 + 1
    assert all(norm.weight is weight for norm, weight in zip(norms, weights, strict=True))
    assert {norm.eps for norm in norms} == {models.EPS}


def test_a_model_without_norms_is_refused():
    with pytest.raises(RuntimeError, match="Linear has no module that is named"):
        contestants.replace_norms(torch.nn.Linear(2, 2))


def test_the_last_token_has_no_target():
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert models.targets(labels).tolist() == [2, 3, models.IGNORED, 5, 6, models.IGNORED]


def contestant(prepare):
    return contestants.Contestant(prepare)


def out_of_memory(model):
    raise torch.OutOfMemoryError("no room")


def not_finite(model):
    loss = contestants._own(model)
    return lambda tokens: loss(tokens) * math.nan


def missing(model):
    raise contestants.NotRun("nothing here")


@pytest.mark.parametrize(
    ("prepare", "figures"),
    [
        (out_of_memory, {"error": "OutOfMemoryError: no room"}),
        (not_finite, {"error": "ArithmeticError: the loss is nan at step 0"}),
        (missing, {"not_run": "nothing here"}),
    ],
)
def test_a_child_says_why_it_has_no_figures(prepare, figures, monkeypatch, tmp_path, small_corpus):
    monkeypatch.setitem(child.CONTESTANTS, "torch", contestant(prepare))
    path = tmp_path / "result"
    monkeypatch.setattr(sys, "argv", ["child", json.dumps(dataclasses.asdict(SETTINGS)), str(path)])
    child.main()
    assert json.loads(path.read_text()) == figures


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("kill -9 $$", "killed by SIGKILL"),
        ("echo first >&2; echo last >&2; exit 3", "exit status 3: last"),
        ("exit 0", "exit status 0: no message"),
        ("exec sleep 60", "took longer than 0.5 s"),
    ],
)
def test_a_child_that_ends_otherwise_is_reported(script, error, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(command.sys, "executable", str(python))
    assert command._in_a_process(SETTINGS, seconds=0.5) == {"error": error}


def record(name, **figures):
    point = dict(section="train", model="small", dtype="bfloat16", batch=8, sequence=2048, steps=2, seed=0)
    environment = {"device": "a", "torch": "b", "commit": "c", "driver": "d"}
    return point | {
        "on": "cuda",
        "contestant": name,
        "results": {name: figures},
        "environment": environment,
        "date": "2026-01-01",
    }


def test_tables_and_pictures_keep_what_failed():
    def ran(ms, losses):
        return dict(ms=ms, tokens_per_second=1.0, peak_gib=2.0, first_step_s=3.0, parameters=5, losses=losses)

    found = [
        record("torch", **ran(20.0, [3.0, 2.0])),
        record("liger", not_run="no such library"),
        record("gander", error="OutOfMemoryError: no room"),
        record("gander", **ran(10.0, [3.0, 2.5])),  # the later one counts
        record("gander-linear", error="killed by SIGKILL"),
    ]
    (table,) = report.tables(found)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["torch"][:2] == ["20.0", "1.00"] and rows["torch"][6] == "0.0e+00"
    assert rows["gander"][:2] == ["10.0", "2.00"] and rows["gander"][6] == "5.0e-01"
    assert rows["liger"][0] == "not run" and rows["gander-linear"][0] == "failed"
    assert "liger not run: no such library." in table.note
    assert "gander-linear failed: killed by SIGKILL." in table.note
    assert len({len(row) for row in table.rows} | {len(table.columns)}) == 1
    ((name, _, panels),) = plots._pictures(report.latest(found))
    assert name == "train-small"
    assert list(panels) == ["time of a step", "peak memory", "loss, difference from torch's"]
    ((_, _, alone),) = plots._pictures(found[:1])
    assert list(alone)[-1] == "loss"  # nothing to differ from
    (differences,) = report.curve_tables(report.latest(found))
    assert differences.columns == ["contestant", "step 1", "step 2", "largest of all steps"]
    assert differences.rows == [
        ["torch: its loss", "3.000", "2.000", ""],
        ["gander", "+0.0000", "+0.5000", "0.5000"],
    ]
    assert report.tables(found[1:2])[0].rows[0][:2] == ["liger", "not run"]
    assert not list(plots._pictures(found[1:2]))


def test_targets_of_training_name_what_failed_and_what_was_not_run():
    def ran(ms, gib):
        return dict(ms=ms, peak_gib=gib)

    found = [
        record("torch.compile", **ran(10.0, 20.0)),
        record("gander.compile", **ran(9.0, 18.0)),
        record("gander", error="OutOfMemoryError: no room"),
        record("gander-linear", **ran(9.0, 10.0)),
    ]
    checks = results.checks(found)
    assert {check.target: check.row()[3] for check in checks} == {
        "gander.compile: time over torch.compile's": "0.9",
        "gander.compile: memory over torch.compile's": "0.9",
        "gander-linear: time over gander's": "failed",
        "gander-linear.compile: time over gander.compile's": "not run",
        "gander-linear.compile: memory, GiB": "not run",
    }
    assert [check.met() for check in checks] == [True, False, False, False, False]
    assert results.checks([one | {"on": "cpu"} for one in found]) == []
    assert results.checks([one | {"model": "tiny"} for one in found]) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "large"], "large is not one of small, medium, llama3-8b, qwen3-8b, tiny"),
        (["--run", "2"], "2 is more than the runs, which are 1"),
        (["--contestants", "jax"], "jax is not one of torch, torch.compile"),
        (["--device", "tpu"], "tpu is not available"),
    ],
)
def test_options_are_checked(arguments, said, tmp_path):
    app = typer.Typer()
    app.command()(command.main)
    arguments = ["--model", "stand-in", "--out", str(tmp_path / "a"), *arguments]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2 and said in result.output
    assert not (tmp_path / "a").exists()


def test_without_transformers_a_model_of_torch_alone_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("--model", "tiny", "--out", tmp_path / "a")
    assert result.exit_code == 2 and "stand-in" in result.output


def test_transformers_llama(small_corpus):
    pytest.importorskip("transformers", reason="./build.sh bench train installs transformers")
    curves = {name: trained(name, model="tiny")["losses"] for name in ("torch", "gander")}
    assert curves["gander"] == pytest.approx(curves["torch"], abs=1e-4)
    model = models.build(models.PRESETS["tiny"], "cpu", 0)
    contestants.replace_norms(model)
    assert sum(isinstance(m, gander.nn.RMSNorm) for m in model.modules()) == 2 * 2 + 1


def pinned(name):
    """Lines of a lock file, without hashes, by distribution."""
    found = {}
    for distribution, rest in re.findall(r"^([\w.-]+)(==.*?) \\\n", Path(ROOT, name).read_text(), re.M):
        found.setdefault(distribution, set()).add(rest.partition(" ")[0])
    return found


# ---- Whole models ----


def of_a_run(name, number, ms, kernels=1.0, gib=10.0, model="llama3-8b", **others):
    parts = {"products": 100.0, "attention": 9.0, "norms": kernels, "optimizer": 7.0, "other": kernels}
    made = record(name, ms=ms, peak_gib=gib, kernels_ms=parts, **others)
    return made | {"model": model, "run": number}


def verdicts(found):
    return {check.target: (check.measured, check.met()) for check in results.checks(found)}


def test_targets_of_whole_models_are_judged_by_the_median_of_three_runs():
    found = []
    for number, (mine, liger) in enumerate([(9.0, 10.0), (12.0, 10.0), (10.0, 10.0)], 1):
        found += [
            of_a_run("liger", number, liger, kernels=2.0),
            of_a_run("gander-hf", number, mine, kernels=1.0 + number / 10, gib=10 + 32 / 1024),
            of_a_run("liger-linear", number, 10.0),
            of_a_run("gander-hf-linear", number, 10.1, gib=10 + 700 / 1024),
        ]
    assert verdicts(found) == {
        "gander-hf: time around products, attention and optimizer over liger's": (pytest.approx(0.6), True),
        "gander-hf: time over liger's": (1.0, True),
        "gander-hf: memory above liger's, MiB": (pytest.approx(32), True),
        "gander-hf-linear: time around products, attention and optimizer over liger-linear's": (1.0, False),
        "gander-hf-linear: time over liger-linear's": (pytest.approx(1.01), False),
        "gander-hf-linear: memory above liger-linear's, MiB": (pytest.approx(700), False),
    }
    assert {check.point for check in results.checks(found)} == {"llama3-8b"}
    assert {check.point for check in results.checks(found[:8])} == {"llama3-8b, 2 of 3 runs"}
    assert results.checks([one | {"on": "cpu"} for one in found]) == []
    assert results.checks([one | {"model": "tiny-qwen3"} for one in found]) == []


def test_an_option_is_judged_beside_the_same_without_it():
    found = [
        of_a_run(name, number, ms, model="qwen3-8b")
        for number, ms in ((1, 98.0), (2, 99.5), (3, 97.0))
        for name, ms in (("gander-hf-qk", ms), ("gander-hf", 100.0))
    ]
    assert verdicts(found)["gander-hf-qk: time over gander-hf's"] == (pytest.approx(0.98), True)
    assert verdicts(found[2:4])["gander-hf-qk: time over gander-hf's"] == (pytest.approx(0.995), False)
    assert not any("-qk" in target for target in verdicts(found[1::2]))


def test_a_contestant_that_failed_misses_its_targets_and_a_mask_is_seen():
    found = [
        of_a_run("torch", 1, 20.0),
        of_a_run("torch.compile", 1, 15.0),
        of_a_run("liger", 1, 10.0),
        record("gander-hf", error="OutOfMemoryError: no room") | {"model": "llama3-8b", "run": 1},
    ]
    found[1]["results"]["torch.compile"]["kernels_ms"]["attention"] = 30.0
    by_target = {check.target: check.row()[3] for check in results.checks(found)}
    assert by_target["gander-hf: time over liger's"] == "failed"
    assert by_target["gander-hf-linear: time over liger-linear's"] == "not run"
    assert verdicts(found)["torch.compile: attention's time over torch's"] == (pytest.approx(30 / 9), False)


def test_figures_of_several_runs_are_those_of_the_median():
    found = [of_a_run("torch", n, ms, gib=n, losses=[1.0]) for n, ms in enumerate([3.0, 1.0, 2.0], 1)]
    assert report.of_contestants(found)["torch"]["peak_gib"] == 3
    failed = record("torch", error="killed") | {"run": 4}
    assert report.of_contestants([*found, failed])["torch"]["ms"] == 2.0
    assert report.of_contestants([failed]) == {"torch": {"error": "killed"}}
    (table,) = [report.kernels_table(found)]
    assert table.rows == [["torch", "100.00", "9.00", "1.00", "7.00", "1.00", "2.00"]]


def test_the_newest_record_of_whole_models_is_found(tmp_path):
    def write(name, found):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))

    assert stored.whole_models(tmp_path) is None
    write("a-train", [record("torch", ms=1.0, losses=[1.0])])  # another model
    write("b-train", [of_a_run("torch", 1, 2.0) | {"on": "cpu"}])
    assert stored.whole_models(tmp_path) is None
    write("d-train", [of_a_run("torch", 1, 2.0) | {"date": "2026-01-02"}])
    write("c-train", [of_a_run("torch", 1, 3.0) | {"date": "2026-01-03"}, record("torch", ms=1.0)])
    name, (found,) = stored.whole_models(tmp_path)
    assert name == "c-train" and found["results"]["torch"]["ms"] == 3.0


def test_in_each_run_another_contestant_begins():
    assert list(command._turns("abc", 2)) == [(1, "a"), (1, "b"), (1, "c"), (2, "b"), (2, "c"), (2, "a")]


@pytest.mark.parametrize(
    ("name", "part"),
    {
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128": "attention",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)": "attention",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "products",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "_rms_norm_backward_kernel": "norms",
        "_triton_rope": "rotary",
        "_swiglu_forward_kernel": "MLP",
        "liger_cross_entropy_kernel": "loss",
        "element_mul_kernel": "loss",
        "void at::native::vectorized_elementwise_kernel<4, silu_kernel(at::TensorIteratorBase&)>": "MLP",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>": (
            "additions"
        ),
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>>": (
            "other"
        ),
        "void cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>": "loss",
        "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0": "norms",
        "triton_poi_fused_mul_silu_3": "MLP",
        "Memcpy DtoD (Device -> Device)": "other",
    }.items(),
)
def test_kernels_have_parts(name, part):
    assert kernels.part_of(name) == part


def test_all_kernels_of_gander_have_parts():
    """But softmax's, which no part of a model is."""
    table = Path(ROOT, "kernels", "variants_gen.go").read_text()
    parts = {}
    for symbol in re.findall(r'Symbol: "(\w+)"', table):
        parts.setdefault(kernels.part_of(symbol), set()).add(symbol)
    assert set(parts) == {"norms", "loss", "rotary", "MLP", "other"}
    assert all(re.match(r"(masked_)?softmax_", symbol) for symbol in parts["other"])
    begins = {"norms": "(rms|layer)?norm|weight", "rotary": "(qk_norm_)?rotate|qk_norm", "MLP": "glu"}
    for part, pattern in begins.items():
        assert all(re.match(pattern, symbol) for symbol in parts[part]), part


def launched(name, ts, dur, cat="kernel"):
    return dict(cat=cat, name=name, ts=ts, dur=dur)


def test_a_kernel_that_starts_early_and_waits_counts_once():
    """The norm begins 40 us before the product ends, and the loss lies within the copy of another stream."""
    events = [
        dict(cat="cpu_op", name="aten::mm", ts=0, dur=5000),
        launched("rmsnorm_forward_rows_bfloat16_128x4", 60, 90),
        launched("nvjet_tst_128x256", 0, 100),
        launched("Memcpy DtoD", 1000, 500, "gpu_memcpy"),
        launched("liger_cross_entropy_kernel", 1100, 200),
        launched("flash_fwd_kernel", 2000, 1000),
        dict(name="process_name", ph="M"),
    ]
    found = kernels.breakdown(events, steps=2)
    assert {part: ms for part, ms in found["kernels_ms"].items() if ms} == {
        "products": 0.05,
        "norms": 0.025,
        "other": 0.25,
        "attention": 0.5,
    }
    assert tuple(found["kernels_ms"]) == kernels.PARTS
    assert found["attention_kernels"] == ["flash_fwd_kernel"]
    largest = found["largest_ms"]
    assert [*largest.values()] == sorted(largest.values(), reverse=True)
    assert not any(name.startswith(("attention", "products")) for name in largest)
    assert report.around(found["kernels_ms"]) == pytest.approx(0.275)
    assert kernels.breakdown(events[:1], steps=2) == {}


def test_a_profile_is_read():
    """Without a GPU it has torch's operators, and no kernels."""
    x = torch.randn(8, 8)
    events = trace.events(lambda: x @ x, torch.profiler.ProfilerActivity.CPU)
    assert any(event.get("name") == "aten::mm" for event in events)
    assert kernels.breakdown(events, 1) == {}


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-8b"])
def test_whole_models_have_the_sizes_of_their_names(name):
    pytest.importorskip("transformers", reason="./build.sh bench train installs transformers")
    model = models.build(models.PRESETS[name], "meta", 0)
    parameters = sum(p.numel() for p in model.parameters())
    # In billions, with all layers: see the configurations of Meta-Llama-3-8B and Qwen3-8B.
    layers, whole = {"llama3-8b": (32, 8.03), "qwen3-8b": (36, 8.19)}[name]
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert parameters + (layers - 16) * layer == pytest.approx(whole * 1e9, rel=1e-3)


def test_a_whole_model_in_small(small_corpus):
    """All that runs on a CPU, on a model with grouped heads and norms of queries and keys."""
    pytest.importorskip("transformers", reason="./build.sh bench train installs transformers")
    preset = models.PRESETS["tiny-qwen3"]
    curves = {}
    for name in preset.contestants:
        if name == "torch.compile":
            continue
        try:
            curves[name] = trained(name, model="tiny-qwen3")["losses"]
        except contestants.NotRun as why:
            assert name.startswith("liger") and "GPU" in str(why)
    assert set(curves) == {name for name in preset.contestants if not name.startswith(("liger", "torch."))}
    for name, curve in curves.items():
        assert curve == pytest.approx(curves["torch"], abs=1e-4), name


def test_what_gander_hf_leaves_is_an_error():
    pytest.importorskip("transformers", reason="./build.sh bench train installs transformers")
    model = models.build(models.PRESETS["tiny"], "cpu", 0)
    model.loss_function = causal = lambda *given, **more: None
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is left: its loss is"):
        contestants.CONTESTANTS["gander-hf"].prepare(model)
    assert model.loss_function is causal


def test_compiled_attention_is_that_of_eager(interpreted):
    """F.scaled_dot_product_attention without a mask, and causal, whether torch.compile traces or not."""
    pytest.importorskip("transformers", reason="./build.sh bench train installs transformers")
    model, tokens = models.build(models.PRESETS["tiny-qwen3"], "cpu", 0), torch.arange(16)[None]
    calls, original = [], F.scaled_dot_product_attention
    graphs = []

    class Calls(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is original:
                calls.append({**kwargs, "rank": args[0].dim()})
            return function(*args, **(kwargs or {}))

    with Calls():
        contestants._own(model)(tokens)

    def backend(graph, inputs):
        graphs.append([n for n in graph.graph.nodes if n.target is original])
        return graph

    torch._dynamo.optimize(backend)(contestants._own(model))(tokens)
    compiled = [node.kwargs for nodes in graphs for node in nodes]
    assert len(calls) == len(compiled) == 2
    for options in (*calls, *compiled):
        assert options["attn_mask"] is None and options["is_causal"] is True
        assert options["enable_gqa"] is True


def test_a_mask_is_refused():
    pytest.importorskip("transformers", reason="./build.sh bench train installs transformers")
    with pytest.raises(RuntimeError, match="has made an attention mask"):
        models._attend(None, None, None, None, torch.ones(1))


def test_both_lock_files_have_the_same_versions():
    """`bench train` installs into .venv, and must not change what requirements.txt put there."""
    base, more = pinned("requirements.txt"), pinned("requirements-train.txt")
    assert {"torch", "numpy"} <= base.keys() & more.keys()
    assert not {name: more[name] for name in base.keys() & more.keys() if not more[name] <= base[name]}
