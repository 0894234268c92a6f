// MSL text to C++ text for clang. Line numbers are kept.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "compiler.h"
#include "compiler_declarations.h"

namespace sim {

// A kernel that newFunctionWithName: can ask for.
struct KernelName {
  std::string name;
  const Function* function = nullptr;
  const Instantiation* instantiation = nullptr;   // null for a kernel that is no template
};

std::vector<KernelName> kernel_names(const Tokens& tokens, const Declarations& declarations);

struct SyntaxCheck {
  std::string text;
  // Number of explicit instantiations that the text keeps: those left out are checked when built.
  size_t instantiations = 0;
};

// For -fsyntax-only: function constants without values. Warnings that spell
// function_constant_index<i, n> tell the index n of constant i.
SyntaxCheck rewrite_for_check(std::string_view source, const Tokens& tokens,
                              const Declarations& declarations);

// One kernel with its entry point. `indices` are those of declarations.constants.
std::string rewrite_for_kernel(std::string_view source, const Tokens& tokens,
                               const Declarations& declarations, const KernelName& kernel,
                               const std::vector<uint32_t>& indices, const ConstantValues& values);

// A function constant without a value is a symbol of this name; it stays undefined in a kernel that
// really reads it.
extern const char kUnsetConstantPrefix[];

}  // namespace sim
