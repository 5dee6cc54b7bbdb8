// A libcuda.so.1 for tests on machines without a GPU. Each call is logged to $FAKE_LOG as
//   function arguments... | current context, capture mode
// $FAKE_FAIL ("function=code") makes a function fail with that code, after $FAKE_FAIL_AFTER successful calls.
// $FAKE_ATTRIBUTE_<number> is the value of a device attribute, or an error code for it ("!801"). Streams 0xCA
// and up are being captured. A query of the legacy stream fails as during a capture while the file
// $FAKE_IMPLICIT exists.

#include <cuda.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static __thread CUcontext stack[8];
static __thread int depth;  // stack[depth] is current; NULL at the bottom
static __thread CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

static int number(const char* variable, int otherwise) {
  const char* value = getenv(variable);
  return value ? atoi(value) : otherwise;
}

static CUresult call(const char* function, const char* format, ...) {
  va_list args;
  va_start(args, format);
  pthread_mutex_lock(&writing);
  FILE* log = fopen(getenv("FAKE_LOG"), "a");
  fprintf(log, "%s ", function);
  vfprintf(log, format, args);
  fprintf(log, "| %#zx %s\n", (size_t)stack[depth],
          mode == CU_STREAM_CAPTURE_MODE_RELAXED ? "relaxed" : "global");
  fclose(log);
  va_end(args);
  static int succeeded;
  CUresult status = CUDA_SUCCESS;
  const char* fail = getenv("FAKE_FAIL");
  size_t length = strlen(function);
  int chosen = fail && !strncmp(fail, function, length) && fail[length] == '=';
  if (chosen && succeeded++ >= number("FAKE_FAIL_AFTER", 0)) status = atoi(fail + length + 1);
  pthread_mutex_unlock(&writing);
  return status;
}

CUresult cuInit(unsigned flags) { return call("cuInit", "%u", flags); }

CUresult cuDriverGetVersion(int* version) {
  *version = number("FAKE_VERSION", 13000);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** name) {
  if (code == 9999) return CUDA_ERROR_INVALID_VALUE;
  *name = code == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
  if (code == 9999) return CUDA_ERROR_INVALID_VALUE;
  *text = code == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "it is fake";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? call("cuDeviceGet", "%d", ordinal) : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
  snprintf(name, length, "Fake %d", device);
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  int capability = number("FAKE_CAPABILITY", 90);
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 52428800; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  char variable[32];
  snprintf(variable, sizeof variable, "FAKE_ATTRIBUTE_%d", attribute);
  const char* given = getenv(variable);
  if (given && *given == '!') return atoi(given + 1);
  if (given) *value = atoi(given);
  return call("cuDeviceGetAttribute", "%d %d", attribute, device);
}

// Device d's primary context is 0x1000 + d.
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)(size_t)(0x1000 + device);
  return call("cuDevicePrimaryCtxRetain", "%d", device);
}

CUresult cuCtxCreate(CUcontext* context, unsigned flags, CUdevice device) {
  return call("cuCtxCreate", "%d", device);
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = stack[depth];
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  stack[depth] = context;
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) {
  CUresult status = call("cuCtxPushCurrent", "%#zx", (size_t)context);
  if (status == CUDA_SUCCESS) stack[++depth] = context;
  return status;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = stack[depth--];
  return call("cuCtxPopCurrent", "%#zx", (size_t)*context);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* other) {
  CUstreamCaptureMode mine = mode;
  mode = *other;
  *other = mine;
  return CUDA_SUCCESS;
}

// The images of the tests are strings.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)strdup(image);
  return call("cuModuleLoadData", "%s", (const char*)image);
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  *function = (CUfunction)strdup(name);
  return call("cuModuleGetFunction", "%s %s", (const char*)module, name);
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? 48 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return call("cuFuncSetAttribute", "%s %d %d", (const char*)function, attribute, value);
}

static void attributes(const CUlaunchConfig* config, unsigned* cluster, int* cooperative) {
  *cluster = *cooperative = 0;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    CUlaunchAttributeValue value = config->attrs[i].value;
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      *cluster = value.clusterDim.y;  // clusters extend along y
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) *cooperative = value.cooperative;
  }
}

// There are 128 / c clusters of c CTAs. Clusters of more than 8 CTAs are an error.
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction function, const CUlaunchConfig* config) {
  unsigned cluster;
  int cooperative;
  attributes(config, &cluster, &cooperative);
  *count = 128 / cluster;
  CUresult status =
      call("cuOccupancyMaxActiveClusters", "%s %u %u x %u %u %u", (const char*)function, cluster,
           config->gridDimX, config->gridDimY, config->blockDimX, config->sharedMemBytes);
  return status == CUDA_SUCCESS && cluster > 8 ? CUDA_ERROR_INVALID_CLUSTER_SIZE : status;
}

// Returns the size of a kernel's argument, or 0 if it is passed by address, and its first 32 bits.
static size_t argument(void** parameters, void** extra, int* first) {
  if (parameters) {
    *first = *(int*)parameters[0];
    return 0;
  }
  if (extra[0] != CU_LAUNCH_PARAM_BUFFER_POINTER || extra[2] != CU_LAUNCH_PARAM_BUFFER_SIZE || extra[4])
    return 0;
  *first = *(int*)extra[1];
  return *(size_t*)extra[3];
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void** parameters, void** extra) {
  int first = 0;
  size_t size = argument(parameters, extra, &first);
  return call("cuLaunchKernel", "%s grid %u block %u shared %u stream %#zx args %d/%zu",
              (const char*)function, gx * gy * gz, bx * by * bz, shared, (size_t)stream, first, size);
}

#ifndef WITHOUT_LAUNCH_EX
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
  unsigned cluster;
  int cooperative, first = 0;
  size_t size = argument(parameters, extra, &first);
  attributes(c, &cluster, &cooperative);
  return call("cuLaunchKernelEx",
              "%s grid %u x %u block %u shared %u stream %#zx args %d/%zu cluster %u cooperative %d",
              (const char*)function, c->gridDimX, c->gridDimY * c->gridDimZ,
              c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes, (size_t)c->hStream, first, size,
              cluster, cooperative);
}
#endif

CUresult cuMemAllocAsync(CUdeviceptr* p, size_t bytes, CUstream stream) {
  static CUdeviceptr next = 0x7000;
  *p = __sync_add_and_fetch(&next, 0x100);
  return call("cuMemAllocAsync", "%zu %#zx = %#llx", bytes, (size_t)stream, *p);
}

CUresult cuMemFreeAsync(CUdeviceptr p, CUstream stream) {
  return call("cuMemFreeAsync", "%#llx %#zx", p, (size_t)stream);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  const char* implicit = getenv("FAKE_IMPLICIT");
  *status = (size_t)stream >= 0xCA ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream == CU_STREAM_LEGACY && implicit && !access(implicit, F_OK))
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  static size_t next = 0xE0;
  *event = (CUevent)__sync_add_and_fetch(&next, 1);
  return call("cuEventCreate", "%u = %#zx", flags, (size_t)*event);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return call("cuEventRecord", "%#zx %#zx", (size_t)event, (size_t)stream);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return call("cuStreamWaitEvent", "%#zx %#zx %u", (size_t)stream, (size_t)event, flags);
}

CUresult cuEventDestroy(CUevent event) { return call("cuEventDestroy", "%#zx", (size_t)event); }
