// Products of whole rows, S = A Bᵀ: scores and dP, whose sums run over head_dim.
#pragma once

#include "tile.h"

namespace flash_mps {

// Rows of more elements are multiplied in parts, which are summed: the rounding error of a float32 sum
// grows with its length, and a loop over such a row would not fit the instruction cache (12 KB) unrolled.
constant constexpr int kWidestRow = 256;
constant constexpr int kPartOfRow = 64;

// S = A Bᵀ for rows of D elements, of which head_dim exist. A is 8 rows, the first num_rows_A of which
// exist, IN_REGISTERS or else at A_rows; B is COUNT * 8 rows, of which num_rows_B exist, or all of which
// are STAGED.
template <int D, bool IN_REGISTERS, bool STAGED, typename T, int KEPT, int COUNT, typename Source>
inline void multiply_rows(
    thread Strip<float, COUNT>& S,
    thread Strip<T, KEPT>& A,
    const device T* A_rows,
    int64_t A_stride,
    int num_rows_A,
    Source B_rows,
    int64_t B_stride,
    int num_rows_B,
    int head_dim,
    uint lane) {
  static_assert(!IN_REGISTERS || D <= kWidestRow, "rows this wide are not kept in registers");
  constexpr int kPart = D <= kWidestRow ? D : kPartOfRow;
  for (int first = 0; first < D; first += kPart) {
    Strip<float, COUNT> part;
    fill(part, 0.0f);
    FLASH_MPS_UNROLL
    for (int d = 0; d < kPart; d += kFragment) {
      const int column = first + d;
      if (column >= D) {
        continue;
      }
      thread Fragment<T>& A_fragment = A.fragments[IN_REGISTERS ? d / kFragment : 0];
      const int columns = head_dim - column;
      if (!IN_REGISTERS) {
        load_fragment(A_fragment, A_rows + column, A_stride, num_rows_A, columns, lane);
      }
      multiply_transposed(
          part, A_fragment, B_rows + column, B_stride, num_rows_B, STAGED ? kFragment : columns,
          lane);
    }
    if (first == 0) {
      S = part;
    } else {
      add(S, part);
    }
  }
}

}  // namespace flash_mps
