#include "metal_script.h"

#include <map>
#include <stdexcept>

#include "metal_objects.h"

namespace sim::script {
namespace {

template <class T>
T as(const Object& object) {
  return static_cast<T>(reinterpret_cast<id>(object.get()));
}

// Takes over the reference that a `new…` method returned.
Object owned(id object) {
  return Object(static_cast<void*>(object));
}
Object retained(id object) {
  return Object(static_cast<void*>([object retain]));
}

[[noreturn]] void raise(NSError* error) {
  throw std::runtime_error(to_string([error localizedDescription]));
}

id<MTLCommandQueue> queue() {
  static id<MTLCommandQueue> const instance = [device() newCommandQueue];
  return instance;
}

id<MTLBuffer> buffer_of(const Buffer* buffer) {
  return buffer ? static_cast<id<MTLBuffer>>(reinterpret_cast<id>(buffer->object())) : nil;
}

MTLSize size_of(Extent extent) {
  return MTLSizeMake(extent.x, extent.y, extent.z);
}

MTLDataType type_of(const std::string& name) {
  static const std::map<std::string, MTLDataType> types = {
      {"bool", MTLDataTypeBool},   {"char", MTLDataTypeChar},     {"uchar", MTLDataTypeUChar},
      {"short", MTLDataTypeShort}, {"ushort", MTLDataTypeUShort}, {"int", MTLDataTypeInt},
      {"uint", MTLDataTypeUInt},   {"long", MTLDataTypeLong},     {"ulong", MTLDataTypeULong},
      {"half", MTLDataTypeHalf},   {"bfloat", MTLDataTypeBFloat}, {"float", MTLDataTypeFloat}};
  const auto found = types.find(name);
  if (found == types.end()) throw std::runtime_error("no function constant has the type " + name);
  return found->second;
}

MTLFunctionConstantValues* values_of(const std::vector<std::pair<uint32_t, Constant>>& constants) {
  MTLFunctionConstantValues* values = [[MTLFunctionConstantValues new] autorelease];
  for (const auto& [index, constant] : constants) {
    [values setConstantValue:constant.bytes.data() type:type_of(constant.type) atIndex:index];
  }
  return values;
}

}  // namespace

Object::Object(const Object& other) : object_(other.object_) {
  if (object_) retain_object(object_);
}

Object::~Object() {
  if (object_) release_object(object_);
}

Buffer::Buffer(size_t length, const std::string& label) {
  @autoreleasepool {
    id<MTLBuffer> buffer = [device() newBufferWithLength:length
                                                 options:MTLResourceStorageModeShared];
    if (!buffer) throw std::runtime_error("no buffer of " + std::to_string(length) + " bytes");
    [buffer setLabel:to_ns(label)];
    object_ = owned(buffer);
  }
}

unsigned char* Buffer::contents() const {
  return static_cast<unsigned char*>([buffer_of(this) contents]);
}

size_t Buffer::length() const {
  return [buffer_of(this) length];
}

uint64_t Pipeline::max_threads() const {
  return [as<id<MTLComputePipelineState>>(object_) maxTotalThreadsPerThreadgroup];
}

uint64_t Pipeline::static_threadgroup_bytes() const {
  return [as<id<MTLComputePipelineState>>(object_) staticThreadgroupMemoryLength];
}

Library::Library(const std::string& source, bool fast_math,
                 const std::vector<std::pair<std::string, std::string>>& macros,
                 int language_version) {
  @autoreleasepool {
    std::vector<id> names, values;
    for (const auto& [name, value] : macros) {
      names.push_back(to_ns(name));
      values.push_back(to_ns(value));
    }
    MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
    [options setMathMode:fast_math ? MTLMathModeFast : MTLMathModeSafe];
    const int major = language_version / 100, minor = language_version % 100 / 10;
    [options setLanguageVersion:static_cast<MTLLanguageVersion>(major << 16 | minor)];
    [options setPreprocessorMacros:[NSDictionary dictionaryWithObjects:values.data()
                                                               forKeys:names.data()
                                                                 count:names.size()]];
    NSError* error = nil;
    id<MTLLibrary> library = [device() newLibraryWithSource:to_ns(source)
                                                    options:options
                                                      error:&error];
    if (!library) raise(error);
    object_ = owned(library);
  }
}

std::vector<std::string> Library::function_names() const {
  @autoreleasepool {
    std::vector<std::string> names;
    for (NSString* name in [as<id<MTLLibrary>>(object_) functionNames]) {
      names.push_back(to_string(name));
    }
    return names;
  }
}

Pipeline Library::pipeline(const std::string& name,
                           const std::vector<std::pair<uint32_t, Constant>>& constants,
                           uint64_t max_threads) const {
  @autoreleasepool {
    NSError* error = nil;
    id<MTLFunction> function = [as<id<MTLLibrary>>(object_) newFunctionWithName:to_ns(name)
                                                                 constantValues:values_of(constants)
                                                                          error:&error];
    if (!function) raise(error);
    MTLComputePipelineDescriptor* descriptor = [[MTLComputePipelineDescriptor new] autorelease];
    [descriptor setComputeFunction:[function autorelease]];
    [descriptor setLabel:to_ns(name)];
    [descriptor setMaxTotalThreadsPerThreadgroup:max_threads];
    id<MTLComputePipelineState> state =
        [device() newComputePipelineStateWithDescriptor:descriptor
                                                options:MTLPipelineOptionNone
                                             reflection:nil
                                                  error:&error];
    if (!state) raise(error);
    Pipeline pipeline;
    pipeline.name_ = name;
    pipeline.object_ = owned(state);
    return pipeline;
  }
}

void Encoder::set_pipeline(const Pipeline* pipeline) {
  id state = pipeline ? reinterpret_cast<id>(pipeline->object()) : nil;
  [as<id<MTLComputeCommandEncoder>>(object_) setComputePipelineState:state];
}

void Encoder::set_buffer(const Buffer* buffer, uint64_t offset, uint64_t slot) {
  [as<id<MTLComputeCommandEncoder>>(object_) setBuffer:buffer_of(buffer)
                                                offset:offset
                                               atIndex:slot];
}

void Encoder::set_buffer_offset(uint64_t offset, uint64_t slot) {
  [as<id<MTLComputeCommandEncoder>>(object_) setBufferOffset:offset atIndex:slot];
}

void Encoder::set_bytes(std::span<const unsigned char> bytes, uint64_t slot) {
  [as<id<MTLComputeCommandEncoder>>(object_) setBytes:bytes.data()
                                               length:bytes.size()
                                              atIndex:slot];
}

void Encoder::set_threadgroup_memory(uint64_t length, uint64_t slot) {
  [as<id<MTLComputeCommandEncoder>>(object_) setThreadgroupMemoryLength:length atIndex:slot];
}

void Encoder::dispatch_threadgroups(Extent threadgroups, Extent threads_per_threadgroup) {
  [as<id<MTLComputeCommandEncoder>>(object_) dispatchThreadgroups:size_of(threadgroups)
                                            threadsPerThreadgroup:size_of(threads_per_threadgroup)];
}

void Encoder::dispatch_threads(Extent threads, Extent threads_per_threadgroup) {
  [as<id<MTLComputeCommandEncoder>>(object_) dispatchThreads:size_of(threads)
                                       threadsPerThreadgroup:size_of(threads_per_threadgroup)];
}

void Encoder::barrier(const std::vector<const Buffer*>& buffers) {
  auto encoder = as<id<MTLComputeCommandEncoder>>(object_);
  if (buffers.empty()) return [encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
  std::vector<id<MTLResource>> resources;
  for (const auto* buffer : buffers) resources.push_back(buffer_of(buffer));
  [encoder memoryBarrierWithResources:resources.data() count:resources.size()];
}

void Encoder::end() {
  [as<id<MTLComputeCommandEncoder>>(object_) endEncoding];
}

CommandBuffer::CommandBuffer(bool retains_references) {
  @autoreleasepool {
    object_ = retained(retains_references ? [queue() commandBuffer]
                                          : [queue() commandBufferWithUnretainedReferences]);
  }
}

Encoder CommandBuffer::compute_encoder(bool is_concurrent) {
  @autoreleasepool {
    const auto type = is_concurrent ? MTLDispatchTypeConcurrent : MTLDispatchTypeSerial;
    Encoder encoder;
    encoder.object_ =
        retained([as<id<MTLCommandBuffer>>(object_) computeCommandEncoderWithDispatchType:type]);
    return encoder;
  }
}

void CommandBuffer::copy(const Buffer& source, uint64_t source_offset, const Buffer& destination,
                         uint64_t destination_offset, uint64_t length) {
  @autoreleasepool {
    id<MTLBlitCommandEncoder> blit = [as<id<MTLCommandBuffer>>(object_) blitCommandEncoder];
    [blit copyFromBuffer:buffer_of(&source)
             sourceOffset:source_offset
                 toBuffer:buffer_of(&destination)
        destinationOffset:destination_offset
                     size:length];
    [blit endEncoding];
  }
}

void CommandBuffer::fill(const Buffer& buffer, uint64_t offset, uint64_t length, uint8_t value) {
  @autoreleasepool {
    id<MTLBlitCommandEncoder> blit = [as<id<MTLCommandBuffer>>(object_) blitCommandEncoder];
    [blit fillBuffer:buffer_of(&buffer) range:NSMakeRange(offset, length) value:value];
    [blit endEncoding];
  }
}

void CommandBuffer::set_label(const std::string& label) {
  @autoreleasepool {
    [as<id<MTLCommandBuffer>>(object_) setLabel:to_ns(label)];
  }
}

void CommandBuffer::commit() {
  [as<id<MTLCommandBuffer>>(object_) commit];
}

void CommandBuffer::wait() {
  [as<id<MTLCommandBuffer>>(object_) waitUntilCompleted];
}

std::string CommandBuffer::status() {
  static const char* const names[] = {"not enqueued", "enqueued",  "committed",
                                      "scheduled",    "completed", "error"};
  return names[[as<id<MTLCommandBuffer>>(object_) status]];
}

std::string CommandBuffer::error() {
  @autoreleasepool {
    NSError* error = [as<id<MTLCommandBuffer>>(object_) error];
    return error ? to_string([error localizedDescription]) : "";
  }
}

std::string device_name() {
  @autoreleasepool {
    return to_string([device() name]);
  }
}

}  // namespace sim::script
