// From MSL text to a loaded kernel: what MTLLibrary, MTLFunction and MTLComputePipelineState do.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernel_abi.h"

namespace sim {

// Plain kernels run as fast as the CPU allows; instrumented ones report every memory access to the
// executor, which checks and counts it.
enum class Flavour { Plain, Instrumented };

struct BufferArgument {
  std::string name;
  uint32_t slot;
  bool is_writable;            // `device T*` without const
  bool is_threadgroup;         // [[threadgroup(n)]]: slot n of the threadgroup table
  // What a binding's offset must be a multiple of: 4 in constant memory, the element type's alignment
  // in device memory; 1 when not known.
  uint32_t alignment = 1;
  bool is_constant = false;  // `constant T*`: not device memory
};

struct FunctionConstant {
  std::string name;
  std::string type;  // MSL spelling: bool, int, uint, float, ...
  uint32_t index;
};

struct KernelInfo {
  std::string name;  // host_name where given
  std::vector<BufferArgument>
      buffers;  // those that exist with the constants of this specialisation
  uint32_t max_total_threads =
      kMaxThreadsPerThreadgroup;  // [[max_total_threads_per_threadgroup(n)]]
  uint32_t static_threadgroup_bytes =
      0;  // arrays that the kernel itself declares; 0 when not known
};

// Values of function constants by index, as raw bytes (MTLFunctionConstantValues).
using ConstantValues = std::map<uint32_t, std::vector<unsigned char>>;

// What() is the compiler's text, with lines of the original source ("program_source:12:3: error: ...").
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct CompileOptions {
  bool fast_math = true;  // MTLCompileOptions.fastMathEnabled / mathMode
  std::map<std::string, std::string> macros;  // preprocessorMacros
  int language_version = 310;  // as __METAL_VERSION__: 310 is Metal 3.1
};

// The folder of metal_stdlib and friends, with `runtime/kernel_abi.h` beside it. Call before anything
// else here.
void set_msl_include_directory(const std::string& directory);

class Library {
 public:
  // Parses and type-checks; throws CompileError. Also refuses what MSL forbids and clang would accept.
  static std::shared_ptr<const Library> from_source(const std::string& source,
                                                    const CompileOptions& options = {});
  virtual ~Library() = default;
  virtual const std::vector<std::string>& function_names() const = 0;
  virtual const std::vector<FunctionConstant>& function_constants() const = 0;
};

class Kernel {
 public:
  // Specialises and compiles (or takes from the cache on disk), loads; throws CompileError.
  static std::shared_ptr<const Kernel> compile(const std::shared_ptr<const Library>& library,
                                               const std::string& function_name,
                                               const ConstantValues& constants, Flavour flavour);
  virtual ~Kernel() = default;
  virtual const KernelInfo& info() const = 0;
  virtual KernelEntry entry() const = 0;
};

}  // namespace sim
