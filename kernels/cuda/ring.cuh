// Gradients over rows that arrive by bulk copies in a ring in shared memory. RMSNorm and LayerNorm use it.
#pragma once
#include "rows.cuh"

namespace gander {

// The weights of a thread's columns. InRegisters: kept as floats for all rows. Otherwise each use loads them
// again, normally from L1.
template <class Op, int V, bool InRegisters, bool Unaligned>
struct ColumnWeights {
  using Args = typename Op::Args;
  static constexpr int E = kElements<typename Op::T>;
  const Args& args;
  int64_t origin;
  int e, step;
  Bounds bounds;
  float cached[InRegisters ? V : 1][E];

  __device__ __forceinline__ ColumnWeights(const Args& a, int64_t origin, int e, int step, Bounds bounds)
      : args(a), origin(origin), e(e), step(step), bounds(bounds) {
    if constexpr (InRegisters) {
#pragma unroll
      for (int i = 0; i < V; i++)
        Op::template load_weight<Unaligned>(a, origin, e + i * step, bounds, cached[i]);
    }
  }
  __device__ __forceinline__ void get(int i, float (&w)[E]) const {
    if constexpr (InRegisters) {
#pragma unroll
      for (int j = 0; j < E; j++) w[j] = cached[i][j];
    } else {
      Op::template load_weight<Unaligned>(args, origin, e + i * step, bounds, w);
    }
  }
};

// Stores the partial dw of one vector's columns.
template <bool Unaligned, class F, int E>
__device__ __forceinline__ void store_partial(F* p, int e, Bounds s, const F (&v)[E]) {
  if constexpr (Unaligned) {
#pragma unroll
    for (int j = 0; j < E; j++)
      if (e + j >= s.lo && e + j < s.hi) p[e + j] = v[j];
  } else if (e < s.hi) {
    constexpr int kPerVector = 16 / sizeof(F);
#pragma unroll
    for (int j = 0; j < E; j += kPerVector) {
      uint4 vector;
      memcpy(&vector, v + j, 16);
      *reinterpret_cast<uint4*>(p + e + j) = vector;
    }
  }
}

// The columns of an input that a CTA of ring_body owns. In an unaligned kernel the 16-byte vectors of the
// input begin `k` elements before those of the output. They are copied to shared memory as they are, and
// shifted when they are read.
template <class T, bool Unaligned>
struct Slice {
  static constexpr int E = kElements<T>;
  const T* p;  // the CTA's first column in row 0
  int64_t stride;
  Bounds bounds;
  int k;
  int begin, end;  // the vectors to copy; number 0 is the one that holds p[0]

