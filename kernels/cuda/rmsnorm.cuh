// RMSNorm over rows, forward and backward. h = x * rstd, g = dout * weight:
//   y = h * weight,  dx = (g - h * mean(g * h)) * rstd,  dw = sum over rows of dout * h.
#pragma once
#include "rows.cuh"

namespace gander {

template <bool General, int E>
__device__ __forceinline__ void load_weight(const RMSNormArgs& a, int64_t origin, int e, Span span, float (&w)[E]) {
  if (a.weight) {
    load_floats<General>(advance(a.weight, a.weight_type, origin), a.weight_type, e, span, w);
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = 1.f;
  }
}

template <class T_>
struct RMSNormForward {
  using T = T_;
  using State = Sum<T>;
  using Args = RMSNormArgs;
  static constexpr int kInputs = 1;
  static constexpr bool kMaps = true, kAnyOutput = true, kTotals = false;
  template <int TPR, int V>
  static constexpr bool kFetches = TPR >= 128 && TPR * V <= 1024;  // kernels.Variant.Fetches
  __device__ static bool done(const Args&) { return false; }
  struct Scalars {
    float rstd;
    unsigned fetched;  // vectors of weights in shared memory, a power of two; or 0
  };
  __device__ static uint4 fill() { return zero_vector(); }
  __device__ static Scalars begin(const Args&, int64_t, bool) { return {}; }
  __device__ static void follow(const Args&, int64_t, Scalars&, bool) {}
  // With few rows, weights come from memory, not from a cache: each thread copies those of its own columns into shared memory while
  // the row is reduced, if the launch has any. Many rows would only lose by it.
  template <int V, int Step, class Place>
  __device__ __forceinline__ static void fetch(const Args& a, Scalars& sc, const Place& p, int e) {
    constexpr int E = kElements<T>;
    extern __shared__ __align__(128) uint4 buffer[];
    if (dynamic_shared_bytes() == 0 || !a.weight || a.weight_type != kDType<T>) return;
    sc.fetched = Step / E * V;
    const T* weight = static_cast<const T*>(a.weight) + p.origin;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int ei = e + i * Step;
      copy_async<16>(buffer + static_cast<unsigned>(ei) / E % (Step / E * V), weight + (ei < p.span.hi ? ei : 0), ei < p.span.hi);
    }
    copies_commit();
  }
  template <class Tile, class Place>
  __device__ __forceinline__ static void add(const Args&, const Scalars&, State& st, const Tile& t, const Place&, int, int) {
#pragma unroll
    for (int i = 0; i < std::extent_v<decltype(t.a)>; i++) {
      float x[Tile::E];
      t.get_a(i, x);
      add_vector(st, x, x, x);
    }
  }
  template <int E>
  __device__ __forceinline__ static void add_vector(State& st, const float (&x)[E], const float (&)[E], const float (&)[E]) {
    st.add(x, x);
  }
  // kExact: rounds once, for float32 results of 16-bit rows.
  template <bool kExact = false, class F, int E>
  __device__ __forceinline__ static void map_vector(const Scalars& sc, const float (&x)[E], const float (&)[E],
                                                    const float (&w)[E], F (&)[E], float (&y)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float h = x[j] * sc.rstd;
      y[j] = h * w[j];
      if constexpr (kExact) y[j] = fmaf(h, w[j], fmaf(x[j], sc.rstd, -h) * w[j]);
    }
  }
  __device__ static void keep(const Args&, int64_t, const Scalars&) {}
  __device__ static void kept(const Args&, int64_t, Scalars&) {}
  __device__ __forceinline__ static void end(const Args& a, int64_t row, Scalars& sc, const State& st, bool first) {
    sc.rstd = __frsqrt_rn(fmaf(st.s, a.inv_n, a.eps));
    if (first && a.rstd) static_cast<float*>(a.rstd)[row] = sc.rstd;
    if (sc.fetched) copies_wait<0>();
  }
  template <bool General, int E, class Place>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E], const float (&)[E],
                                             const Place& p, int e, float (&y)[E]) {
    float w[E];
    extern __shared__ __align__(128) uint4 buffer[];
    if (sc.fetched) unpack(T(), buffer[static_cast<unsigned>(e) / E % sc.fetched], w);
    else load_weight<General>(a, p.origin, e, p.span, w);
    map_vector<General>(sc, x, x, w, w, y);
  }
};

