// The state that a row is reduced to, and its reduction over lanes, warps and the CTAs of a cluster.
// All threads of a row get the result.
#pragma once
#include "vector.cuh"

#include <cstring>
#include <type_traits>

namespace gander {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kHighest = 3.402823466e+38f;  // the highest finite float

// threadIdx.x, but not from a register that has been kept for it.
__device__ __forceinline__ unsigned thread_number_again() {
  unsigned number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

template <int L>
__device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
  for (int k = L / 2; k; k /= 2) v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, k));
  return v;
}

template <int L, class F>
__device__ __forceinline__ F lanes_sum(F v) {
#pragma unroll
  for (int k = L / 2; k; k /= 2) v += __shfl_xor_sync(kAllLanes, v, k);
  return v;
}

constexpr float kLog2E = 1.4426950408889634f;

// 2^x by the hardware, whose error is 2 ulp of float32.
__device__ __forceinline__ float quick_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// exp(x - m). The difference is computed first: x * log2(e) - m * log2(e) in one FMA loses digits where |x|
// is large. float32 rows use the accurate exponential, 16-bit rows the hardware's.
template <class T>
__device__ __forceinline__ float exp_difference(float x, float m) {
  if constexpr (sizeof(T) == 4) return expf(x - m);
  else return quick_exp2((x - m) * kLog2E);
}

// The type of sums across threads. It is double for float32 rows: the terms are few and large, and rounding
// them to float would show in the result.
template <class T>
using Accumulator = std::conditional_t<sizeof(T) == 4, double, float>;

// exp(m - r) for m <= r: the factor that turns a sum of exp(x - m) into a sum of exp(x - r). It is more
// accurate than exp_difference: the hardware's exponential has a bias, which would show in the sum. That
// costs little, because a thread needs it once per row.
template <class A>
__device__ __forceinline__ A rescale_factor(float m, float r) {
  if constexpr (sizeof(A) == 8) {
    double d = static_cast<double>(m) - r;
    d = d > -200. ? d : -200.;                      // exp(-200) is negligible compared with 1
    const double k = rint(d * 1.4426950408889634);  // exp(d) = 2^k exp(x), |x| <= log(2) / 2
    const double x = fma(k, -0.6931471805599453, d);
    double e = 1. / 40320;  // Taylor series up to x^8: an error of 2e-10
#pragma unroll
    for (int i = 7, f = 5040; i >= 0; f /= i ? i : 1, i--) e = fma(e, x, 1. / f);
    return e * __hiloint2double((1023 + static_cast<int>(k)) << 20, 0);
  } else {
    return expf(m - r);
  }
}

// A state in shared or global memory. States themselves cannot be __shared__, because they have constructors.
template <class State>
struct alignas(alignof(State)) Slot {
  uint64_t words[sizeof(State) / 8];
  __device__ __forceinline__ void set(const State& st) { memcpy(words, &st, sizeof(State)); }
  __device__ __forceinline__ State get() const {
    State st;
    memcpy(&st, words, sizeof(State));
    return st;
  }
  // Reads global memory through L2 only: L1 may hold what was there before another launch wrote it.
  __device__ __forceinline__ State load() const {
    Slot copy;
#pragma unroll
    for (int i = 0; i < sizeof(State) / 8; i++)
      copy.words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(words) + i);
    return copy.get();
  }
};

// The state of an operator that sums. A state's kMaxFirst says that the lanes of a row must agree on the
// maximum before they sum.
template <class T>
struct alignas(8) Sum {
  using Partial = Sum;  // the state of a part of a row, where a row has many
  static constexpr bool kMaxFirst = false;
  Accumulator<T> s = 0;
  // Adds the products a[j] * b[j]. They are summed in F before they are added to s. One long chain of
  // additions would lose more digits, and for squares, which are all positive, the errors would not cancel.
  template <class F = float, int E>
  __device__ __forceinline__ void add(const float (&a)[E], const float (&b)[E]) {
    F t = static_cast<F>(a[0]) * b[0];
#pragma unroll
    for (int j = 1; j < E; j++) t = fma(static_cast<F>(a[j]), static_cast<F>(b[j]), t);
    s += t;
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    s = lanes_sum<L>(s);
  }
  __device__ __forceinline__ void merge(Sum o) { s += o.s; }
  template <int U>
  __device__ __forceinline__ void merge(const Sum (&o)[U]) {
#pragma unroll
    for (int u = 0; u < U; u++) s += o[u].s;
  }
};

