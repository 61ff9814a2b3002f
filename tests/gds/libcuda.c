// A stand-in for libcuda.so.1, so that the real kvikio runs on a machine without a GPU.
//
// With STAND_IN_MEMORY=device every address counts as device memory, else as host memory. "Device" memory is ordinary
// memory, and copies are made at once, whatever the stream. The stand_in_* calls are for tests.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_READY = 600, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3, ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

typedef int Result;
typedef uint64_t Address;

static int context;  // its address stands for the only context
static __thread int pushed;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_held, held_count, failures, flips;

void stand_in_hold(int hold) {
  pthread_mutex_lock(&mutex);
  is_held = hold;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

// Returns once this many copies hang.
void stand_in_wait_held(int count) {
  pthread_mutex_lock(&mutex);
  while (held_count < count) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
}

// The next copies fail.
void stand_in_fail(int count) {
  pthread_mutex_lock(&mutex);
  failures = count;
  pthread_mutex_unlock(&mutex);
}

// The next copies arrive with one bit changed.
void stand_in_flip(int count) {
  pthread_mutex_lock(&mutex);
  flips = count;
  pthread_mutex_unlock(&mutex);
}

static Result copy(Address target, Address source, size_t size) {
  pthread_mutex_lock(&mutex);
  if (is_held) {
    ++held_count;
    pthread_cond_broadcast(&changed);
    while (is_held) pthread_cond_wait(&changed, &mutex);
    --held_count;
  }
  const int is_failing = failures > 0 && failures-- > 0;
  const int is_flipping = !is_failing && flips > 0 && flips-- > 0;
  pthread_mutex_unlock(&mutex);
  if (is_failing) return ILLEGAL_ADDRESS;
  memcpy((void*)(uintptr_t)target, (const void*)(uintptr_t)source, size);
  if (is_flipping) ((unsigned char*)(uintptr_t)target)[size / 2] ^= 4;
  return SUCCESS;
}

static int memory_type(void) {
  const char* value = getenv("STAND_IN_MEMORY");
  return value != NULL && strcmp(value, "device") == 0 ? MEMORY_DEVICE : MEMORY_HOST;
}

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int* version) { *version = 12040; return SUCCESS; }
Result cuGetErrorName(Result code, const char** name) { *name = "CUDA_ERROR_STAND_IN"; return SUCCESS; }
Result cuGetErrorString(Result code, const char** text) { *text = "an error of the stand-in"; return SUCCESS; }

Result cuDeviceGetCount(int* count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int* device, int ordinal) { *device = ordinal; return SUCCESS; }
Result cuDeviceGetAttribute(int* value, int attribute, int device) { *value = 0; return SUCCESS; }
Result cuDevicePrimaryCtxRetain(void** result, int device) { *result = &context; return SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }

Result cuCtxCreate_v2(void** result, unsigned flags, int device) { return NOT_SUPPORTED; }
Result cuCtxCreate_v4(void** result, void* parameters, unsigned flags, int device) { return NOT_SUPPORTED; }
Result cuCtxDestroy_v2(void* old) { return NOT_SUPPORTED; }
Result cuCtxPushCurrent_v2(void* next) { ++pushed; return SUCCESS; }
Result cuCtxPopCurrent_v2(void** old) { --pushed; if (old) *old = &context; return SUCCESS; }
Result cuCtxGetCurrent(void** result) { *result = pushed ? &context : NULL; return SUCCESS; }
Result cuCtxGetDevice(int* device) { *device = 0; return SUCCESS; }

Result cuPointerGetAttribute(void* result, int attribute, Address address) {
  switch (attribute) {
    case ATTRIBUTE_MEMORY_TYPE: *(int*)result = memory_type(); return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int*)result = 0; return SUCCESS;
    case ATTRIBUTE_CONTEXT: *(void**)result = &context; return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER: *(Address*)result = address; return SUCCESS;
    default: return INVALID_VALUE;
  }
}

Result cuPointerGetAttributes(unsigned count, const int* attributes, void** results, Address address) {
  for (unsigned i = 0; i < count; ++i) {
    const Result result = cuPointerGetAttribute(results[i], attributes[i], address);
    if (result != SUCCESS) return result;
  }
  return SUCCESS;
}

Result cuMemGetAddressRange_v2(Address* base, size_t* size, Address address) {
  if (base) *base = address;
  if (size) *size = (size_t)1 << 40;
  return SUCCESS;
}

Result cuMemHostAlloc(void** memory, size_t size, unsigned flags) {
  return posix_memalign(memory, 4096, size) == 0 ? SUCCESS : INVALID_VALUE;
}
Result cuMemFreeHost(void* memory) { free(memory); return SUCCESS; }
Result cuMemHostRegister_v2(void* memory, size_t size, unsigned flags) { return SUCCESS; }
Result cuMemHostUnregister(void* memory) { return SUCCESS; }

Result cuMemcpyAsync(Address target, Address source, size_t size, void* stream) { return copy(target, source, size); }
Result cuMemcpyHtoDAsync_v2(Address target, const void* source, size_t size, void* stream) {
  return copy(target, (Address)(uintptr_t)source, size);
}
Result cuMemcpyDtoHAsync_v2(void* target, Address source, size_t size, void* stream) {
  return copy((Address)(uintptr_t)target, source, size);
}
// What the engine itself uses, for checksums: never held, never failing.
Result cuMemcpyDtoH_v2(void* target, Address source, size_t size) {
  memcpy(target, (const void*)(uintptr_t)source, size);
  return SUCCESS;
}

Result cuStreamCreate(void** stream, unsigned flags) { *stream = &context; return SUCCESS; }
Result cuStreamDestroy_v2(void* stream) { return SUCCESS; }
Result cuStreamSynchronize(void* stream) { return SUCCESS; }
Result cuEventCreate(void** event, unsigned flags) { *event = &context; return SUCCESS; }
Result cuEventDestroy_v2(void* event) { return SUCCESS; }
Result cuEventRecord(void* event, void* stream) { return SUCCESS; }
Result cuEventQuery(void* event) { return SUCCESS; }
Result cuEventSynchronize(void* event) { return SUCCESS; }
Result cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) { function(data); return SUCCESS; }
