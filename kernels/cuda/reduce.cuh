// What a row is reduced to, and how the threads of a row agree on it: lanes, then warps, then the CTAs of a cluster.
#pragma once
#include "vector.cuh"

namespace gander {

constexpr unsigned kAllLanes = 0xffffffffu;

template <int L>
__device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
  for (int k = L / 2; k; k /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, k));
  return v;
}

template <int L>
__device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
  for (int k = L / 2; k; k /= 2) v += __shfl_xor_sync(kAllLanes, v, k);
  return v;
}

// exp(x - m), the difference taken first: x * log2(e) - m * log2(e) in one fused step loses digits where |x| is
// large. float32 rows get the accurate exponential, 16-bit rows the hardware's (2 ulp of float32).
template <class T>
__device__ __forceinline__ float exp_difference(float x, float m) {
  if constexpr (sizeof(T) == 4) return expf(x - m);
  else {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"((x - m) * 1.4426950408889634f));
    return y;
  }
}

// Nothing to agree on.
struct None {
  static constexpr bool kMaxFirst = false;
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {}
};

struct Sum {
  static constexpr bool kMaxFirst = false;
  float s = 0.f;
  // Products of a vector. They are added up apart: one long chain of additions loses digits, and of squares always the same way.
  template <int E>
  __device__ __forceinline__ void add(const float (&a)[E], const float (&b)[E]) {
    float t = a[0] * b[0];
#pragma unroll
    for (int j = 1; j < E; j++) t = fmaf(a[j], b[j], t);
    s += t;
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() { s = lanes_sum<L>(s); }
  __device__ __forceinline__ void merge(Sum o) { s += o.s; }
  __device__ __forceinline__ uint64_t bits() const { return __float_as_uint(s); }
  __device__ __forceinline__ static Sum from_bits(uint64_t b) { return {__uint_as_float(static_cast<unsigned>(b))}; }
};

// A maximum, and the sum of exponentials relative to it (online softmax). An empty state is (-inf, 0).
template <class T>
struct MaxSum {
  static constexpr bool kMaxFirst = true;
  float m = -kInfinity, s = 0.f;

  // What exponentials are taken relative to: a part of the row that is all -inf adds 0, not NaN.
  __device__ __forceinline__ static float reference(float m) { return m == -kInfinity ? 0.f : m; }

  // One exponential per lane, not one per step: all lanes agree on the maximum first.
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    const float top = lanes_max<L>(m);
    s = lanes_sum<L>(s * exp_difference<T>(m, reference(top)));
    m = top;
  }
  // The state of a row that L lanes hold: they agree on the maximum before they take exponentials, so that no lane's sum is scaled.
  template <int L, int V>
  __device__ __forceinline__ void reduce_tile(const uint4 (&v)[V]) {
    m = lanes_max<L>(tile_max(T(), v));
    s = lanes_sum<L>(exponentials(v, reference(m)));
  }
  __device__ __forceinline__ void merge(MaxSum o) {
    const float top = fmaxf(m, o.m), r = reference(top);
    s = s * exp_difference<T>(m, r) + o.s * exp_difference<T>(o.m, r);
    m = top;
  }
  // Adds a tile of elements.
  template <int V>
  __device__ __forceinline__ void add(const uint4 (&v)[V]) {
    const float top = fmaxf(m, tile_max(T(), v)), r = reference(top);
    s = fmaf(s, exp_difference<T>(m, r), exponentials(v, r));
    m = top;
  }
  template <int V>
  __device__ __forceinline__ static float exponentials(const uint4 (&v)[V], float r) {
    float sum = 0.f;  // vector by vector: one long chain of additions would lose digits
#pragma unroll
    for (int i = 0; i < V; i++) {
      float f[kElements<T>];
      unpack(T(), v[i], f);
      float t = exp_difference<T>(f[0], r);
#pragma unroll
      for (int j = 1; j < kElements<T>; j++) t += exp_difference<T>(f[j], r);
      sum += t;
    }
    return sum;
  }
  __device__ __forceinline__ uint64_t bits() const {
    return static_cast<uint64_t>(__float_as_uint(s)) << 32 | __float_as_uint(m);
  }
  __device__ __forceinline__ static MaxSum from_bits(uint64_t b) {
    return {__uint_as_float(static_cast<unsigned>(b)), __uint_as_float(static_cast<unsigned>(b >> 32))};
  }
};

// Merges `count` <= L states; every group of L lanes does the same work, so all lanes end with the same bits.
template <int L, class State>
__device__ __forceinline__ State gather(const uint64_t* slots, int count) {
  const int lane = threadIdx.x % L;
  State st = lane < count ? State::from_bits(slots[lane]) : State();
  st.template reduce_lanes<L>();
  return st;
}

template <int N>
constexpr int kPowerOfTwo = 2 * kPowerOfTwo<(N + 1) / 2>;  // the next one, from N on
template <>
constexpr int kPowerOfTwo<1> = 1;

// ---- warps of a CTA, `Warps` of them per row. `slots` holds one entry per warp of the CTA; a loop alternates between two sets.
template <int Warps, class State>
__device__ __forceinline__ void reduce_warps(State& st, uint64_t* slots) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) slots[warp] = st.bits();
  __syncthreads();
  st = gather<kPowerOfTwo<Warps>, State>(slots + warp / Warps * Warps, Warps);
}

// ---- CTAs of a cluster, over distributed shared memory
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define GANDER_SM90 1

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
// Every CTA has started and has initialised its barriers. Split, so that loads are issued in between.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(shared_address(b)), "r"(phase) : "memory");
}
__device__ __forceinline__ void barrier_wait_cluster(uint64_t* b, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(shared_address(b)), "r"(phase) : "memory");
}
// Writes 8 bytes into the same place of CTA `rank`, and counts them at its barrier.
__device__ __forceinline__ void send(uint64_t* slot, uint64_t value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 s, b;\n"
      "mapa.shared::cluster.u32 s, %0, %3;\nmapa.shared::cluster.u32 b, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [s], %2, [b];\n}" ::"r"(shared_address(slot)),
      "r"(shared_address(barrier)), "l"(value), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
#endif

// Waits for the launch before this one to be over, where this one was allowed to start early.
__device__ __forceinline__ void wait_for_previous_launch() {
#ifdef GANDER_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch of the same call start as soon as all CTAs of this one have: it gets ready, and waits.
__device__ __forceinline__ void let_next_launch_start() {
#ifdef GANDER_SM90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All CTAs of a cluster exchange their states: warp 0 sends this CTA's to every CTA, and everybody merges in rank order.
template <class State>
__device__ __forceinline__ void reduce_cluster(State& st, uint64_t* slots, uint64_t* barrier, uint32_t phase) {
#ifdef GANDER_SM90
  const uint32_t size = cluster_size(), rank = cluster_rank();
  if (threadIdx.x < size) send(slots + rank, st.bits(), barrier, threadIdx.x);
  barrier_wait_cluster(barrier, phase);
  st = gather<16, State>(slots, size);
#endif
}

}  // namespace gander
