"""Programs of functions that were seen before. What they captured is held weakly."""

from __future__ import annotations

import threading
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
    captured: list[tuple[weakref.ref[Tensor], torch.dtype, int]]   # with dtype and rank

    def tensors(self) -> tuple[Tensor, ...] | None:
        """What it captured; None if the text is not for them any more."""
        found = [(ref(), dtype, dim) for ref, dtype, dim in self.captured]
        alive = [one for one, dtype, dim in found
                 if one is not None and (one.dtype, one.dim()) == (dtype, dim)]
        return tuple(alive) if len(alive) == len(found) else None


_entries: OrderedDict[tuple, list[_Entry]] = OrderedDict()
#: Of the entries, and of torch.fx, which traces in one thread at a time.
_lock = threading.RLock()


def program_of(score_mod: Function, mask_mod: Function, device: torch.device) -> Program:
    """The program of both functions, which are traced only where they may trace otherwise."""
    with _lock:
        return _program_of(score_mod, mask_mod, device)


def _program_of(score_mod: Function, mask_mod: Function, device: torch.device) -> Program:
    try:
        snapshots = [snapshot(one) for one in (score_mod, mask_mod)]
    except (Unknowable, RecursionError):
        return make_program(score_mod, mask_mod, device)
    key = (code_of(score_mod), code_of(mask_mod), str(device))
    entries = _entries.setdefault(key, [])
    _entries.move_to_end(key)
    for entry in entries:
        if entry.snapshots == snapshots and (captured := entry.tensors()) is not None:
            return replace(entry.program, captured=captured)
    program = make_program(score_mod, mask_mod, device)
    entries.append(_Entry(snapshots, replace(program, captured=()),
                          [(weakref.ref(one), one.dtype, one.dim()) for one in program.captured]))
    entries[:] = [one for one in entries[-_MAX_PROGRAMS:] if one.tensors() is not None]
    while len(_entries) > _MAX_PAIRS:
        _entries.popitem(last=False)
    return program
