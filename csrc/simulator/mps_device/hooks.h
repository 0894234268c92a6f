// How PyTorch finds the simulated device.
#pragma once

namespace sim {

// Puts the device into a torch that may have looked for it in vain before. Called once, when all that
// the library registers is there.
void join_torch();

}  // namespace sim
