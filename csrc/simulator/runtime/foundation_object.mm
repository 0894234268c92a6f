// NSObject and NSAutoreleasePool.
#include <atomic>
#include <cstdlib>
#include <vector>

#include "objc_object.h"
#include "objc_runtime.h"

namespace sim {
namespace {

struct alignas(16) Header {
  std::atomic<NSUInteger> references;
  Destroy destroy;
};

Header& header(id object) {
  return reinterpret_cast<Header*>(object)[-1];
}

// The objects of all nested pools of a thread, and where each pool begins.
struct PoolStack {
  std::vector<id> objects;
  std::vector<size_t> begins;
};

PoolStack& pool_stack() {
  static thread_local PoolStack stack;
  return stack;
}

void release_down_to(size_t size) {
  auto& objects = pool_stack().objects;
  while (objects.size() > size) {   // a dealloc may autorelease more
    id object = objects.back();
    objects.pop_back();
    [object release];
  }
}

}  // namespace

id allocate_object(Class cls, size_t state_bytes, Destroy destroy) {
  const size_t bytes = sizeof(Header) + kStateOffset + state_bytes;
  auto* begin = static_cast<Header*>(std::calloc(1, bytes));
  if (!begin) throw std::bad_alloc();
  new (begin) Header{1, destroy};
  auto* object = reinterpret_cast<Class*>(begin + 1);
  *object = cls;
  return reinterpret_cast<id>(object);
}

void retain_object(void* object) {
  [reinterpret_cast<id>(object) retain];
}
void release_object(void* object) {
  [reinterpret_cast<id>(object) release];
}

}  // namespace sim

@implementation NSObject
+ (void)initialize {
}
+ (instancetype)alloc {
  return sim::allocate_object(self, 0, nullptr);
}
+ (instancetype)new {
  return [[self alloc] init];
}
+ (Class)class {
  return self;
}
+ (Class)superclass {
  return class_getSuperclass(self);
}
- (instancetype)init {
  return self;
}
- (void)dealloc {
  auto& header = sim::header(self);
  if (header.destroy) header.destroy(reinterpret_cast<char*>(self) + sim::kStateOffset);
  std::free(&header);
}
- (instancetype)retain {
  sim::header(self).references.fetch_add(1, std::memory_order_relaxed);
  return self;
}
- (oneway void)release {
  if (sim::header(self).references.fetch_sub(1, std::memory_order_acq_rel) == 1) [self dealloc];
}
- (instancetype)autorelease {
  sim::pool_stack().objects.push_back(self);
  return self;
}
- (NSUInteger)retainCount {
  return sim::header(self).references;
}
- (instancetype)self {
  return self;
}
- (Class)class {
  return class_of(self);
}
- (Class)superclass {
  return class_getSuperclass(class_of(self));
}
- (BOOL)isEqual:(id)object {
  return object == self;
}
- (NSUInteger)hash {
  return reinterpret_cast<NSUInteger>(self);
}
- (BOOL)isKindOfClass:(Class)aClass {
  for (Class each = class_of(self); each; each = class_getSuperclass(each)) {
    if (each == aClass) return YES;
  }
  return NO;
}
- (BOOL)isMemberOfClass:(Class)aClass {
  return class_of(self) == aClass;
}
- (BOOL)respondsToSelector:(SEL)aSelector {
  return class_respondsToSelector(class_of(self), aSelector);
}
- (NSString*)description {
  return [NSString
      stringWithFormat:@"<%s: %p>", class_getName([self class]), static_cast<void*>(self)];
}
- (id)copy {
  return [static_cast<id<NSCopying>>(self) copyWithZone:nullptr];
}
- (id)mutableCopy {
  return [self copy];
}
@end

@implementation NSAutoreleasePool
- (instancetype)init {
  auto& stack = sim::pool_stack();
  stack.begins.push_back(stack.objects.size());
  return self;
}
+ (void)addObject:(id)anObject {
  [anObject autorelease];
}
- (void)addObject:(id)anObject {
  [anObject autorelease];
}
- (void)drain {
  [self release];
}
- (void)dealloc {
  auto& stack = sim::pool_stack();
  sim::release_down_to(stack.begins.back());
  stack.begins.pop_back();
  [super dealloc];
}
@end
