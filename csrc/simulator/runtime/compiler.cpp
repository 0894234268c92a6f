#include "compiler.h"

#include <dlfcn.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <set>

#include "compiler_cache.h"
#include "compiler_rewriter.h"
#include "compiler_rules.h"
#include "compiler_toolchain.h"

namespace sim {
namespace {

// What a warning of the syntax check says about constant i: function_constant_index<i, n>.
std::vector<uint32_t> indices_in(const std::string& warnings, size_t count) {
  std::vector<uint32_t> result(count, 0);
  const std::string word = "function_constant_index<";
  for (size_t at = warnings.find(word); at != std::string::npos; at = warnings.find(word, at)) {
    at += word.size();
    char* rest = nullptr;
    const unsigned long constant = std::strtoul(warnings.c_str() + at, &rest, 10);
    if (constant < count && *rest == ',') result[constant] = std::strtoul(rest + 1, nullptr, 10);
  }
  return result;
}

// The rules and the rewriter are part of what a checked library depends on.
const std::string& identity_of_this_module() {
  static const std::string identity = [] {
    Dl_info info{};
    if (!dladdr(reinterpret_cast<const void*>(&indices_in), &info)) return std::string();
    return identity_of_file(info.dli_fname);
  }();
  return identity;
}

// Runs what is asked for under one key once at a time; others wait for the first.
class Exclusive {
 public:
  explicit Exclusive(std::string key) : key_(std::move(key)) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return busy_.insert(key_).second; });
  }
  ~Exclusive() {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_.erase(key_);
    changed_.notify_all();
  }

 private:
  const std::string key_;
  inline static std::mutex mutex_;
  inline static std::condition_variable changed_;
  inline static std::set<std::string> busy_;
};

class SourceLibrary final : public Library {
 public:
  // `text` is preprocessed.
  SourceLibrary(std::string text, bool fast_math)
      : text(std::move(text)),
        fast_math(fast_math),
        tokens(tokenize(this->text)),
        declarations(parse_declarations(tokens)),
        kernels(kernel_names(tokens, declarations)) {
    for (const KernelName& kernel : kernels) names_.push_back(kernel.name);
  }

  void set_indices(std::vector<uint32_t> values) {
    indices = std::move(values);
    for (size_t i = 0; i < declarations.constants.size(); ++i) {
      const ConstantDeclaration& c = declarations.constants[i];
      constants_.push_back({c.name, c.type, indices[i]});
    }
  }

  const std::vector<std::string>& function_names() const override { return names_; }
  const std::vector<FunctionConstant>& function_constants() const override { return constants_; }

  const std::string text;
  const bool fast_math;
  const Tokens tokens;
  const Declarations declarations;
  const std::vector<KernelName> kernels;
  std::vector<uint32_t> indices;   // of declarations.constants

 private:
  std::vector<std::string> names_;
  std::vector<FunctionConstant> constants_;
};

class LoadedKernel final : public Kernel {
 public:
  LoadedKernel(void* handle, std::string name) : handle_(handle) {
    entry_ = reinterpret_cast<KernelEntry>(dlsym(handle, SIM_KERNEL_ENTRY_NAME));
    const auto* record = static_cast<const KernelRecord*>(dlsym(handle, SIM_KERNEL_RECORD_NAME));
    info_.name = std::move(name);
    for (uint32_t i = 0; record && i < record->num_parameters; ++i) {
      const ParameterRecord& p = record->parameters[i];
      if (!p.is_buffer || !p.exists) continue;
      info_.buffers.push_back(
          {p.name, p.slot, p.is_writable, p.is_threadgroup, p.alignment, p.is_constant});
    }
    if (record && record->max_total_threads) info_.max_total_threads = record->max_total_threads;
  }
  ~LoadedKernel() override { dlclose(handle_); }
  const KernelInfo& info() const override { return info_; }
  KernelEntry entry() const override { return entry_; }

 private:
  void* handle_;
  KernelEntry entry_;
  KernelInfo info_;
};

// First line: the indices of the function constants. The rest: the preprocessed source.
std::string serialise(const SourceLibrary& library) {
  std::string head;
  for (uint32_t index : library.indices) head += std::to_string(index) + " ";
  return head + "\n" + library.text;
}

std::shared_ptr<SourceLibrary> deserialise(const std::string& content, bool fast_math) {
  const size_t line = content.find('\n');
  if (line == std::string::npos) return nullptr;
  auto library = std::make_shared<SourceLibrary>(content.substr(line + 1), fast_math);
  std::vector<uint32_t> indices;
  const char* at = content.c_str();
  for (size_t i = 0; i < library->declarations.constants.size(); ++i) {
    char* rest = nullptr;
    indices.push_back(static_cast<uint32_t>(std::strtoul(at, &rest, 10)));
    if (rest == at || rest > content.c_str() + line) return nullptr;
    at = rest;
  }
  library->set_indices(std::move(indices));
  return library;
}

std::string joined(const std::vector<std::string>& names) {
  std::string result;
  for (size_t i = 0; i < names.size() && i < 8; ++i) result += (i ? ", " : "") + names[i];
  return result + (names.size() > 8 ? ", ..." : "");
}

