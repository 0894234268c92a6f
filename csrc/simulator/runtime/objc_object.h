// How this runtime's Objective-C objects are made: a reference count in front, C++ state behind.
//
// The GNU runtime has neither ARC nor instance variables outside public headers, so each class keeps
// its state in one C++ struct that lies behind the object and is destroyed with it.
#pragma once

#include <Foundation/Foundation.h>

#include <new>
#include <string>
#include <utility>

namespace sim {

using Destroy = void (*)(void* state);

// Memory for an object with `state_bytes` behind it; the count is 1. `destroy` may be null.
id allocate_object(Class cls, size_t state_bytes, Destroy destroy);

constexpr size_t kStateOffset = 16;  // behind isa, aligned for every type

template <class State>
State& state(id object) {
  static_assert(alignof(State) <= kStateOffset);
  return *reinterpret_cast<State*>(reinterpret_cast<char*>(object) + kStateOffset);
}

template <class State>
id allocate(Class cls) {
  id object = allocate_object(cls, sizeof(State),
                              [](void* state) { static_cast<State*>(state)->~State(); });
  new (&state<State>(object)) State();
  return object;
}

// Owns one reference. T is a pointer to an Objective-C type.
template <class T>
class Strong {
 public:
  Strong() = default;
  explicit Strong(T object) : object_([object retain]) {}
  Strong(const Strong& other) : Strong(other.object_) {}
  Strong(Strong&& other) noexcept : object_(std::exchange(other.object_, nil)) {}
  Strong& operator=(Strong other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Strong() { [object_ release]; }
  T get() const { return object_; }

 private:
  T object_ = nil;
};

inline std::string to_string(NSString* text) {
  return text ? [text UTF8String] : "";
}
inline NSString* to_ns(const std::string& text) {
  return [NSString stringWithUTF8String:text.c_str()];
}

}  // namespace sim
