// Objective-C that a Mac would run, against the simulator's runtime. Each function returns what it
// found wrong, or an empty string; test_objc_runtime.py calls them.
#include <Block.h>
#include <Metal/Metal.h>
#include <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include <stdexcept>
#include <string>
#include <thread>

namespace {

std::string problem;

void expect(bool holds, const std::string& what) {
  if (!holds && problem.empty()) problem = what;
}

void expect_text(NSString* found, const char* expected) {
  expect([found isEqualToString:[NSString stringWithUTF8String:expected]],
         "expected '" + std::string(expected) + "', found '" + [found UTF8String] + "'");
}

const char* result() {
  return problem.c_str();
}

}  // namespace

// Counts its own end.
@interface Witness : NSObject
@end
static int num_witnesses_gone = 0;
@implementation Witness
- (void)dealloc {
  ++num_witnesses_gone;
  [super dealloc];
}
@end

extern "C" {

const char* check_reference_counts() {
  problem.clear();
  num_witnesses_gone = 0;
  Witness* witness = [Witness new];
  [witness retain];
  expect([witness retainCount] == 2, "retain: expected a count of 2");
  [witness release];
  @autoreleasepool {
    [[witness retain] autorelease];
    @autoreleasepool {
      [[[Witness new] autorelease] self];
      expect(num_witnesses_gone == 0, "an autoreleased object went before its pool");
    }
    expect(num_witnesses_gone == 1, "the inner pool kept its object");
    expect([witness retainCount] == 2, "the inner pool released what was not its own");
  }
  expect([witness retainCount] == 1, "the outer pool did not release");
  [witness release];
  expect(num_witnesses_gone == 2, "the last release did not end the object");
  expect([witness = nil retainCount] == 0, "a message to nil is 0");
  return result();
}

const char* check_strings() {
  problem.clear();
  @autoreleasepool {
    NSString* text = [NSString stringWithFormat:@"%s|%@|%d|%5.2f|%lu|%llx|%c|%%|%@", "c", @"o", -3,
                                                2.5, 7ul, 255ull, 'x', static_cast<id>(nil)];
    expect_text(text, "c|o|-3| 2.50|7|ff|x|%|(null)");
    const std::string large(2000, 'a');
    expect_text([NSString stringWithFormat:@"%s", large.c_str()], large.c_str());
    expect([@"h\u00e9\U0001F600" length] == 4, "length counts UTF-16 units");
    expect([@"flash_fwd" hasPrefix:@"flash"] && ![@"flash" hasPrefix:@"flash_fwd"], "hasPrefix:");
    expect([@"flash_fwd" hasSuffix:@"fwd"] && [@"flash_fwd" containsString:@"sh_f"], "hasSuffix:");
    expect([@"a" isEqual:[NSString stringWithUTF8String:"a"]], "a literal equals a made string");
    expect([@"a" hash] == [[NSString stringWithUTF8String:"a"] hash], "equal strings hash alike");
    expect_text([[[NSString alloc] initWithBytes:"abc" length:2
                                        encoding:NSUTF8StringEncoding] autorelease],
                "ab");
    expect([[@"a" retain] retainCount] == NSUIntegerMax, "literals are not counted");
    expect([@"a" isKindOfClass:[NSString class]], "a literal is a string");
  }
  return result();
}

const char* check_collections() {
  problem.clear();
  @autoreleasepool {
    NSDictionary* dictionary = @{@"one" : @1, @"half" : @0.5, @"yes" : @YES, @"big" : @(~0ull)};
    expect([[dictionary objectForKey:@"one"] intValue] == 1, "objectForKey:");
    expect([dictionary objectForKey:@"two"] == nil, "a missing key gives nil");
    expect_text([[dictionary objectForKey:@"half"] description], "0.5");
    expect_text([[dictionary objectForKey:@"yes"] description], "1");
    expect_text([[dictionary objectForKey:@"big"] description], "18446744073709551615");
    int sum = 0;
    for (NSNumber* number in @[ @1, @2, @3 ]) sum += [number intValue];
    expect(sum == 6, "for … in visits each element once");
    expect([[dictionary allKeys] count] == 4, "allKeys");
    NSError* error = [NSError errorWithDomain:@"D" code:7 userInfo:nil];
    expect_text([error localizedDescription], "The operation couldn't be completed. (D error 7.)");
  }
  return result();
}

const char* check_blocks() {
  problem.clear();
  num_witnesses_gone = 0;
  Witness* witness = [Witness new];
  __block int called = 0;
  void (^copied)(void) = Block_copy(^{
    ++called;
    [witness self];
  });
  expect([witness retainCount] == 2, "a copied block retains the objects that it captures");
  [witness release];
  copied();
  expect(called == 1 && num_witnesses_gone == 0, "the block ran with its object alive");
  Block_release(copied);
  expect(num_witnesses_gone == 1, "the block released its object");
  return result();
}

const char* check_dispatch_queues() {
  problem.clear();
  dispatch_queue_t queue = dispatch_queue_create("outer", DISPATCH_QUEUE_SERIAL);
  dispatch_queue_t other = dispatch_queue_create("inner", DISPATCH_QUEUE_SERIAL);
  __block std::string labels;
  dispatch_sync(queue, ^{
    labels += dispatch_queue_get_label(DISPATCH_CURRENT_QUEUE_LABEL);
    dispatch_sync(other, ^{
      labels += dispatch_queue_get_label(DISPATCH_CURRENT_QUEUE_LABEL);
    });
    labels += dispatch_queue_get_label(DISPATCH_CURRENT_QUEUE_LABEL);
  });
  expect(labels == "outerinnerouter", "the current queue: found " + labels);
  int sum = 0;
  int* shared = &sum;
  auto add = [queue, shared] {
    for (int i = 0; i < 10000; ++i) {
      dispatch_sync(queue, ^{
        ++*shared;
      });
    }
  };
  std::thread first(add), second(add);
  first.join();
  second.join();
  expect(sum == 20000, "blocks of one queue ran at once");
  dispatch_release(other);
  dispatch_release(queue);
  return result();
}

// Returns the message of the exception, for a queue that a Mac would deadlock on.
const char* nested_dispatch_sync() {
  problem.clear();
  dispatch_queue_t queue = dispatch_queue_create("stream", DISPATCH_QUEUE_SERIAL);
  try {
    dispatch_sync(queue, ^{
      dispatch_sync(queue, ^{
        problem = "the inner block ran";
      });
    });
  } catch (const std::exception& error) {
    problem = error.what();
  }
  bool is_free = false;
  dispatch_sync_f(queue, &is_free, [](void* flag) { *static_cast<bool*>(flag) = true; });
  if (!is_free) problem = "the queue stayed locked";
  dispatch_release(queue);
  return result();
}

const char* check_events() {
  problem.clear();
  @autoreleasepool {
    id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
    id<MTLCommandQueue> producer = [[device newCommandQueue] autorelease];
    id<MTLCommandQueue> consumer = [[device newCommandQueue] autorelease];
    id<MTLSharedEvent> event = [[device newSharedEvent] autorelease];
    __block uint64_t notified = 0;
    MTLSharedEventListener* listener = [[MTLSharedEventListener new] autorelease];
    [event notifyListener:listener
                  atValue:2
                    block:^(id<MTLSharedEvent> sender, uint64_t value) {
                      notified = sender == event ? value : 99;
                    }];
    id<MTLCommandBuffer> signal = [producer commandBuffer];
    [signal encodeSignalEvent:event value:2];
    id<MTLCommandBuffer> wait = [consumer commandBuffer];
    [wait encodeWaitForEvent:event value:2];
    [signal commit];
    [wait commit];
    expect([event signaledValue] == 0, "the signal came at commit");
    [wait waitUntilCompleted];
    expect([wait status] == MTLCommandBufferStatusCompleted, "the wait saw no signal");
    expect([event signaledValue] == 2 && notified == 2, "the listener was not told");
    expect([event waitUntilSignaledValue:2 timeoutMS:0], "a value that is there needs no waiting");
    expect(![event waitUntilSignaledValue:3 timeoutMS:1], "a value that never comes");
  }
  return result();
}

const char* wait_for_an_event_that_nobody_signals() {
  problem.clear();
  @autoreleasepool {
    id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
    id<MTLEvent> event = [[device newEvent] autorelease];
    id<MTLCommandBuffer> wait = [[[device newCommandQueue] autorelease] commandBuffer];
    [wait encodeWaitForEvent:event value:1];
    [wait commit];
    [wait waitUntilCompleted];
    problem = [[[wait error] localizedDescription] UTF8String];
  }
  return result();
}

const char* check_command_buffers() {
  problem.clear();
  @autoreleasepool {
    id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
    id<MTLCommandQueue> queue = [[device newCommandQueue] autorelease];
    id<MTLBuffer> buffer = [device newBufferWithLength:16 options:MTLResourceStorageModeShared];
    MPSCommandBuffer* commands = [MPSCommandBuffer commandBufferFromCommandQueue:queue];
    id<MTLCommandBuffer> first = [commands rootCommandBuffer];
    __block int completed = 0;
    [commands addCompletedHandler:^(id<MTLCommandBuffer> done) {
      completed = done == first && [done status] == MTLCommandBufferStatusCompleted ? 1 : -1;
    }];
    id<MTLBlitCommandEncoder> blit = [commands blitCommandEncoder];
    [blit fillBuffer:buffer range:NSMakeRange(0, 16) value:5];
    [blit endEncoding];
    expect([buffer retainCount] == 2, "an encoded buffer is retained");
    [commands commitAndContinue];
    expect([commands rootCommandBuffer] != first, "commitAndContinue goes on with a new one");
    expect(completed == 0, "the handler ran before anybody waited");
    [first waitUntilCompleted];
    expect(completed == 1, "the completed handler");
    expect([buffer retainCount] == 1, "a completed command buffer lets go");
    expect(static_cast<char*>([buffer contents])[15] == 5, "fillBuffer:");
    expect([first GPUEndTime] >= [first GPUStartTime] && [first GPUStartTime] > 0, "GPU times");
    [buffer release];
  }
  return result();
}

const char* check_buffers() {
  problem.clear();
  @autoreleasepool {
    id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
    const NSUInteger before = [device currentAllocatedSize];
    __block int freed = 0;
    std::string host(32, 'h');
    void* memory = host.data();
    id<MTLBuffer> view = [device newBufferWithBytesNoCopy:memory
                                                   length:host.size()
                                                  options:MTLResourceStorageModeShared
                                              deallocator:^(void* pointer, NSUInteger length) {
                                                freed = pointer == memory && length == 32 ? 1 : -1;
                                              }];
    expect([view contents] == memory, "NoCopy uses the caller's memory");
    [view release];
    expect(freed == 1, "the deallocator");
    const auto options = MTLResourceStorageModePrivate | MTLResourceHazardTrackingModeUntracked;
    id<MTLBuffer> hidden = [device newBufferWithLength:100 options:options];
    expect([hidden contents] == nullptr, "private memory has no contents for the host");
    expect([hidden storageMode] == MTLStorageModePrivate, "storageMode");
    expect([hidden hazardTrackingMode] == MTLHazardTrackingModeUntracked, "hazardTrackingMode");
    expect([device currentAllocatedSize] == before + 100, "currentAllocatedSize");
    [hidden release];
    expect([device currentAllocatedSize] == before, "released memory is not counted");
    expect([device newBufferWithLength:0 options:MTLResourceStorageModeShared] == nil, "no bytes");
  }
  return result();
}

const char* check_device() {
  problem.clear();
  @autoreleasepool {
    id<MTLDevice> device = [MTLCreateSystemDefaultDevice() autorelease];
    expect_text([device name], "Simulated Apple GPU");
    expect([device supportsFamily:MTLGPUFamilyApple7], "Apple7");
    expect(![device supportsFamily:MTLGPUFamilyApple10], "not Apple10");
    expect([device supportsFamily:MTLGPUFamilyMetal3], "Metal3");
    expect([[MTLCompileOptions new] respondsToSelector:@selector(setMathMode:)], "macOS 15's API");
    NSError* error = nil;
    dispatch_data_t data = dispatch_data_create("MTLB", 4, nullptr, nullptr);
    expect([device newLibraryWithData:data error:&error] == nil && error, "a metallib is refused");
    expect([error code] == MTLLibraryErrorUnsupported, "by its code");
    dispatch_release(data);
  }
  return result();
}

}  // extern "C"
