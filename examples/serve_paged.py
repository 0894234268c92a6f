"""Continuous batching with SmolLM2: requests come and go, their keys and values live in pages.

Each decode step serves all running requests at once, whatever their lengths. A request holds as
many pages of the cache as its tokens need, takes another when one is full, and gives all back when
it is done; a waiting request is admitted as soon as pages are free. The answers are then compared
with those of transformers' own attention on the CPU, one request at a time; the exit code is 1 if
a token differs.

    python examples/serve_paged.py --pages 12 --page-size 16
"""

import argparse
import collections
import random
import sys
import textwrap
import time
from dataclasses import dataclass, field

import torch
import transformers
from measure import Recorder
from models import encode, load
from torch import Tensor, nn
from tqdm import tqdm

from torch_flash_mps.flash_attn import flash_attn_with_kvcache

NAME = "metal_paged"   # of the attention function that transformers calls

# When the request comes (decode steps so far), how many tokens it may take, and what it says.
REQUESTS = [
    (0, 12, "Why is the sky blue?"),
    (0, 5, "Say hello."),
    (1, 20, "Write one sentence about the sea, and do not forget the gulls above it."),
    (3, 8, "What is the capital of Peru?"),
    (6, 16, "List three colours."),
    (9, 10, "Who wrote Faust?"),
]


class PagedCache:
    """Keys and values of all layers in pages, and which pages are free.

    A page holds `page_size` tokens of one request: `[num_pages, page_size, num_heads_kv, head_dim]`
    for each layer. Free pages are full of NaN, so that an answer shows if one is read.
    """

    def __init__(self, config, dtype: torch.dtype, num_pages: int, page_size: int) -> None:
        shape = (num_pages, page_size, config.num_key_value_heads, config.head_dim)
        self.layers = [
            tuple(torch.full(shape, torch.nan, dtype=dtype, device="mps") for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]
        self.page_size = page_size
        self.free = list(range(num_pages))
        random.Random(0).shuffle(self.free)   # any order will do

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def release(self, pages: list[int]) -> None:
        for key, value in self.layers:
            key[pages] = value[pages] = torch.nan
        self.free += pages
        pages.clear()


@dataclass
class Request:
    name: str
    arrival: int
    prompt: Tensor   # [seqlen]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)   # generated
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose keys and values are in the cache

    @property
    def max_length(self) -> int:
        """The last token is never put into the cache."""
        return len(self.prompt) + self.max_new_tokens - 1


class Engine:
    """Runs requests on one model."""

    def __init__(self, model, cache: PagedCache, max_batch: int) -> None:
        self.model, self.cache, self.max_batch = model, cache, max_batch
        self.running: list[Request] = []
        self.eos = model.generation_config.eos_token_id

    def can_admit(self, request: Request) -> bool:
        """Whether all running requests and this one can get the pages that they may need."""
        promised = sum(
            self.cache.pages_for(one.max_length) - len(one.pages) for one in self.running
        )
        needed = self.cache.pages_for(request.max_length)
        return len(self.running) < self.max_batch and promised + needed <= len(self.cache.free)

    def admit(self, request: Request) -> list[Request]:
        """Runs the prompt. Returns the request if that finished it."""
        self.running.append(request)
        return self._forward([request], request.prompt[None])

    def step(self) -> list[Request]:
        """One more token for each running request. Returns those that are finished."""
        last = torch.tensor([[request.tokens[-1]] for request in self.running])
        return self._forward(self.running, last)

    def _forward(self, batch: list[Request], tokens: Tensor) -> list[Request]:
        """Puts new tokens, `[batch, seqlen]`, through the model; the same number for each."""
        seqlen = tokens.shape[1]
        for request in batch:
            while len(request.pages) < self.cache.pages_for(request.length + seqlen):
                request.pages.append(self.cache.free.pop())
        cache_seqlens = torch.tensor([request.length for request in batch], dtype=torch.int32)
        block_table = nn.utils.rnn.pad_sequence(
            [torch.tensor(request.pages, dtype=torch.int32) for request in batch],
            batch_first=True, padding_value=-1,
        )
        logits = self.model(
            tokens.to("mps"),
            position_ids=(cache_seqlens[:, None] + torch.arange(seqlen)).to("mps"),
            use_cache=False,
            logits_to_keep=1,
            # For `paged_attention`, below.
            paged_cache=self.cache.layers,
            cache_seqlens=cache_seqlens.to("mps"),
            block_table=block_table.to("mps"),
        ).logits[:, -1]
        for request, token in zip(batch, logits.argmax(-1).tolist(), strict=True):
            request.length += seqlen
            request.tokens.append(token)
        finished = [
            request for request in batch
            if request.tokens[-1] == self.eos or len(request.tokens) == request.max_new_tokens
        ]
        for request in finished:
            self.cache.release(request.pages)
        self.running = [request for request in self.running if request not in finished]
        return finished


def paged_attention(module, query, key, value, attention_mask, scaling, paged_cache, cache_seqlens,
                    block_table, **_):
    """transformers' attention function: puts the new keys and values into the pages, attends."""
    k_cache, v_cache = paged_cache[module.layer_idx]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))   # [B, S, H, D]
    out = flash_attn_with_kvcache(
        query, k_cache, v_cache, key, value, cache_seqlens=cache_seqlens, block_table=block_table,
        softmax_scale=scaling, causal=True,
    )
    return out, None


