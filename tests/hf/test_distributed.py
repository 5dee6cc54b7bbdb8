"""Two processes with gloo: DDP, FSDP2 in every order, and tensor parallelism."""

import ast
import os
import traceback
from pathlib import Path

import gander.hf
import models
import torch
import torch.distributed as dist
import transformers
from test_models import F32, assert_near, gradients
from torch.distributed.fsdp import fully_shard

RANKS, FOLDER = 2, "llama"


def batch_of(rank):
    return models.batch(seed=10 + rank)


def expected_gradients(family):
    """The mean of the ranks' gradients."""
    model = models.model(family, F32)
    one, two = (gradients(model, batch_of(rank)) for rank in range(RANKS))
    return {name: (one[name] + two[name]) / 2 for name in one}


def whole(grads):
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}


def run_ddp(rank, loss, order):
    model = models.model("Llama", F32)
    if order == "before":
        gander.hf.apply(model, loss=loss)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if order == "after":
        gander.hf.apply(wrapped, loss=loss)
    found = gradients(wrapped, batch_of(rank))
    assert_near({n.removeprefix("module."): g for n, g in found.items()}, expected_gradients("Llama"), 5e-5)


def run_fsdp(rank, loss, order, units):
    model = models.model("Qwen3", F32)
    before = [type(module) for module in model.modules()]

    def shard():
        for layer in model.model.layers:
            for norm in [m for m in layer.modules() if "Norm" in type(m).__name__] if units == "all" else []:
                fully_shard(norm)
            fully_shard(layer)
        if units != "root":
            fully_shard(model.lm_head)
        fully_shard(model)

    if order == "after":
        shard()
        sharded = [type(module) for module in model.modules()]
    report = gander.hf.apply(model, loss=loss, qk_norm=True)
    assert not report.left
    if order == "before":
        shard()
    output = model(**batch_of(rank))
    assert models.on_gander(output.loss) and (output.logits is None) == (loss == "linear")
    assert_near(whole(gradients(model, batch_of(rank))), expected_gradients("Qwen3"), 5e-5)
    names = [type(module).__name__ for module in model.modules()]
    gander.hf.undo(model)
    assert [type(module).__name__ for module in model.modules()] == names
    assert not models.on_gander(model(**batch_of(rank)).loss)
    if order == "after":
        assert [type(m).__mro__[1:] for m in model.modules()] == [cls.__mro__[1:] for cls in sharded]
    assert all(issubclass(type(m), cls) for m, cls in zip(model.modules(), before, strict=True))


def run_tensor_parallel(rank, loss, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=F32)
    batch = models.batch()
    with torch.no_grad():
        expected = model(**batch)
    report = gander.hf.apply(model, loss=loss)
    if loss == "linear":
        refusal = next(e.detail for e in report.left if e.kind == "loss")
        assert refusal == "linear_cross_entropy: tensor parallelism divides its head", refusal
    output = model.train()(**batch)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss)
    output.loss.backward()


CASES = {
    **{
        ("ddp", loss, order): run_ddp for loss in ("cross_entropy", "linear") for order in ("before", "after")
    },
    **{
        ("fsdp2", loss, order, units): run_fsdp
        for loss in ("cross_entropy", "linear")
        for order in ("before", "after")
        for units in ("root", "head", "all")
    },
    **{("tensor parallel", loss, FOLDER): run_tensor_parallel for loss in ("cross_entropy", "linear")},
}


def work(rank, folder):
    environment = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS, LOCAL_WORLD_SIZE=RANKS)
    os.environ |= {name: str(value) for name, value in environment.items()}
    torch.set_num_threads(1)
    # A file, because another program may take a port that was free.
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{folder}/store")
    os.chdir(folder)
    failures = {}
    for case, run in CASES.items():
        try:
            run(rank, *case[1:])
        except Exception:
            failures[case] = traceback.format_exc()
        dist.barrier()
    Path(f"failures-{rank}").write_text(repr(failures))
    dist.destroy_process_group()


def test_in_two_processes(tmp_path):
    """One test for all cases: a process takes long to start."""
    models.model("Llama", F32).save_pretrained(tmp_path / FOLDER)
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=RANKS)
    for rank in range(RANKS):
        failures = ast.literal_eval((tmp_path / f"failures-{rank}").read_text())
        told = [f"rank {rank}, {' '.join(case)}: {text}" for case, text in failures.items()]
        assert not told, "\n".join(told)
