"""Calls of gander's functions for type checkers to check. `./build.sh test types` checks this file. It never
runs."""

from typing import Any

import gander
import gander.rl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

Array = npt.NDArray[np.float32]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.norm = gander.nn.RMSNorm(8, eps=1e-6, dtype=torch.bfloat16)
        self.softmax = gander.nn.Softmax(dim=-1)
        self.log_softmax = gander.nn.LogSoftmax(dim=-1)
        self.loss = gander.nn.CrossEntropyLoss(reduction="sum")

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        assert_type(self.norm.forward(x), Tensor)
        assert_type(self.softmax.forward(input=x), Tensor)
        assert_type(self.log_softmax.forward(input=x), Tensor)
        return self.loss.forward(input=gander.rmsnorm(x, self.weight), target=target)


def tensors(x: Tensor, parameter: nn.Parameter, target: Tensor) -> None:
    assert_type(gander.softmax(x, algorithm="cluster", batch_invariant=True), Tensor)
    of_parameter: Tensor = gander.softmax(parameter)
    assert_type(of_parameter + 0, Tensor)
    assert_type(gander.softmax(x, dim=0, dtype=torch.float32, scale=0.5, mask=x, masked="zero"), Tensor)
    assert_type(gander.log_softmax(x, 1, "float32", mask=x > 0, causal=True), Tensor)
    assert_type(gander.softmax_fwd(x), Tensor)
    assert_type(gander.softmax_bwd(x, x), Tensor)
    assert_type(gander.rmsnorm(x, parameter, out_dtype=torch.float16, eps=None), Tensor)
    assert_type(gander.rmsnorm(x, out_dtype="float16"), Tensor)
    assert_type(gander.rmsnorm(x, parameter, bias=parameter, residual=x), Tensor)
    assert_type(gander.rmsnorm(x, residual=x, residual_dtype="float32", prenorm=True), tuple[Tensor, Tensor])
    assert_type(gander.layernorm(x, parameter, parameter), Tensor)
    assert_type(gander.layernorm(x, parameter, residual=x, prenorm=True), tuple[Tensor, Tensor])
    assert_type(gander.layernorm_fwd(x, parameter), Tensor)
    assert_type(gander.layernorm_fwd(x, parameter, return_mean=True), tuple[Tensor, Tensor])
    assert_type(
        gander.layernorm_fwd(x, parameter, return_rstd=True, return_mean=True), tuple[Tensor, Tensor, Tensor]
    )
    assert_type(gander.layernorm_bwd(x, parameter, x, x, x), tuple[Tensor, Tensor | None, Tensor | None])
    assert_type(gander.nn.LayerNorm(8, bias=False).forward(x), Tensor)
    assert_type(gander.nn.functional.layer_norm(x, (8,), parameter, parameter, 1e-6), Tensor)
    assert_type(gander.l2norm(x, 1e-5), Tensor)
    assert_type(gander.rotary(x, x, x, x, True, casting_mode="llama"), tuple[Tensor, Tensor | None])
    assert_type(gander.apply_rotary_emb(x, x, x, seqlen_offsets=3, max_seqlen=8), Tensor)
    assert_type(gander.apply_rotary_emb(x, x, x, False, True, x, x, 8), Tensor)
    assert_type(gander.logsumexp(x), Tensor)
    assert_type(gander.logsumexp(x, (0, 1), keepdim=True), Tensor)
    assert_type(gander.nn.functional.log_softmax(x, 0, dtype=torch.float32), Tensor)
    assert_type(gander.nn.functional.softmax(x, dim=0, dtype=torch.float32), Tensor)
    assert_type(gander.nn.functional.rms_norm(x, (8,), parameter, 1e-6), Tensor)
    assert_type(gander.nn.functional.cross_entropy(x, target, ignore_index=-1, reduction="none"), Tensor)
    out, residual, rstd = gander.rmsnorm_fwd(x, parameter, store_rstd=True)
    assert_type(out, Tensor)
    assert_type(residual, Tensor)
    assert rstd is not None
    dx, dw, _, _ = gander.rmsnorm_bwd(x, parameter, out, rstd)
    assert_type(dx, Tensor)
    assert_type(dw, Tensor | None)
    assert_type(gander.cross_entropy(x, target, weight=parameter, reduction="none"), Tensor)
    assert_type(gander.cross_entropy(x, target, x, parameter), Tensor)
    found = gander.cross_entropy(x, target, z_loss=1e-4, outputs=("loss", "is_top1"))
    assert len(found) == 2
    found.loss.backward()
    assert_type(gander.distributed.cross_entropy(x, target, weight=parameter, sizes=[8, 8]), Tensor)
    assert_type(gander.distributed.token_statistics(x, target, row_mask=x, classes=8).entropy, Any)
    of_head = gander.distributed.linear_token_statistics(
        x, parameter, target, parameter, sizes=[8, 8], allreduce_dgrad=True, keep="logits", chunk=8
    )
    assert_type(of_head.entropy, Any)
    assert_type(gander.cross_entropy_fwd(x, target), Tensor)
    assert_type(gander.cross_entropy_fwd(x, target, x, return_lse=True), tuple[Tensor, Tensor])
    assert_type(gander.cross_entropy_fwd(x, target, return_lse=True), tuple[Tensor, Tensor])
    assert_type(
        gander.cross_entropy_fwd(x, target, return_dx=True, inplace_backward=True), tuple[Tensor, Tensor]
    )
    assert_type(
        gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True), tuple[Tensor, Tensor, Tensor]
    )
    assert_type(gander.cross_entropy_bwd(x, target, x, x, inplace_backward=True), Tensor)
    assert_type(gander.cross_entropy(x, target, reduction="sum", divisor=x.sum(), upstream=0.25), Tensor)
    assert_type(gander.cross_entropy_fwd(x, target, divisor=3), Tensor)
    assert_type(gander.linear_cross_entropy(x, parameter, target, accumulate="float32", chunk=8), Tensor)
    assert_type(gander.linear_token_statistics(x, parameter, target, chunk=8, keep="logits").entropy, Any)
    assert_type(gander.nn.LinearCrossEntropy(4, 8), gander.nn.LinearCrossEntropy)


