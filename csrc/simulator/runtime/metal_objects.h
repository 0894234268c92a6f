// The state behind the Objective-C objects of Metal, and the small helpers that they share.
#pragma once

#include <Metal/Metal.h>

#include <memory>
#include <string>

#include "command_list.h"
#include "compiler.h"
#include "encoders.h"
#include "memory.h"
#include "objc_object.h"
#include "pipeline.h"

// Classes behind Metal's protocols. Each is allocated with the state struct named beside it.
@interface SimDevice : NSObject <MTLDevice>   // stateless, the only one
@end
@interface SimBuffer : NSObject <MTLBuffer>   // sim::BufferState
@end
@interface SimLibrary : NSObject <MTLLibrary>   // sim::LibraryState
@end
@interface SimFunction : NSObject <MTLFunction>   // sim::FunctionState
@end
@interface SimPipelineState : NSObject <MTLComputePipelineState>  // std::shared_ptr<sim::Pipeline>
@end
@interface SimCommandQueue : NSObject <MTLCommandQueue>  // sim::QueueState
@end
@interface SimCommandBuffer : NSObject <MTLCommandBuffer>  // sim::CommandBufferState
@end
@interface SimComputeEncoder : NSObject <MTLComputeCommandEncoder>  // sim::ComputeEncoderState
@end
@interface SimBlitEncoder : NSObject <MTLBlitCommandEncoder>  // sim::BlitEncoderState
@end
@interface SimEvent : NSObject <MTLSharedEvent>  // sim::EventState
@end

namespace sim {

struct BufferState {
  std::shared_ptr<Storage> storage;
  MTLResourceOptions options = 0;
  ~BufferState();
};

struct LibraryState {
  std::shared_ptr<const Library> library;
  std::string label;
};

struct FunctionState {
  std::shared_ptr<const Library> library;
  std::string name, label;
  ConstantValues constants;
};

// MTLFunctionConstantValues: by index, or by name until a library tells the index.
struct ConstantValuesState {
  ConstantValues by_index;
  std::map<std::string, std::vector<unsigned char>> by_name;
};

struct QueueState {
  std::string label;
};

struct CommandBufferState {
  std::shared_ptr<CommandList> list = std::make_shared<CommandList>();
  Strong<id<MTLCommandQueue>> queue;
};

struct ComputeEncoderState {
  std::unique_ptr<ComputeEncoder> encoder;
  std::string label;
};

struct BlitEncoderState {
  std::unique_ptr<BlitEncoder> encoder;
  std::string label;
};

struct Listener {
  uint64_t value;
  MTLSharedEventNotificationBlock block;  // a copy of ours
};

struct EventState {
  std::shared_ptr<Event> event = std::make_shared<Event>();
  std::string label;
  std::mutex mutex;
  std::vector<Listener> listeners;
  ~EventState();
};

// The device of this process. Not retained for the caller.
id<MTLDevice> device();

NSError* make_error(NSErrorDomain domain, NSInteger code, const std::string& description);
inline void set_error(NSError** error, NSErrorDomain domain, NSInteger code,
                      const std::string& description) {
  if (error) *error = make_error(domain, code, description);
}

// nil for nil. Fails, by an exception, for an object that is not one of ours.
BufferRef buffer_ref(id<MTLBuffer> buffer);
id<MTLBuffer> make_buffer(std::shared_ptr<Storage> storage, MTLResourceOptions options);
id<MTLComputePipelineState> make_pipeline(id<MTLFunction> function, NSString* label,
                                          NSUInteger max_threads, NSError** error);
CompileOptions compile_options(MTLCompileOptions* options);

}  // namespace sim
