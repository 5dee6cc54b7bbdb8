// RMSNorm over rows, forward and backward. With h = x * rstd and g = dout * weight:
//   y = h * weight,  dx = (g - h * mean(g * h)) * rstd,  dw = sum over rows of dout * h.
//
// Besides the bodies of rows.cuh, grid.cuh and ring.cuh:
//   staged_body           forward, with a row in the shared memory of a CTA or of a cluster
//   lanes_body            dx and dw of short rows: persistent groups of lanes
//   columns_body          dx and dw of any rows: a CTA walks down a tile of columns
//   weight_gradient_body  dw, from the partial dw that these and grid_cooperative_body store
#pragma once
#include "grid.cuh"
#include "ring.cuh"
#include "rmsnorm_args_gen.cuh"

namespace gander {

template <bool Unaligned, int E>
__device__ __forceinline__ void load_weight(const RMSNormArgs& a, int64_t origin, int e, Bounds bounds,
                                            float (&w)[E]) {
  if (a.weight) {
    load_floats<Unaligned>(advance(a.weight, a.weight_type, origin), a.weight_type, e, bounds, w);
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) w[j] = 1.f;
  }
}

// The weights of V vectors, the first at element e. InRegisters: loaded when the object is constructed. Of
// float32 weights of 16-bit rows, those of up to two vectors are, else half of them, and the other half at
// once when these have been used. All others are loaded in `map`, and shifted there if rows are unaligned.
template <class Op, int V, int Step, bool Unaligned, bool InRegisters, bool LateWide>
struct WeightOperands {
  using T = typename Op::T;
  static constexpr int E = kElements<T>;
  static constexpr bool kWide = InRegisters && sizeof(T) == 2 && Op::kInputs == 1 && !LateWide;
  static constexpr int kHeld = !InRegisters ? 1 : kWide && V <= 2 ? 2 * V : V, kHeldWide = kHeld / 2;
  const RMSNormArgs& args;
  const T* weight;    // null if there is none, or if it has another type
  const float* wide;  // kWide: the same for float32
  uint4 w[kHeld];