// Online softmax: a maximum m, and s = sum of exp(x - m), of type A. The empty state is m = -inf, s = 0.
// Quick: a lane does not wait for the maximum of the others, and sums are rescaled by the exponential that
// elements have, where that is accurate enough.
// Infinite: elements of +inf make the sum +inf, which a NaN among them makes NaN. Otherwise both make it NaN.
template <class T, class A, bool Quick = false, bool Infinite = false>
struct alignas(2 * sizeof(A)) MaxSum {
  using Partial = MaxSum<T, float, Quick, Infinite>;  // float suffices: errors of many parts average out
  static constexpr bool kMaxFirst = true;
  A s = 0;
  float m = -kInfinity;

  // What is subtracted in exponents, for a maximum of m. It is never -inf, so that elements of -inf add 0 and
  // not NaN.
  __device__ __forceinline__ static float reference(float m) {
    if constexpr (Infinite) m = fminf(m, kHighest);
    return m == -kInfinity ? 0.f : m;
  }

  // The factor for a sum that was relative to m, and is to be relative to r.
  __device__ __forceinline__ static A factor(float m, float r) {
    if constexpr (Quick) return exp_difference<T>(m, r);
    else return rescale_factor<A>(m, r);
  }

  // The lanes agree on the maximum first. So each lane computes one exponential instead of one per shuffle.
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    const float top = lanes_max<L>(m);
    s = lanes_sum<L>(s * factor(m, reference(top)));
    m = top;
  }
  // The state of the elements of L lanes. They agree on the maximum before they compute exponentials, so that
  // no sum has to be rescaled, unless the state is Quick. CacheExp: stores the exponentials to exps.
  template <int L, bool CacheExp = false, int V, int K>
  __device__ __forceinline__ void reduce_tile(const uint4 (&v)[V], float (&exps)[K][kElements<T>]) {
    const float own = tile_max(T(), v);
    if constexpr (Quick && !CacheExp) {
      m = own, s = exponentials<false>(v, reference(own), exps);
      if constexpr (L > 1) reduce_lanes<L>();
    } else {
      reduce_below<L, CacheExp>(lanes_max<L>(own), v, exps);
    }
  }
  // The same for a maximum that is known. The elements need not have it.
  template <int L, bool CacheExp, int V, int K>
  __device__ __forceinline__ void reduce_below(float max, const uint4 (&v)[V],
                                               float (&exps)[K][kElements<T>]) {
    m = max;
    s = lanes_sum<L>(exponentials<CacheExp>(v, reference(m), exps));
  }
  __device__ __forceinline__ void merge(MaxSum o) {
    const float top = fmaxf(m, o.m), r = reference(top);
    s = s * factor(m, r) + o.s * factor(o.m, r);
    m = top;
  }
  // Merges U states. Their rescale factors do not depend on each other.
  template <int U>
  __device__ __forceinline__ void merge(const MaxSum (&o)[U]) {
    float top = m;
#pragma unroll
    for (int u = 0; u < U; u++) top = fmaxf(top, o[u].m);
    const float r = reference(top);
    s *= factor(m, r);
#pragma unroll
    for (int u = 0; u < U; u++) s += o[u].s * factor(o[u].m, r);
    m = top;
  }
  // Adds a tile of elements.
  template <int V>
  __device__ __forceinline__ void add(const uint4 (&v)[V]) {
    const float top = fmaxf(m, tile_max(T(), v)), r = reference(top);
    float none[1][kElements<T>];
    s = s * factor(m, r) + exponentials<false>(v, r, none);
    m = top;
  }
  template <bool CacheExp, int V, int K>
  __device__ __forceinline__ static A exponentials(const uint4 (&v)[V], float r,
                                                   float (&exps)[K][kElements<T>]) {
    A sum = 0;  // each vector is summed by itself: one long chain of additions would lose digits
#pragma unroll
    for (int i = 0; i < V; i++) {
      float f[kElements<T>], t = 0.f;
      unpack(T(), v[i], f);
#pragma unroll
      for (int j = 0; j < kElements<T>; j++) {
        const float x = exp_difference<T>(f[j], r);
        if constexpr (CacheExp) exps[i][j] = x;
        t = j ? t + x : x;
      }
      sum += t;
    }
    return sum;
  }
};

