// NSValue, NSNumber, NSError, NSURL.
#include <variant>

#include "objc_object.h"

namespace {

using Number = std::variant<bool, long long, unsigned long long, float, double>;

template <class T>
T number_as(id number) {
  return std::visit([](auto value) { return static_cast<T>(value); }, sim::state<Number>(number));
}

NSNumber* make_number(Number value) {
  NSNumber* number = [[NSNumber alloc] autorelease];
  sim::state<Number>(number) = value;
  return number;
}

struct Error {
  sim::Strong<NSString*> domain;
  NSInteger code = 0;
  sim::Strong<NSDictionary*> user_info;
};

}  // namespace

NSErrorUserInfoKey const NSLocalizedDescriptionKey = @"NSLocalizedDescription";

@implementation NSValue
- (const char*)objCType {
  return "";
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end

@implementation NSNumber
+ (instancetype)alloc {
  return sim::allocate<Number>(self);
}
+ (NSNumber*)numberWithBool:(BOOL)value {
  return make_number(static_cast<bool>(value));
}
+ (NSNumber*)numberWithInt:(int)value {
  return make_number(static_cast<long long>(value));
}
+ (NSNumber*)numberWithUnsignedInt:(unsigned int)value {
  return make_number(static_cast<unsigned long long>(value));
}
+ (NSNumber*)numberWithLong:(long)value {
  return make_number(static_cast<long long>(value));
}
+ (NSNumber*)numberWithUnsignedLong:(unsigned long)value {
  return make_number(static_cast<unsigned long long>(value));
}
+ (NSNumber*)numberWithLongLong:(long long)value {
  return make_number(value);
}
+ (NSNumber*)numberWithUnsignedLongLong:(unsigned long long)value {
  return make_number(value);
}
+ (NSNumber*)numberWithFloat:(float)value {
  return make_number(value);
}
+ (NSNumber*)numberWithDouble:(double)value {
  return make_number(value);
}
+ (NSNumber*)numberWithInteger:(NSInteger)value {
  return [self numberWithLong:value];
}
+ (NSNumber*)numberWithUnsignedInteger:(NSUInteger)value {
  return [self numberWithUnsignedLong:value];
}
- (const char*)objCType {
  static const char* const types[] = {@encode(BOOL), @encode(long long),
                                      @encode(unsigned long long), @encode(float), @encode(double)};
  return types[sim::state<Number>(self).index()];
}
- (BOOL)boolValue {
  return number_as<bool>(self);
}
- (int)intValue {
  return number_as<int>(self);
}
- (unsigned int)unsignedIntValue {
  return number_as<unsigned int>(self);
}
- (long)longValue {
  return number_as<long>(self);
}
- (unsigned long)unsignedLongValue {
  return number_as<unsigned long>(self);
}
- (long long)longLongValue {
  return number_as<long long>(self);
}
- (unsigned long long)unsignedLongLongValue {
  return number_as<unsigned long long>(self);
}
- (float)floatValue {
  return number_as<float>(self);
}
- (double)doubleValue {
  return number_as<double>(self);
}
- (NSInteger)integerValue {
  return number_as<NSInteger>(self);
}
- (NSUInteger)unsignedIntegerValue {
  return number_as<NSUInteger>(self);
}
- (NSString*)stringValue {
  switch (sim::state<Number>(self).index()) {
    case 2: return [NSString stringWithFormat:@"%llu", [self unsignedLongLongValue]];
    case 3: return [NSString stringWithFormat:@"%.9g", [self doubleValue]];
    case 4: return [NSString stringWithFormat:@"%.17g", [self doubleValue]];
    default: return [NSString stringWithFormat:@"%lld", [self longLongValue]];
  }
}
- (NSString*)description {
  return [self stringValue];
}
- (BOOL)isEqualToNumber:(NSNumber*)number {
  return
      [self doubleValue] == [number doubleValue] && [self longLongValue] == [number longLongValue];
}
- (BOOL)isEqual:(id)object {
  return [object isKindOfClass:[NSNumber class]] && [self isEqualToNumber:object];
}
- (NSUInteger)hash {
  return [self unsignedIntegerValue];
}
@end

@implementation NSError
+ (instancetype)alloc {
  return sim::allocate<Error>(self);
}
+ (instancetype)errorWithDomain:(NSErrorDomain)domain
                           code:(NSInteger)code
                       userInfo:(NSDictionary*)dict {
  NSError* error = [[self alloc] autorelease];
  sim::state<Error>(error) = {sim::Strong<NSString*>(domain), code, sim::Strong(dict)};
  return error;
}
- (NSErrorDomain)domain {
  return sim::state<Error>(self).domain.get();
}
- (NSInteger)code {
  return sim::state<Error>(self).code;
}
- (NSDictionary*)userInfo {
  NSDictionary* info = sim::state<Error>(self).user_info.get();
  return info ? info : [NSDictionary dictionary];
}
- (NSString*)localizedDescription {
  NSString* text = [[self userInfo] objectForKey:NSLocalizedDescriptionKey];
  if (text) return text;
  return [NSString stringWithFormat:@"The operation couldn't be completed. (%@ error %ld.)",
                                    [self domain], [self code]];
}
- (NSString*)description {
  return [NSString stringWithFormat:@"Error Domain=%@ Code=%ld \"%@\"", [self domain], [self code],
                                    [self localizedDescription]];
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end

@implementation NSURL
+ (instancetype)alloc {
  return sim::allocate<sim::Strong<NSString*>>(self);
}
+ (NSURL*)fileURLWithPath:(NSString*)path {
  NSURL* url = [[self alloc] autorelease];
  sim::state<sim::Strong<NSString*>>(url) = sim::Strong(path);
  return url;
}
- (NSString*)path {
  return sim::state<sim::Strong<NSString*>>(self).get();
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end
