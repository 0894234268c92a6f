"""Programs of functions that were seen before. What they captured is held weakly."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torch_flash_mps.flex.guards import Unknowable, code_of, snapshot
from torch_flash_mps.flex.program import Program, make_program

Function = Callable[..., Tensor] | None

#: Pairs of functions by their code, the most recent last, and programs of one pair.
_MAX_PAIRS, _MAX_PROGRAMS = 256, 64


@dataclass
class _Entry:
    """A program without its tensors, and the snapshots that it is for."""

    snapshots: list
    program: Program
    captured: list[weakref.ref[Tensor]]


_entries: OrderedDict[tuple, list[_Entry]] = OrderedDict()


def program_of(score_mod: Function, mask_mod: Function, device: torch.device) -> Program:
    """The program of both functions, which are traced only where they may trace otherwise."""
    try:
        snapshots = [snapshot(one) for one in (score_mod, mask_mod)]
    except Unknowable:
        return make_program(score_mod, mask_mod, device)
    key = (code_of(score_mod), code_of(mask_mod), str(device))
    entries = _entries.setdefault(key, [])
    _entries.move_to_end(key)
    for entry in entries:
        if entry.snapshots == snapshots:
            alive = [tensor for ref in entry.captured if (tensor := ref()) is not None]
            if len(alive) == len(entry.captured):
                return replace(entry.program, captured=tuple(alive))
    program = make_program(score_mod, mask_mod, device)
    entries.append(_Entry(snapshots, replace(program, captured=()),
                          [weakref.ref(one) for one in program.captured]))
    entries[:] = [one for one in entries[-_MAX_PROGRAMS:]
                  if all(ref() is not None for ref in one.captured)]
    while len(_entries) > _MAX_PAIRS:
        _entries.popitem(last=False)
    return program
