// aten::scaled_dot_product_attention on mps tensors by our op, for as long as it is switched on.
#pragma once

namespace flash_mps {

// Puts our kernels in front of PyTorch's at the keys MPS and AutogradMPS. Inputs that the op does not
// take reach the kernel that was there before. Does nothing where it is on already.
void enable_sdpa();

// Takes them away again. Does nothing where it is off already.
void disable_sdpa();

}  // namespace flash_mps
