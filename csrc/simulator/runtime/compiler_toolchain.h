// clang as a process: which one, with which flags, and what it said.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "compiler.h"

namespace sim {

// Everything but the source that a result of the compiler depends on.
std::string toolchain_identity(Flavour flavour, bool fast_math);

// Each throws CompileError with clang's messages in the words of MSL.
std::string preprocess(const std::string& source, const CompileOptions& options);
// Returns the warnings.
std::string check_syntax(const std::string& text, bool fast_math);
void compile_shared_object(const std::string& text, const std::filesystem::path& output,
                           Flavour flavour, bool fast_math);

}  // namespace sim
