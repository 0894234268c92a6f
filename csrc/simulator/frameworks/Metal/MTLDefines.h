// Linkage of the framework's few functions and constants.
#pragma once

#include <Foundation/Foundation.h>

#define MTL_EXPORT __attribute__((visibility("default")))
#define MTL_EXTERN extern "C" MTL_EXPORT
