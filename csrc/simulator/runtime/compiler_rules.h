// What Metal refuses and clang, given our headers, would accept.
#pragma once

#include <string>

#include "compiler_declarations.h"

namespace sim {

// Lines of "program_source:12:3: error: ...", in the order of the source; empty when all is well.
// `language_version` as in CompileOptions.
std::string check_rules(const Tokens& tokens, const Declarations& declarations,
                        int language_version);

}  // namespace sim
