// The C++ that joins a kernel to the executor's entry point (msl/sim/entry.h).
#pragma once

#include <string>

#include "compiler_rewriter.h"

namespace sim {

// A class that states the kernel's attributes. It stands right after the kernel, so that the names in
// its attributes mean what they mean there.
std::string attributes_class(const Tokens& tokens, const Function& function);
// Follows the whole source.
std::string entry_text(const Tokens& tokens, const KernelName& kernel);

}  // namespace sim