  template <class W>
  __device__ __forceinline__ static const W* weights_of(const RMSNormArgs& args, int64_t origin) {
    const bool same = args.weight && args.weight_type == kDType<W>;
    return same ? static_cast<const W*>(args.weight) + origin : nullptr;
  }
  __device__ __forceinline__ WeightOperands(const RMSNormArgs& args, const RowView<T>& p, int e)
      : args(args), weight(weights_of<T>(args, p.origin)), wide(nullptr) {
    if constexpr (kWide) wide = weights_of<float>(args, p.origin);
    load(p, e);
  }
  __device__ __forceinline__ void load(const RowView<T>& p, int e) {
    if constexpr (InRegisters) {
      const T* const at = opaque(weight + e);
#pragma unroll
      for (int i = 0; i < V; i++)
        w[i] = load_vector_if(weight && e + i * Step < p.bounds.hi, at + i * Step, zero_vector());
    }
    if constexpr (kWide)
      if (wide) load_wide(p, e, 0, w);
  }
  // The float32 weights of kHeldWide vectors from vector `first` on.
  __device__ __forceinline__ void load_wide(const RowView<T>& p, int e, int first, uint4 (&to)[kHeld]) const {
    const float* const at = opaque(const_cast<float*>(wide) + e);
#pragma unroll
    for (int i = 0; i < 2 * kHeldWide; i++) {
      const int vector = first + i / 2;
      if (vector < V)
        to[i] =
            load_vector_if(e + vector * Step < p.bounds.hi, at + vector * Step + i % 2 * 4, zero_vector());
    }
  }
  // Calls each(i, map) for each vector i. map(x, dy, y) computes vector i of the output from those of the
  // inputs.
  template <bool Cached, class Each>
  __device__ __forceinline__ void map(const typename Op::Scalars& sc, const RowView<T>& p, int e,
                                      Each each) const {
    const auto with_weight = [&](const float (&w)[E]) {
      return [&](const float (&x)[E], const float (&dy)[E], float (&y)[E]) {
        float unused[E] = {};
        Op::map_vector(sc, x, dy, w, unused, y);
      };
    };
    // How many vectors of weights are loaded at a time.
    constexpr int B = InRegisters ? 1 : V < 4 ? V : Unaligned ? sizeof(T) : 2;
    if (weight) {
#pragma unroll
      for (int i = 0; i < V; i += B) {
        if (Unaligned && e + i * Step >= p.bounds.hi) break;
        uint4 b[B];
        if constexpr (InRegisters) b[0] = w[i];
        else gander::load<Unaligned, false>(weight, e + i * Step, Step, p.bounds, zero_vector(), b);
#pragma unroll
        for (int k = 0; k < B; k++) {
          float f[E];
          unpack(T(), b[k], f);
          each(i + k, with_weight(f));
        }
      }
    } else if (kWide && wide) {
      if constexpr (kWide) {
        uint4 held[kHeld];
        memcpy(held, w, sizeof(held));
#pragma unroll
        for (int i = 0; i < V; i++) {
          if (i > 0 && i % kHeldWide == 0) load_wide(p, e, i, held);
          float f[E];
          memcpy(f, held + i % kHeldWide * 2, sizeof(f));
          each(i, with_weight(f));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int ei = e + i * Step;
        if (ei >= p.bounds.hi) break;
        float f[E];
        load_weight<Unaligned>(args, p.origin, ei, p.bounds, f);
        each(i, with_weight(f));
      }
    }
  }
};

template <class T_>
struct RMSNormForward : RowOperator<RMSNormForward<T_>> {
  using T = T_;
  using State = Sum<T>;
  using Args = RMSNormArgs;
  static constexpr bool kAnyOutputType = true;
  template <int V, int Step, bool Unaligned, bool InRegisters, bool LateWide = false>
  using EpilogueOperands = WeightOperands<RMSNormForward, V, Step, Unaligned, InRegisters, LateWide>;
  struct Scalars {
    float rstd;
  };
  template <bool Unaligned, int E>
  __device__ __forceinline__ static void load_weight(const Args& a, int64_t origin, int e, Bounds s,
                                                     float (&w)[E]) {
    gander::load_weight<Unaligned>(a, origin, e, s, w);
  }
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args&, State& st, const Tile& t, const View&, int,
                                                    int) {
#pragma unroll
    for (int i = 0; i < std::extent_v<decltype(t.a)>; i++) {
      float x[Tile::E];
      t.get_a(i, x);
      add_vector(st, x, x, x);
    }
  }
  template <int E>
  __device__ __forceinline__ static void add_vector(State& st, const float (&x)[E], const float (&)[E],
                                                    const float (&)[E]) {
    st.add(x, x);
  }
  // kExact: the result is rounded only once. That matters in unaligned kernels, which can store it as
  // float32.
  template <bool kExact = false, class F, int E>
  __device__ __forceinline__ static void map_vector(const Scalars& sc, const float (&x)[E],
                                                    const float (&)[E], const float (&w)[E], F (&)[E],
                                                    float (&y)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float h = x[j] * sc.rstd;
      y[j] = h * w[j];
      if constexpr (kExact) y[j] = fmaf(h, w[j], fmaf(x[j], sc.rstd, -h) * w[j]);
    }
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, Scalars& sc, const State& st,
                                                  bool leader) {
    sc.rstd = __frsqrt_rn(fmaf(st.s, a.inv_n, a.options.eps));
    if (leader && a.rstd) static_cast<float*>(a.rstd)[row] = sc.rstd;
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View& p, int e, float (&y)[E]) {
    float w[E];
    load_weight<Unaligned>(a, p.origin, e, p.bounds, w);
    map_vector<Unaligned>(sc, x, x, w, w, y);
  }
};

