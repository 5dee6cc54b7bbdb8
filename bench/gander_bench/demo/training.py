"""The model, and its training with torch's operators and with gander's."""

import math
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gander
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

EPS = 1e-6


# ---- The operators that are compared ----


@dataclass(frozen=True)
class Operators:
    """The operators of a training run. Nothing else differs between the two runs."""

    name: str
    softmax: Callable[[Tensor], Tensor]  # over the last dimension
    rmsnorm: Callable[[Tensor, Tensor], Tensor]  # x, weight
    cross_entropy: Callable[[Tensor, Tensor], Tensor]  # logits, targets: the mean, in float32


TORCH = Operators(
    "torch",
    softmax=lambda x: F.softmax(x, -1),
    rmsnorm=lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    cross_entropy=lambda logits, target: F.cross_entropy(logits.float(), target),
)
GANDER = Operators(
    "gander",
    softmax=gander.softmax,
    rmsnorm=lambda x, weight: gander.rmsnorm(x, weight, eps=EPS),
    cross_entropy=gander.cross_entropy,
)


# ---- The model ----


@dataclass(frozen=True)
class Config:
    """The size of the model and of its training.

    agreement: the largest difference of the loss curves that is allowed at any step. Both runs compute the
    same function, but with sums in another order and other roundings. Each step of training amplifies the
    differences of the steps before. Gradients are clipped and the learning rate is moderate, because an
    unstable run amplifies without bound: in float32, at a learning rate of 3e-3 and without clipping, the
    curves differed by 4e-2.
    """

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    dtype: torch.dtype  # of activations; parameters are float32
    agreement: float


# The measured difference is 1e-4 over these steps, and 1e-3 at a learning rate of 3e-3, which is close to
# unstable. The order of sums depends on the processor and on the number of threads, so more is allowed.
CPU = Config(128, 2, 4, 128, 8, 300, 2e-3, torch.float32, agreement=1e-2)
# bfloat16 has 8 significant bits, so the differences are larger: 2e-2 in 120 steps of the small model in
# bfloat16.
GPU = Config(768, 8, 12, 512, 32, 300, 6e-4, torch.bfloat16, agreement=1e-1)
VOCABULARY = 256  # bytes


