// Compiled kernels.
#pragma once

#include <Metal/MTLAllocation.h>
#include <Metal/MTLLibrary.h>
#include <Metal/MTLTypes.h>

NS_ASSUME_NONNULL_BEGIN

@protocol MTLDevice;

MTL_EXPORT
@interface MTLComputePipelineReflection : NSObject
@end

MTL_EXPORT
@interface MTLComputePipelineDescriptor : NSObject <NSCopying>
@property(nullable, copy, nonatomic) NSString* label;
@property(nullable, readwrite, nonatomic, strong) id<MTLFunction> computeFunction;
@property(readwrite, nonatomic) BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth;
@property(readwrite, nonatomic) NSUInteger maxTotalThreadsPerThreadgroup;
- (void)reset;
@end

@protocol MTLComputePipelineState <MTLAllocation>
@property(nullable, readonly) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end

NS_ASSUME_NONNULL_END
