"""Reads which symbols a Mach-O file takes from elsewhere, and from which library."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC_64 = 0xFEEDFACF
_LC_SYMTAB = 0x2
_LOAD_DYLIB_COMMANDS = (0xC, 0x80000018, 0x8000001F)   # plain, weak, re-exported
_TYPE_MASK, _STAB_MASK, _UNDEFINED = 0x0E, 0xE0, 0x0


class Undefined(NamedTuple):
    symbol: str
    library: str | None   # install name; None when it is to be looked up at run time


def undefined_symbols(path: Path) -> list[Undefined]:
    """The undefined symbols of a 64-bit Mach-O file."""
    data = path.read_bytes()
    if struct.unpack_from("<I", data)[0] != _MAGIC_64:
        raise ValueError(f"{path}: expected a 64-bit Mach-O file, got magic {data[:4].hex()}")
    libraries: list[str] = []
    symbols: list[tuple[str, int]] = []
    for command, offset in _load_commands(data):
        if command in _LOAD_DYLIB_COMMANDS:
            name = struct.unpack_from("<I", data, offset + 8)[0]
            libraries.append(_string(data, offset + name))
        elif command == _LC_SYMTAB:
            symbols += _undefined(data, *struct.unpack_from("<3I", data, offset + 8))
    # Ordinals count from 1; those beyond the libraries (and Zig's 0) mean a look-up at run time.
    names = dict(enumerate(libraries, start=1))
    return [Undefined(symbol, names.get(ordinal)) for symbol, ordinal in symbols]


def _load_commands(data: bytes) -> Iterator[tuple[int, int]]:
    count, offset = struct.unpack_from("<I", data, 16)[0], 32
    for _ in range(count):
        command, size = struct.unpack_from("<2I", data, offset)
        yield command, offset
        offset += size


def _undefined(data: bytes, table: int, count: int, strings: int) -> Iterator[tuple[str, int]]:
    for index in range(count):
        name, kind, _, description, _ = struct.unpack_from("<IBBHQ", data, table + 16 * index)
        if not kind & _STAB_MASK and kind & _TYPE_MASK == _UNDEFINED:
            yield _string(data, strings + name), description >> 8


def _string(data: bytes, offset: int) -> str:
    return data[offset:data.index(b"\0", offset)].decode()