def arrays(x: Array, target: npt.NDArray[np.int64]) -> None:
    assert_type(gander.rmsnorm(x, bias=x, residual=x, prenorm=True), tuple[Array, Array])
    assert_type(gander.layernorm(x, x, x), Array)
    assert_type(gander.softmax(x), Array)
    assert_type(gander.softmax(x, mask=x, scale=2, causal=True), Array)
    assert_type(gander.log_softmax(x, dtype=np.float32), Array)
    assert_type(gander.softmax_bwd(x, x), Array)
    assert_type(gander.rmsnorm(x, x, out_dtype=np.float32), Array)
    assert_type(gander.rmsnorm_fwd(x)[0], Array)
    assert_type(gander.rotary(x, None, x, x, inplace=True)[0], Array)
    assert_type(gander.apply_rotary_emb(x, x, x, cu_seqlens=target), Array)
    assert_type(gander.logsumexp(x), Array)
    assert_type(gander.cross_entropy(x, target), Array)
    assert_type(
        gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True), tuple[Array, Array, Array]
    )
    assert_type(gander.cross_entropy_bwd(x, target, x, x), Array)


def about(x: Tensor) -> None:
    assert_type(gander.explain("softmax", x, algorithm="warp"), str)
    assert_type(gander.explain("rmsnorm", shape=(4, 8), dtype="bfloat16", device="h100"), str)
    assert_type([algorithm.name for algorithm in gander.algorithms("softmax_bwd")], list[str])
    assert_type(gander.get_include() + gander.cmake_prefix_path, str)
    gander.set_debug(True)
    gander.warmup(torch.device("cpu"))


def mistakes(x: Tensor, target: Tensor) -> None:
    """Each line is an error. A checker that does not find it reports the comment as unneeded."""
    gander.softmax(x, algorithm="fast")  # type: ignore[arg-type]
    gander.cross_entropy(x, target, reduction="avg")  # type: ignore[call-overload]
    gander.cross_entropy(x, target, outputs=("accuracy",))  # type: ignore[arg-type]
    gander.log_softmax(x, masked="zeros")  # type: ignore[arg-type]
    gander.rotary(x, x, x, x, casting_mode="gemma")  # type: ignore[arg-type]
    gander.softmax([1.0])  # type: ignore[type-var]


def trainers() -> None:
    with gander.rl.trl() as swap:
        assert_type(swap, gander.rl.Swap)
    swap = gander.rl.verl()
    assert_type(swap.places, tuple[str, ...])
    swap.undo()
    assert_type(gander.rl.openrlhf(), gander.rl.Swap)
    assert_type(gander.rl.CHECKED["trl"], str)