// Merges `count` <= L states. Each group of L lanes does the same work, so that all lanes get the same bits.
template <int L, class State>
__device__ __forceinline__ State merge_slots(const Slot<State>* slots, int count) {
  const int lane = threadIdx.x % L;
  State st = lane < count ? slots[lane].get() : State();
  st.template reduce_lanes<L>();
  return st;
}

template <int N>
constexpr int kPowerOfTwo = 2 * kPowerOfTwo<(N + 1) / 2>;  // the smallest power of two that is at least N
template <>
constexpr int kPowerOfTwo<1> = 1;

// Named barriers, of a CTA of so many threads. Those that only arrive do not wait for the others.
template <int Barrier>
__device__ __forceinline__ void arrive_at(int threads) {
  asm volatile("bar.arrive %0, %1;" ::"n"(Barrier), "r"(threads) : "memory");
}
template <int Barrier>
__device__ __forceinline__ void wait_at(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(Barrier), "r"(threads) : "memory");
}

// ---- Reduction over the warps of a row: `Warps` of them, or fewer. `slots` has an entry for each warp of
// the CTA. There is only one barrier, so successive calls must alternate between two arrays of slots.
template <int Warps, class State>
__device__ __forceinline__ void reduce_warps(State& st, Slot<State>* slots, int warps = Warps) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 == 0) slots[warp].set(st);
  __syncthreads();
  st = merge_slots<kPowerOfTwo<Warps>, State>(slots + warp / Warps * Warps, warps);
}

// The same for a CTA of which only the first warp needs the state. The others go on, and return false.
template <int Warps, class State>
__device__ __forceinline__ bool reduce_to_first_warp(State& st, Slot<State>* slots, int warps) {
  const int warp = threadIdx.x / 32, threads = warps * 32;
  if (threadIdx.x % 32 == 0) slots[warp].set(st);
  if (warp > 0) {
    arrive_at<1>(threads);
    return false;
  }
  wait_at<1>(threads);
  st = merge_slots<kPowerOfTwo<Warps>, State>(slots, warps);
  return true;
}

// The same from the states of single threads, of up to eight warps: no shuffles before the barrier. `slots`
// has an entry for each thread but those of the first warp. Sharing the branch with reduce_to_first_warp made
// it two: 1.004 times the time.
template <int Warps, class State>
__device__ __forceinline__ bool reduce_threads_to_first_warp(State& st, Slot<State>* slots, int warps) {
  const int thread = threadIdx.x, threads = warps * 32;
  if (thread >= 32) {
    slots[thread - 32].set(st);
    arrive_at<1>(threads);
    return false;
  }
  wait_at<1>(threads);
  State others[Warps - 1];
#pragma unroll
  for (int i = 1; i < Warps; i++) others[i - 1] = i < warps ? slots[(i - 1) * 32 + thread].get() : State();
  st.merge(others);
  st.template reduce_lanes<32>();
  return true;
}

