// NSString, its literals, formatting, NSLog.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "objc_object.h"

namespace sim {
namespace {

// The conversion as C's printf takes it, and which type its argument has.
struct Conversion {
  std::string spec;
  std::string length;
  char kind;
};

Conversion parse_conversion(const char*& cursor) {
  Conversion conversion{"%", "", 0};
  while (*cursor && std::strchr("-+ #0123456789.'", *cursor)) conversion.spec += *cursor++;
  while (*cursor && std::strchr("hlqjzt", *cursor)) conversion.length += *cursor++;
  if (conversion.length == "q") conversion.length = "ll";
  conversion.kind = *cursor ? *cursor++ : '%';
  conversion.spec += conversion.length + conversion.kind;
  return conversion;
}

template <class T>
std::string print(const std::string& spec, T value) {
  char buffer[512];
  const int needed = std::snprintf(buffer, sizeof(buffer), spec.c_str(), value);
  if (needed < static_cast<int>(sizeof(buffer))) return buffer;
  std::string large(static_cast<size_t>(needed), '\0');
  std::snprintf(large.data(), large.size() + 1, spec.c_str(), value);
  return large;
}

std::string print_argument(const Conversion& conversion, va_list* arguments) {
  const auto& [spec, length, kind] = conversion;
  switch (kind) {
    case '%': return "%";
    case '@': {
      id object = va_arg(*arguments, id);
      return object ? to_string([object description]) : "(null)";
    }
    case 's': return print(spec, va_arg(*arguments, const char*));
    case 'p': return print(spec, va_arg(*arguments, void*));
    case 'a':
    case 'A':
    case 'e':
    case 'E':
    case 'f':
    case 'F':
    case 'g':
    case 'G': return print(spec, va_arg(*arguments, double));
    default:
      if (length.empty() || length[0] == 'h') return print(spec, va_arg(*arguments, int));
      return print(spec, va_arg(*arguments, long));
  }
}

std::string format_text(NSString* format, va_list arguments) {
  std::string out;
  va_list remaining;
  va_copy(remaining, arguments);
  const std::string pattern = to_string(format);
  for (const char* cursor = pattern.c_str(); *cursor;) {
    if (*cursor != '%') {
      out += *cursor++;
      continue;
    }
    ++cursor;
    out += print_argument(parse_conversion(cursor), &remaining);
  }
  va_end(remaining);
  return out;
}

NSString* make_string(std::string text) {
  NSString* string = allocate<std::string>([NSString class]);
  state<std::string>(string) = std::move(text);
  return string;
}

}  // namespace
}  // namespace sim

@implementation NSString
+ (instancetype)alloc {
  return sim::allocate<std::string>([NSString class]);
}
+ (instancetype)string {
  return [sim::make_string("") autorelease];
}
+ (instancetype)stringWithString:(NSString*)string {
  return [sim::make_string(sim::to_string(string)) autorelease];
}
+ (instancetype)stringWithUTF8String:(const char*)nullTerminatedCString {
  return [sim::make_string(nullTerminatedCString) autorelease];
}
+ (instancetype)stringWithCString:(const char*)cString encoding:(NSStringEncoding)enc {
  (void)enc;
  return [sim::make_string(cString) autorelease];
}
+ (instancetype)stringWithFormat:(NSString*)format, ... {
  va_list arguments;
  va_start(arguments, format);
  NSString* string = sim::make_string(sim::format_text(format, arguments));
  va_end(arguments);
  return [string autorelease];
}
- (instancetype)initWithUTF8String:(const char*)nullTerminatedCString {
  sim::state<std::string>(self) = nullTerminatedCString;
  return self;
}
- (instancetype)initWithFormat:(NSString*)format, ... {
  va_list arguments;
  va_start(arguments, format);
  sim::state<std::string>(self) = sim::format_text(format, arguments);
  va_end(arguments);
  return self;
}
- (instancetype)initWithFormat:(NSString*)format arguments:(va_list)argList {
  sim::state<std::string>(self) = sim::format_text(format, argList);
  return self;
}
- (instancetype)initWithBytes:(const void*)bytes
                       length:(NSUInteger)len
                     encoding:(NSStringEncoding)encoding {
  (void)encoding;
  sim::state<std::string>(self).assign(static_cast<const char*>(bytes), len);
  return self;
}
- (const char*)UTF8String {
  return sim::state<std::string>(self).c_str();
}
- (const char*)cStringUsingEncoding:(NSStringEncoding)encoding {
  (void)encoding;
  return [self UTF8String];
}
- (NSUInteger)lengthOfBytesUsingEncoding:(NSStringEncoding)enc {
  (void)enc;
  return std::strlen([self UTF8String]);
}
// In UTF-16 units: a character of four UTF-8 bytes is two of them.
- (NSUInteger)length {
  NSUInteger units = 0;
  for (const char* byte = [self UTF8String]; *byte; ++byte) {
    const auto value = static_cast<unsigned char>(*byte);
    units += ((value & 0xC0) != 0x80) + (value >= 0xF0);
  }
  return units;
}
- (NSInteger)integerValue {
  return std::strtol([self UTF8String], nullptr, 10);
}
- (BOOL)isEqualToString:(NSString*)aString {
  return aString && std::strcmp([self UTF8String], [aString UTF8String]) == 0;
}
- (BOOL)isEqual:(id)object {
  return [object isKindOfClass:[NSString class]] && [self isEqualToString:object];
}
- (NSUInteger)hash {
  return std::hash<std::string>()(sim::to_string(self));
}
- (BOOL)hasPrefix:(NSString*)str {
  return sim::to_string(self).starts_with(sim::to_string(str));
}
- (BOOL)hasSuffix:(NSString*)str {
  return sim::to_string(self).ends_with(sim::to_string(str));
}
- (BOOL)containsString:(NSString*)str {
  return std::strstr([self UTF8String], [str UTF8String]) != nullptr;
}
- (NSString*)stringByAppendingString:(NSString*)aString {
  return sim::to_ns(sim::to_string(self) + sim::to_string(aString));
}
- (NSString*)description {
  return self;
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end

// Literals live in the binary: no header in front of them, so they are never counted.
@implementation NSConstantString
- (const char*)UTF8String {
  return _bytes;
}
- (instancetype)retain {
  return self;
}
- (oneway void)release {
}
- (instancetype)autorelease {
  return self;
}
- (NSUInteger)retainCount {
  return NSUIntegerMax;
}
@end

void NSLog(NSString* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "%s\n", sim::format_text(format, arguments).c_str());
  va_end(arguments);
}