  __device__ __forceinline__ Slice(const void* base, int64_t stride, int64_t origin, Bounds bounds)
      : p(static_cast<const T*>(base) + origin), stride(stride), bounds(bounds) {}
  // All rows that follow must be aligned as this one.
  __device__ __forceinline__ void set_alignment(int64_t row) {
    k = Unaligned ? vector_offset(p + row * stride) : 0;
    begin = (k + bounds.lo) / E;
    end = bounds.hi > bounds.lo ? (k + bounds.hi + E - 1) / E : begin;
  }
  // True if enough rows follow that the load of this row's last vector stays within the tensor.
  __device__ __forceinline__ bool row_follows(int64_t row, int64_t rows) const {
    return (rows - 1 - row) * stride >= E;
  }
  // The number of vectors that `copy` copies. It leaves out a last vector that could pass the end of the
  // tensor.
  __device__ __forceinline__ int count(int64_t row, int64_t rows) const {
    const bool whole = !Unaligned || (k + bounds.hi) % E == 0 || row_follows(row, rows);
    return max(end - !whole - begin, 0);
  }
#ifdef GANDER_SM90
  __device__ __forceinline__ void copy(uint4* to, int64_t row, int64_t rows, uint64_t* barrier) const {
    const int vectors = count(row, rows);
    if (vectors) bulk_copy(to + begin, p + row * stride - k + begin * E, vectors * 16, barrier);
  }
#endif
  // In an unaligned kernel the caller has to mask what is out of bounds.
  __device__ __forceinline__ uint4 read(const uint4* from, int vector) const {
    if constexpr (!Unaligned) return vector * E < bounds.hi ? from[vector] : zero_vector();
    const uint4 v = from[vector];
    return k ? shifted(v, from[vector + 1], k * sizeof(T)) : v;
  }
  // Loads the elements of a vector that `copy` may have left out.
  __device__ __forceinline__ void load_tail(uint4& v, int vector, int64_t row) const {
    const int e = vector * E;
    if (bounds.touches<E>(e) && e + E + (k ? E - k : 0) > bounds.hi)
      v = load_elements(p + row * stride + e, bounds.lo - e, bounds.hi - e, zero_vector());
  }
};

// Initializes the barriers of a ring: one for each stage, and two for the states of a cluster's CTAs.
template <bool Cluster>
__device__ __forceinline__ void init_ring(uint64_t* full, int stages, uint64_t (&merged)[2]) {
#ifdef GANDER_SM90
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1);
    barrier_init(merged, 1), barrier_init(merged + 1, 1);
    barrier_init_fence();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  if constexpr (Cluster) cluster_arrive(), cluster_wait();
  else __syncthreads();
#endif
}

// Divides the rows among persistent CTAs (or clusters), of which there are `ctas`.
//
// Aligned kernels: CTA c takes the rows c, c + ctas, c + 2 * ctas and so on.
//
// Unaligned kernels: rows that are E rows apart have the same alignment (E elements are a vector), and a
// thread can keep its columns only among such rows. So the rows are sorted by row % E, and each CTA takes an
// equal, contiguous part of that order. It calls `work` for each run of the same alignment in its part, even
// for empty ones. So the runs of all CTAs have each number from 0 to ctas + E - 2.
template <bool Unaligned, int E, class Work>
__device__ __forceinline__ void partition_rows(int64_t rows, int64_t cta, int64_t ctas, Work work) {
  if constexpr (!Unaligned) {
    work(cta, ctas, rows, cta);
  } else {
    const auto start = [&](int64_t c) { return c * (rows / E) + min(c, rows % E); };
    const auto residue = [&](int64_t position) {
      int c = E - 1;
      while (start(c) > position) c--;
      return c;
    };
    const int64_t from = rows * cta / ctas, to = rows * (cta + 1) / ctas;
    const int last = residue(to);
    for (int c = residue(from); c <= last; c++) {
      const int64_t first = max(from - start(c), static_cast<int64_t>(0));
      const int64_t end = min(to, start(c + 1)) - start(c);
      work(c + E * first, static_cast<int64_t>(E), c + E * end, cta + c);
    }
  }
}