def use_pages(model) -> None:
    """Moves the model to the device, with `paged_attention`, which needs no mask."""
    transformers.AttentionInterface.register(NAME, paged_attention)
    transformers.AttentionMaskInterface.register(NAME, lambda **_: None)
    model.set_attn_implementation(NAME)
    model.to("mps")


@torch.no_grad()
def serve(engine: Engine, requests: list[Request]) -> None:
    """Runs all requests, which are sorted by arrival, and tells what happens when."""
    waiting, steps, num_pages = collections.deque(requests), 0, len(engine.cache.free)

    def tell(event: str, request: Request) -> None:
        used = num_pages - len(engine.cache.free)
        print(f"  step {steps:3}  {event}  {textwrap.shorten(request.name, 28):28}  "
              f"{len(request.prompt)} + {len(request.tokens)} tokens; "
              f"{len(engine.running)} running, {used} of {num_pages} pages in use")

    while waiting or engine.running:
        while waiting and waiting[0].arrival <= steps and engine.can_admit(waiting[0]):
            request = waiting.popleft()
            finished = engine.admit(request)
            tell("admitted", request)
            for request in finished:
                tell("finished", request)
        if engine.running:
            for request in engine.step():
                tell("finished", request)
        steps += 1


def run_alone(model, request: Request) -> list[int]:
    """The same request with transformers' own attention and cache, on the model's device."""
    prompt = request.prompt[None]
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=request.max_new_tokens,
    )
    return tokens[0, len(request.prompt) :].tolist()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=12)
    parser.add_argument("--page-size", type=int, default=16, help="tokens; a multiple of 16")
    parser.add_argument("--max-batch", type=int, default=4, help="requests that run together")
    parser.add_argument("--requests", type=int, default=len(REQUESTS), help="how many of them")
    arguments = parser.parse_args(argv)

    tokenizer, model = load("smollm2", torch.float32)
    requests = [
        Request(text, arrival, encode(tokenizer, [text])["input_ids"][0], max_new_tokens)
        for arrival, max_new_tokens, text in REQUESTS[: arguments.requests]
    ]
    use_pages(model)
    cache = PagedCache(model.config, model.dtype, arguments.pages, arguments.page_size)
    largest = max(cache.pages_for(request.max_length) for request in requests)
    if largest > arguments.pages:
        parser.error(f"--pages: expected {largest} or more for the longest request")

    begin = time.perf_counter()
    with Recorder(model) as record:
        serve(Engine(model, cache, arguments.max_batch), requests)
    seconds = time.perf_counter() - begin

    model.to("cpu")
    model.set_attn_implementation("eager")
    wrong = 0
    for request in tqdm(requests, desc="Checking each request alone", unit="request"):
        wrong += request.tokens != run_alone(model, request)
    for request in requests:
        print(f"\n> {request.name}\n{tokenizer.decode(request.tokens, skip_special_tokens=True)}")
    kernels = collections.Counter(name for one in record.passes for name in one.kernels)
    print()
    for kernel, times in kernels.items():
        print(f"  kernel:   {kernel}, {times} times")
    num_tokens = sum(len(request.tokens) for request in requests)
    print(f"  speed:    {num_tokens} tokens in {len(record.passes)} passes, "
          f"{num_tokens / seconds:.1f} tokens per second")
    print(f"  pages:    {len(cache.free)} of {arguments.pages} free")
    print(f"  requests: {len(requests) - wrong} of {len(requests)} the same as alone")
    return 1 if wrong or len(cache.free) < arguments.pages else 0


if __name__ == "__main__":
    sys.exit(main())
