//go:build cuda && cgo && linux && amd64

// Each function is one crossing from Go: make the context current if it is not, call the driver, restore.

#include "driver.h"

// The context is most often current already: frameworks keep the primary one current.
static CUresult push(uintptr_t context, int *pushed) {
  CUcontext current = NULL;
  CUresult status = cuCtxGetCurrent(&current);
  *pushed = 0;
  if (status != CUDA_SUCCESS || current == (CUcontext)context) return status;
  status = cuCtxPushCurrent((CUcontext)context);
  *pushed = status == CUDA_SUCCESS;
  return status;
}

static void pop(int pushed) {
  CUcontext ignored;
  if (pushed) cuCtxPopCurrent(&ignored);
}

CUresult gander_driver_enter(uintptr_t context, gander_driver_scope *scope) {
  CUresult status = push(context, &scope->pushed);
  if (status != CUDA_SUCCESS) return status;
  scope->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  status = cuThreadExchangeStreamCaptureMode(&scope->mode);
  if (status != CUDA_SUCCESS) pop(scope->pushed);
  return status;
}

void gander_driver_leave(gander_driver_scope *scope) {
  cuThreadExchangeStreamCaptureMode(&scope->mode);
  pop(scope->pushed);
}

// Attributes of a function hold for its context, so they are set once: all the shared memory that its static
// part leaves, and clusters above the portable 8.
CUresult gander_driver_prepare(uintptr_t function, int shared_per_block, int cluster) {
  CUfunction f = (CUfunction)function;
  int fixed = 0;
  CUresult status = cuFuncGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f);
  if (status == CUDA_SUCCESS)
    status = cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_per_block - fixed);
  if (status == CUDA_SUCCESS && cluster)
    status = cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
  return status;
}

// Clusters lie along y, so that blockIdx.x counts them, and no kernel has to divide.
static CUlaunchAttribute in_clusters(uint32_t cluster) {
  return (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {1, cluster, 1}};
}

static CUlaunchAttribute cooperatively(void) {
  return (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
}

static CUlaunchAttribute dependently(void) {
  return (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                             .value.programmaticStreamSerializationAllowed = 1};
}

// *count is 0 unless the answer is a success.
CUresult gander_driver_max_clusters(uintptr_t function, uint32_t cluster, uint32_t block, uint32_t shared,
                                    int *count) {
  CUlaunchAttribute attribute = in_clusters(cluster);
  CUlaunchConfig config = {
      .gridDimX = 1, .gridDimY = cluster, .gridDimZ = 1, .blockDimX = block, .blockDimY = 1, .blockDimZ = 1,
      .sharedMemBytes = shared, .attrs = &attribute, .numAttrs = 1};
  CUresult status = cuOccupancyMaxActiveClusters(count, (CUfunction)function, &config);
  if (status != CUDA_SUCCESS) *count = 0;
  return status;
}

CUresult gander_driver_launch(uintptr_t context, uintptr_t function, uint32_t grid, uint32_t cluster, uint32_t block,
                              uint32_t shared, int cooperative, int dependent, uintptr_t stream, void *args,
                              size_t bytes) {
  int pushed;
  CUresult status = push(context, &pushed);
  if (status != CUDA_SUCCESS) return status;
  // As a buffer of a stated size: the driver reads no further, and refuses a struct larger than the kernel's.
  void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, args, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
  if (cluster <= 1 && !cooperative && !dependent) {
    status = cuLaunchKernel((CUfunction)function, grid, 1, 1, block, 1, 1, shared, (CUstream)stream, NULL, extra);
  } else {
    CUlaunchAttribute attributes[3];
    uint32_t together = cluster > 1 ? cluster : 1;
    CUlaunchConfig config = {
        .gridDimX = grid / together, .gridDimY = together, .gridDimZ = 1, .blockDimX = block, .blockDimY = 1,
        .blockDimZ = 1, .sharedMemBytes = shared, .hStream = (CUstream)stream, .attrs = attributes};
    if (cluster > 1) attributes[config.numAttrs++] = in_clusters(cluster);
    if (cooperative) attributes[config.numAttrs++] = cooperatively();
    if (dependent) attributes[config.numAttrs++] = dependently();
    // While a stream is captured, a cooperative launch takes its argument by address only (CUDA 13.0).
    status = cuLaunchKernelEx(&config, (CUfunction)function, cooperative ? &args : NULL, cooperative ? NULL : extra);
  }
  pop(pushed);
  return status;
}

CUresult gander_driver_allocate(uintptr_t context, size_t bytes, uintptr_t stream, uintptr_t *p) {
  CUdeviceptr device = 0;
  int pushed;
  CUresult status = push(context, &pushed);
  if (status != CUDA_SUCCESS) return status;
  status = cuMemAllocAsync(&device, bytes, (CUstream)stream);
  *p = device;
  pop(pushed);
  return status;
}

CUresult gander_driver_free(uintptr_t context, uintptr_t p, uintptr_t stream) {
  int pushed;
  CUresult status = push(context, &pushed);
  if (status != CUDA_SUCCESS) return status;
  status = cuMemFreeAsync(p, (CUstream)stream);
  pop(pushed);
  return status;
}

CUresult gander_driver_allocate_owned(uintptr_t context, size_t bytes, uintptr_t stream, uintptr_t *p,
                                      uintptr_t *event) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUdeviceptr device = 0;
  CUevent allocated = NULL;
  gander_driver_scope scope;
  CUresult status = gander_driver_enter(context, &scope);
  if (status != CUDA_SUCCESS) return status;
  status = cuStreamIsCapturing((CUstream)stream, &capture);
  if (status == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE)
    status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (status == CUDA_SUCCESS) status = cuEventCreate(&allocated, CU_EVENT_DISABLE_TIMING);
  if (status == CUDA_SUCCESS) status = cuMemAllocAsync(&device, bytes, (CUstream)stream);
  if (status == CUDA_SUCCESS) {
    status = cuEventRecord(allocated, (CUstream)stream);
    if (status != CUDA_SUCCESS) cuMemFreeAsync(device, (CUstream)stream);
  }
  if (status != CUDA_SUCCESS && allocated) cuEventDestroy(allocated);
  *p = device;
  *event = (uintptr_t)allocated;
  gander_driver_leave(&scope);
  return status;
}

CUresult gander_driver_seal(uintptr_t context, uintptr_t event, uintptr_t stream) {
  int pushed;
  CUresult status = push(context, &pushed);
  if (status != CUDA_SUCCESS) return status;
  status = cuEventRecord((CUevent)event, (CUstream)stream);
  pop(pushed);
  return status;
}

CUresult gander_driver_free_owned(uintptr_t context, uintptr_t p, uintptr_t event) {
  CUstreamCaptureStatus capture;
  gander_driver_scope scope;
  CUresult status = gander_driver_enter(context, &scope);
  if (status != CUDA_SUCCESS) return status;
  // The legacy stream must not be touched while a stream that synchronises with it is captured: that would
  // break the capture. This question is allowed, and then answers CUDA_ERROR_STREAM_CAPTURE_IMPLICIT.
  status = cuStreamIsCapturing(CU_STREAM_LEGACY, &capture);
  if (status == CUDA_SUCCESS) status = cuStreamWaitEvent(CU_STREAM_LEGACY, (CUevent)event, 0);
  if (status == CUDA_SUCCESS) status = cuMemFreeAsync(p, CU_STREAM_LEGACY);
  if (status == CUDA_SUCCESS) status = cuEventDestroy((CUevent)event);
  gander_driver_leave(&scope);
  return status;
}
