// Synchronisation between command buffers, and with the CPU.
#pragma once

#include <Metal/MTLDefines.h>
#include <dispatch/dispatch.h>

NS_ASSUME_NONNULL_BEGIN

@protocol MTLDevice;

@protocol MTLEvent <NSObject>
@property(nullable, readonly) id<MTLDevice> device;
@property(nullable, copy, atomic) NSString* label;
@end

MTL_EXPORT
@interface MTLSharedEventListener : NSObject
- (instancetype)init;
- (instancetype)initWithDispatchQueue:(dispatch_queue_t)dispatchQueue;
@property(nonatomic, readonly) dispatch_queue_t dispatchQueue;
@end

@protocol MTLSharedEvent;
typedef void (^MTLSharedEventNotificationBlock)(id<MTLSharedEvent>, uint64_t value);

@protocol MTLSharedEvent <MTLEvent>
- (void)notifyListener:(MTLSharedEventListener*)listener
               atValue:(uint64_t)value
                 block:(MTLSharedEventNotificationBlock)block;
- (BOOL)waitUntilSignaledValue:(uint64_t)value
                     timeoutMS:(uint64_t)milliseconds API_AVAILABLE(macos(12.0));
@property(readwrite) uint64_t signaledValue;
@end

NS_ASSUME_NONNULL_END
