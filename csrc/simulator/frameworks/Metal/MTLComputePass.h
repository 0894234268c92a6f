// Options of a compute encoder.
#pragma once

#include <Metal/MTLCommandBuffer.h>

NS_ASSUME_NONNULL_BEGIN

MTL_EXPORT
@interface MTLComputePassDescriptor : NSObject <NSCopying>
+ (MTLComputePassDescriptor*)computePassDescriptor;
@property(nonatomic) MTLDispatchType dispatchType;
@end

NS_ASSUME_NONNULL_END
