"""TRL's log-probabilities: those of a head, of which its trainers make their losses, and those of logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gander

from ._logits import UNKNOWN
from ._swap import Replacement, Swap
from ._versions import find

# TRL's names of outputs, in the order of its results. The first two have gradients.
_OUTPUTS: dict[str, Any] = {
    "log_probs": "log_prob",
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
_DIFFERENTIABLE = {"log_prob", "entropy"}


def trl() -> Swap:
    """Computes TRL's log-probabilities, entropies and other statistics of tokens by gander.

    The trainers for SFT, DPO, KTO, GRPO and RLOO call one function for their losses, which gander's
    `linear_token_statistics` replaces. `selective_log_softmax` and `entropy_from_logits`, which have logits
    in hand, call another one on a GPU, which `token_statistics` replaces. Both hold in this process, in all
    threads, whether trainers were imported before or after.

    Returns:
        What undoes it: `with gander.rl.trl(): ...`, or `swap = gander.rl.trl()` and `swap.undo()`.

    Raises:
        ImportError: TRL is not installed.
        NotImplementedError: The source of TRL's functions is not the one that was checked.
    """
    return Swap("trl", _find)


def _find() -> list[Replacement]:
    module = find("trl.kernels.chunked_logprob")
    function = module.ChunkedLogProbFunction
    found = [Replacement(function, _of_head(function, module.TOKEN_CHUNK_SIZE))]
    if module.is_triton_available():  # else TRL has no such function
        function = find("trl.kernels.logprob_entropy").selective_log_softmax_and_entropy
        found.append(Replacement(function, _of_logits()))
    return found


def _of_head(original: Any, tokens: int) -> type:
    """What stands for TRL's autograd function, of which the trainers know `apply` alone.

    tokens: The rows of TRL's tiles of logits, of which chunk_size is the columns.
    """

    class ChunkedLogProbFunction:
        @staticmethod
        def apply(
            hidden: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            targets: Tensor,
            temperature: float,
            chunk_size: int,
            final_logit_softcapping: float | None = None,
            logit_scale: float = 1.0,
            outputs: tuple[str, ...] = tuple(_OUTPUTS),
        ) -> tuple[Tensor | None, ...]:
            if hasattr(weight, "ds_id"):  # ZeRO-3 divides it again. TRL's backward gathers it.
                options = final_logit_softcapping, logit_scale, outputs
                taken: tuple[Tensor | None, ...] = original.apply(
                    hidden, weight, bias, targets, temperature, chunk_size, *options
                )
                return taken
            names = [ours for its, ours in _OUTPUTS.items() if its in (*outputs, "log_probs")]
            statistics = gander.linear_token_statistics(
                hidden,
                weight,
                targets,
                bias,
                temperature=temperature,
                softcap=final_logit_softcapping,
                scale=logit_scale,
                ignore_index=UNKNOWN,
                chunk=max(1, tokens * chunk_size // weight.shape[0]),
                outputs=names,
            )
            results = dict(zip(names, statistics, strict=True))
            for name in results.keys() - _DIFFERENTIABLE:
                results[name] = results[name].detach()
            return tuple(map(results.get, _OUTPUTS.values()))

    return ChunkedLogProbFunction


def _of_logits() -> Any:
    """What stands for TRL's function of logits."""

    def selective_log_softmax_and_entropy(
        logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        log_prob, entropy = gander.token_statistics(
            logits, index, temperature=temperature, row_mask=row_mask, ignore_index=UNKNOWN
        )
        return log_prob, entropy

    return selective_log_softmax_and_entropy
