// What is precompiled: the whole library and the entry point's machinery.
#pragma once

#include <metal_stdlib>

#include "sim/entry.h"
#include "sim/hooks.h"