// As part of `rows`, `partial` and `apply`: dx alone, where dw is not wanted, or the row sums of `columns`. `ring` and `lanes` hold
// dw too.
template <class T_>
struct RMSNormBackward {
  using T = T_;
  using State = Sum<T>;
  using Args = RMSNormArgs;
  static constexpr int kInputs = 2;
  static constexpr bool kMaps = true, kAnyOutput = false, kTotals = false;
  template <int TPR, int V>
  static constexpr bool kFetches = false;
  __device__ static bool done(const Args&) { return false; }
  struct Scalars {
    float rstd, mean;
  };
  __device__ static uint4 fill() { return zero_vector(); }
  __device__ static Scalars begin(const Args& a, int64_t row, bool) {
    return {static_cast<const float*>(a.rstd)[row], 0.f};
  }
  __device__ static void follow(const Args&, int64_t, Scalars&, bool) {}
  template <class Tile, class Place>
  __device__ __forceinline__ static void add(const Args& a, const Scalars&, State& st, const Tile& t, const Place& p, int e,
                                             int step) {
#pragma unroll
    for (int i = 0; i < std::extent_v<decltype(t.a)>; i++) {
      float x[Tile::E], dy[Tile::E], w[Tile::E];
      t.get_a(i, x);
      t.get_b(i, dy);
      load_weight<Tile::kGeneral>(a, p.origin, e + i * step, p.span, w);
      add_vector(st, x, dy, w);
    }
  }
  template <int E>
  __device__ __forceinline__ static void add_vector(State& st, const float (&x)[E], const float (&dy)[E], const float (&w)[E]) {
    float g[E];
#pragma unroll
    for (int j = 0; j < E; j++) g[j] = dy[j] * w[j];
    st.add(x, g);
  }
  // kExact: no rounding of dw's terms, which errs to one side where x * rstd is near 1.
  template <bool kExact = false, class F, int E>
  __device__ __forceinline__ static void map_vector(const Scalars& sc, const float (&x)[E], const float (&dy)[E],
                                                    const float (&w)[E], F (&dw)[E], float (&dx)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float h = x[j] * sc.rstd;
      if constexpr (kExact) dw[j] += static_cast<F>(dy[j]) * x[j] * sc.rstd;
      else dw[j] += dy[j] * h;
      dx[j] = (dy[j] * w[j] - h * sc.mean) * sc.rstd;
    }
  }
  __device__ static void keep(const Args&, int64_t, const Scalars&) {}
  __device__ static void kept(const Args& a, int64_t row, Scalars& sc) { sc = begin(a, row, false); }
  __device__ static void end(const Args& a, int64_t, Scalars& sc, const State& st, bool) {
    sc.mean = static_cast<float>(st.s) * sc.rstd * a.inv_n;
  }
  template <bool General, int E, class Place>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E], const float (&dy)[E],
                                             const Place& p, int e, float (&dx)[E]) {
    float w[E], unused[E] = {};
    load_weight<General>(a, p.origin, e, p.span, w);
    map_vector(sc, x, dy, w, unused, dx);
  }
};

// The weights of a thread's columns: held as floats for all rows where registers allow, else fetched again from the caches.
template <int V, int E, bool Held>
struct ColumnWeights {
  const RMSNormArgs& args;
  int64_t origin;
  int e, step;
  Span span;
  float held[Held ? V : 1][E];

  __device__ __forceinline__ ColumnWeights(const RMSNormArgs& a, int64_t origin, int e, int step, Span span)
      : args(a), origin(origin), e(e), step(step), span(span) {
    if constexpr (Held) {
#pragma unroll
      for (int i = 0; i < V; i++) load_weight<false>(a, origin, e + i * step, span, held[i]);
    }
  }
  __device__ __forceinline__ void get(int i, float (&w)[E]) const {
    if constexpr (Held) {
#pragma unroll
      for (int j = 0; j < E; j++) w[j] = held[i][j];
    } else {
      load_weight<false>(args, origin, e + i * step, span, w);
    }
  }
};

