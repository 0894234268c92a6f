// Common ancestor of resources and pipelines.
#pragma once

#include <Metal/MTLDefines.h>

@protocol MTLAllocation <NSObject>
@property(readonly) NSUInteger allocatedSize;
@end
