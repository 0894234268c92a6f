// The 8x8 products that the lanes of one simdgroup have logged.
#pragma once

#include "kernel_abi.h"

namespace sim {

// d += a * b for each product, in log order per destination, for all 32 lanes. Sums in float32;
// half and bfloat destinations are rounded to nearest even after each product.
void evaluate_matrix_log(const MatrixProduct* products, uint32_t count);

}  // namespace sim