// The hooks compute dx alone. dw is summed by grid_cooperative_body, ring_body, lanes_body and columns_body.
// columns_body takes the states of rows from partial_body.
template <class T_>
struct RMSNormBackward : RowOperator<RMSNormBackward<T_>> {
  using T = T_;
  using State = Sum<T>;
  using Args = RMSNormArgs;
  static constexpr int kInputs = 2;
  template <int V, int Step, bool Unaligned, bool InRegisters, bool LateWide = false>
  using EpilogueOperands = WeightOperands<RMSNormBackward, V, Step, Unaligned, InRegisters, LateWide>;
  struct Scalars {
    float rstd, mean;
  };
  template <bool Unaligned, int E>
  __device__ __forceinline__ static void load_weight(const Args& a, int64_t origin, int e, Bounds s,
                                                     float (&w)[E]) {
    gander::load_weight<Unaligned>(a, origin, e, s, w);
  }
  template <int E>
  __device__ __forceinline__ static void reduce_columns(const Scalars&, State& st, const float (&x)[E],
                                                        const float (&dy)[E], const float (&w)[E], bool) {
    add_vector(st, x, dy, w);
  }
  template <int V>
  struct ColumnSums {
    static constexpr int E = kElements<T>;
    Accumulator<T> dw[V][E] = {};
    __device__ __forceinline__ void map(const Scalars& sc, int i, const float (&x)[E], const float (&dy)[E],
                                        const float (&w)[E], float (&dx)[E]) {
      map_vector(sc, x, dy, w, dw[i], dx);
    }
    template <bool Unaligned>
    __device__ __forceinline__ void store(const Args& a, int64_t run, int64_t origin, int i, int e,
                                          Bounds s) const {
      store_partial<Unaligned>(static_cast<Accumulator<T>*>(a.dw_partial) + run * a.rows.n + origin, e, s,
                               dw[i]);
    }
  };
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    return {static_cast<const float*>(a.rstd)[row], 0.f};
  }
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args& a, State& st, const Tile& t, const View& p,
                                                    int e, int step) {
#pragma unroll
    for (int i = 0; i < std::extent_v<decltype(t.a)>; i++) {
      float x[Tile::E], dy[Tile::E], w[Tile::E];
      t.get_a(i, x);
      t.get_b(i, dy);
      load_weight<Tile::kUnaligned>(a, p.origin, e + i * step, p.bounds, w);
      add_vector(st, x, dy, w);
    }
  }
  template <int E>
  __device__ __forceinline__ static void add_vector(State& st, const float (&x)[E], const float (&dy)[E],
                                                    const float (&w)[E]) {
    float g[E];
#pragma unroll
    for (int j = 0; j < E; j++) g[j] = dy[j] * w[j];
    st.add(x, g);
  }
  // kExact: the terms of dw are not rounded to float. That rounding is biased where x * rstd is near 1.
  template <bool kExact = false, class F, int E>
  __device__ __forceinline__ static void map_vector(const Scalars& sc, const float (&x)[E],
                                                    const float (&dy)[E], const float (&w)[E], F (&dw)[E],
                                                    float (&dx)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float h = x[j] * sc.rstd;
      if constexpr (kExact) dw[j] += static_cast<F>(dy[j]) * x[j] * sc.rstd;
      else dw[j] += dy[j] * h;
      dx[j] = (dy[j] * w[j] - h * sc.mean) * sc.rstd;
    }
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t, Scalars& sc, const State& st,
                                                  bool) {
    sc.mean = static_cast<float>(st.s) * sc.rstd * a.inv_n;
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&dy)[E], const View& p, int e, float (&dx)[E]) {
    float w[E], unused[E] = {};
    load_weight<Unaligned>(a, p.origin, e, p.bounds, w);
    map_vector(sc, x, dy, w, unused, dx);
  }
};