template <class F, int E>
__device__ __forceinline__ void store_partial(F* p, const F (&v)[E]) {
  constexpr int kPerVector = 16 / sizeof(F);
#pragma unroll
  for (int j = 0; j < E; j += kPerVector) {
    uint4 vector;
    memcpy(&vector, v + j, 16);
    *reinterpret_cast<uint4*>(p + j) = vector;
  }
}

// Long rows through persistent CTAs (or clusters) that own fixed columns: rows arrive by bulk copies in a ring of `stages` rows in
// shared memory; the columns' weights, and backward dw, stay in registers. Aligned rows only. Backward, each CTA (cluster) leaves one
// row of partial dw, which `weight_gradient` adds up.
template <class Op, int Threads, int V, bool Cluster>
__device__ __forceinline__ void ring_body(const RMSNormArgs& a) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  constexpr bool kBackward = Op::kInputs > 1;
  constexpr int E = kElements<T>, kWarps = Threads / 32, kSlice = Threads * V, kStage = Op::kInputs * kSlice, kMaxStages = 16;
  extern __shared__ __align__(128) uint4 buffer[];  // stages x inputs x kSlice
  __shared__ Slot<Sum<T>> warp_slots[2][kWarps], cluster_slots[2][Cluster ? 16 : 1];
  __shared__ uint64_t full[kMaxStages], merged[2];
  if constexpr (kBackward) let_next_launch_start();
  const int tid = threadIdx.x, stages = a.stages;
  const uint32_t size = Cluster ? cluster_size() : 1, rank = Cluster ? cluster_rank() : 0;
  const int64_t first_row = blockIdx.x / size, step = gridDim.x / size, rows = a.rows.m;
  const int vectors = static_cast<int>(a.rows.n / E);
  const int begin = rank * kSlice, count = max(0, min(kSlice, vectors - begin));
  const T* x = static_cast<const T*>(a.rows.a) + begin * E;
  const T* dy = static_cast<const T*>(a.rows.b) + begin * E;
  T* y = static_cast<T*>(a.rows.y) + begin * E;
  if (tid == 0) {
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1);
    barrier_init(merged, 1), barrier_init(merged + 1, 1);
    barrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if constexpr (Cluster) cluster_arrive(), cluster_wait();
  else __syncthreads();
  const auto fetch = [&](int64_t row, int stage) {
    if (count == 0) return;
    uint4* to = buffer + stage * kStage;
    barrier_expect(full + stage, count * 16 * Op::kInputs);
    bulk_copy(to, x + row * a.rows.a_stride, count * 16, full + stage);
    if constexpr (kBackward) bulk_copy(to + kSlice, dy + row * a.rows.b_stride, count * 16, full + stage);
  };
  if (tid == 0)
    for (int i = 0; i < stages && first_row + i * step < rows; i++) fetch(first_row + i * step, i);

  const Span span = {0, count * E};
  constexpr int kHeld = !kBackward ? 32 : Threads == 1024 ? 8 : 16;  // floats of weights that registers leave room for
  const ColumnWeights<V, E, (V * E <= kHeld)> weights(a, begin * E, tid * E, Threads * E, span);
  Accumulator<T> dw[kBackward ? V : 1][E] = {};
  int stage = 0, set = 0;
  uint32_t phase = 0, merged_phase = 0;
  auto next = Op::begin(a, first_row < rows ? first_row : 0, false);
  for (int64_t row = first_row; row < rows; row += step) {
    auto sc = next;
    if (row + step < rows) next = Op::begin(a, row + step, false);
    if (Cluster && tid == 0) barrier_expect(merged + set, size * sizeof(Sum<T>));
    if (count) barrier_wait(full + stage, phase);
    const uint4* from = buffer + stage * kStage + tid;
    uint4 xs[V], ds[kBackward ? V : 1];
    Sum<T> st;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const bool in = tid + i * Threads < count;
      float fx[E], fd[E], w[E];
      xs[i] = in ? from[i * Threads] : zero_vector();
      unpack(T(), xs[i], fx);
      if constexpr (kBackward) {
        ds[i] = in ? from[i * Threads + kSlice] : zero_vector();
        unpack(T(), ds[i], fd);
        weights.get(i, w);
      }
      Op::add_vector(st, fx, fd, w);
    }
    st.template reduce_lanes<32>();
    reduce_warps<kWarps>(st, warp_slots[set]);  // its barrier: everybody has read this stage
    if (tid == 0 && row + stages * step < rows) fetch(row + stages * step, stage);
    if constexpr (Cluster) reduce_cluster(st, cluster_slots[set], merged + set, merged_phase);
    Op::end(a, row, sc, st, tid == 0 && rank == 0);
