"""The table of docs/backward.md: where the operands of every backward row lie, and what that costs.

    python tests/backward_table.py            # prints it
    python tests/backward_table.py --write    # puts it into docs/backward.md

Made from the rows that the library has (metal/instances.h), for head_dim = head_dim_v = the row's.
"""

import re
from pathlib import Path

from generated_table import GeneratedTable, markdown

from torch_flash_mps._extension import extension

ROOT = Path(__file__).resolve().parent.parent

FRAGMENT = 8
FLOAT_REGISTERS = 2      # of one lane, for its two float32 elements of a fragment
PAD_BYTES = 16           # at the end of a staged row
LSE_AND_DELTA_BYTES = 8  # of a staged row
MOST_COLUMNS = {
    kernel: int(re.search(rf"#define {name} (\d+)", (ROOT / "metal/instances.h").read_text())[1])
    for kernel, name in (("flash_bwd_dq", "FLASH_HEAD_COLUMNS"),
                         ("flash_bwd_dkv", "FLASH_BWD_DKV_COLUMNS"))
}

HEADER = ("kernel", "family", "bytes", "head_dim up to", "block_q × block_k", "path", "own tiles",
          "registers a lane", "with softcap", "threadgroup memory", "products")


def backward_rows() -> list[dict]:
    return [row for row in extension().tilings() if row["op"].startswith("flash_bwd_d")]


def is_dkv(row: dict) -> bool:
    return row["op"] == "flash_bwd_dkv"


def head_blocks(row: dict) -> int:
    return -(-row["max_head_dim"] // MOST_COLUMNS[row["op"]])


def columns(row: dict) -> int:
    """Columns of dQ, or of each of dK and dV, that one threadgroup accumulates."""
    if is_dkv(row):
        return min(row["max_head_dim"], MOST_COLUMNS[row["op"]])
    return -(-row["max_head_dim"] // head_blocks(row) // FRAGMENT) * FRAGMENT


def products(row: dict) -> int:
    """Matrix products of a block: S and dP once per head block; dQ, or dK and dV."""
    return 2 * head_blocks(row) + (2 if is_dkv(row) else 1)


def registers(row: dict) -> dict[str, int]:
    """32-bit registers of one lane that live through the loop, by operand."""
    wide = row["max_head_dim"] // FRAGMENT
    operand = wide if row["home"] == "registers" else 1
    per_operand = operand * row["element_bytes"] // 2
    streamed = row["block_q" if is_dkv(row) else "block_k"] // FRAGMENT
    scores = {"S": streamed * FLOAT_REGISTERS, "dS": streamed * FLOAT_REGISTERS}
    accumulator = columns(row) // FRAGMENT * FLOAT_REGISTERS
    if not is_dkv(row):
        return {"Q": per_operand, "dO": per_operand, "dQ": accumulator, **scores, "lse, delta": 2}
    return {"K": per_operand, "V": per_operand, "dK": accumulator, "dV": accumulator, **scores,
            "lse, delta": 2 * streamed * FLOAT_REGISTERS}


def threadgroup_bytes(row: dict) -> int:
    if row["path"] == "direct":
        return 0
    row_bytes = 2 * (row["max_head_dim"] * row["element_bytes"] + PAD_BYTES)
    if is_dkv(row):
        return row["block_q"] * (row_bytes + LSE_AND_DELTA_BYTES)
    return row["block_k"] * row_bytes


def line(row: dict) -> tuple[str, ...]:
    parts = registers(row)
    with_softcap = sum(parts.values()) + parts["S"]   # one more strip, of its derivative
    return (
        row["op"], row["family"], str(row["element_bytes"]), str(row["max_head_dim"]),
        f"{row['block_q']} × {row['block_k']}", row["path"], row["home"],
        f"**{sum(parts.values())}** = {' + '.join(map(str, parts.values()))}",
        str(with_softcap), f"{threadgroup_bytes(row):,}", str(products(row)),
    )


def backward_table() -> str:
    return markdown(HEADER, *map(line, backward_rows()))


TABLE = GeneratedTable(ROOT / "docs" / "backward.md", "backward table", backward_table)

if __name__ == "__main__":
    TABLE.main(__doc__.splitlines()[0])
