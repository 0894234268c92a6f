// Where command buffers come from.
#pragma once

#include <Metal/MTLDefines.h>

NS_ASSUME_NONNULL_BEGIN

@protocol MTLCommandBuffer;
@protocol MTLDevice;

@protocol MTLCommandQueue <NSObject>
@property(nullable, copy, atomic) NSString* label;
@property(readonly) id<MTLDevice> device;
- (nullable id<MTLCommandBuffer>)commandBuffer;
- (nullable id<MTLCommandBuffer>)commandBufferWithUnretainedReferences;
@end

NS_ASSUME_NONNULL_END