// Forward, long rows: a row lies in the shared memory of a CTA or of a cluster, which saves registers. Each
// thread copies the elements that it works on itself, so that the copies need no barrier. In an unaligned
// kernel all operands have the same offset.
template <class Op, int Threads, int V, unsigned Flags>
__device__ __forceinline__ void staged_body(const typename Op::Args& args) {
  constexpr bool Unaligned = Flags & kUnaligned, Cluster = Flags & kCluster;
#ifndef GANDER_SM90
  if constexpr (Cluster) return;
#endif
  using T = typename Op::T;
  using State = typename Op::State;
  using Place = RowPlace<Threads, V>;
  constexpr int E = kElements<T>, kWarps = Place::kMaxWarps, kStep = 32 * E;
  static_assert(Op::kInputs == 1 && !State::kMaxFirst);
  extern __shared__ __align__(128) uint4 buffer[];  // V x threads
  __shared__ Slot<State> warp_slots[kWarps];
  prefetch_later_rows<Op, Cluster>(args.rows, 1, Place::capacity() * E);
  const int64_t row = blockIdx.x;
  int e = Place::first(threadIdx.x) * E;
  bool leader = threadIdx.x == 0;
#ifdef GANDER_SM90
  __shared__ Slot<State> cluster_slots[Cluster ? 16 : 1];
  __shared__ uint64_t barrier;
  if constexpr (Cluster) {
    e += cluster_rank() * Place::capacity() * E;
    leader = leader && cluster_rank() == 0;
    cluster_begin(&barrier, sizeof(State));
  }
#endif
  const RowView<T> p = row_view<Op, Unaligned, true>(args.rows, row);
  auto sc = Op::load_scalars(args, row, leader);
  uint4* mine = buffer + Place::first(threadIdx.x);
  const T* const from = opaque(p.a + e);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int ei = e + i * kStep;
    if (Unaligned && ei >= p.bounds.hi) break;
    if (!Unaligned && ei >= p.bounds.hi) mine[i * 32] = Op::fill();
    else if (Unaligned && ei + E > p.load_bounds().load_end)
      mine[i * 32] = load_elements(from + i * kStep, p.bounds.lo - ei, p.bounds.hi - ei, Op::fill());
    else copy_async<16>(mine + i * 32, from + i * kStep, 16);
  }
  copies_commit();
  using Operands = typename Op::template EpilogueOperands<V, kStep, Unaligned, !Unaligned,
                                                          (Flags & kLateWideWeights) != 0>;
  const Operands operands(args, p, e);
  Op::resolve_scalars(args, row, sc, leader);
  copies_wait<0>();
  State st;
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int ei = e + i * kStep;
    if (Unaligned && ei >= p.bounds.hi) break;
    uint4 v = mine[i * 32];
    if (Unaligned && !p.bounds.template whole<E>(ei))
      v = masked<T>(v, p.bounds.lo - ei, p.bounds.hi - ei, Op::fill());
    float x[E];
    unpack(T(), v, x);
    Op::add_vector(st, x, x, x);
  }
  st.template reduce_lanes<32>();
  reduce_warps<kWarps>(st, warp_slots, Place::warps());
#ifdef GANDER_SM90
  if constexpr (Cluster) {
    cluster_wait();
    reduce_cluster(st, cluster_slots, &barrier, 0);
  }
#endif
  Op::finalize(args, row, sc, st, leader);
  T* const to = opaque(static_cast<T*>(p.y) + e);
  operands.template map<false>(sc, p, e, [&](int i, auto map) {
    const int ei = e + i * kStep;
    if (ei >= p.bounds.hi) return;
    float x[E], y[E];
    unpack(T(), mine[i * 32], x);
    map(x, x, y);
    if constexpr (Unaligned) store<Unaligned>(to - e, ei, p.bounds, y);
    else store_vector(to + i * kStep, y);
  });
}

// The `Columns` of grid_cooperative_body: the weights of a thread's columns, and in backward their dw.
template <class Op, int Threads, int V, unsigned Flags>
struct RMSNormColumnState {
  using T = typename Op::T;
  static constexpr int E = kElements<T>;
  static constexpr bool kBackward = Op::kInputs > 1;
  const RMSNormArgs& args;
  int64_t origin;
  int e;
  Bounds bounds;
  ColumnWeights<Op, V, !(Flags & kLateWeights), false> weights;
  Accumulator<T> dw[kBackward ? V : 1][E] = {};

