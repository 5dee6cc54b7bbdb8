// A libcuda.so.1 without a device: the functions of the CUDA driver that gander calls. Device memory is
// memory of the host. A launch runs at once, in the emulator.
#include "emulator.h"

#include <cuda.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace {

// The devices, with the largest cluster, KiB of a CTA's shared memory, MiB of L2, and of the memory kHz and
// bits. EMULATED_DEVICE chooses one, by default that of EMULATED_ARCH.
struct Device {
  const char* name;
  int arch, cluster, shared, l2, clock, bus;
};
constexpr Device kDevices[] = {
    {"NVIDIA A100", 800, 1, 163, 40, 1593000, 5120},
    {"NVIDIA GeForce RTX 3090", 860, 1, 99, 6, 9751000, 384},
    {"NVIDIA H200", 900, 16, 227, 60, 3201000, 6144},
    {"NVIDIA GeForce RTX 5090", 1200, 8, 99, 96, 14001000, 512},
};

const Device& device() {
  const char* const value = std::getenv("EMULATED_DEVICE");
  const int arch = value ? std::atoi(value) : EMULATED_ARCH;
  const auto* const found =
      std::find_if(kDevices, std::end(kDevices), [=](const Device& d) { return d.arch == arch; });
  if (found == std::end(kDevices)) std::abort();
  return *found;
}

constexpr size_t kPage = 4096;
std::mutex mutex;
std::string failure;                                          // of the last launch
std::map<CUdeviceptr, std::pair<char*, size_t>> allocations;  // and the pages of each
thread_local CUcontext current;

template <class T>
CUresult give(T* to, T value) {
  *to = value;
  return CUDA_SUCCESS;
}

// The SMs of the device.
int sms() {
  const char* const value = std::getenv("EMULATED_SMS");
  return value ? std::atoi(value) : 8;
}

// An allocation begins at a multiple of 16 bytes, and ends where a page begins that faults, or up to 15 bytes
// before. It is filled with a word.
CUresult allocate(CUdeviceptr* p, size_t bytes, uint64_t word) {
  const size_t size = (bytes + 15) / 16 * 16, mapped = (size + kPage - 1) / kPage * kPage + kPage;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  char* const at = static_cast<char*>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, flags, -1, 0));
  char* const guard = at + mapped - kPage;
  if (at == MAP_FAILED || mprotect(guard, kPage, PROT_NONE)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::fill(reinterpret_cast<uint64_t*>(at), reinterpret_cast<uint64_t*>(guard), word);
  const std::lock_guard lock(mutex);
  emulator::surroundings()[guard - size] = at;
  emulator::surroundings()[guard] = guard - size + bytes;
  *p = reinterpret_cast<CUdeviceptr>(guard - size);
  allocations[*p] = {at, mapped};
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr p) {
  const std::lock_guard lock(mutex);
  const auto found = allocations.find(p);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  const auto [at, mapped] = found->second;
  auto& surroundings = emulator::surroundings();
  surroundings.erase(surroundings.lower_bound(at), surroundings.upper_bound(at + mapped));
  munmap(at, mapped);
  allocations.erase(found);
  return CUDA_SUCCESS;
}

CUresult launch(const CUlaunchConfig& config, CUfunction function, void** parameters, void** extra) {
  auto* const kernel = reinterpret_cast<emulator::Kernel*>(function);
  unsigned cluster = 1;
  bool cooperative = false;
  for (unsigned i = 0; i < config.numAttrs; i++) {
    const CUlaunchAttribute& a = config.attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      cluster = a.value.clusterDim.y;  // clusters extend along y
    if (a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) cooperative = a.value.cooperative;
  }
  const void* args = parameters ? parameters[0] : extra[1];
  const bool fits = config.gridDimY == cluster &&
                    int(cluster) <= std::min(kernel->cluster, device().cluster) &&
                    int(config.sharedMemBytes) <= kernel->shared && config.blockDimX % 32 == 0 &&
                    config.blockDimX > 0 && config.blockDimX <= kernel->threads && config.gridDimX > 0;
  if (!fits || (extra && *static_cast<size_t*>(extra[3]) != kernel->bytes)) return CUDA_ERROR_INVALID_VALUE;
  const unsigned ctas = config.gridDimX * cluster;
  if (cooperative && ctas > static_cast<unsigned>(sms())) return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
  const std::lock_guard lock(mutex);
  // One CTA on an SM. So a grid that the planner makes for several waits for CTAs that start late.
  failure = emulator::run({kernel, config.gridDimX, cluster, config.blockDimX, config.sharedMemBytes,
                           static_cast<unsigned>(sms()), args});
  return failure.empty() ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return give(version, 13000); }
