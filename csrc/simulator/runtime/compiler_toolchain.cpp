#include "compiler_toolchain.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <mutex>
#include <sstream>

#include "compiler_cache.h"

extern char** environ;

namespace sim {
namespace {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

std::mutex g_msl_mutex;
std::string g_msl_directory;

fs::path msl_directory() {
  std::lock_guard<std::mutex> lock(g_msl_mutex);
  if (g_msl_directory.empty()) {
    throw CompileError(
        "simulator: expected set_msl_include_directory before the first compilation");
  }
  return g_msl_directory;
}

fs::path find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    return fs::path(access(name.c_str(), X_OK) == 0 ? name : "");
  }
  std::istringstream path(std::getenv("PATH") ? std::getenv("PATH") : "/usr/bin:/bin");
  for (std::string folder; std::getline(path, folder, ':');) {
    const fs::path candidate = fs::path(folder) / name;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

fs::path find_clang() {
  Arguments names = {"clang++-21", "clang++-20", "clang++-19",
                     "clang++-18", "clang++-17", "clang++"};
  const char* chosen = std::getenv("TORCH_FLASH_MPS_CLANG");
  if (chosen && *chosen) names = {chosen};
  for (const std::string& name : names) {
    if (const fs::path path = find_program(name); !path.empty()) return path;
  }
  throw CompileError(
      chosen && *chosen
          ? "simulator: TORCH_FLASH_MPS_CLANG names no program: " + std::string(chosen)
          : "simulator: expected clang++ 17 or newer, found none in PATH; install it "
            "(Debian: clang-19 lld-19) or set TORCH_FLASH_MPS_CLANG");
}

const fs::path& clang() {
  static const fs::path path = find_clang();
  return path;
}

// <stdint.h> of MSL: there is no signed char.
constexpr char kInt8IsChar[] = "-D__INT8_TYPE__=char";

// -march=native would make a shared cache unsafe; the levels of the psABI are few and fixed.
std::string cpu_flag() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c")) {
    return "-march=x86-64-v3";
  }
  return "-march=x86-64";
#else
  return "-fsigned-char";
#endif
}

Arguments language_flags(Flavour flavour, bool fast_math) {
  const fs::path msl = msl_directory();
  Arguments flags = {
      "-std=c++17", "-O2", cpu_flag(), "-fPIC", "-fsigned-char", "-nostdlibinc", "-nostdinc++",
      kInt8IsChar, "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math",
      "-fvisibility=hidden", "-fno-asynchronous-unwind-tables", "-fno-stack-protector",
      // A large frame touches the guard of its own stack before it can reach another fibre's.
      "-fstack-clash-protection",
      // As compilers for GPUs do; a helper that stays out of line hides what it does to its arguments.
      "-mllvm", "-inline-threshold=2000",
      // Literals without a suffix are floats; half and bfloat round after every operation.
      "-Xclang", "-cl-single-precision-constant", "-Xclang", "-ffloat16-excess-precision=none",
      "-Xclang", "-fbfloat16-excess-precision=none",
      fast_math ? "-ffp-contract=fast" : "-ffp-contract=off", "-Wno-everything",
      "-Wimplicit-float-conversion", "-Wdeprecated-declarations", "-Werror=vla",
      "-fno-caret-diagnostics", "-fno-color-diagnostics", "-isystem", msl.string(), "-isystem",
      (msl.parent_path() / "runtime").string()};
  if (flavour == Flavour::Instrumented) {
    // The kernel flavour of the address sanitizer calls a hook for every access of any size, and
    // needs neither shadow memory nor a run-time library.
    flags.insert(flags.end(), {"-DSIM_INSTRUMENTED", "-fsanitize=kernel-address"});
    for (const char* option :
         {"-asan-instrumentation-with-call-threshold=0", "-asan-stack=0", "-asan-globals=0",
          "-asan-opt-same-temp=0", "-asan-kernel-mem-intrinsic-prefix=1",
          "-asan-constructor-kind=none"}) {
      flags.insert(flags.end(), {"-mllvm", option});
    }
  }
  return flags;
}

struct Result {
  int status;
  std::string output, errors;
};

// A file of the cache's directory that goes away with its scope.
struct Scratch {
  fs::path path;
  explicit Scratch(const std::string& suffix) : path(DiskCache::instance().temporary(suffix)) {}
  ~Scratch() {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
};

Result run_clang(Arguments arguments) {
  const Scratch out(".out"), err(".err");
  arguments.insert(arguments.begin(), clang().string());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  const int flags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.path.c_str(), flags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.path.c_str(), flags, 0600);
  pid_t child = 0;
  const int failure = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failure) throw CompileError("simulator: cannot start " + arguments[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out.path), read_file(err.path)};
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

std::string in_words_of_msl(std::string line) {
  static const std::pair<const char*, const char*> kWords[] = {
      {"__global ", "device "},
      {"__constant ", "constant "},
      {"__local ", "threadgroup "},
      {"generic address space", "address space 'thread'"},
      {"'__global'", "'device'"},
      {"'__constant'", "'constant'"},
      {"'__local'", "'threadgroup'"},
      {" (aka '_Float16')", ""},
      {" (aka '__bf16')", ""},
      {"_Float16", "half"},
      {"__bf16", "bfloat"}};
  for (const auto& [from, to] : kWords) replace_all(line, from, to);
  replace_all(line, msl_directory().string() + "/sim/", "metal_stdlib/");
  return line;
}