  __device__ __forceinline__ RMSNormColumnState(const RMSNormArgs& args, int64_t origin, int e, int end)
      : args(args),
        origin(origin),
        e(e),
        bounds{0, end, end},
        weights(args, origin, e, Threads * E, bounds) {}
  template <class Tile>
  __device__ __forceinline__ void reduce(typename Op::State& st, const Tile& tile) const {
#pragma unroll
    for (int i = 0; i < V; i++) {
      float x[E], dy[E], w[E];
      tile.get_a(i, x);
      tile.get_b(i, dy);
      if constexpr (kBackward) weights.get(i, w);
      Op::add_vector(st, x, dy, w);
    }
    st.template reduce_lanes<32>();
  }
  template <class Tile>
  __device__ __forceinline__ void map(const typename Op::Scalars& sc, const Tile& tile, int64_t row) {
    T* y = static_cast<T*>(args.rows.y) + row * args.rows.y_stride + origin;
#pragma unroll
    for (int i = 0; i < V; i++) {
      float x[E], dy[E], w[E], out[E];
      tile.get_a(i, x);
      tile.get_b(i, dy);
      weights.get(i, w);
      Op::map_vector(sc, x, dy, w, dw[kBackward ? i : 0], out);
      store<false>(y, e + i * Threads * E, bounds, out);
    }
  }
  __device__ __forceinline__ void finish(int group) const {
    if constexpr (kBackward)
#pragma unroll
      for (int i = 0; i < V; i++)
        store_partial<false>(static_cast<Accumulator<T>*>(args.dw_partial) + group * args.rows.n + origin,
                             e + i * Threads * E, bounds, dw[i]);
  }
};

// dx and dw, short rows: persistent groups of TPR lanes, each of which works on one row and copies its next
// `Stages` - 1 rows to shared memory meanwhile. In an unaligned kernel the rows of a CTA are gridDim.x rows
// apart, and gridDim.x is a multiple of E. So they all have the same alignment. The three operands must have
// the same offset too.
template <class T, int Threads, int TPR, int V, int Stages, bool Unaligned>
__device__ __forceinline__ void lanes_body(const RMSNormArgs& a) {
  using Op = RMSNormBackward<T>;
  constexpr int E = kElements<T>, kColumns = TPR * V * E;
  constexpr int kGroups = Threads / TPR, kWarps = Threads / 32;
  static_assert(TPR <= 32);
  static_assert(kWarps * kColumns * sizeof(Accumulator<T>) <= Stages * 2 * V * Threads * sizeof(uint4));
  // stages x (x, dy) x V x threads, then rstd: stages x threads
  extern __shared__ __align__(128) uint4 buffer[];
  float* rstd = reinterpret_cast<float*>(buffer + Stages * 2 * V * Threads);
  let_next_launch_start();
  const int tid = threadIdx.x, lane = tid % TPR;
  const int64_t rows = a.rows.m, ctas = gridDim.x, step = ctas * kGroups, n = a.rows.n;
  const int shift = Unaligned ? vector_offset(static_cast<T*>(a.rows.y) + blockIdx.x * a.rows.y_stride) : 0;
  const Bounds bounds = {shift, static_cast<int>(n) + shift, static_cast<int>(n) + shift};
  const auto fetch = [&](int64_t row, int stage) {
    const bool active = row < rows;
    // Inactive groups read nothing, but need an address of the right alignment.
    const int64_t r = active ? row : Unaligned ? blockIdx.x : 0;
    const T* x = static_cast<const T*>(a.rows.a) + r * a.rows.a_stride - shift;
    const T* dy = static_cast<const T*>(a.rows.b) + r * a.rows.b_stride - shift;
    uint4* to = buffer + stage * 2 * V * Threads + tid;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int e = (lane + i * TPR) * E, left = bounds.hi - e;
      const bool in = active && left > 0;
      const int bytes = !in ? 0 : Unaligned && left < E ? left * static_cast<int>(sizeof(T)) : 16;
      if (Unaligned && in && left < E && (rows - 1 - row) * min(a.rows.a_stride, a.rows.b_stride) < E) {
        // A 16-byte load could pass the end of the tensor.
        to[i * Threads] = load_elements(x + e, shift - e, left, zero_vector());
        to[(V + i) * Threads] = load_elements(dy + e, shift - e, left, zero_vector());
        continue;
      }
      copy_async<16>(to + i * Threads, x + (in ? e : 0), bytes);
      copy_async<16>(to + (V + i) * Threads, dy + (in ? e : 0), bytes);
    }
    copy_async<4>(rstd + stage * Threads + tid, static_cast<const float*>(a.rstd) + r, active ? 4 : 0);
    copies_commit();
  };
  const int64_t first = Unaligned ? blockIdx.x : blockIdx.x * static_cast<int64_t>(kGroups);
  int64_t row = first + tid / TPR * (Unaligned ? ctas : 1);