CUresult cuGetErrorName(CUresult, const char** name) { return give(name, "CUDA_ERROR"); }
CUresult cuGetErrorString(CUresult code, const char** text) {
  return give(text, code == CUDA_ERROR_LAUNCH_FAILED ? failure.c_str() : "see cuda.h");
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return ordinal == 0 ? give(device, 0) : CUDA_ERROR_INVALID_DEVICE;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, length, "%s", device().name);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return give(value, device().arch / 100);
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return give(value, device().arch / 10 % 10);
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return give(value, sms());
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return give(value, device().shared << 10);
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return give(value, (device().shared + 1) << 10);
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return give(value, device().l2 << 20);
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return give(value, device().clock);
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return give(value, device().bus);
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  return give(context, reinterpret_cast<CUcontext>(&mutex));
}
CUresult cuCtxGetCurrent(CUcontext* context) { return give(context, current); }
CUresult cuCtxPushCurrent(CUcontext context) { return give(&current, context); }
CUresult cuCtxPopCurrent(CUcontext* context) {
  *context = current;
  return give(&current, CUcontext());
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return give(module, static_cast<CUmodule>(const_cast<void*>(image)));
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  const auto found = emulator::kernels().find(name);
  if (found == emulator::kernels().end()) return CUDA_ERROR_NOT_FOUND;
  return give(function, reinterpret_cast<CUfunction>(&found->second));
}

// How much static shared memory a kernel has is known once it runs.
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) { return give(value, 0); }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  auto* const kernel = reinterpret_cast<emulator::Kernel*>(function);
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) kernel->cluster = device().cluster;
  else if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  else if (value > device().shared << 10) return CUDA_ERROR_INVALID_VALUE;
  else kernel->shared = value;
  return CUDA_SUCCESS;
}

// There is always room for one cluster, even if it has more CTAs than the device SMs.
CUresult cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig* config) {
  const int cluster = config->attrs[0].value.clusterDim.y;
  if (cluster > device().cluster) return give(count, 0);
  return give(count, std::max(sms() / cluster, 1));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  return launch(*config, function, parameters, extra);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid, unsigned grid_y, unsigned, unsigned threads,
                        unsigned, unsigned, unsigned shared, CUstream, void** parameters, void** extra) {
  CUlaunchConfig config = {};
  config.gridDimX = grid, config.gridDimY = grid_y, config.blockDimX = threads,
  config.sharedMemBytes = shared;
  return launch(config, function, parameters, extra);
}

CUresult cuMemAlloc(CUdeviceptr* p, size_t bytes) { return allocate(p, bytes, ~uint64_t(0)); }
CUresult cuMemFree(CUdeviceptr p) { return release(p); }
// Scratch memory may have NaN in it, or what kernels/cuda/grid.cuh has left there: states with the tag 1.
CUresult cuMemAllocAsync(CUdeviceptr* p, size_t bytes, CUstream) { return allocate(p, bytes, 0x1ffffffff); }
CUresult cuMemFreeAsync(CUdeviceptr p, CUstream) { return release(p); }

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  return give(status, CU_STREAM_CAPTURE_STATUS_NONE);
}
CUresult cuEventCreate(CUevent*, unsigned) { return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
CUresult cuEventDestroy(CUevent) { return CUDA_SUCCESS; }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }

// How often a kernel has been launched, or -1 if there is none of that name.
int emulated_launches(const char* name) {
  const auto found = emulator::kernels().find(name);
  return found == emulator::kernels().end() ? -1 : static_cast<int>(found->second.launches);
}

}  // extern "C"
