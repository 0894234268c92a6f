"""Moves tensors to the simulated device and compares what comes of it with the CPU."""

import torch
from torch.utils._pytree import tree_flatten, tree_map


def on(device, value):
    """A copy of `value` on `device` with the same strides, offset and position in its storage."""

    def move(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        base = torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage())
        moved = base.to(device).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
        return moved.detach().requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def assert_same(got, expected):
    """Same structure, strides and values; `got` on mps."""
    got_leaves, got_tree = tree_flatten(got)
    expected_leaves, expected_tree = tree_flatten(expected)
    assert got_tree == expected_tree
    for one, other in zip(got_leaves, expected_leaves, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other
            continue
        assert one.device.type == "mps"
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other, equal_nan=True)