class Linear(nn.Linear):
    """Computes in the dtype of x, the activations. The parameters may have another dtype."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    def __init__(self, operators, width):
        super().__init__()
        self.operators = operators
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.operators.rmsnorm(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, operators, config):
        super().__init__()
        self.operators = operators
        self.heads = config.heads
        self.query_key_value = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x, rotation, mask):
        batch, length, width = x.shape
        q, k, v = self.query_key_value(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5 + mask
        mixed = self.operators.softmax(scores) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, operators, config):
        super().__init__()
        hidden = config.width * 8 // 3 // 32 * 32
        self.norms = nn.ModuleList(Norm(operators, config.width) for _ in range(2))
        self.attention = Attention(operators, config)
        self.gate, self.up = (Linear(config.width, hidden) for _ in range(2))
        self.down = Linear(hidden, config.width)

    def forward(self, x, rotation, mask):
        x = x + self.attention(self.norms[0](x), rotation, mask)
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """forward(tokens, target), both (batch, length), returns the mean loss. target: the next tokens."""

    def __init__(self, operators: Operators, config: Config):
        super().__init__()
        self.operators, self.dtype = operators, config.dtype
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(operators, config) for _ in range(config.layers))
        self.norm = Norm(operators, config.width)
        self.head = Linear(config.width, VOCABULARY)
        half = config.width // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())).to(config.dtype))
        later = torch.full((config.context, config.context), -math.inf).triu(1)
        self.register_buffer("mask", later.to(config.dtype))

    def forward(self, tokens, target):
        x = self.embedding(tokens).to(self.dtype)
        for block in self.blocks:
            x = block(x, self.rotation, self.mask)
        logits = self.head(self.norm(x))
        return self.operators.cross_entropy(logits.flatten(0, 1), target.flatten())


def rotate(x, rotation):
    """Rotary position embedding: rotates pairs of channels by an angle that grows with the position."""
    (a, b), (cos, sin) = x.chunk(2, -1), rotation
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


# ---- Training ----


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The median step in milliseconds, without the first ones, which warm up."""
        return statistics.median(self.milliseconds[min(10, len(self.milliseconds) // 2) :])


def corpus(megabytes: float = 4) -> Tensor:
    """The standard library's source, as bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) > megabytes * 2**20:
            break
    if len(text) < 2**16:
        raise RuntimeError(
            f"{folder} holds {len(text)} bytes of Python source, expected the standard library's files"
        )
    return torch.frombuffer(text, dtype=torch.uint8)


def train(operators: Operators, config: Config, text: Tensor, device: str, seed: int, progress) -> Run:
    """progress(run) is called after each step."""
    torch.manual_seed(seed)
    model = Model(operators, config).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    order = torch.Generator().manual_seed(seed)
    run = Run()
    for step in range(config.steps):
        at = torch.randint(len(text) - config.context, (config.batch, 1), generator=order)
        window = text[at + torch.arange(config.context + 1)].to(device=device, dtype=torch.int64)
        begin = time.perf_counter()
        warmup = min(1.0, (step + 1) / 20)
        decay = 0.55 + 0.45 * math.cos(math.pi * step / config.steps)
        optimizer.param_groups[0]["lr"] = config.learning_rate * warmup * decay
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.item())  # waits for the device
        run.milliseconds.append((time.perf_counter() - begin) * 1e3)
        progress(run)
    return run


def train_both(console: Console, config: Config, device: str, seed: int) -> dict[str, Run]:
    text = corpus()
    parameters = sum(p.numel() for p in Model(TORCH, config).parameters())
    console.print(
        f"Training a byte-level model of {parameters / 1e6:.1f} M parameters on {len(text) / 1e6:.1f} MB of "
        f"Python's standard library: {config.steps} steps of {config.batch} x {config.context} bytes, "
        f"{str(config.dtype).removeprefix('torch.')}, {device}"
    )
    columns = (
        TextColumn("{task.description:6}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    runs = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        for operators in (TORCH, GANDER):
            task = bar.add_task(operators.name, total=config.steps, state="")

            def progress(run, name=operators.name, task=task):
                done = len(run.losses)
                state = f"loss {run.losses[-1]:.4f}, {run.milliseconds[-1]:.0f} ms a step"
                bar.update(task, completed=done, state=state)
                # Without a terminal there is no progress bar, so some lines show the progress.
                if not console.is_terminal and (
                    done == config.steps or done % max(1, config.steps // 4) == 0
                ):
                    console.print(f"  {name:6} step {done}/{config.steps}: {state}", highlight=False)

            runs[operators.name] = train(operators, config, text, device, seed, progress)
    return runs


def difference(runs: dict[str, Run]) -> list[float]:
    return [abs(a - b) for a, b in zip(*(run.losses for run in runs.values()), strict=True)]


def plot(runs: dict[str, Run], config: Config, device: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, apart, times = figure.subplots(1, 3)
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        losses.plot(run.losses, style, label=name)
        times.plot(run.milliseconds, style, label=f"{name}: median {run.step:.1f} ms")
    apart.plot(difference(runs), color="tab:green", label="|gander - torch|")
    apart.axhline(config.agreement, color="tab:red", linestyle=":", label="allowed")
    apart.set_yscale("symlog", linthresh=1e-8)
    times.set_ylim(0, 2 * max(run.step for run in runs.values()))
    titles = "training loss", "difference of the losses", "time of a step, ms"
    for axes, title in zip((losses, apart, times), titles, strict=True):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"A byte-level language model with torch's operators and with gander's, {device}")
    figure.savefig(path, dpi=110)