// The gradients of long rows: persistent CTAs (or clusters) that own fixed columns. Rows arrive by bulk
// copies in a ring of `stages` rows in shared memory. The columns' weights and the sums over rows stay in
// registers. Each run of rows (see partition_rows) leaves one row of partial sums, which another kernel adds
// up.
//
// An operator with a third input adds it to dx. Besides the hooks of RowOperator an operator has
//   load_weight<Unaligned>(args, origin, e, bounds, w)   a vector of weights
//   reduce_columns(scalars, state, x, dy, w, in)         adds a vector to a row's state; in: it is in bounds
//   ColumnSums<V>                                        a thread's sums over rows: map() computes a vector
//                                                        of dx and adds to them, store() stores a vector's
template <class Op, int Threads, int V, bool Cluster, bool Unaligned>
__device__ __forceinline__ void ring_body(const typename Op::Args& a) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  using State = typename Op::State;
  using Place = RowPlace<Threads, V>;
  constexpr int E = kElements<T>, kWarps = Place::kMaxWarps, kMaxStages = 16;
  const int slice = Place::capacity();  // vectors of a row
  const int input = slice + Unaligned;  // and those that it touches, if it is shifted
  constexpr bool kThird = Op::kInputs > 2;
  static_assert(!kThird || !Unaligned);
  extern __shared__ __align__(128) uint4 buffer[];  // stages x (x, dy and the third input) x input
  __shared__ Slot<State> warp_slots[2][kWarps], cluster_slots[2][Cluster ? 16 : 1];
  __shared__ uint64_t full[kMaxStages], merged[2];
  let_next_launch_start();
  const int tid = threadIdx.x, own = Place::first(tid), stages = a.rows.stages;
  const uint32_t size = Cluster ? cluster_size() : 1, rank = Cluster ? cluster_rank() : 0;
  const int64_t rows = a.rows.m, n = a.rows.n;
  init_ring<Cluster>(full, stages, merged);
  int stage = 0, set = 0;
  uint32_t phase = 0, merged_phase = 0;
  const auto work = [&](int64_t first, int64_t step, int64_t limit, int64_t run) {
    const int shift = Unaligned ? vector_offset(static_cast<T*>(a.rows.y) + first * a.rows.y_stride) : 0;
    const int origin = static_cast<int>(rank) * slice * E - shift, left = static_cast<int>(n) - origin;
    const Bounds bounds = {max(-origin, 0), max(min(left, slice * E), 0), left};
    Slice<T, Unaligned> x(a.rows.a, a.rows.a_stride, origin, bounds);
    Slice<T, Unaligned> dy(a.rows.b, a.rows.b_stride, origin, bounds);
    x.set_alignment(first);
    dy.set_alignment(first);
    const auto third = [&] {
      if constexpr (kThird) {
        Slice<T, false> c(a.c, a.c_stride, origin, bounds);
        c.set_alignment(first);
        return c;
      } else {
        return 0;
      }
    }();
    T* y = static_cast<T*>(a.rows.y) + origin;
    const auto fetch = [&](int64_t row, int at) {
      if (!Unaligned && bounds.hi == 0) return;
      uint4* to = buffer + at * Op::kInputs * input;
      int vectors = x.count(row, rows) + dy.count(row, rows);
      if constexpr (kThird) vectors += third.count(row, rows);
      barrier_expect(full + at, vectors * 16);
      x.copy(to, row, rows, full + at);
      dy.copy(to + input, row, rows, full + at);
      if constexpr (kThird) third.copy(to + 2 * input, row, rows, full + at);
    };
    if (tid == 0)
      for (int i = 0; i < stages && first + i * step < limit; i++)
        fetch(first + i * step, stage + i < stages ? stage + i : stage + i - stages);

    const ColumnWeights<Op, V, true, Unaligned> weights(a, origin, own * E, 32 * E, bounds);
    typename Op::template ColumnSums<V> sums;
    uint4 inside[V];  // masks of the elements within bounds, the same for all rows of the run
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int e = (own + i * 32) * E;
      inside[i] = masked<T>(make_uint4(~0u, ~0u, ~0u, ~0u), bounds.lo - e, bounds.hi - e, zero_vector());
    }
    auto next = Op::load_scalars(a, first < limit ? first : 0, false);
    for (int64_t row = first; row < limit; row += step) {
      auto sc = next;
      if (row + step < limit) next = Op::load_scalars(a, row + step, false);
      if (Cluster && tid == 0) barrier_expect(merged + set, size * sizeof(State));
      if (Unaligned || bounds.hi) barrier_wait(full + stage, phase);
      const uint4* from = buffer + stage * Op::kInputs * input;
      uint4 xs[V], ds[V], cs[kThird ? V : 1];
#pragma unroll
      for (int i = 0; i < V; i++) {
        xs[i] = x.read(from, own + i * 32);
        ds[i] = dy.read(from + input, own + i * 32);
        if constexpr (kThird) cs[i] = third.read(from + 2 * input, own + i * 32);
      }
      if constexpr (Unaligned) {
        if (!x.row_follows(row, rows) || !dy.row_follows(row, rows))
#pragma unroll
          for (int i = 0; i < V; i++) {
            x.load_tail(xs[i], own + i * 32, row);
            dy.load_tail(ds[i], own + i * 32, row);
          }
#pragma unroll
        for (int i = 0; i < V; i++) xs[i] = xs[i] & inside[i], ds[i] = ds[i] & inside[i];
      }
      State st;
#pragma unroll
      for (int i = 0; i < V; i++) {
        float fx[E], fd[E], w[E];
        unpack(T(), xs[i], fx);
        unpack(T(), ds[i], fd);
        weights.get(i, w);
        Op::reduce_columns(sc, st, fx, fd, w, (own + i * 32) * E < bounds.hi);
      }
      st.template reduce_lanes<32>();
      // After its barrier all threads have read the stage.
      reduce_warps<kWarps>(st, warp_slots[set], Place::warps());
      if (tid == 0 && row + stages * step < limit) fetch(row + stages * step, stage);
      if constexpr (Cluster) reduce_cluster(st, cluster_slots[set], merged + set, merged_phase);
      Op::finalize(a, row, sc, st, tid == 0 && rank == 0);
#pragma unroll
      for (int i = 0; i < V; i++) {
        float fx[E], fd[E], w[E], out[E];
        rematerialize<T>(xs[i], a.rows.opaque_zero), rematerialize<T>(ds[i], a.rows.opaque_zero);
        unpack(T(), xs[i], fx);
        unpack(T(), ds[i], fd);
        weights.get(i, w);
        sums.map(sc, i, fx, fd, w, out);
        if constexpr (kThird) {
          float more[E];
          unpack(T(), cs[i], more);
#pragma unroll
          for (int j = 0; j < E; j++) out[j] += more[j];
        }
        store<Unaligned>(y + row * a.rows.y_stride, (own + i * 32) * E, bounds, out);
      }
      if (++stage == stages) stage = 0, phase ^= 1;
      merged_phase ^= set;
      set ^= 1;
    }
