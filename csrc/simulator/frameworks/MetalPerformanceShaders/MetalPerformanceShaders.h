// Stand-in for MetalPerformanceShaders: the command buffer that PyTorch's stream hands out.
#pragma once

#include <Metal/Metal.h>

NS_ASSUME_NONNULL_BEGIN

@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
@property(readonly, nonatomic, nonnull, retain) id<MTLCommandBuffer> commandBuffer;
@property(readonly, nonatomic, nonnull, retain) id<MTLCommandBuffer> rootCommandBuffer;
+ (nonnull instancetype)commandBufferWithCommandBuffer:(nonnull id<MTLCommandBuffer>)commandBuffer;
+ (nonnull instancetype)commandBufferFromCommandQueue:(nonnull id<MTLCommandQueue>)commandQueue;
- (nonnull instancetype)initWithCommandBuffer:(nonnull id<MTLCommandBuffer>)commandBuffer;
- (void)commitAndContinue;
@end

NS_ASSUME_NONNULL_END