#pragma unroll
  for (int i = 0; i < Stages; i++) fetch(row + i * step, i);
  const ColumnWeights<Op, V, true, Unaligned> weights(a, -shift, lane * E, TPR * E, bounds);
  Accumulator<T> dw[V][E] = {};
  int stage = 0;
  // All lanes of a warp take part in its shuffles. So all groups do as many iterations as the CTA's first.
  for (int64_t base = first; base < rows; base += step, row += step) {
    copies_wait<Stages - 1>();
    const uint4* from = buffer + stage * 2 * V * Threads + tid;
    uint4 x[V], dy[V];
    Sum<T> st;
#pragma unroll
    for (int i = 0; i < V; i++) {
      float fx[E], fd[E], w[E];
      x[i] = from[i * Threads], dy[i] = from[(V + i) * Threads];
      if (Unaligned && i == 0 && lane == 0) {  // masks elements before the row; those after it are zeros
        x[i] = masked<T>(x[i], shift, E, zero_vector());
        dy[i] = masked<T>(dy[i], shift, E, zero_vector());
      }
      unpack(T(), x[i], fx);
      unpack(T(), dy[i], fd);
      weights.get(i, w);
      Op::add_vector(st, fx, fd, w);
    }
    typename Op::Scalars sc = {rstd[stage * Threads + tid], 0.f};
    fetch(row + Stages * step, stage);
    st.template reduce_lanes<TPR>();
    Op::finalize(a, row, sc, st, false);
#pragma unroll
    for (int i = 0; i < V; i++) {
      rematerialize<T>(x[i], a.rows.opaque_zero), rematerialize<T>(dy[i], a.rows.opaque_zero);
      float fx[E], fd[E], w[E], out[E];
      unpack(T(), x[i], fx);
      unpack(T(), dy[i], fd);
      weights.get(i, w);
      Op::map_vector(sc, fx, fd, w, dw[i], out);
      const Bounds in = {bounds.lo, row < rows ? bounds.hi : 0};
      T* const y = static_cast<T*>(a.rows.y) + row * a.rows.y_stride - shift;
      store<Unaligned>(y, (lane + i * TPR) * E, in, out);
    }
    if (++stage == Stages) stage = 0;
  }
  // Sums dw over the groups of a warp, then over the warps, in a fixed order.
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
    for (int i = 0; i < V; i++)
      store_partial<false>(sums + tid / 32 * kColumns, (lane + i * TPR) * E, Bounds{0, kColumns}, dw[i]);
  __syncthreads();
  for (int c = tid; c < n; c += Threads) {
    Accumulator<T> s = sums[c + shift];
#pragma unroll
    for (int warp = 1; warp < kWarps; warp++) s += sums[warp * kColumns + c + shift];
    static_cast<Accumulator<T>*>(a.dw_partial)[static_cast<int64_t>(blockIdx.x) * n + c] = s;
  }
}

