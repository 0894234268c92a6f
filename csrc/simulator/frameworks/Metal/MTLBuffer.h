// Linear memory.
#pragma once

#include <Metal/MTLResource.h>

NS_ASSUME_NONNULL_BEGIN

@protocol MTLBuffer <MTLResource>
@property(readonly) NSUInteger length;
- (void*)contents NS_RETURNS_INNER_POINTER;
- (void)didModifyRange:(NSRange)range;
@property(readonly) uint64_t gpuAddress;
@end

NS_ASSUME_NONNULL_END
