// Basic types and annotation macros. A macOS build takes the types from the system's <objc/...>.
#pragma once

#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __APPLE__
#include <objc/NSObjCRuntime.h>
#include <objc/objc.h>
#include <os/availability.h>
#else
typedef bool BOOL;
#define YES ((BOOL)1)
#define NO ((BOOL)0)
#define nil nullptr
#define Nil nullptr
typedef long NSInteger;
typedef unsigned long NSUInteger;
#define NSIntegerMax LONG_MAX
#define NSIntegerMin LONG_MIN
#define NSUIntegerMax ULONG_MAX
#define API_AVAILABLE(...)
#define API_DEPRECATED(...)
#define API_UNAVAILABLE(...)
#endif

#define NS_ENUM(_type, _name) \
  enum _name : _type _name;   \
  enum _name : _type
// As in Apple's headers, options are plain integers in C++, so that they combine with |.
#define NS_OPTIONS(_type, _name) \
  _type _name;                   \
  enum __attribute__((flag_enum)) : _type

#define NS_ASSUME_NONNULL_BEGIN _Pragma("clang assume_nonnull begin")
#define NS_ASSUME_NONNULL_END _Pragma("clang assume_nonnull end")
#define NS_RETURNS_RETAINED __attribute__((ns_returns_retained))
#define NS_RETURNS_INNER_POINTER __attribute__((objc_returns_inner_pointer))
#define NS_FORMAT_FUNCTION(F, A) __attribute__((format(__NSString__, F, A)))
#define NS_REQUIRES_NIL_TERMINATION __attribute__((sentinel(0, 1)))
#define FOUNDATION_EXPORT extern "C" __attribute__((visibility("default")))

typedef double NSTimeInterval;

@class NSString;

FOUNDATION_EXPORT void NSLog(NSString* _Nonnull format, ...) NS_FORMAT_FUNCTION(1, 2);
