"""Generates text, every attention call through the Metal kernels, and tells what they did.

On a Mac the model runs on the GPU; elsewhere on the simulated Metal device, which runs the same
kernels on the CPU. The answer is then checked against transformers' own attention on the CPU, each
prompt for itself and with an exact cache; the exit code is 1 if a token differs, other than through
the rounding of --cache int8, or if attention is not what float64 makes of the same cache.

    python examples/generate.py --prompt "Why is the sky blue?" --max-new-tokens 32
    python examples/generate.py --model gemma3 --prompt "The sea is" --cache static
    python examples/generate.py --prompt "Hello." --prompt "What is the capital of Peru?"
"""

import argparse
import collections
import inspect
import sys

import torch
import transformers
from measure import Pass, Recorder, bytes_read, largest_error
from models import MODELS, encode, load
from torch import nn
from tqdm import tqdm

from torch_flash_mps.integrations.transformers import NAME
from torch_flash_mps.integrations.transformers_cache import Int8Cache

PROMPT = "Write one sentence about the sea."
LARGEST_ERROR = 64   # of attention, in units of the dtype's rounding


def new_cache(kind: str, config, length: int) -> transformers.Cache:
    """An empty cache for the keys and values of `length` tokens."""
    if kind == "int8":
        return Int8Cache(config)
    if kind == "static":
        return transformers.StaticCache(config=config, max_cache_len=length)
    return transformers.DynamicCache(config=config)


def generate(model, inputs, cache: str, max_new_tokens: int, streamer=None):
    """Greedy generation.

    Returns:
        The new tokens `[batch, seqlen]` and the logits that chose them `[batch, seqlen,
        vocabulary]`, on the CPU.
    """
    prompt_length = inputs["input_ids"].shape[1]
    # The argument has a new name in transformers after 5.22.
    parameters = inspect.signature(model.forward).parameters
    cache_argument = "cache" if "cache" in parameters else "past_key_values"
    result = model.generate(
        **inputs,
        **{cache_argument: new_cache(cache, model.config, prompt_length + max_new_tokens)},
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(result.logits, dim=1).float().cpu()
    return result.sequences[:, prompt_length:].cpu(), logits


def generate_on_device(model, tokenizer, inputs, arguments):
    """`generate` with the Metal kernels, and a record of what ran."""
    model.set_attn_implementation(NAME)
    model.to("mps")
    inputs = inputs.to("mps")
    print("Compiling the kernels ...")
    generate(model, inputs, arguments.cache, max_new_tokens=2)
    streamer = None
    if len(inputs["input_ids"]) == 1:
        print(f"\n> {arguments.prompt[0]}")
        streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with Recorder(model) as record:
        tokens, logits = generate(
            model, inputs, arguments.cache, arguments.max_new_tokens, streamer
        )
    if streamer is None:
        for prompt, answer in zip(arguments.prompt, tokens, strict=True):
            print(f"\n> {prompt}\n{tokenizer.decode(answer, skip_special_tokens=True)}")
    return tokens, logits, record.passes


def compare_with_eager(model, inputs, tokens, logits, max_new_tokens: int) -> tuple[int, float]:
    """Each prompt alone, with eager attention and an exact cache on the CPU.

    Returns:
        How many tokens of the batch come before one that differs, in the worst of its answers, and
        how far the logits up to there are apart.
    """
    model.to("cpu")
    model.set_attn_implementation("eager")
    inputs = inputs.to("cpu")
    num_same, largest = tokens.shape[1], 0.0
    batch = zip(inputs["input_ids"], inputs["attention_mask"].bool(), strict=True)
    for row, (ids, is_real) in enumerate(tqdm(batch, desc="Checking", total=len(tokens))):
        prompt = ids[is_real][None]
        alone = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        expected_tokens, expected_logits = generate(model, alone, "dynamic", max_new_tokens)
        # In a batch, the answers that end first are filled up.
        filling = tokens.shape[1] - expected_tokens.shape[1]
        expected = nn.functional.pad(
            expected_tokens[0], (0, filling), value=model.generation_config.pad_token_id
        )
        is_same = tokens[row] == expected[: tokens.shape[1]]
        num_same = min(num_same, int(is_same.cumprod(0).sum()))
        length = min(num_same + 1, expected_logits.shape[1], tokens.shape[1])
        difference = logits[row, :length] - expected_logits[0, :length]
        largest = max(largest, difference.abs().max().item())
    return num_same, largest


def report(name: str, passes: list[Pass], tokens_per_pass: int, num_layers: int) -> float:
    """Prints what ran; the largest error of attention in the last of the passes."""
    kernels = collections.Counter(kernel for one in passes for kernel in one.kernels)
    calls = sum(one.num_calls for one in passes)
    seconds = sum(one.seconds for one in passes)
    print(f"  {name}:")
    for kernel, times in kernels.items():
        print(f"    kernel: {kernel}, {times} times")
    print(f"    calls:  {calls} of {num_layers * len(passes)} attention calls "
          f"({num_layers} layers, {len(passes)} {'pass' if len(passes) == 1 else 'passes'})")
    print(f"    speed:  {tokens_per_pass * len(passes) / seconds:.1f} tokens per second")
    measured = bytes_read(passes[-1].calls)
    if measured is None:
        print("    K, V:   bytes not measured; the simulated device counts them")
    else:
        read, least = measured
        print(f"    K, V:   {read / tokens_per_pass:,.0f} bytes read per token, "
              f"{read / least:.2f} of the least possible")
    error = largest_error(passes[-1].calls)
    print(f"    error:  {error:.1e} of the largest value, against float64")
    return error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--cache", choices=["dynamic", "static", "int8"], default="dynamic")
    parser.add_argument("--prompt", action="append", help="may be repeated: a left-padded batch")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
        help="in half precision a near tie may go the other way on the CPU and be reported",
    )
    arguments = parser.parse_args(argv)
    arguments.prompt = arguments.prompt or [PROMPT]
    if arguments.max_new_tokens < 2:
        parser.error("--max-new-tokens: expected 2 or more, the first comes from the prompt's pass")

    dtype = getattr(torch, arguments.dtype)
    tokenizer, model = load(arguments.model, dtype)
    inputs = encode(tokenizer, arguments.prompt)
    with torch.no_grad():
        tokens, logits, passes = generate_on_device(model, tokenizer, inputs, arguments)
        batch, prompt_length = inputs["input_ids"].shape
        num_layers = model.config.num_hidden_layers
        print()
        prefill, decode = passes[:1], passes[1:]
        error = max(
            report("prefill", prefill, batch * prompt_length, num_layers),
            report("decode", decode, batch, num_layers),
        )
    num_same, largest = compare_with_eager(model, inputs, tokens, logits, arguments.max_new_tokens)

    length = tokens.shape[1]
    print(f"  tokens: {length} generated, " + (
        "the same as eager" if num_same == length else f"{num_same} of them as eager"
    ))
    print(f"  logits: largest difference {largest:.2e}")
    is_decode = all(
        sum("flash_decode" in name for name in one.kernels) >= num_layers
        and not any("flash_fwd" in name for name in one.kernels)
        for one in decode
    )
    if not is_decode:
        print("  a decode step ran another kernel than flash_decode")
    # An 8-bit cache rounds, and may well change a token.
    is_right = error < LARGEST_ERROR * torch.finfo(dtype).eps
    is_right &= arguments.cache == "int8" or num_same == length
    return 0 if is_right and is_decode and all(one.num_calls == num_layers for one in passes) else 1


if __name__ == "__main__":
    sys.exit(main())
