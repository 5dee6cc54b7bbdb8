// CUDA for the host: what kernels use of CUDA's language and of PTX. It is included before each file that
// rewrite.py has made.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

#undef __forceinline__
#define __forceinline__ inline

namespace emulator {

// A barrier. A phase ends when all that are expected have arrived.
struct Phase {
  unsigned expected, arrived;
  uint64_t number;
};

struct Warp {
  Phase phase;
  uint64_t values[2][32];  // what the lanes exchange, in even and odd phases
};

struct Cta {
  struct Cluster* cluster;
  unsigned rank, live;  // live: threads that have not ended
  uint3 index;
  dim3 threads, grid;
  char* memory;  // static shared memory, then dynamic
  Phase phase;
  Phase named[16];  // barriers by number
  bool any[2];      // of __syncthreads_or, in even and odd phases
};

struct Copy {
  uint32_t to;
  const void* from;
  int bytes, size;
};

struct Thread {
  Cta* cta;
  Warp* warp;
  uint3 index;
  unsigned lane;
  void* stack;
  bool ended;
  const char* where;                // it waits
  const Phase* phase;               // it waits for the end of phase `number` of this
  const struct Mbarrier* mbarrier;  // or of the phase of that parity
  uint64_t number;
  bool polls;                // or until other CTAs have run
  const ulonglong2* polled;  // the slot that it has read last
  ulonglong2 found;          // and what was in it
  bool arrived;              // at the cluster's barrier, in phase cluster_phase
  uint64_t cluster_phase;
  std::vector<std::vector<Copy>> copies;  // by group, of which the last is open
};
extern Thread* self;  // the thread that runs

// ---- What the driver uses.
struct Kernel {
  unsigned threads;  // of a CTA, at most
  size_t bytes;      // of its argument, a struct that a launch passes by address
  void (*body)(const void*);
  unsigned launches;
  // What a launch may ask for: bytes of dynamic shared memory, and CTAs of a cluster.
  int shared = 48 << 10, cluster = 8;
};
std::map<std::string, Kernel>& kernels();

struct Launch {
  Kernel* kernel;
  unsigned clusters, cluster, threads;  // cluster: its number of CTAs
  size_t shared;                        // bytes of dynamic shared memory
  unsigned resident;                    // CTAs, at a time
  const void* args;
};
// Mapped memory around allocations that a kernel must not read: {end, begin}. Beyond it are pages that fault.
std::map<const char*, const char*>& surroundings();

// Returns what the kernel did wrong, or "".
std::string run(const Launch& launch);

// ---- What kernels use.
#define EMULATED_KERNEL(Args, name, threads, ...) \
  static void name(const void* args) { __VA_ARGS__(*static_cast<const Args*>(args)); } \
  static const auto& kernel_##name = emulator::kernels()[#name] = {threads, sizeof(Args), name, 0};

// Reports a mistake of the kernel. The launch fails with the first one.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();
uint32_t shared_address(const void* p);
template <class T>
T& shared() {
  static const char key = 0;
  return *static_cast<T*>(static_shared(&key, sizeof(T), alignof(T)));
}

void sync_warp();
int sync_cta_or(int predicate);
int64_t clock();
void check_alignment(const void* p, size_t bytes);
void check_read(const void* p, size_t bytes);

// What the lanes of the warp pass, by lane.
template <class T>
const uint64_t* shared_by_lanes(T value) {
  uint64_t* const values = self->warp->values[self->warp->phase.number & 1];
  static_assert(sizeof(T) <= sizeof(*values));
  std::memcpy(values + self->lane, &value, sizeof(T));
  sync_warp();
  return values;
}

// ---- PTX. The outputs come first.
template <class... T>
void nothing(T...) {}
template <class T>
void opaque(T&) {}
inline void ex2(float& y, float x) {
  const auto flush = [](float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.f, v) : v; };
  y = flush(exp2f(flush(x)));
}
inline void reciprocal(float& y, float x) { y = 1 / x; }
inline void minimum_or_nan(float& y, float a, float b) {
  y = std::isnan(a) ? a : std::isnan(b) ? b : std::fmin(a, b);
}
// token_statistics.cuh, Sums
inline void add_or_count(float& sum, float& depth, int& ones, float v, float by, float key, float top) {
  if (key >= top) ones++;
  else sum += v, depth = std::fma(v, by, depth);
}
inline void add_square_or_find(float& squares, int& first, float v, int number, float key, float top) {
  if (key >= top) first = std::min(first, number);
  else squares = std::fma(v, v, squares);
}
inline void xor_bits(float& x, uint32_t bits) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  u ^= bits;
  std::memcpy(&x, &u, sizeof(u));
}
void load_words_if(bool in, const void* p, int count, unsigned* const (&words)[4]);
inline void load_if(unsigned& x, const void* p, bool in) { load_words_if(in, p, 1, {&x}); }
inline void load_if(unsigned& x, unsigned& y, const void* p, bool in) { load_words_if(in, p, 2, {&x, &y}); }
inline void load_if(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* p, bool in) {
  load_words_if(in, p, 4, {&x, &y, &z, &w});
}
inline void store_if(float* p, float v, bool in) {
  if (in) *p = v;
}
inline void store_if(float2* p, float x, float y, bool in) {
  if (!in) return;
  check_alignment(p, sizeof(*p));
  *p = {x, y};
}
void named_arrive(int barrier, int threads);
void named_sync(int barrier, int threads);
void thread_number(uint32_t& number);
void cluster_rank(uint32_t& rank);
void cluster_size(uint32_t& size);
void cluster_arrive();
void cluster_wait();
void barrier_init(uint32_t barrier, unsigned count);
void barrier_expect(uint32_t barrier, uint32_t bytes);
void barrier_arrive(uint32_t barrier);
void barrier_wait(uint32_t barrier, uint32_t parity);
void send(uint32_t slot, uint32_t barrier, uint64_t value, uint32_t rank);
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier);
void prefetch(uintptr_t from, uint32_t bytes);
void copy_async(uint32_t to, const void* from, int bytes, int size);
void copies_commit();
void copies_wait(unsigned pending);
void publish(ulonglong2* slot, uint64_t x, uint64_t y);
void poll(unsigned long long& x, unsigned long long& y, const ulonglong2* slot);

}  // namespace emulator

