// Stand-in for MetalPerformanceShadersGraph: names that PyTorch's MPS headers mention.
#pragma once

#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraph;
@class MPSGraphCompilationDescriptor;
@class MPSGraphExecutable;
@class MPSGraphExecutionDescriptor;
@class MPSGraphTensor;
@class MPSGraphTensorData;
