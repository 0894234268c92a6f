// The functions of the GNU Objective-C runtime that we call. Its own headers define BOOL otherwise
// than Apple's, so they cannot be included next to Foundation.
#pragma once

#include <Foundation/NSObjCRuntime.h>

extern "C" {
const char* class_getName(Class cls);
Class class_getSuperclass(Class cls);
BOOL class_respondsToSelector(Class cls, SEL selector);
}

inline Class class_of(id object) {
  return *reinterpret_cast<Class*>(object);
}
