// The blocks runtime of Linux knows no Objective-C: a block that it copies would not keep the objects
// that the block captures. These definitions, hidden inside our library, add that for our own blocks
// and leave the rest to it.
#include <dlfcn.h>

#include "objc_object.h"

namespace {

constexpr int kFieldIsObject = 3;  // BLOCK_FIELD_IS_OBJECT, without the bits of __block and __weak

template <class Function>
Function original(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

__attribute__((visibility("hidden"))) void _Block_object_assign(void* destination,
                                                                const void* object,
                                                                const int flags) {
  using Assign = void (*)(void*, const void*, int);
  static const auto assign = original<Assign>("_Block_object_assign");
  if (flags != kFieldIsObject) return assign(destination, object, flags);
  *static_cast<id*>(destination) = [static_cast<id>(const_cast<void*>(object)) retain];
}

__attribute__((visibility("hidden"))) void _Block_object_dispose(const void* object,
                                                                 const int flags) {
  using Dispose = void (*)(const void*, int);
  static const auto dispose = original<Dispose>("_Block_object_dispose");
  if (flags != kFieldIsObject) return dispose(object, flags);
  [static_cast<id>(const_cast<void*>(object)) release];
}

}  // extern "C"
