"""Who trains the model: what each replaces in it, and what torch.compile compiles."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gander
from torch import Tensor, nn

from .models import IGNORED, targets

Loss = Callable[[Tensor], Tensor]  # of tokens (batch, length), each of which predicts the next


class NotRun(Exception):
    """What a contestant needs is not here."""


@dataclass(frozen=True)
class Contestant:
    prepare: Callable[[nn.Module], Loss]  # changes the model
    compiled: bool = False
    distribution: str | None = None  # whose version is recorded; None: gander's

    def version(self) -> str:
        """Raises NotRun where the distribution is not installed."""
        if self.distribution is None:
            return gander.__version__
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            raise NotRun(f"{self.distribution} is not installed") from None


def _own(model: nn.Module) -> Loss:
    return lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _family(model: nn.Module) -> str | None:
    """transformers' name for the kind of a model, such as "llama"; None of a stand-in."""
    return getattr(getattr(model, "config", None), "model_type", None)


# ---- Liger: its own patch, which also replaces rotary embeddings and SwiGLU ----


def _liger(prepare: Callable[[nn.Module], Loss], **replaced: bool) -> Callable[[nn.Module], Loss]:
    """Liger's patch, and then another contestant's changes. replaced: the patch's options."""

    def patch_and_prepare(model):
        family = _family(model)
        if family is None:
            raise NotRun("Liger patches models of transformers, and this model is a stand-in")
        if not next(model.parameters()).is_cuda:
            raise NotRun("Liger's kernels run on a GPU")
        try:
            import liger_kernel.transformers as liger
        except ImportError as error:
            raise NotRun(f"liger-kernel cannot be imported: {error}") from None
        getattr(liger, f"apply_liger_kernel_to_{family}")(**replaced, model=model)
        return prepare(model)

    return patch_and_prepare


_LOSS = {"cross_entropy": True, "fused_linear_cross_entropy": False}
_LINEAR_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": True}
# Rotary embeddings and SwiGLU alone.
_NO_NORMS_NO_LOSS = {"rms_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


# ---- gander.hf: all that it replaces ----


def _hf(**options) -> Callable[[nn.Module], Loss]:
    """gander.hf.apply. What it leaves would be measured as gander's, so nothing may be left."""

    def prepare(model):
        if _family(model) is None:
            raise NotRun("gander.hf changes models of transformers, and this model is a stand-in")
        import gander.hf

        if options.get("qk_norm") and not hasattr(model.model.layers[0].self_attn, "q_norm"):
            raise NotRun(f"{type(model).__name__} has no norms of queries and keys")
        report = gander.hf.apply(model, **options)
        if report.left:
            raise RuntimeError("; ".join(f"{entry.module} is left: {entry.detail}" for entry in report.left))
        return _own(model)

    return prepare


# ---- gander: the RMSNorm modules and the loss ----


def replace_norms(model: nn.Module) -> None:
    """Replaces each *RMSNorm by gander.nn.RMSNorm, with the same parameter."""
    replaced = 0
    for parent in list(model.modules()):
        for name, old in list(parent.named_children()):
            if type(old).__name__.endswith("RMSNorm"):
                weight = old.weight
                norm = gander.nn.RMSNorm(weight.shape, old.variance_epsilon, device="meta")
                norm.weight = weight
                setattr(parent, name, norm)
                replaced += 1
    if not replaced:
        raise RuntimeError(f"{type(model).__name__} has no module that is named ...RMSNorm")


def causal_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, one_pass: bool | None = None, **more
) -> Tensor:
    """What transformers calls as model.loss_function. gander computes in float32, so logits stay as they
    are."""
    return gander.cross_entropy(
        logits.view(-1, vocab_size), targets(labels), ignore_index=IGNORED, one_pass=one_pass
    )


def _gander_loss(model: nn.Module) -> Loss:
    model.loss_function = causal_loss
    return _own(model)


def _gander_one_pass(model: nn.Module) -> Loss:
    replace_norms(model)
    model.loss_function = partial(causal_loss, one_pass=True)
    return _own(model)


def _gander(model: nn.Module) -> Loss:
    replace_norms(model)
    return _gander_loss(model)


def _gander_linear(model: nn.Module) -> Loss:
    """The head's matrix product and the loss in one function, which need not keep logits."""
    linear_cross_entropy = getattr(gander, "linear_cross_entropy", None)
    if linear_cross_entropy is None:
        raise NotRun(f"gander {gander.__version__} has no linear_cross_entropy")
    replace_norms(model)

    def loss(tokens):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return linear_cross_entropy(
            hidden.flatten(0, 1), model.lm_head.weight, targets(tokens), ignore_index=IGNORED
        )

    return loss


CONTESTANTS = {
    "torch": Contestant(_own, distribution="torch"),
    "torch.compile": Contestant(_own, compiled=True, distribution="torch"),
    "liger": Contestant(_liger(_own, **_LOSS), distribution="liger-kernel"),
    "liger-linear": Contestant(_liger(_own, **_LINEAR_LOSS), distribution="liger-kernel"),
    "gander-hf": Contestant(_hf()),
    "gander-hf-linear": Contestant(_hf(loss="linear")),
    "gander-hf-qk": Contestant(_hf(qk_norm=True)),
    "gander-hf-linear-qk": Contestant(_hf(loss="linear", qk_norm=True)),
    "gander": Contestant(_gander),
    "gander-linear": Contestant(_gander_linear),
    "gander+liger": Contestant(_liger(_gander, **_NO_NORMS_NO_LOSS), distribution="liger-kernel"),
    "gander-linear+liger": Contestant(
        _liger(_gander_linear, **_NO_NORMS_NO_LOSS), distribution="liger-kernel"
    ),
    "gander.compile": Contestant(_gander, compiled=True),
    "gander-loss.compile": Contestant(_gander_loss, compiled=True),
    "gander-one-pass.compile": Contestant(_gander_one_pass, compiled=True),
    "gander-linear.compile": Contestant(_gander_linear, compiled=True),
}
