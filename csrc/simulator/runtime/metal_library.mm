// MTLLibrary, MTLFunction, function constants, compile options, pipelines.
#include <algorithm>

#include "device_state.h"
#include "metal_objects.h"

NSErrorDomain const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

namespace sim {
namespace {

size_t bytes_of(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
    case MTLDataTypeChar:
    case MTLDataTypeUChar: return 1;
    case MTLDataTypeHalf:
    case MTLDataTypeBFloat:
    case MTLDataTypeShort:
    case MTLDataTypeUShort: return 2;
    case MTLDataTypeFloat:
    case MTLDataTypeInt:
    case MTLDataTypeUInt:
    case MTLDataTypeHalf2: return 4;
    case MTLDataTypeLong:
    case MTLDataTypeULong:
    case MTLDataTypeFloat2:
    case MTLDataTypeInt2:
    case MTLDataTypeUInt2:
    case MTLDataTypeHalf3:
    case MTLDataTypeHalf4: return 8;
    case MTLDataTypeFloat3:
    case MTLDataTypeFloat4:
    case MTLDataTypeInt3:
    case MTLDataTypeInt4:
    case MTLDataTypeUInt3:
    case MTLDataTypeUInt4: return 16;
    default: return 0;
  }
}

std::vector<unsigned char> bytes_from(const void* value, MTLDataType type) {
  const size_t size = bytes_of(type);
  if (size == 0) {
    report_fault("setConstantValue: MTLDataType " + std::to_string(type) +
                 " is not a type of function constants");
  }
  const auto* bytes = static_cast<const unsigned char*>(value);
  return {bytes, bytes + size};
}

MTLDataType data_type(const std::string& msl_type) {
  static const std::map<std::string, MTLDataType> types = {
      {"bool", MTLDataTypeBool},       {"char", MTLDataTypeChar},
      {"int8_t", MTLDataTypeChar},     {"uchar", MTLDataTypeUChar},
      {"uint8_t", MTLDataTypeUChar},   {"short", MTLDataTypeShort},
      {"int16_t", MTLDataTypeShort},   {"ushort", MTLDataTypeUShort},
      {"uint16_t", MTLDataTypeUShort}, {"int", MTLDataTypeInt},
      {"int32_t", MTLDataTypeInt},     {"uint", MTLDataTypeUInt},
      {"uint32_t", MTLDataTypeUInt},   {"long", MTLDataTypeLong},
      {"int64_t", MTLDataTypeLong},    {"ulong", MTLDataTypeULong},
      {"uint64_t", MTLDataTypeULong},  {"half", MTLDataTypeHalf},
      {"bfloat", MTLDataTypeBFloat},   {"float", MTLDataTypeFloat}};
  const auto found = types.find(msl_type);
  return found == types.end() ? MTLDataTypeNone : found->second;
}

struct Options {
  Strong<NSDictionary*> macros;
  BOOL fast_math = YES;
  MTLMathMode math_mode = MTLMathModeFast;
  MTLMathFloatingPointFunctions functions = MTLMathFloatingPointFunctionsFast;
  MTLLanguageVersion version = MTLLanguageVersion3_1;
  BOOL preserve_invariance = NO;
  MTLLibraryOptimizationLevel level = MTLLibraryOptimizationLevelDefault;
  NSUInteger max_threads = 0;
};

id<MTLFunction> make_function(SimLibrary* library, NSString* name) {
  const auto& from = state<LibraryState>(library).library;
  const std::string wanted = to_string(name);
  const auto& names = from->function_names();
  if (std::find(names.begin(), names.end(), wanted) == names.end()) return nil;
  id function = allocate<FunctionState>([SimFunction class]);
  state<FunctionState>(function).library = from;
  state<FunctionState>(function).name = wanted;
  return function;
}

std::string resolve_names(const ConstantValuesState& values, const Library& library,
                          ConstantValues& by_index) {
  for (const auto& [name, bytes] : values.by_name) {
    const auto& all = library.function_constants();
    auto found = std::find_if(all.begin(), all.end(),
                              [&](const FunctionConstant& one) { return one.name == name; });
    if (found == all.end()) return "no function constant is named '" + name + "'";
    by_index[found->index] = bytes;
  }
  return "";
}

struct ConstantState {
  std::string name;
  MTLDataType type = MTLDataTypeNone;
  NSUInteger index = 0;
};

}  // namespace

