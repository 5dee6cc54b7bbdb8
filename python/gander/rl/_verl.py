"""verl's log-probabilities and entropies: those of a head, from the hidden states, and those of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

import gander

from ._logits import UNKNOWN, entropy_of, log_prob_of
from ._swap import Replacement, Swap
from ._versions import find

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def verl() -> Swap:
    """Computes verl's log-probabilities and entropies of tokens by gander.

    `linear_token_statistics` replaces the forward of `FusedLinearForPPO`, with any `impl_backend`, and
    `linear_cross_entropy`, which models call with the back ends torch, liger and triton of
    `use_fused_kernels`. Where the vocabulary is divided among ranks, as in Megatron's models, that calls
    `gander.distributed.linear_token_statistics`. `token_statistics` replaces `logprobs_from_logits`,
    `entropy_from_logits` and `entropy_from_logits_with_chunking`, which are called without
    `use_fused_kernels`. All hold in this process, in all threads, whether models were imported before or
    after. Workers keep an entropy function from when they are made, so this has to run before that.

    Returns:
        What undoes it: `with gander.rl.verl(): ...`, or `swap = gander.rl.verl()` and `swap.undo()`.

    Raises:
        ImportError: verl is not installed.
        NotImplementedError: The source of verl's functions is not the one that was checked.
    """
    return Swap("verl", _find)


def _find() -> list[Replacement]:
    layer = find("verl.utils.experimental.torch_functional").FusedLinearForPPO
    function = find("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    logits = find("verl.utils.torch_functional")
    return [
        Replacement(layer.forward, _of_layer(), layer),
        Replacement(function, _of_head(function)),
        Replacement(logits.logprobs_from_logits, _log_prob(logits)),
        Replacement(logits.entropy_from_logits, _entropy()),
        Replacement(logits.entropy_from_logits_with_chunking, _entropy_with_chunking()),
    ]


def _of_layer() -> Any:
    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        log_prob, entropy = gander.linear_token_statistics(
            hidden_states,
            vocab_weights,
            input_ids,
            temperature=temperature,
            ignore_index=-100 if self.impl_backend == "liger" else UNKNOWN,
            chunk=self.chunk_size,
        )
        return log_prob, entropy

    return forward


def _of_head(original: Any) -> Any:
    def linear_cross_entropy(
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        if reduction.lower() != "none":
            taken: tuple[Tensor, Tensor] = original(
                hidden, weight, labels, temperature, reduction, dist_process_group
            )
            return taken
        given: Any = hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1)
        options: Any = {"temperature": temperature, "ignore_index": UNKNOWN}
        if dist_process_group is not None and dist_process_group.size() > 1:
            # As verl's, the gradient of hidden is a partial sum. Megatron's gather of sequences adds it up.
            found = gander.distributed.linear_token_statistics(*given, group=dist_process_group, **options)
        else:
            found = gander.linear_token_statistics(*given, **options)
        log_prob, entropy = found
        return log_prob, entropy

    return linear_cross_entropy


def _log_prob(module: Any) -> Any:
    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        # It is a default, and verl keeps the logits unless flash-attn is there: callers may read them again.
        over = inplace_backward and module.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE
        return log_prob_of(logits, labels, inplace_backward=over)

    return logprobs_from_logits


def _entropy() -> Any:
    def entropy_from_logits(logits: Tensor) -> Tensor:
        return entropy_of(logits)

    return entropy_from_logits


def _entropy_with_chunking() -> Any:
    def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
        return entropy_of(logits)

    return entropy_from_logits_with_chunking
