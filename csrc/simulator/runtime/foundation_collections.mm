// NSArray and NSDictionary.
#include <vector>

#include "objc_object.h"

namespace {

using Items = std::vector<sim::Strong<id>>;

struct Entries {
  Items keys, objects;
};

// Hands out the items in place, all in one batch.
NSUInteger enumerate(const Items& items, NSFastEnumerationState* enumeration) {
  static_assert(sizeof(sim::Strong<id>) == sizeof(id));
  if (enumeration->state) return 0;
  static unsigned long never_mutated = 0;
  enumeration->state = 1;
  enumeration->mutationsPtr = &never_mutated;
  enumeration->itemsPtr = reinterpret_cast<id*>(const_cast<sim::Strong<id>*>(items.data()));
  return items.size();
}

}  // namespace

@implementation NSArray
+ (instancetype)alloc {
  return sim::allocate<Items>(self);
}
+ (instancetype)array {
  return [[self new] autorelease];
}
+ (instancetype)arrayWithObject:(id)anObject {
  return [self arrayWithObjects:&anObject count:1];
}
+ (instancetype)arrayWithObjects:(const id[])objects count:(NSUInteger)cnt {
  NSArray* array = [[self new] autorelease];
  for (NSUInteger i = 0; i < cnt; ++i) sim::state<Items>(array).emplace_back(objects[i]);
  return array;
}
- (NSUInteger)count {
  return sim::state<Items>(self).size();
}
- (id)objectAtIndex:(NSUInteger)index {
  return sim::state<Items>(self).at(index).get();
}
- (id)objectAtIndexedSubscript:(NSUInteger)idx {
  return [self objectAtIndex:idx];
}
- (id)firstObject {
  return [self count] ? [self objectAtIndex:0] : nil;
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id*)buffer
                                    count:(NSUInteger)len {
  (void)buffer, (void)len;
  return enumerate(sim::state<Items>(self), state);
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end

@implementation NSDictionary
+ (instancetype)alloc {
  return sim::allocate<Entries>(self);
}
+ (instancetype)dictionary {
  return [[self new] autorelease];
}
+ (instancetype)dictionaryWithObject:(id)object forKey:(id<NSCopying>)key {
  return [self dictionaryWithObjects:&object forKeys:&key count:1];
}
+ (instancetype)dictionaryWithObjects:(const id[])objects
                              forKeys:(const id<NSCopying>[])keys
                                count:(NSUInteger)cnt {
  NSDictionary* dictionary = [[self new] autorelease];
  auto& entries = sim::state<Entries>(dictionary);
  for (NSUInteger i = 0; i < cnt; ++i) {
    entries.keys.emplace_back(keys[i]);
    entries.objects.emplace_back(objects[i]);
  }
  return dictionary;
}
- (NSUInteger)count {
  return sim::state<Entries>(self).keys.size();
}
- (NSArray*)allKeys {
  NSArray* keys = [NSArray array];
  sim::state<Items>(keys) = sim::state<Entries>(self).keys;
  return keys;
}
- (id)objectForKey:(id)aKey {
  const auto& entries = sim::state<Entries>(self);
  for (size_t i = 0; i < entries.keys.size(); ++i) {
    if ([entries.keys[i].get() isEqual:aKey]) return entries.objects[i].get();
  }
  return nil;
}
- (id)objectForKeyedSubscript:(id)key {
  return [self objectForKey:key];
}
- (NSUInteger)countByEnumeratingWithState:(NSFastEnumerationState*)state
                                  objects:(id*)buffer
                                    count:(NSUInteger)len {
  (void)buffer, (void)len;
  return enumerate(sim::state<Entries>(self).keys, state);
}
- (id)copyWithZone:(NSZone*)zone {
  (void)zone;
  return [self retain];
}
@end