// dx and dw of rows that no other body takes: any alignment, any length, any type of dout. partial_body has
// computed the rows' states. A CTA owns a tile of columns, and a block of rows which it walks down. In an
// aligned kernel a thread owns a vector. In an unaligned kernel its elements are 256 columns apart, so that a
// warp's accesses are adjacent.
template <class T, bool Unaligned>
__device__ __forceinline__ void columns_body(const RMSNormArgs& a) {
  constexpr int E = kElements<T>, kTile = kChunkThreads * E;
  wait_for_previous_launch();
  const int64_t tiles = (a.rows.n + kTile - 1) / kTile;
  const int64_t tile = blockIdx.x % tiles, block = blockIdx.x / tiles, blocks = gridDim.x / tiles;
  const int64_t begin = tile * kTile;
  const Bounds bounds = {0, static_cast<int>(a.rows.n - begin < kTile ? a.rows.n - begin : kTile)};
  const int64_t first = a.rows.m * block / blocks, last = a.rows.m * (block + 1) / blocks;
  const auto column = [](int j) {
    const int tid = threadIdx.x;
    return Unaligned ? tid + j * kChunkThreads : tid * E + j;
  };
  Accumulator<T> dw[1][E] = {};
  float w[E];
#pragma unroll
  for (int j = 0; j < E; j++)
    w[j] = a.weight && column(j) < bounds.hi ? load_float(a.weight, a.weight_type, begin + column(j)) : 1.f;
  for (int64_t row = first; row < last; row++) {
    const T* x = static_cast<const T*>(a.rows.a) + row * a.rows.a_stride + begin;
    const void* dy = advance(a.rows.b, a.rows.b_type, row * a.rows.b_stride + begin);
    T* dx = static_cast<T*>(a.rows.y) + row * a.rows.y_stride + begin;
    float fx[E], fd[E], out[E];
    if constexpr (Unaligned) {
#pragma unroll
      for (int j = 0; j < E; j++) {
        const bool in = column(j) < bounds.hi;
        fx[j] = in ? to_float(x[column(j)]) : 0.f;
        fd[j] = in ? load_float(dy, a.rows.b_type, column(j)) : 0.f;
      }
    } else {
      uint4 vx[1], vd[1];
      load<false, true>(x, column(0), 0, bounds, zero_vector(), vx);
      load<false, true>(static_cast<const T*>(dy), column(0), 0, bounds, zero_vector(), vd);
      unpack(T(), vx[0], fx);
      unpack(T(), vd[0], fd);
    }
    Sum<T> dot;
    const Slot<Sum<T>>* slots = static_cast<const Slot<Sum<T>>*>(a.rows.partial) + row * a.rows.splits;
    for (int i = threadIdx.x % 32; i < a.rows.splits; i += 32) dot.merge(slots[i].load());
    dot.template reduce_lanes<32>();
    auto sc = RMSNormBackward<T>::load_scalars(a, row, false);
    RMSNormBackward<T>::finalize(a, row, sc, dot, false);
    RMSNormBackward<T>::template map_vector<sizeof(T) == 4>(sc, fx, fd, w, dw[0], out);
    if constexpr (Unaligned) {
#pragma unroll
      for (int j = 0; j < E; j++)
        if (column(j) < bounds.hi) dx[column(j)] = from_float<T>(out[j]);
    } else {
      store<false>(dx, column(0), bounds, out);
    }
  }
  Accumulator<T>* partial = static_cast<Accumulator<T>*>(a.dw_partial) + block * a.rows.n + begin;
#pragma unroll
  for (int j = 0; j < E; j++)
    if (column(j) < bounds.hi) partial[column(j)] = dw[0][j];
}

// dw: sums the rows of partial dw in a fixed order. `Parts` threads share a column.
template <class T, int Threads, int Parts>
__device__ __forceinline__ void weight_gradient_body(const RMSNormArgs& a) {
  int64_t column;
  double sum;
  if (sum_column<Threads, Parts>(static_cast<const Accumulator<T>*>(a.dw_partial), a.rows.n, a.partials,
                                 column, sum))
    store_float(a.dw, a.dw_type, column, sum);
}

}  // namespace gander
