// Stand-in for libdispatch: serial queues, whose blocks run on the calling thread.
#pragma once

#ifdef __APPLE__
#include_next <dispatch/dispatch.h>
#else

#include <stddef.h>
#include <stdint.h>

// Apple's <dispatch/...> brings this clock along; PyTorch's MPSEvent.h relies on it.
#include <time.h>

extern "C" {

typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_queue_attr_s* dispatch_queue_attr_t;
typedef struct dispatch_data_s* dispatch_data_t;
typedef void (*dispatch_function_t)(void*);

#define DISPATCH_QUEUE_SERIAL NULL
#define DISPATCH_CURRENT_QUEUE_LABEL NULL
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT NULL

dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t attr);
void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t work);
void dispatch_retain(void* object);
void dispatch_release(void* object);
const char* dispatch_queue_get_label(dispatch_queue_t queue);
size_t dispatch_data_get_size(dispatch_data_t data);

#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
dispatch_data_t dispatch_data_create(const void* buffer, size_t size, dispatch_queue_t queue,
                                     dispatch_block_t destructor);
#endif

uint64_t clock_gettime_nsec_np(clockid_t clock_id);

}  // extern "C"

#endif
