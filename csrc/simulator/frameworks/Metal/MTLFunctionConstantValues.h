// Values that specialise a function.
#pragma once

#include <Metal/MTLDataType.h>

NS_ASSUME_NONNULL_BEGIN

MTL_EXPORT
@interface MTLFunctionConstantValues : NSObject <NSCopying>
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index;
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range;
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name;
- (void)reset;
@end

NS_ASSUME_NONNULL_END
