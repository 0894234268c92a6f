#include "user_code.h"

#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>

namespace flash_mps {

namespace {

struct Texts {
  std::mutex mutex;
  std::unordered_map<std::string, uint32_t> numbers = {{"", 0}};
  std::vector<std::string> texts = {""};
};

Texts& known() {
  static Texts texts;
  return texts;
}

}  // namespace

uint32_t user_code_number(const std::string& text) {
  Texts& all = known();
  const std::lock_guard lock(all.mutex);
  const auto found = all.numbers.find(text);
  if (found != all.numbers.end()) return found->second;
  if (all.texts.size() >= kMaxUserCodes) {
    throw std::length_error(
        "more than 65535 different score_mod and mask_mod functions in one process; numbers that "
        "change from call to call belong into a captured tensor");
  }
  const auto number = static_cast<uint32_t>(all.texts.size());
  all.texts.push_back(text);
  all.numbers.emplace(text, number);
  return number;
}

std::string user_code_text(uint32_t number) {
  Texts& all = known();
  const std::lock_guard lock(all.mutex);
  return all.texts.at(number);
}

}  // namespace flash_mps