#pragma unroll
    for (int i = 0; i < V; i++) {
      float fx[E], fd[E], w[E], out[E];
      forget<T>(xs[i], a.rows.zero);
      unpack(T(), xs[i], fx);
      if constexpr (kBackward) {
        forget<T>(ds[i], a.rows.zero);
        unpack(T(), ds[i], fd);
      }
      weights.get(i, w);
      Op::map_vector(sc, fx, fd, w, dw[kBackward ? i : 0], out);
      store<false>(y + row * a.rows.y_stride, (tid + i * Threads) * E, span, out);
    }
    if (++stage == stages) stage = 0, phase ^= 1;
    merged_phase ^= set;
    set ^= 1;
  }
  // Nobody may leave while others may still write into its shared memory.
  if constexpr (Cluster) cluster_arrive(), cluster_wait();
  if constexpr (kBackward) {
    Accumulator<T>* partial = static_cast<Accumulator<T>*>(a.dw_partial) + first_row * a.rows.n + begin * E;
#pragma unroll
    for (int i = 0; i < V; i++)
      if (tid + i * Threads < count) store_partial(partial + (tid + i * Threads) * E, dw[i]);
  }
#endif
}

// dx and dw, short rows: persistent groups of TPR lanes take a row each, with the next `Stages` - 1 rows on their way.
template <class T, int TPR, int V, int Stages>
__device__ __forceinline__ void lanes_body(const RMSNormArgs& a) {
  using Op = RMSNormBackward<T>;
  constexpr int E = kElements<T>, kThreads = 256, kGroups = kThreads / TPR, kWarps = kThreads / 32, kColumns = TPR * V * E;
  static_assert(TPR <= 32 && kWarps * kColumns * sizeof(Accumulator<T>) <= Stages * 2 * V * kThreads * sizeof(uint4));
  extern __shared__ __align__(128) uint4 buffer[];  // stages x (V of x, V of dy) x threads; then stages x threads of rstd
  float* rstd = reinterpret_cast<float*>(buffer + Stages * 2 * V * kThreads);
  let_next_launch_start();
  const int tid = threadIdx.x, lane = tid % TPR;
  const int64_t rows = a.rows.m, step = static_cast<int64_t>(gridDim.x) * kGroups;
  const Span span = {0, static_cast<int>(a.rows.n)};
  const auto fetch = [&](int64_t row, int stage) {
    const bool active = row < rows;
    const int64_t r = active ? row : 0;
    const T* x = static_cast<const T*>(a.rows.a) + r * a.rows.a_stride;
    const T* dy = static_cast<const T*>(a.rows.b) + r * a.rows.b_stride;
    uint4* to = buffer + stage * 2 * V * kThreads + tid;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int e = (lane + i * TPR) * E;
      const bool in = active && e < span.hi;
      copy_async<16>(to + i * kThreads, x + (in ? e : 0), in);
      copy_async<16>(to + (V + i) * kThreads, dy + (in ? e : 0), in);
    }
    copy_async<4>(rstd + stage * kThreads + tid, static_cast<const float*>(a.rstd) + r, active);
    copies_commit();
  };
  int64_t row = static_cast<int64_t>(blockIdx.x) * kGroups + tid / TPR;