// Errors and their notes; a narrowing to bfloat, which clang only warns about, is one.
std::string errors_of(const std::string& messages) {
  std::string result;
  bool is_wanted = false;
  std::istringstream lines(messages);
  for (std::string line; std::getline(lines, line);) {
    line = in_words_of_msl(line);
    const bool is_narrowing = line.find("[-Wimplicit-float-conversion]") != std::string::npos &&
                              line.find("to 'bfloat") != std::string::npos;
    if (is_narrowing) replace_all(line, "warning: ", "error: ");
    // The requirement is the library's own business; the message after it is what the user needs.
    const size_t requirement = line.find(" due to requirement '"),
                 end = line.find("': ", requirement);
    if (requirement != std::string::npos && end != std::string::npos) {
      line.erase(requirement, end + 1 - requirement);
    }
    if (line.find("error: ") != std::string::npos)
      is_wanted = true;
    else if (line.find("warning: ") != std::string::npos)
      is_wanted = false;
    else if (line.find("note: ") == std::string::npos)
      continue;  // summaries, include stacks
    if (is_wanted) result += line + "\n";
  }
  return result;
}

std::string checked(const Result& result) {
  std::string errors = errors_of(result.errors);
  if (result.status != 0 && errors.empty()) errors = result.errors;
  if (!errors.empty() || result.status != 0) throw CompileError(errors);
  return result.errors;
}

std::string content_of_headers() {
  const fs::path msl = msl_directory();
  std::vector<fs::path> files = {msl.parent_path() / "runtime" / "kernel_abi.h"};
  for (const auto& item : fs::recursive_directory_iterator(msl)) {
    if (item.is_regular_file()) files.push_back(item.path());
  }
  std::sort(files.begin(), files.end());
  Hash hash;
  for (const fs::path& file : files) hash.add(file.string()).add(read_file(file));
  return hash.hex();
}

// The library, precompiled for these flags.
fs::path precompiled_library(Flavour flavour, bool fast_math) {
  const std::string name = "metal-" + toolchain_identity(flavour, fast_math) + ".pch";
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = DiskCache::instance().find(name)) return *found;
  return DiskCache::instance().store(name, [&](const fs::path& path) {
    Arguments arguments = language_flags(flavour, fast_math);
    arguments.insert(arguments.end(),
                     {"-Xclang", "-fno-pch-timestamp", "-x", "c++-header",
                      (msl_directory() / "sim" / "prefix.h").string(), "-o", path.string()});
    checked(run_clang(std::move(arguments)));
  });
}

Arguments with_library(Flavour flavour, bool fast_math) {
  Arguments arguments = language_flags(flavour, fast_math);
  arguments.insert(arguments.end(),
                   {"-include-pch", precompiled_library(flavour, fast_math).string()});
  return arguments;
}

}  // namespace

void set_msl_include_directory(const std::string& directory) {
  std::lock_guard<std::mutex> lock(g_msl_mutex);
  g_msl_directory = fs::weakly_canonical(directory).string();
}

std::string toolchain_identity(Flavour flavour, bool fast_math) {
  static const std::string fixed =
      Hash().add(content_of_headers()).add(identity_of_file(clang())).hex();
  Hash hash;
  hash.add(fixed);
  for (const std::string& flag : language_flags(flavour, fast_math)) hash.add(flag);
  return hash.hex();
}

std::string preprocess(const std::string& source, const CompileOptions& options) {
  const Scratch input(".metal");
  write_file(input.path, "# 1 \"program_source\"\n" + source);
  Arguments arguments = {"-E",
                         "-x",
                         "c++",
                         "-std=c++17",
                         "-nostdlibinc",
                         "-nostdinc++",
                         kInt8IsChar,
                         "-Wno-everything",
                         "-fno-caret-diagnostics",
                         "-fno-color-diagnostics",
                         "-DSIM_PREPROCESS_ONLY",
                         "-D__METAL__=1",
                         "-D__METAL_VERSION__=" + std::to_string(options.language_version),
                         "-D__METAL_MACOS__=1",
                         "-isystem",
                         msl_directory().string()};
  if (options.fast_math) arguments.push_back("-D__FAST_MATH__=1");
  for (const auto& [name, value] : options.macros) arguments.push_back("-D" + name + "=" + value);
  arguments.push_back(input.path.string());
  Result result = run_clang(std::move(arguments));
  checked(result);
  // What comes before names the scratch file, and would make every process's text another one.
  const size_t begin = result.output.find("# 1 \"program_source\"");
  return begin == std::string::npos ? std::move(result.output) : result.output.substr(begin);
}

std::string check_syntax(const std::string& text, bool fast_math) {
  const Scratch input(".cpp");
  write_file(input.path, text);
  Arguments arguments = with_library(Flavour::Plain, fast_math);
  arguments.insert(arguments.end(), {"-fsyntax-only", "-x", "c++", input.path.string()});
  return checked(run_clang(std::move(arguments)));
}

void compile_shared_object(const std::string& text, const fs::path& output, Flavour flavour,
                           bool fast_math) {
  const Scratch input(".cpp");
  write_file(input.path, text);
  Arguments arguments = with_library(flavour, fast_math);
  arguments.insert(arguments.end(), {"-x", "c++", input.path.string(), "-shared", "-nostdlib",
                                     "-Wl,-Bsymbolic", "-o", output.string()});
  std::error_code error;
  if (fs::exists(fs::canonical(clang(), error).parent_path() / "ld.lld", error)) {
    arguments.push_back("-fuse-ld=lld");
  }
  arguments.push_back("-l:libm.so.6");
  checked(run_clang(std::move(arguments)));
}

}  // namespace sim
