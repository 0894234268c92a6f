// Compiled kernels on disk: content-addressed files, written atomically, bounded in size.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace sim {

// A running 128-bit hash (FNV-1a). Each piece is hashed with its length.
class Hash {
 public:
  Hash& add(std::string_view piece);
  std::string hex() const;

 private:
  unsigned long long high_ = 0x6c62272e07bb0142ull, low_ = 0x62b821756295c58dull;
};

class DiskCache {
 public:
  // $TORCH_FLASH_MPS_CACHE, or $XDG_CACHE_HOME (~/.cache) / torch_flash_mps / simulator.
  static DiskCache& instance();

  // The file of this name, marked as used. One that is not as it was stored (a full disk, a machine that
  // lost power) is removed.
  std::optional<std::filesystem::path> find(const std::string& name);
  // Lets `produce` write a temporary file, seals and renames it; returns where it is now.
  std::filesystem::path store(const std::string& name,
                              const std::function<void(const std::filesystem::path&)>& produce);
  void remove(const std::string& name);
  // A path in the cache's directory that nobody else uses.
  std::filesystem::path temporary(const std::string& suffix);

 private:
  DiskCache();
  void evict();

  std::filesystem::path directory_;
};

// Changes when the file is replaced: path, size and time of the file it really is.
std::string identity_of_file(const std::filesystem::path& path);
std::string read_file(const std::filesystem::path& path);
// What was stored in a file of the cache, without its seal.
std::string read_sealed_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, std::string_view content);

}  // namespace sim
