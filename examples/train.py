"""Trains a small GPT on Python's own documentation, attention through the Metal kernels.

The text comes with every Python (`pydoc_data.topics`), and the model reads bytes, so nothing is
downloaded. On a Mac it runs on the GPU, elsewhere on the simulated Metal device. The loss curve is
drawn into `--out`, a PNG or SVG file.

    python examples/train.py --attention sdpa --steps 50
    python examples/train.py --compare      # trains twice; exit code 1 if the losses differ
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib
import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import torch_flash_mps

if sys.platform != "darwin":
    import torch_flash_mps.simulator  # gives this machine the device "mps"

    torch_flash_mps.simulator.checks(False)   # of every access to memory: thorough, but slow

matplotlib.use("Agg")
matplotlib.rcParams |= {"axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False,
                        "axes.spines.right": False, "svg.fonttype": "none"}

CONTEXT = 256
VOCABULARY = 256   # bytes
LARGEST_DIFFERENCE = 1e-3   # between the losses of two kinds of attention, relative


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of this package."""
    return torch_flash_mps.attention(q, k, v, is_causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of PyTorch."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as in the textbook, with all seqlen x seqlen scores in memory."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


ATTENTION = {"flash": flash, "sdpa": sdpa, "naive": naive}


class Block(nn.Module):
    """Attention, then a small network on each token; each adds to what comes in."""

    def __init__(self, width: int, num_heads: int, attention: Callable) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.attention = attention
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        widen, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(widen, nn.GELU(), narrow)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, self.head_dim))   # [B, S, 3, H, D]
        q, k, v = heads.transpose(1, 3).unbind(2)   # three views [B, H, S, D], nothing is copied
        out = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.project(out)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Predicts the next byte at each position: `[batch, seqlen]` to `[batch, seqlen, 256]`."""

    def __init__(self, attention: Callable, width: int = 192, num_heads: int = 3,
                 num_layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        blocks = (Block(width, num_heads, attention) for _ in range(num_layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.size(1), device=tokens.device)
        x = self.blocks(self.token(tokens) + self.position(places))
        return self.norm(x) @ self.token.weight.T


class Text:
    """The documentation as bytes: nine tenths to train on, the rest to judge by."""

    def __init__(self, seed: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.train, self.held_out = tokens.tensor_split([len(tokens) * 9 // 10])
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Random pieces of the training text, and for each byte the one that follows it."""
        starts = torch.randint(len(self.train) - length, (size, 1), generator=self.generator)
        pieces = self.train[starts + torch.arange(length + 1)].to("mps")
        return pieces[:, :-1], pieces[:, 1:]


@dataclass
class Run:
    """What one training run was and what came of it."""

    attention: str
    losses: list[float] = field(default_factory=list)
    held_out_loss: float = math.nan
    seconds: float = 0.0
    tokens: int = 0
    saved_bytes: int = 0   # what the forward pass keeps for the backward pass


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text, length: int) -> float:
    pieces = text.held_out[: 8 * (length + 1)].view(8, -1).to("mps")
    return loss_of(model, pieces[:, :-1], pieces[:, 1:]).item()


def train(attention: str, steps: int, batch_size: int, seed: int, length: int = CONTEXT,
          **sizes: int) -> Run:
    """Trains a fresh model. On the simulated device the same arguments give the same bits.

    Args:
        attention: a key of ATTENTION.
        steps, batch_size, length: how many batches of how many pieces of how many bytes.
        seed: of the weights and of the order of the text; sizes: of the model, as GPT takes them.
    """
    torch.manual_seed(seed)
    text = Text(seed)
    model = GPT(ATTENTION[attention], **sizes).to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1.1 - step / max(steps, 1))
    )
    run = Run(attention)
    bar = tqdm(range(steps), desc=attention, unit="step")
    begin = time.perf_counter()
    for _ in bar:
        tokens, targets = text.batch(batch_size, length)
        before = torch.mps.current_allocated_memory()
        loss = loss_of(model, tokens, targets)
        run.losses.append(loss.item())
        run.saved_bytes = torch.mps.current_allocated_memory() - before
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.seconds = time.perf_counter() - begin
        run.tokens += tokens.numel()
        bar.set_postfix_str(f"loss {run.losses[-1]:.3f}, {run.tokens / run.seconds:,.0f} tokens/s")
    run.held_out_loss = held_out_loss(model, text, length)
    return run


def relative_differences(runs: list[Run]) -> list[float]:
    """How far the losses of two runs are apart, step by step."""
    return [abs(a - b) / b for a, b in zip(*(run.losses for run in runs), strict=True)]


def draw(runs: list[Run], path: Path) -> None:
    """Loss by step; below it the differences, where two runs are to be compared."""
    is_comparison = len(runs) == 2
    figure, axes = pyplot.subplots(
        1 + is_comparison, sharex=True, squeeze=False, layout="constrained",
        figsize=(7, 5.4 if is_comparison else 4), height_ratios=[3, 1.3][: 1 + is_comparison],
    )
    top = axes[0, 0]
    styles = [{"color": "#1f5fa8", "lw": 3, "alpha": 0.8}, {"color": "#d1495b", "lw": 1.2}]
    steps = range(1, len(runs[0].losses) + 1)
    for run, style in zip(runs, styles, strict=False):
        top.plot(steps, run.losses, label=f"{run.attention}, each batch", **style)
    judged = runs[0].held_out_loss
    top.plot(len(steps), judged, "ko", ms=5, clip_on=False, label=f"held-out text: {judged:.2f}")
    top.axhline(math.log(VOCABULARY), color="grey", lw=0.9, ls=":", label="guessing blindly")
    top.set(ylabel="loss (nats per byte)", title="A small GPT learns Python's documentation")
    top.legend(frameon=False)
    if is_comparison:
        bottom = axes[1, 0]
        differences = [max(one, 1e-8) for one in relative_differences(runs)]   # 0 is off the scale
        bottom.semilogy(steps, differences, color="#444444", lw=1.2)
        bottom.axhline(LARGEST_DIFFERENCE, color="grey", lw=0.9, ls="--", label="allowed")
        bottom.legend(frameon=False, loc="upper right")
        bottom.set(ylim=(1e-8, 1e-2), ylabel="relative\ndifference")
    axes[-1, 0].set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def report(run: Run) -> None:
    last = statistics.mean(run.losses[-10:])
    print(f"{run.attention}:\n  loss:   {run.losses[0]:.3f} at first, {last:.3f} over the last 10 "
          f"steps, {run.held_out_loss:.3f} on held-out text")
    print(f"  memory: {run.saved_bytes / 2**20:.1f} MiB kept for the backward pass")
    print(f"  time:   {run.seconds:.0f} s, {run.tokens / run.seconds:,.0f} tokens per second")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=ATTENTION, default="flash")
    parser.add_argument("--compare", action="store_true", help="train with flash and with naive")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/train/loss.png"))
    arguments = parser.parse_args()
    kinds = ["flash", "naive"] if arguments.compare else [arguments.attention]
    runs = [train(kind, arguments.steps, arguments.batch_size, arguments.seed) for kind in kinds]
    print()
    for run in runs:
        report(run)
    draw(runs, arguments.out)
    print(f"loss curve: {arguments.out}")
    if not arguments.compare:
        return 0
    largest = max(relative_differences(runs))
    print(f"largest relative difference: {largest:.1e} (allowed: {LARGEST_DIFFERENCE:g})")
    return 0 if largest <= LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