CompileOptions compile_options(MTLCompileOptions* options) {
  CompileOptions result;
  if (!options) return result;
  const auto& from = state<Options>(options);
  result.fast_math = from.fast_math && from.math_mode == MTLMathModeFast;
  // MTLLanguageVersion: the major version, and 16 bits below it the minor one.
  result.language_version =
      static_cast<int>((from.version >> 16) * 100 + (from.version & 0xFFFF) * 10);
  NSDictionary* macros = from.macros.get();
  for (NSString* name in macros) {
    result.macros[to_string(name)] = to_string([[macros objectForKey:name] description]);
  }
  return result;
}

id<MTLComputePipelineState> make_pipeline(id<MTLFunction> function, NSString* label,
                                          NSUInteger max_threads, NSError** error) {
  if (!function) {
    set_error(error, MTLLibraryErrorDomain, MTLLibraryErrorFunctionNotFound,
              "newComputePipelineState: expected a function, found nil");
    return nil;
  }
  const auto& from = state<FunctionState>(function);
  try {
    auto pipeline = Pipeline::build(from.library, from.name, from.constants);
    pipeline->label = to_string(label);
    if (max_threads) {
      pipeline->max_threads = std::min(pipeline->max_threads, static_cast<uint32_t>(max_threads));
    }
    id object = allocate<std::shared_ptr<Pipeline>>([SimPipelineState class]);
    state<std::shared_ptr<Pipeline>>(object) = std::move(pipeline);
    return object;
  } catch (const std::exception& failure) {
    set_error(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, failure.what());
    return nil;
  }
}

}  // namespace sim