// The maximum over the warps of a row, as above.
template <int Warps>
__device__ __forceinline__ float warps_max(float v, float* slots, int warps) {
  constexpr int L = kPowerOfTwo<Warps>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % L;
  if (threadIdx.x % 32 == 0) slots[warp] = v;
  __syncthreads();
  return lanes_max<L>(lane < warps ? slots[warp / Warps * Warps + lane] : -kInfinity);
}

// ---- Reduction over the CTAs of a cluster, through distributed shared memory.
// Clusters extend along y, so that blockIdx.x is the number of the cluster.
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
// After arrive and wait, every CTA of the cluster has started and has initialized its barriers. They are two
// calls so that loads can be issued in between. The arrival is relaxed, since barrier_init_fence() has made
// the barriers visible to the cluster. A release would wait for all earlier memory operations.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Acquires at the scope of the CTA: the data lies in this CTA's shared memory, even if another CTA sent it.
// The scope of the cluster would also invalidate L1.
__device__ __forceinline__ void barrier_wait(uint64_t* b, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(shared_address(b)),
      "r"(phase)
      : "memory");
}
// Initializes the barrier for one exchange, in which every CTA sends `bytes` bytes to every CTA, and one of
// them `more`, and arrives at the cluster's barrier. cluster_wait() must come before the exchange.
__device__ __forceinline__ void cluster_begin(uint64_t* barrier, uint32_t bytes, uint32_t more = 0) {
  if (threadIdx.x == 0) {
    barrier_init(barrier, 1);
    barrier_init_fence();
    barrier_expect(barrier, cluster_size() * bytes + more);
  }
  cluster_arrive();
}
// Writes 8 bytes to `slot` in the shared memory of CTA `rank`, and signals them to that CTA's `barrier`.
__device__ __forceinline__ void send(uint64_t* slot, uint64_t value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 s, b;\n"
      "mapa.shared::cluster.u32 s, %0, %3;\nmapa.shared::cluster.u32 b, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [s], %2, [b];\n}" ::"r"(
          shared_address(slot)),
      "r"(shared_address(barrier)), "l"(value), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
// Like bulk_copy, for data that is not read again. L2 evicts it first.
__device__ __forceinline__ void bulk_copy_once(void* shared, const void* global, uint32_t bytes,
                                               uint64_t* barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], policy;\n}" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
#endif

// Prefetches into L2 the 16-byte vectors that the `bytes` bytes at `from` lie in.
__device__ __forceinline__ void prefetch_l2(const void* from, int64_t bytes) {
#ifdef GANDER_SM90
  const uintptr_t begin = reinterpret_cast<uintptr_t>(from) & ~uintptr_t(15);
  const uintptr_t end = reinterpret_cast<uintptr_t>(from) + bytes;
  const uint32_t size = static_cast<uint32_t>((end - begin + 15) & ~uintptr_t(15));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(size) : "memory");
#endif
}

// Programmatic dependent launch: waits until the launch before this one has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#ifdef GANDER_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Programmatic dependent launch: lets the next launch start once all CTAs of this one have called this or
// have ended. The next launch has to call wait_for_previous_launch() before it uses results of this one.
__device__ __forceinline__ void let_next_launch_start() {
#ifdef GANDER_SM90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// All CTAs of a cluster exchange their states. Warp 0 sends this CTA's state to each CTA of the cluster. Each
// thread merges the states in the order of ranks.
template <class State>
__device__ __forceinline__ void reduce_cluster(State& st, Slot<State>* slots, uint64_t* barrier,
                                               uint32_t phase) {
#ifdef GANDER_SM90
  const uint32_t size = cluster_size(), rank = cluster_rank();
  if (threadIdx.x < size) {
    Slot<State> own;
    own.set(st);
#pragma unroll
    for (int i = 0; i < sizeof(State) / 8; i++)
      send(slots[rank].words + i, own.words[i], barrier, threadIdx.x);
  }
  barrier_wait(barrier, phase);
  st = merge_slots<16, State>(slots, size);
#endif
}

}  // namespace gander
