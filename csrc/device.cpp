#include "device.h"

namespace flash_mps {

namespace {
Device* current_device = nullptr;
}

Device* device() {
  return current_device;
}

void set_device(Device* device) {
  current_device = device;
}

}  // namespace flash_mps
