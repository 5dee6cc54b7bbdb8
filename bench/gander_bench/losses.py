"""What `linear`, `head` and `sharded` compare with: gradients in float64, matmuls alone, an all-gather."""

import atexit
import datetime
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

# ---- The loss of a linear head ----

_REFERENCE_ROWS = 1024  # whose logits exist in float64 at a time


def linear_inputs(m: int, k: int, n: int, dtype, device) -> tuple[torch.Tensor, ...]:
    """Hidden states (m, k), weights (n, k) that give logits of deviation 1, and targets."""
    x = torch.randn(m, k, device=device, dtype=dtype)
    weight = torch.randn(n, k, device=device, dtype=dtype).mul_(k**-0.5)
    return x, weight, torch.randint(n, (m,), device=device)


def linear_gradients(loss: Callable, x, weight, target) -> Callable[[], tuple[torch.Tensor, ...]]:
    """dx and dw of a loss, made anew at each call."""
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    return lambda: torch.autograd.grad(loss(*leaves, target), leaves)


def linear_reference(x, weight, target) -> tuple[torch.Tensor, torch.Tensor]:
    """dx and dw of the mean loss in float64: with p = softmax(x @ weight.T), (p - onehot(target)) / m times
    weight and times x."""
    wide, dw = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    dx = torch.empty_like(x, dtype=torch.float64)
    for rows in torch.arange(len(x), device=x.device).split(_REFERENCE_ROWS):
        some = x[rows].double()
        gradient = (some @ wide.t()).softmax(-1)
        gradient.scatter_add_(1, target[rows, None], gradient.new_full((len(rows), 1), -1.0))
        gradient /= len(x)
        dx[rows] = gradient @ wide
        dw.addmm_(gradient.t(), some)
    return dx, dw


OF_ENTROPY = 0.5  # the entropy's upstream gradient; that of log_prob is 1


def statistics_gradients(statistics: Callable, x, weight, index, *, trained: bool, entropy: bool):
    """A function that makes dx, and with trained dw, of log-probabilities and entropies anew at each call."""
    leaves = [x.detach().requires_grad_()]
    head = weight.detach().requires_grad_(trained)
    if trained:
        leaves.append(head)
    outputs = ("log_prob", "entropy")[: 1 + entropy]
    ones = torch.ones(len(x), device=x.device)
    upstream = (ones, OF_ENTROPY * ones)[: 1 + entropy]
    return lambda: torch.autograd.grad(statistics(leaves[0], head, index, outputs), leaves, upstream)


def statistics_reference(x, weight, index, *, trained: bool, entropy: bool) -> tuple[torch.Tensor, ...]:
    """The same in float64: with log p = log_softmax(x @ weight.T) and the entropy H,
    onehot(index) - p - OF_ENTROPY p (log p + H) times weight, and times x."""
    wide = weight.double()
    dx, dw = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(wide if trained else wide[:0])
    for rows in torch.arange(len(x), device=x.device).split(_REFERENCE_ROWS):
        some = x[rows].double()
        log_p = (some @ wide.t()).log_softmax(-1)
        gradient = -log_p.exp()
        if entropy:
            h = (gradient * log_p).sum(-1, keepdim=True)
            gradient *= 1 + OF_ENTROPY * (log_p + h)
        gradient.scatter_add_(1, index[rows, None], gradient.new_ones(len(rows), 1))
        dx[rows] = gradient @ wide
        if trained:
            dw.addmm_(gradient.t(), some)
    return (dx, dw) if trained else (dx,)


def matmuls(x, weight, *, again: bool = False, trained: bool = True) -> Callable[[], object]:
    """The products of a linear loss and its gradients, without the loss: those of the logits, which are made
    again if they were not kept, of dx, and with trained of dw."""

    def run():
        logits = x @ weight.t()
        if again:
            logits = x @ weight.t()
        dx = logits @ weight
        return (dx, logits.t() @ x) if trained else (dx,)

    return run


def off(got, want) -> float:
    """How far a gradient is from float64, relative to its size."""
    return float(f"{((got.double() - want).norm() / want.norm()).item():.3e}")


# ---- The loss of a rank's slice ----


def ranks() -> int:
    """How many processes torchrun has started; 1 without it."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def rank() -> int:
    """This process's number among them."""
    return int(os.environ["RANK"]) if dist.is_torchelastic_launched() else 0


@contextmanager
def group(device: str) -> Iterator[int]:
    """The default group of torch.distributed and its size: torchrun's processes, which keep it, or this
    process alone: what a rank does itself is all there."""
    backend = "nccl" if device == "cuda" else "gloo"
    if ranks() > 1:
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=_TIMEOUT)
            atexit.register(dist.destroy_process_group)
        yield dist.get_world_size()
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield 1
    finally:
        dist.destroy_process_group()


_TIMEOUT = datetime.timedelta(minutes=2)  # a rank that fails alone leaves the others waiting


def slice_inputs(m: int, n: int, dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's logits, and the targets among the classes of all ranks, which are the same on each."""
    torch.manual_seed(0)
    target = torch.randint(dist.get_world_size() * n, (m,), device=device)
    torch.manual_seed(1 + dist.get_rank())
    return torch.randn(m, n, device=device, dtype=dtype), target


def all_classes(logits: torch.Tensor) -> torch.Tensor:
    """The logits of all ranks side by side."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return torch.cat(parts, -1)


def own_classes(values: torch.Tensor) -> torch.Tensor:
    """This rank's part of values for all classes."""
    return values.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def furthest(distance: float, device) -> float:
    """The largest of the ranks' distances, NaN if one is."""
    every = torch.empty(dist.get_world_size(), device=device, dtype=torch.float64)
    dist.all_gather_into_tensor(every, torch.tensor([distance], device=device, dtype=torch.float64))
    return every.max().item()


def all_gather(count: int, device: str) -> Callable[[], object]:
    """The collective of so many float32 numbers of each rank."""
    mine = torch.zeros(count, device=device)
    every = torch.empty(dist.get_world_size() * count, device=device)
    return lambda: dist.all_gather_into_tensor(every, mine)
