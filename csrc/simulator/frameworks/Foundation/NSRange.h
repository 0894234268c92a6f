// A span of bytes or elements.
#pragma once

#include <Foundation/NSObjCRuntime.h>

typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;

static inline NSRange NSMakeRange(NSUInteger loc, NSUInteger len) {
  NSRange range;
  range.location = loc;
  range.length = len;
  return range;
}

static inline NSUInteger NSMaxRange(NSRange range) {
  return range.location + range.length;
}