#pragma unroll
    for (int i = 0; i < V; i++) sums.template store<Unaligned>(a, run, origin, i, (own + i * 32) * E, bounds);
  };
  partition_rows<Unaligned, E>(rows, blockIdx.x, gridDim.x, work);
  // The CTA may exit: it has received all that others send to its shared memory.
#endif
}

// Adds up one column of the partial sums that ring_body and others leave, in a fixed order. `Parts` threads
// share a column. Returns whether this thread has the sum of one.
template <int Threads, int Parts, class A>
__device__ __forceinline__ bool sum_column(const A* partial, int64_t width, int rows, int64_t& column,
                                           double& sum) {
  constexpr int kColumns = Threads / Parts;
  constexpr int U = 16;  // loads at a time: few rows are then read in one round trip to memory
  const int part = threadIdx.x / kColumns;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns;
  column = first + threadIdx.x % kColumns;
  const A* at = partial + part * width + column;
  wait_for_previous_launch();
  sum = 0;
  if (column < width)
    for (int r = part; r < rows; r += U * Parts) {
      A v[U];
#pragma unroll
      for (int u = 0; u < U; u++, at += Parts * width) v[u] = r + u * Parts < rows ? *at : 0;
#pragma unroll
      for (int u = 0; u < U; u++) sum += v[u];
    }
  // Transposes through shared memory, so that a column's parts are in adjacent lanes.
  if constexpr (Parts > 1) {
    __shared__ double sums[Parts][kColumns + 1];
    sums[part][threadIdx.x % kColumns] = sum;
    __syncthreads();
    const int lane = threadIdx.x % Parts, c = threadIdx.x / Parts;
    sum = lanes_sum<Parts>(sums[lane][c]);
    column = first + c;
    if (lane != 0) return false;
  }
  return column < width;
}

}  // namespace gander
