#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/mps/MPSGeneratorImpl.h>

#include <cstring>
#include <mutex>

namespace at {
namespace mps::detail {

const Generator& getDefaultMPSGenerator() {
  static auto* generator =
      new Generator(createMPSGenerator(c10::detail::getNonDeterministicRandom()));
  return *generator;
}

Generator createMPSGenerator(uint64_t seed_val) {
  auto generator = make_generator<MPSGeneratorImpl>(seed_val);
  check_generator<MPSGeneratorImpl>(generator)->set_current_seed(seed_val);
  return generator;
}

}  // namespace mps::detail

namespace {

// What get_state() returns, as bytes: the Philox words and the seed, as PyTorch lays them out, then
// the offset.
struct SavedState {
  std::array<uint32_t, mps::detail::PHILOX_STATE_N> words;
  uint32_t padding;
  uint64_t seed;
  uint64_t offset;
};

}  // namespace

MPSGeneratorImpl::MPSGeneratorImpl(uint64_t seed_in)
    : c10::GeneratorImpl{Device(DeviceType::MPS, 0), DispatchKeySet(c10::DispatchKey::MPS)},
      engine_(seed_in, 0, 0) {
  data_.seed = seed_in;
}

void MPSGeneratorImpl::set_current_seed(uint64_t seed) {
  data_.seed = seed;
  data_.state.fill(1);
  data_.state[5] = static_cast<uint32_t>(seed);
  data_.state[6] = static_cast<uint32_t>(seed >> 32);
  engine_.reset_state(seed);
}

void MPSGeneratorImpl::set_offset(uint64_t offset) {
  engine_.set_offset(offset);
}

uint64_t MPSGeneratorImpl::get_offset() const {
  return engine_.get_offset();
}

uint64_t MPSGeneratorImpl::current_seed() const {
  return data_.seed;
}

uint64_t MPSGeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return data_.seed;
}

// Four numbers of the engine become the counter words of the next kernel.
void MPSGeneratorImpl::update_philox_counters() {
  for (size_t i = 1; i <= 4; ++i) data_.state[i] = engine_();
}

c10::intrusive_ptr<c10::TensorImpl> MPSGeneratorImpl::get_state() const {
  const SavedState saved{data_.state, 0, data_.seed, get_offset()};
  auto bytes = at::detail::empty_cpu({sizeof(saved)}, ScalarType::Byte, {}, {}, {}, {});
  std::memcpy(bytes.mutable_data_ptr(), &saved, sizeof(saved));
  return bytes.getIntrusivePtr();
}

void MPSGeneratorImpl::set_state(const c10::TensorImpl& new_state) {
  at::detail::check_rng_state(new_state);
  SavedState saved;
  TORCH_CHECK(new_state.numel() == sizeof(saved), "RNG state is wrong size: expected ",
              sizeof(saved), " bytes, got ", new_state.numel());
  std::memcpy(&saved, new_state.data(), sizeof(saved));
  set_current_seed(saved.seed);
  data_.state = saved.words;
  engine_.set_offset(saved.offset);
}

std::shared_ptr<MPSGeneratorImpl> MPSGeneratorImpl::clone() const {
  return std::shared_ptr<MPSGeneratorImpl>(clone_impl());
}

MPSGeneratorImpl* MPSGeneratorImpl::clone_impl() const {
  auto* copy = new MPSGeneratorImpl(data_.seed);
  copy->data_ = data_;
  copy->engine_ = engine_;
  return copy;
}

}  // namespace at

namespace sim {
namespace {

// One round of splitmix64: neighbouring seeds and offsets give unrelated streams.
uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

at::Generator cpu_generator_for(const std::optional<at::Generator>& mps_generator) {
  auto* generator = at::get_generator_or_default<at::MPSGeneratorImpl>(
      mps_generator, at::mps::detail::getDefaultMPSGenerator());
  std::lock_guard lock(generator->mutex_);
  const uint64_t seed = mix(generator->current_seed() ^ mix(generator->get_offset()));
  generator->update_philox_counters();
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

}  // namespace sim