#pragma unroll
  for (int i = 0; i < Stages; i++) fetch(row + i * step, i);
  const ColumnWeights<V, E, (V * E <= 16)> weights(a, 0, lane * E, TPR * E, span);
  Accumulator<T> dw[V][E] = {};
  int stage = 0;
  // All groups of a warp take part in its shuffles, so all make as many turns as the first.
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kGroups; base < rows; base += step, row += step) {
    copies_wait<Stages - 1>();
    const uint4* from = buffer + stage * 2 * V * kThreads + tid;
    uint4 x[V], dy[V];
    Sum<T> st;
#pragma unroll
    for (int i = 0; i < V; i++) {
      float fx[E], fd[E], w[E];
      unpack(T(), x[i] = from[i * kThreads], fx);
      unpack(T(), dy[i] = from[(V + i) * kThreads], fd);
      weights.get(i, w);
      Op::add_vector(st, fx, fd, w);
    }
    typename Op::Scalars sc = {rstd[stage * kThreads + tid], 0.f};
    fetch(row + Stages * step, stage);
    st.template reduce_lanes<TPR>();
    Op::end(a, row, sc, st, false);
#pragma unroll
    for (int i = 0; i < V; i++) {
      forget<T>(x[i], a.rows.zero), forget<T>(dy[i], a.rows.zero);
      float fx[E], fd[E], w[E], out[E];
      unpack(T(), x[i], fx);
      unpack(T(), dy[i], fd);
      weights.get(i, w);
      Op::map_vector(sc, fx, fd, w, dw[i], out);
      const Span in = {0, row < rows ? span.hi : 0};
      store<false>(static_cast<T*>(a.rows.y) + row * a.rows.y_stride, (lane + i * TPR) * E, in, out);
    }
    if (++stage == Stages) stage = 0;
  }
  // The groups of a warp, then the warps, in one order on every run.
#pragma unroll
  for (int i = 0; i < V; i++)
#pragma unroll
    for (int j = 0; j < E; j++)
#pragma unroll
      for (int k = TPR; k < 32; k *= 2) dw[i][j] += __shfl_xor_sync(kAllLanes, dw[i][j], k);
  copies_wait<0>();
  __syncthreads();  // the buffer is free
  Accumulator<T>* sums = reinterpret_cast<Accumulator<T>*>(buffer);
  if (tid % 32 < TPR)
#pragma unroll
    for (int i = 0; i < V; i++) store_partial(sums + tid / 32 * kColumns + (lane + i * TPR) * E, dw[i]);
  __syncthreads();
  for (int c = tid; c < a.rows.n; c += kThreads) {
    Accumulator<T> s = sums[c];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) s += sums[warp * kColumns + c];
    static_cast<Accumulator<T>*>(a.dw_partial)[static_cast<int64_t>(blockIdx.x) * a.rows.n + c] = s;
  }
}