void* load(const std::filesystem::path& path) {
  return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

// dlopen's message when a kernel reads a function constant that has no value.
std::string unset_constant(const SourceLibrary& library, const std::string& kernel,
                           const std::string& message) {
  const size_t at = message.find(kUnsetConstantPrefix);
  if (at == std::string::npos) return "simulator: cannot load kernel '" + kernel + "': " + message;
  std::string name = message.substr(at + std::string(kUnsetConstantPrefix).size());
  name.resize(std::min(
      name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"),
      name.size()));
  for (const FunctionConstant& c : library.function_constants()) {
    if (c.name == name) name += "' (index " + std::to_string(c.index) + ", type '" + c.type + "')";
  }
  return "error: function constant '" + name + " is used by kernel '" + kernel +
         "' but has no value";
}

// Bytes of a value of this MSL type; 0 when unknown.
size_t size_of_type(const std::string& type) {
  static const std::map<std::string, size_t> kScalars = {
      {"bool", 1},   {"char", 1}, {"uchar", 1}, {"short", 2}, {"ushort", 2}, {"half", 2},
      {"bfloat", 2}, {"int", 4},  {"uint", 4},  {"float", 4}, {"long", 8},   {"ulong", 8}};
  if (const auto scalar = kScalars.find(type); scalar != kScalars.end()) return scalar->second;
  const auto element = kScalars.find(type.substr(0, type.size() - 1));
  if (type.empty() || element == kScalars.end()) return 0;
  return element->second * (type.back() == '2' ? 2 : 4);
}

void check_sizes(const SourceLibrary& source, const ConstantValues& values) {
  for (const FunctionConstant& c : source.function_constants()) {
    const auto value = values.find(c.index);
    const size_t expected = size_of_type(c.type);
    if (value == values.end() || expected == 0 || value->second.size() == expected) continue;
    throw CompileError("error: function constant '" + c.name + "' (index " +
                       std::to_string(c.index) + "): expected a value of type '" + c.type + "' (" +
                       std::to_string(expected) + " bytes), found " +
                       std::to_string(value->second.size()) + " bytes");
  }
}

std::shared_ptr<const Library> checked_library(const std::string& source,
                                               const CompileOptions& options) {
  Hash hash;
  hash.add(source).add(options.fast_math ? "fast" : "safe");
  hash.add(std::to_string(options.language_version));
  for (const auto& [name, value] : options.macros) hash.add(name).add(value);
  hash.add(toolchain_identity(Flavour::Plain, options.fast_math)).add(identity_of_this_module());
  const std::string file = hash.hex() + ".msl";
  const Exclusive turn(file);
  if (const auto path = DiskCache::instance().find(file)) {
    if (auto library = deserialise(read_sealed_file(*path), options.fast_math)) return library;
  }
  auto library = std::make_shared<SourceLibrary>(preprocess(source, options), options.fast_math);
  const std::string broken =
      check_rules(library->tokens, library->declarations, options.language_version);
  const SyntaxCheck check =
      rewrite_for_check(library->text, library->tokens, library->declarations);
  std::string warnings;
  try {
    warnings = check_syntax(check.text, options.fast_math);
  } catch (const CompileError& error) {
    throw CompileError(broken + error.what());
  }
  if (!broken.empty()) throw CompileError(broken);
  library->set_indices(indices_in(warnings, library->declarations.constants.size()));
  DiskCache::instance().store(file,
                              [&](const auto& path) { write_file(path, serialise(*library)); });
  return library;
}

std::shared_ptr<const Kernel> compiled_kernel(const SourceLibrary& source,
                                              const std::string& function_name,
                                              const ConstantValues& constants, Flavour flavour) {
  const auto kernel = std::find_if(source.kernels.begin(), source.kernels.end(),
                                   [&](const KernelName& k) { return k.name == function_name; });
  if (kernel == source.kernels.end()) {
    throw CompileError("error: the library has no kernel '" + function_name +
                       "'; it has: " + joined(source.function_names()));
  }
  check_sizes(source, constants);
  const std::string text = rewrite_for_kernel(source.text, source.tokens, source.declarations,
                                              *kernel, source.indices, constants);
  // The text holds all that the source, the constants and the rewriter contribute.
  Hash hash;
  hash.add(text).add(toolchain_identity(flavour, source.fast_math));
  const std::string file = hash.hex() + ".so";
  const Exclusive turn(file);
  DiskCache& cache = DiskCache::instance();
  if (const auto path = cache.find(file)) {
    if (void* handle = load(*path)) return std::make_shared<LoadedKernel>(handle, function_name);
    cache.remove(file);
  }
  const auto path = cache.store(file, [&](const std::filesystem::path& output) {
    compile_shared_object(text, output, flavour, source.fast_math);
  });
  void* handle = load(path);
  if (!handle) {
    const std::string message = dlerror();
    cache.remove(file);
    throw CompileError(unset_constant(source, function_name, message));
  }
  return std::make_shared<LoadedKernel>(handle, function_name);
}

// Callers know one exception: a full disk or an unwritable cache must not pass through them as another.
template <typename F>
auto reported(F work) {
  try {
    return work();
  } catch (const CompileError&) {
    throw;
  } catch (const std::exception& error) {
    throw CompileError(std::string("simulator: ") + error.what());
  }
}

}  // namespace

std::shared_ptr<const Library> Library::from_source(const std::string& source,
                                                    const CompileOptions& options) {
  return reported([&] { return checked_library(source, options); });
}

std::shared_ptr<const Kernel> Kernel::compile(const std::shared_ptr<const Library>& library,
                                              const std::string& function_name,
                                              const ConstantValues& constants, Flavour flavour) {
  return reported([&] {
    return compiled_kernel(dynamic_cast<const SourceLibrary&>(*library), function_name, constants,
                           flavour);
  });
}

}  // namespace sim
