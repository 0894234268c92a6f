#include "compiler_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

namespace sim {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t kMaxBytes = 512u << 20;
constexpr uintmax_t kBytesAfterEviction = kMaxBytes / 10 * 8;
// Another process may be about to rename its temporary file; older ones are leftovers.
constexpr std::chrono::hours kTemporaryLifetime{1};
constexpr size_t kSealBytes = 32;
constexpr char kTemporaryPrefix[] = "tmp-";

fs::path default_directory() {
  if (const char* path = std::getenv("TORCH_FLASH_MPS_CACHE"); path && *path) return path;
  fs::path base;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg) {
    base = xdg;
  } else if (const char* home = std::getenv("HOME"); home && *home) {
    base = fs::path(home) / ".cache";
  } else {
    base = fs::temp_directory_path() / ("cache-" + std::to_string(getuid()));
  }
  return base / "torch_flash_mps" / "simulator";
}

// Stands at the end of each file: the hash of what is before it. Loaders and clang do not read on there.
std::string seal_of(std::string_view content) {
  return Hash().add(content).hex();
}

bool is_intact(const fs::path& path) {
  const std::string content = read_file(path), stored = read_sealed_file(path);
  return stored.size() < content.size() && content.substr(stored.size()) == seal_of(stored);
}

struct Entry {
  fs::path path;
  fs::file_time_type used;
  uintmax_t bytes;
};

}  // namespace

Hash& Hash::add(std::string_view piece) {
  using Wide = unsigned __int128;
  constexpr Wide kPrime = (Wide(1) << 88) + 0x13b;
  Wide state = (Wide(high_) << 64) | low_;
  const auto mix = [&](unsigned char byte) { state = (state ^ byte) * kPrime; };
  for (char c : piece) mix(static_cast<unsigned char>(c));
  for (uint64_t size = piece.size(), i = 0; i < 8; ++i) mix(size >> (8 * i) & 0xFF);
  high_ = static_cast<unsigned long long>(state >> 64);
  low_ = static_cast<unsigned long long>(state);
  return *this;
}

std::string Hash::hex() const {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", high_, low_);
  return text;
}

DiskCache& DiskCache::instance() {
  static DiskCache cache;
  return cache;
}

DiskCache::DiskCache() : directory_(default_directory()) {
  std::error_code error;
  fs::create_directories(directory_, error);
  if (error) {
    throw std::runtime_error("cannot create the cache folder " + directory_.string() + ": " +
                             error.message() + "; set TORCH_FLASH_MPS_CACHE to a writable folder");
  }
}

std::optional<fs::path> DiskCache::find(const std::string& name) {
  const fs::path path = directory_ / name;
  std::error_code error;
  fs::last_write_time(path, fs::file_time_type::clock::now(), error);
  if (error && !fs::exists(path)) return std::nullopt;
  if (is_intact(path)) return path;
  remove(name);
  return std::nullopt;
}

fs::path DiskCache::store(const std::string& name,
                          const std::function<void(const fs::path&)>& produce) {
  const fs::path target = directory_ / name, temporary_path = temporary(target.extension());
  std::error_code ignored;
  try {
    produce(temporary_path);
    const std::string content = read_file(temporary_path);
    write_file(temporary_path, content + seal_of(content));
    fs::rename(temporary_path, target);
  } catch (...) {
    fs::remove(temporary_path, ignored);
    throw;
  }
  evict();
  return target;
}

void DiskCache::remove(const std::string& name) {
  std::error_code ignored;
  fs::remove(directory_ / name, ignored);
}

fs::path DiskCache::temporary(const std::string& suffix) {
  static std::atomic<uint64_t> counter{0};
  return directory_ /
         (kTemporaryPrefix + std::to_string(getpid()) + "-" + std::to_string(counter++) + suffix);
}

// Oldest use first, until the rest is comfortably below the bound.
void DiskCache::evict() {
  std::vector<Entry> entries;
  uintmax_t total = 0;
  std::error_code error;
  const auto now = fs::file_time_type::clock::now();
  for (const auto& item : fs::directory_iterator(directory_, error)) {
    Entry entry{item.path(), item.last_write_time(error), item.file_size(error)};
    if (error) continue;  // gone meanwhile
    const bool is_temporary = entry.path.filename().string().rfind(kTemporaryPrefix, 0) == 0;
    if (is_temporary && now - entry.used > kTemporaryLifetime) fs::remove(entry.path, error);
    if (is_temporary) continue;
    total += entry.bytes;
    entries.push_back(std::move(entry));
  }
  if (total <= kMaxBytes) return;
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total <= kBytesAfterEviction) break;
    fs::remove(entry.path, error);
    total -= entry.bytes;
  }
}

std::string identity_of_file(const fs::path& path) {
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  return real.string() + " " + std::to_string(fs::file_size(real, error)) + " " +
         std::to_string(fs::last_write_time(real, error).time_since_epoch().count());
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string read_sealed_file(const fs::path& path) {
  std::string content = read_file(path);
  content.resize(content.size() - std::min(content.size(), kSealBytes));
  return content;
}

void write_file(const fs::path& path, std::string_view content) {
  std::ofstream out(path, std::ios::binary);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  if (!out) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace sim
