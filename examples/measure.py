"""What the attention of a model did: which kernels ran, how often, and what they read."""

import collections
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_flash_mps
from torch_flash_mps._extension import extension
from torch_flash_mps.reference import attention_ref, visible_pairs

if sys.platform != "darwin":
    import torch_flash_mps.simulator as simulator
else:
    simulator = None

extension()   # loads the ops
ATTENTION = {
    torch.ops.flash_mps.attention.default, torch.ops.flash_mps.attention_with_kvcache.default
}
BAND = ("is_causal", "window_left", "window_right")


class OpCounter(TorchDispatchMode):
    """Counts the operators that run while it is active, whoever calls them."""

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Pass:
    """One forward pass of a model."""

    seconds: float = 0.0
    num_calls: int = 0                                  # of attention
    kernels: list[str] = field(default_factory=list)    # that these ran
    calls: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)   # op, arguments by name


class Recorder(OpCounter):
    """The forward passes of a model while it is active. Only the first and the last one keep the
    arguments of their calls."""

    def __init__(self, model):
        super().__init__()
        self.model, self.passes = model, []

    def __enter__(self):
        self._hooks = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end),
        ]
        return super().__enter__()

    def __exit__(self, *exc_info):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exc_info)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ATTENTION:
            names = (argument.name for argument in func._schema.arguments)
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.passes[-1].calls.append((func, arguments))
            self.passes[-1].num_calls += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _begin(self, *_):
        if len(self.passes) > 1:
            self.passes[-1].calls.clear()
        kernels_of([])
        self.passes.append(Pass())
        self._start = time.perf_counter()

    def _end(self, *_):
        this = self.passes[-1]
        torch.mps.synchronize()
        this.seconds = time.perf_counter() - self._start
        this.kernels = kernels_of(this.calls)


def kernels_of(calls) -> list[str]:
    """Names of the kernels that ran for the calls: on the simulated device those that it counted
    since it was last asked, on a Mac those that the library chooses."""
    if simulator is None:
        return [_kernel_on_a_mac(op, **arguments) for op, arguments in calls]
    names = [row["kernel"] for row in simulator.counters()]
    simulator.reset_counters()
    return names


def _kernel_on_a_mac(op, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> str:
    if op is not torch.ops.flash_mps.attention.default:
        return "flash_decode"   # the only one that reads a KV cache
    options.pop("is_bottom_right", None)   # the same kernel either way
    return torch_flash_mps.explain(query, key, value, **options)["kernel"]


def bytes_read(calls) -> tuple[int, int] | None:
    """How much of K and V the calls read, and the least they could: each visible key once.

    The calls run once more, counted. What they read of queries and masks is taken off at its
    least, so that reading any of those twice shows too. None on a Mac, which does not count.
    """
    if simulator is None:
        return None
    with simulator.checks():   # only then are bytes counted
        simulator.reset_counters()
        for op, arguments in calls:
            op(**arguments)
        read = sum(row["device_bytes_read"] for row in simulator.counters())
        simulator.reset_counters()
    least = 0
    for op, arguments in calls:
        least += _bytes_of_visible_keys(op, **arguments)
        read -= _distinct_bytes(arguments["query"]) + _distinct_bytes(arguments.get("attn_mask"))
    return read, least


def largest_error(calls) -> float:
    """How far the calls' results are from float64, relative to the largest value of each."""
    worst = 0.0
    for op, arguments in calls:
        out = op(**arguments)
        out = out if isinstance(out, Tensor) else out[0]
        key, value = (
            arguments[name].cpu().double() * _per_token(arguments.get(f"{name[0]}_scale"))
            for name in ("key", "value")
        )
        options = {name: arguments[name]
                   for name in ("attn_mask", "scale", "softcap", "sinks") if name in arguments}
        expected, _ = attention_ref(
            arguments["query"], key, value, **options, **_band(op, arguments)
        )
        error = (out.cpu() - expected).abs().max() / expected.abs().max()
        worst = max(worst, error.item())
    return worst


def _per_token(scale: Tensor | None) -> Tensor | float:
    return 1.0 if scale is None else scale.cpu().double().unsqueeze(-1)


def _band(op, arguments) -> dict[str, Any]:
    """Which keys the positions of the queries let them see, as `attention_ref` takes it."""
    seqlen_q, seqlen_k = (arguments[name].shape[-2] for name in ("query", "key"))
    is_cache = op is not torch.ops.flash_mps.attention.default
    is_bottom_right = is_cache or arguments.get("is_bottom_right", False)
    band = {name: arguments[name] for name in BAND if name in arguments}
    return band | {"causal_offset": seqlen_k - seqlen_q if is_bottom_right else 0}


def _bytes_of_visible_keys(op, query: Tensor, key: Tensor, value: Tensor,
                           attn_mask: Tensor | None = None, k_scale: Tensor | None = None,
                           **others: Any) -> int:
    batch, num_heads_kv, seqlen_k, head_dim = key.shape
    band = _band(op, others | {"query": query, "key": key})
    visible = visible_pairs(query.shape[-2], seqlen_k, **band)[None, None]
    if attn_mask is not None:   # [batch or 1, 1, seqlen_q, seqlen_k]
        mask = attn_mask.cpu()
        visible = visible & (mask if mask.dtype == torch.bool else mask > -torch.inf)
    num_keys = visible.any(1).any(1).expand(batch, seqlen_k).sum().item()
    of_one = head_dim * key.itemsize + value.shape[-1] * value.itemsize
    return num_keys * num_heads_kv * (of_one + (0 if k_scale is None else 2 * k_scale.itemsize))


def _distinct_bytes(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.itemsize
