// What @autoreleasepool compiles to without ARC.
#pragma once

#include <Foundation/NSObject.h>

@interface NSAutoreleasePool : NSObject
+ (void)addObject:(id)anObject;
- (void)addObject:(id)anObject;
- (void)drain;
@end