// ---- CUDA's variables and functions.
#define threadIdx (emulator::self->index)
#define blockIdx (emulator::self->cta->index)
#define blockDim (emulator::self->cta->threads)
#define gridDim (emulator::self->cta->grid)

inline void __syncthreads() { emulator::sync_cta_or(0); }
inline int __syncthreads_or(int predicate) { return emulator::sync_cta_or(predicate); }
inline void __syncwarp() { emulator::sync_warp(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  std::memcpy(&value, emulator::shared_by_lanes(value) + (emulator::self->lane ^ mask), sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  const int lane = emulator::self->lane / width * width + from % width;
  std::memcpy(&value, emulator::shared_by_lanes(value) + lane, sizeof(T));
  return value;
}
inline int __any_sync(unsigned, int predicate) {
  const uint64_t* const values = emulator::shared_by_lanes<uint64_t>(predicate != 0);
  return std::any_of(values, values + 32, [](uint64_t v) { return v != 0; });
}

inline int __ffs(int v) { return __builtin_ffs(v); }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  emulator::check_alignment(p, sizeof(T));
  *p = value;
}
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  const T old = *p;
  *p += value;
  return old;
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  const T old = *p;
  if (old == expected) *p = value;
  return old;
}
inline long long clock64() { return emulator::clock(); }
#define __cvta_generic_to_shared emulator::shared_address

template <class To, class From>
To emulated_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline unsigned __float_as_uint(float v) { return emulated_cast<unsigned>(v); }
inline int __float_as_int(float v) { return emulated_cast<int>(v); }
inline float __uint_as_float(unsigned v) { return emulated_cast<float>(v); }
inline float __int_as_float(int v) { return emulated_cast<float>(v); }
inline long long __double_as_longlong(double v) { return emulated_cast<long long>(v); }
inline double __longlong_as_double(long long v) { return emulated_cast<double>(v); }
inline double __hiloint2double(int high, int low) {
  return emulated_cast<double>(static_cast<uint64_t>(high) << 32 | static_cast<uint32_t>(low));
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned bits) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (bits & 31));
}
inline float __frsqrt_rn(float v) { return static_cast<float>(1 / std::sqrt(static_cast<double>(v))); }
inline float __fdividef(float a, float b) { return a / b; }
inline float normcdff(float v) { return 0.5f * std::erfc(-v * 0.707106781186547524f); }
// The compiler may fuse these neither with what made their operands nor with what takes their result.
inline float emulated_rounded(float v) {
  asm volatile("" : "+x"(v));
  return v;
}
inline float __fadd_rn(float a, float b) {
  return emulated_rounded(emulated_rounded(a) + emulated_rounded(b));
}
inline float __fsub_rn(float a, float b) {
  return emulated_rounded(emulated_rounded(a) - emulated_rounded(b));
}
inline float __fmul_rn(float a, float b) { return emulated_rounded(a * b); }

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
using std::isfinite, std::isnan, std::signbit;