// dx and dw of rows that neither shape takes: any alignment, any length, any type of dout. The rows' sums came from `partial`;
// here a CTA owns a tile of columns and walks down a block of rows. Vectors where rows are aligned, else elements that lie
// a CTA apart, so that a warp's accesses stay adjacent.
template <class T, bool General>
__device__ __forceinline__ void columns_body(const RMSNormArgs& a) {
  constexpr int kThreads = 256, E = kElements<T>, kTile = kThreads * E;
  wait_for_previous_launch();
  const int64_t tiles = (a.rows.n + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x % tiles, block = blockIdx.x / tiles, blocks = gridDim.x / tiles;
  const int64_t begin = tile * kTile;
  const Span span = {0, static_cast<int>(a.rows.n - begin < kTile ? a.rows.n - begin : kTile)};
  const int64_t first = a.rows.m * block / blocks, last = a.rows.m * (block + 1) / blocks;
  const auto column = [](int j) { return General ? static_cast<int>(threadIdx.x) + j * kThreads : static_cast<int>(threadIdx.x) * E + j; };
  Accumulator<T> dw[1][E] = {};
  float w[E];
#pragma unroll
  for (int j = 0; j < E; j++)
    w[j] = a.weight && column(j) < span.hi ? load_float(a.weight, a.weight_type, begin + column(j)) : 1.f;
  for (int64_t row = first; row < last; row++) {
    const T* x = static_cast<const T*>(a.rows.a) + row * a.rows.a_stride + begin;
    const void* dy = advance(a.rows.b, a.rows.b_type, row * a.rows.b_stride + begin);
    T* dx = static_cast<T*>(a.rows.y) + row * a.rows.y_stride + begin;
    float fx[E], fd[E], out[E];
    if constexpr (General) {
#pragma unroll
      for (int j = 0; j < E; j++) {
        const bool in = column(j) < span.hi;
        fx[j] = in ? to_float(x[column(j)]) : 0.f;
        fd[j] = in ? load_float(dy, a.rows.b_type, column(j)) : 0.f;
      }
    } else {
      unpack(T(), load<false>(x, column(0), span, zero_vector()), fx);
      unpack(T(), load<false>(static_cast<const T*>(dy), column(0), span, zero_vector()), fd);
    }
    Sum<T> dot;
    const Slot<Sum<T>>* slots = static_cast<const Slot<Sum<T>>*>(a.rows.partial) + row * a.rows.splits;
    for (int i = threadIdx.x % 32; i < a.rows.splits; i += 32) dot.merge(slots[i].load());
    dot.template reduce_lanes<32>();
    auto sc = RMSNormBackward<T>::begin(a, row, false);
    RMSNormBackward<T>::end(a, row, sc, dot, false);
    RMSNormBackward<T>::template map_vector<sizeof(T) == 4>(sc, fx, fd, w, dw[0], out);
    if constexpr (General) {
#pragma unroll
      for (int j = 0; j < E; j++)
        if (column(j) < span.hi) dx[column(j)] = from_float<T>(out[j]);
    } else {
      store<false>(dx, column(0), span, out);
    }
  }
  Accumulator<T>* partial = static_cast<Accumulator<T>*>(a.dw_partial) + block * a.rows.n + begin;
#pragma unroll
  for (int j = 0; j < E; j++)
    if (column(j) < span.hi) partial[column(j)] = dw[0][j];
}

// dw = the sum of the rows of partial dw, in one order. Few columns: a CTA of 32 x 32 threads takes 32 of them. Many: a thread to
// each, or the CTAs would be more than the work.
template <class T, int Threads>
__device__ __forceinline__ void weight_gradient_body(const RMSNormArgs& a) {
  constexpr int kWarps = Threads == 1024 ? 32 : 1, kColumns = Threads / kWarps;
  const int lane = threadIdx.x % kColumns, warp = threadIdx.x / kColumns;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns, column = first + lane, n = a.rows.n;
  const Accumulator<T>* partial = static_cast<const Accumulator<T>*>(a.dw_partial) + column;
  wait_for_previous_launch();
  constexpr int U = 16;  // loads at a time: with few rows of partial dw, one round trip to memory is all there is
  double s = 0;
  if (column < n)
    for (int64_t r = warp; r < a.partials; r += U * kWarps) {
      Accumulator<T> v[U];
#pragma unroll
      for (int u = 0; u < U; u++) v[u] = r + u * kWarps < a.partials ? partial[(r + u * kWarps) * n] : 0;
#pragma unroll
      for (int u = 0; u < U; u++) s += v[u];
    }
  if constexpr (kWarps == 1) {
    if (column < n) store_float(a.dw, a.dw_type, column, s);
  } else {  // a warp to each column
    __shared__ double sums[kWarps][kColumns + 1];
    sums[warp][lane] = s;
    __syncthreads();
    s = lanes_sum<32>(sums[lane][warp]);
    if (lane == 0 && first + warp < n) store_float(a.dw, a.dw_type, first + warp, s);
  }
}

}  // namespace gander
