// Stand-in for Apple's Metal: compute only. Declarations, values and layouts are Apple's.
#pragma once

#include <Metal/MTLAllocation.h>
#include <Metal/MTLBlitCommandEncoder.h>
#include <Metal/MTLBuffer.h>
#include <Metal/MTLCommandBuffer.h>
#include <Metal/MTLCommandEncoder.h>
#include <Metal/MTLCommandQueue.h>
#include <Metal/MTLComputeCommandEncoder.h>
#include <Metal/MTLComputePass.h>
#include <Metal/MTLComputePipeline.h>
#include <Metal/MTLDataType.h>
#include <Metal/MTLDefines.h>
#include <Metal/MTLDevice.h>
#include <Metal/MTLEvent.h>
#include <Metal/MTLFunctionConstantValues.h>
#include <Metal/MTLLibrary.h>
#include <Metal/MTLResource.h>
#include <Metal/MTLTypes.h>
