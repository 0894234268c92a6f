"""The table of docs/decode.md: what a row of the decode kernel keeps where, and what that costs.

    python tests/decode_table.py            # prints it
    python tests/decode_table.py --write    # puts it into docs/decode.md

Made from the rows that the library has (metal/instances.h), for head_dim = head_dim_v = the row's,
query in the dtype of K and V, or float16 for int8. Sizes are those of DecodeTile
(metal/decode_rows.h), which tests/test_docs.py compares.
"""

from pathlib import Path

from generated_table import GeneratedTable, markdown

from torch_flash_mps._extension import extension

ROOT = Path(__file__).resolve().parent.parent

SIMD_WIDTH = 32
WORD_BYTES = 16          # what a lane loads at once
PLACE_BYTES = 16         # of a key: entry, row, two scales
WORDS_IN_FLIGHT = 4      # of a lane, on the direct path
FLOAT_BYTES = 4

HEADER = ("bytes of K, V", "head_dim up to", "path", "simdgroups", "rows of a simdgroup",
          "rows that share a read", "keys of a block", "registers a lane", "threadgroup memory")


class Row:
    """One instance; names as in DecodeTile."""

    def __init__(self, row: dict) -> None:
        self.kv_bytes = row["element_bytes"]
        self.dim = row["max_head_dim"]
        self.is_staged = row["path"] == "staged"
        self.simdgroups = row["num_simdgroups"]
        self.rows = row["block_q"]
        self.block_k = row["block_k"]
        self.query_bytes = max(self.kv_bytes, 2)
        # A lane takes 16 bytes at a time; of staged int8 rows 8, as many elements as of halves.
        self.elements = WORD_BYTES // (max(self.kv_bytes, 2) if self.is_staged else self.kv_bytes)
        self.words = -(-self.dim // self.elements)
        self.lanes = next(lanes for lanes in (1, 2, 4, 8, 16, 32)
                          if self.words <= lanes or lanes == SIMD_WIDTH)
        self.groups = SIMD_WIDTH // self.lanes
        self.lane_words = -(-self.words // self.lanes)
        wanted = (self.block_k // 4 // self.groups if self.is_staged
                  else WORDS_IN_FLIGHT // self.lane_words)
        self.keys = min(max(1, wanted), self.lanes)
        self.step = self.keys * self.groups

    @property
    def shared_rows(self) -> int:
        return self.rows * (self.simdgroups if self.is_staged else 1)

    @property
    def keys_of_a_block(self) -> int:
        return self.block_k if self.is_staged else self.simdgroups * self.step

    @property
    def registers(self) -> dict[str, int]:
        """32-bit registers of one lane that live through a step of keys, by what they hold."""
        elements = self.lane_words * self.elements
        return {
            "Q": self.rows * elements * self.query_bytes // FLOAT_BYTES,
            "O": self.rows * elements,
            "K, V": self.keys * elements * self.kv_bytes // FLOAT_BYTES,
            "S": self.rows * self.keys,
            "m, l, indexes": self.rows * 4 + self.keys * (5 if self.kv_bytes == 1 else 3),
        }

    @property
    def threadgroup_bytes(self) -> int:
        """The largest of what takes its turn, the mask, m and l of every row, places of keys."""
        queries = self.rows * self.dim * self.query_bytes
        pitch_bytes = -(-self.words * self.elements * self.kv_bytes // WORD_BYTES) * WORD_BYTES
        staged = 2 * self.block_k * pitch_bytes if self.is_staged else 0
        merged = self.simdgroups * self.dim * FLOAT_BYTES
        pitch = self.block_k if self.is_staged else self.step
        per_row = self.rows * self.simdgroups * FLOAT_BYTES
        places = PLACE_BYTES * (2 * self.block_k if self.is_staged else 1)
        return max(queries, staged, merged) + per_row * (pitch + 2) + places

    @property
    def line(self) -> tuple[str, ...]:
        parts = self.registers
        return (
            str(self.kv_bytes), str(self.dim), "staged" if self.is_staged else "direct",
            str(self.simdgroups), str(self.rows), str(self.shared_rows), str(self.keys_of_a_block),
            f"**{sum(parts.values())}** = {' + '.join(map(str, parts.values()))}",
            f"{self.threadgroup_bytes:,}",
        )


def decode_rows() -> list[Row]:
    return [Row(row) for row in extension().tilings() if row["op"] == "flash_decode"]


def decode_table() -> str:
    return markdown(HEADER, *(row.line for row in decode_rows()))


TABLE = GeneratedTable(ROOT / "docs" / "decode.md", "decode table", decode_table)

if __name__ == "__main__":
    TABLE.main(__doc__.splitlines()[0])
