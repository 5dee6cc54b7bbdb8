//go:build cuda && cgo && linux && amd64

// cgo calls are slow. So each operation on a device is one C function that makes the device's context
// current, calls the driver, and restores the previous context.

#include "driver.h"

// Makes the context current unless it already is. Usually it is: frameworks keep the primary context current.
static CUresult push(uintptr_t context, int* pushed) {
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

CUresult gander_driver_enter(uintptr_t context, gander_driver_scope* scope) {
  CUresult status = push(context, &scope->pushed);
  if (status != CUDA_SUCCESS) return status;
  scope->mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  status = cuThreadExchangeStreamCaptureMode(&scope->mode);
  if (status != CUDA_SUCCESS) pop(scope->pushed);
  return status;
}

void gander_driver_leave(gander_driver_scope* scope) {
  cuThreadExchangeStreamCaptureMode(&scope->mode);
  pop(scope->pushed);
}

// Must be called once for each function, before its first launch. It allows as much dynamic shared memory as
// the function's static shared memory leaves. With `cluster` it also allows clusters of more than 8 CTAs: 8
// is the limit on which portable code can rely.
CUresult gander_driver_prepare(uintptr_t function, int shared_per_block, int cluster) {
  CUfunction f = (CUfunction)function;
  int static_shared = 0;
  CUresult status = cuFuncGetAttribute(&static_shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f);
  if (status == CUDA_SUCCESS)
    status = cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                shared_per_block - static_shared);
  if (status == CUDA_SUCCESS && cluster)
    status = cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1);
  return status;
}

// Clusters extend along y. So blockIdx.x is the index of the cluster, without a division.
static CUlaunchAttribute cluster_attribute(uint32_t cluster) {
  return (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                             .value.clusterDim = {1, cluster, 1}};
}

static CUlaunchAttribute cooperative_attribute(void) {
  return (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value.cooperative = 1};
}

static CUlaunchAttribute dependent_attribute(void) {
  return (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                             .value.programmaticStreamSerializationAllowed = 1};
}

// Counts the clusters of a size that can be resident at once. *count is 0 if the call fails.
CUresult gander_driver_max_clusters(uintptr_t function, uint32_t cluster, uint32_t block, uint32_t shared,
                                    int* count) {
  CUlaunchAttribute attribute = cluster_attribute(cluster);
  CUlaunchConfig config = {.gridDimX = 1,
                           .gridDimY = cluster,
                           .gridDimZ = 1,
                           .blockDimX = block,
                           .blockDimY = 1,
                           .blockDimZ = 1,
                           .sharedMemBytes = shared,
                           .attrs = &attribute,
                           .numAttrs = 1};
  CUresult status = cuOccupancyMaxActiveClusters(count, (CUfunction)function, &config);
  if (status != CUDA_SUCCESS) *count = 0;
  return status;
}

CUresult gander_driver_launch(uintptr_t context, uintptr_t function, uint32_t grid, uint32_t cluster,
                              uint32_t block, uint32_t shared, int cooperative, int dependent,
                              uintptr_t stream, void* args, size_t bytes) {
  int pushed;
  CUresult status = push(context, &pushed);
  if (status != CUDA_SUCCESS) return status;
  // The kernel's parameter is passed as a buffer with a size. So the driver checks that the buffer is not
  // larger than the parameter, and reads no further. With a pointer it could do neither.
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, args, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  if (cluster <= 1 && !cooperative && !dependent) {
    status =
        cuLaunchKernel((CUfunction)function, grid, 1, 1, block, 1, 1, shared, (CUstream)stream, NULL, extra);
  } else {
    CUlaunchAttribute attributes[3];
    uint32_t cluster_size = cluster > 1 ? cluster : 1;
    CUlaunchConfig config = {.gridDimX = grid / cluster_size,
                             .gridDimY = cluster_size,
                             .gridDimZ = 1,
                             .blockDimX = block,
                             .blockDimY = 1,
                             .blockDimZ = 1,
                             .sharedMemBytes = shared,
                             .hStream = (CUstream)stream,
                             .attrs = attributes};
    if (cluster > 1) attributes[config.numAttrs++] = cluster_attribute(cluster);
    if (cooperative) attributes[config.numAttrs++] = cooperative_attribute();
    if (dependent) attributes[config.numAttrs++] = dependent_attribute();
    // CUDA 13.0 rejects a buffer in a cooperative launch during stream capture. Those get a pointer instead.
    status = cuLaunchKernelEx(&config, (CUfunction)function, cooperative ? &args : NULL,
                              cooperative ? NULL : extra);
  }
  pop(pushed);
  return status;
}

CUresult gander_driver_allocate(uintptr_t context, size_t bytes, uintptr_t stream, uintptr_t* p) {
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

CUresult gander_driver_allocate_owned(uintptr_t context, size_t bytes, uintptr_t stream, uintptr_t* p,
                                      uintptr_t* event) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUdeviceptr device = 0;
  CUevent ready = NULL;
  gander_driver_scope scope;
  CUresult status = gander_driver_enter(context, &scope);
  if (status != CUDA_SUCCESS) return status;
  status = cuStreamIsCapturing((CUstream)stream, &capture);
  if (status == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE)
    status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (status == CUDA_SUCCESS) status = cuEventCreate(&ready, CU_EVENT_DISABLE_TIMING);
  if (status == CUDA_SUCCESS) status = cuMemAllocAsync(&device, bytes, (CUstream)stream);
  if (status == CUDA_SUCCESS) {
    // Recorded a first time, so that the free is ordered after the allocation even if no other work follows.
    status = cuEventRecord(ready, (CUstream)stream);
    if (status != CUDA_SUCCESS) cuMemFreeAsync(device, (CUstream)stream);
  }
  if (status != CUDA_SUCCESS && ready) cuEventDestroy(ready);
  *p = device;
  *event = (uintptr_t)ready;
  gander_driver_leave(&scope);
  return status;
}

// Records the event after which an output is complete.
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
  // Work on the legacy stream would invalidate the capture of any stream that synchronizes with it. During
  // such a capture cuStreamIsCapturing returns CUDA_ERROR_STREAM_CAPTURE_IMPLICIT and does no harm.
  status = cuStreamIsCapturing(CU_STREAM_LEGACY, &capture);
  if (status == CUDA_SUCCESS) status = cuStreamWaitEvent(CU_STREAM_LEGACY, (CUevent)event, 0);
  if (status == CUDA_SUCCESS) status = cuMemFreeAsync(p, CU_STREAM_LEGACY);
  if (status == CUDA_SUCCESS) status = cuEventDestroy((CUevent)event);
  gander_driver_leave(&scope);
  return status;
}