@implementation SimLibrary
- (NSString*)label {
  return sim::to_ns(sim::state<sim::LibraryState>(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::state<sim::LibraryState>(self).label = sim::to_string(label);
}
- (id<MTLDevice>)device {
  return sim::device();
}
- (NSArray<NSString*>*)functionNames {
  std::vector<NSString*> names;
  for (const auto& name : sim::state<sim::LibraryState>(self).library->function_names()) {
    names.push_back(sim::to_ns(name));
  }
  return [NSArray arrayWithObjects:names.data() count:names.size()];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)functionName {
  return sim::make_function(self, functionName);
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)name
                        constantValues:(MTLFunctionConstantValues*)constantValues
                                 error:(NSError**)error {
  id<MTLFunction> function = sim::make_function(self, name);
  if (!function) {
    sim::set_error(error, MTLLibraryErrorDomain, MTLLibraryErrorFunctionNotFound,
                   "the library has no function named '" + sim::to_string(name) + "'");
    return nil;
  }
  if (!constantValues) return function;
  auto& target = sim::state<sim::FunctionState>(function);
  const auto& values = sim::state<sim::ConstantValuesState>(constantValues);
  target.constants = values.by_index;
  const auto problem = sim::resolve_names(values, *target.library, target.constants);
  if (problem.empty()) return function;
  sim::set_error(error, MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, problem);
  [function release];
  return nil;
}
@end

@implementation SimFunction
- (NSString*)label {
  return sim::to_ns(sim::state<sim::FunctionState>(self).label);
}
- (void)setLabel:(NSString*)label {
  sim::state<sim::FunctionState>(self).label = sim::to_string(label);
}
- (id<MTLDevice>)device {
  return sim::device();
}
- (MTLFunctionType)functionType {
  return MTLFunctionTypeKernel;
}
- (NSString*)name {
  return sim::to_ns(sim::state<sim::FunctionState>(self).name);
}
- (NSDictionary*)functionConstantsDictionary {
  std::vector<id> names, constants;
  for (const auto& one : sim::state<sim::FunctionState>(self).library->function_constants()) {
    id constant = [sim::allocate<sim::ConstantState>([MTLFunctionConstant class]) autorelease];
    sim::state<sim::ConstantState>(constant) = {one.name, sim::data_type(one.type), one.index};
    names.push_back(sim::to_ns(one.name));
    constants.push_back(constant);
  }
  return [NSDictionary dictionaryWithObjects:constants.data()
                                     forKeys:names.data()
                                       count:names.size()];
}
@end

@implementation MTLFunctionConstant
- (NSString*)name {
  return sim::to_ns(sim::state<sim::ConstantState>(self).name);
}
- (MTLDataType)type {
  return sim::state<sim::ConstantState>(self).type;
}
- (NSUInteger)index {
  return sim::state<sim::ConstantState>(self).index;
}
- (BOOL)required {
  return YES;
}
@end

@implementation MTLFunctionConstantValues
+ (instancetype)alloc {
  return sim::allocate<sim::ConstantValuesState>(self);
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  sim::state<sim::ConstantValuesState>(self).by_index[static_cast<uint32_t>(index)] =
      sim::bytes_from(value, type);
}
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range {
  const auto* bytes = static_cast<const unsigned char*>(values);
  for (NSUInteger i = 0; i < range.length; ++i) {
    [self setConstantValue:bytes + i * sim::bytes_of(type) type:type atIndex:range.location + i];
  }
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
  sim::state<sim::ConstantValuesState>(self).by_name[sim::to_string(name)] =
      sim::bytes_from(value, type);
}
- (void)reset {
  sim::state<sim::ConstantValuesState>(self) = {};
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  id copy = [[self class] new];
  sim::state<sim::ConstantValuesState>(copy) = sim::state<sim::ConstantValuesState>(self);
  return copy;
}
@end

@implementation MTLCompileOptions
+ (instancetype)alloc {
  return sim::allocate<sim::Options>(self);
}
- (NSDictionary*)preprocessorMacros {
  return sim::state<sim::Options>(self).macros.get();
}
- (void)setPreprocessorMacros:(NSDictionary*)macros {
  sim::state<sim::Options>(self).macros = sim::Strong(macros);
}
- (BOOL)fastMathEnabled {
  return sim::state<sim::Options>(self).fast_math;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  sim::state<sim::Options>(self).fast_math = enabled;
}
- (MTLMathMode)mathMode {
  return sim::state<sim::Options>(self).math_mode;
}
- (void)setMathMode:(MTLMathMode)mode {
  sim::state<sim::Options>(self).math_mode = mode;
}
- (MTLMathFloatingPointFunctions)mathFloatingPointFunctions {
  return sim::state<sim::Options>(self).functions;
}
- (void)setMathFloatingPointFunctions:(MTLMathFloatingPointFunctions)functions {
  sim::state<sim::Options>(self).functions = functions;
}
- (MTLLanguageVersion)languageVersion {
  return sim::state<sim::Options>(self).version;
}
- (void)setLanguageVersion:(MTLLanguageVersion)version {
  sim::state<sim::Options>(self).version = version;
}
- (BOOL)preserveInvariance {
  return sim::state<sim::Options>(self).preserve_invariance;
}
- (void)setPreserveInvariance:(BOOL)preserve {
  sim::state<sim::Options>(self).preserve_invariance = preserve;
}
- (MTLLibraryOptimizationLevel)optimizationLevel {
  return sim::state<sim::Options>(self).level;
}
- (void)setOptimizationLevel:(MTLLibraryOptimizationLevel)level {
  sim::state<sim::Options>(self).level = level;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return sim::state<sim::Options>(self).max_threads;
}
- (void)setMaxTotalThreadsPerThreadgroup:(NSUInteger)threads {
  sim::state<sim::Options>(self).max_threads = threads;
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  id copy = [[self class] new];
  sim::state<sim::Options>(copy) = sim::state<sim::Options>(self);
  return copy;
}
@end
