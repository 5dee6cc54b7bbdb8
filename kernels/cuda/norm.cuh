// RMSNorm and LayerNorm with all their options, forward and backward. What is used most has kernels of its
// own (rmsnorm.cuh, aligned_norm.cuh). With h = x + residual, rounded to sum_type, and g = dout * (weight +
// weight_offset):
//   xhat = (h - mean) * rstd,  y = xhat * (weight + weight_offset) + bias,  residual_out = h
//   dx = (g - mean(g) - xhat * mean(g * xhat)) * rstd + dresidual_out,  dresidual = dx
//   dw = sum over rows of dout * xhat,  db = sum over rows of dout
// RMSNorm has neither mean nor mean(g). With round_normalized, y and dw have xhat rounded. With heads, rows
// have the weight and bias of their head, and dw and db are sums over the rows of each.
//
// Which options a call uses is decided at run time, as are the types of all operands but the first: these
// conditions are the same for all threads, and a kernel that waits for memory has time for them.
//
//   norm_rows_body     forward: a row lies in the registers of TPR threads of a CTA, or of a cluster
//   norm_partial_body  forward and backward: the state of one chunk of a row
//   norm_apply_body    forward: merges the states of a row's chunks, and maps one of the chunks
//   norm_ring_body     backward: persistent CTAs or clusters, a ring of rows in shared memory
//   norm_columns_body  backward, after norm_partial_body: a CTA walks down a tile of columns
//   norm_finish_body   dw and db, from the sums that the last two leave
#pragma once
#include "aligned_norm.cuh"
#include "operands.cuh"

namespace gander {

// ---- Operands.

// V vectors of a row: of x, or of x + residual, rounded to sum_type. Elements out of bounds are 0.
template <class T, int V, bool Unaligned>
__device__ __forceinline__ void load_sum(const NormArgs& a, int64_t row, int64_t origin, int e, int step,
                                         Bounds s, float (&h)[V][kElements<T>]) {
  constexpr int E = kElements<T>;
  const T* const x = static_cast<const T*>(a.rows.a) + row * a.rows.a_stride + origin;
  const void* const r = advance(a.rows.b, a.rows.b_type, row * a.rows.b_stride + origin);
  if constexpr (!Unaligned) {
    load_vectors<false>(x, e, step, s.hi, h);
    if (sizeof(T) == 2 && a.sum_type == kDType<T>) {  // and the residual is a T: see forwardRequest in ops
      load_vectors<true>(static_cast<const T*>(r), e, step, s.hi, h);
#pragma unroll
      for (int i = 0; i < V; i++) unpack(T(), pack(T(), h[i]), h[i]);
    } else if (a.rows.b) {
      add_vectors(r, a.rows.b_type, e, step, s.hi, h);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; i++) {
      load_floats<true>(x, kDType<T>, e + i * step, s, h[i]);
      if (a.rows.b) {
        float f[E];
        load_floats<true>(r, a.rows.b_type, e + i * step, s, f);
#pragma unroll
        for (int j = 0; j < E; j++) h[i][j] += f[j];
      }
#pragma unroll
      for (int j = 0; j < E; j++) h[i][j] = rounded(a.sum_type, h[i][j]);
    }
  }
}

// Where the weight and the bias of a row begin, in elements.
__device__ __forceinline__ int64_t parameters_of(const NormArgs& a, int64_t row) {
  return a.heads == 1 ? 0 : row % a.heads * a.rows.n;
}

// origin: where column e = 0 is in the weights.
template <bool Unaligned, int E>
__device__ __forceinline__ void load_scale(const NormArgs& a, int64_t origin, int e, Bounds s,
                                           float (&w)[E]) {
#pragma unroll
  for (int j = 0; j < E; j++) w[j] = 1.f;
  if (!a.weight) return;
  load_floats<Unaligned>(advance(a.weight, a.weight_type, origin), a.weight_type, e, s, w);
#pragma unroll
  for (int j = 0; j < E; j++) w[j] += a.weight_offset;  // if none, -0: adding it changes no bit
}

template <bool Unaligned, int E>
__device__ __forceinline__ void load_bias(const NormArgs& a, int64_t origin, int e, Bounds s, float (&b)[E]) {
#pragma unroll
  for (int j = 0; j < E; j++) b[j] = 0.f;
  if (a.bias) load_floats<Unaligned>(advance(a.bias, a.bias_type, origin), a.bias_type, e, s, b);
}

// ---- Forward.

// The state of V vectors of each of L lanes. Elements out of bounds are 0, and are not counted.
template <class T, int L, int V, bool Unaligned>
__device__ __forceinline__ Moments<T> tile_moments(bool center, const float (&h)[V][kElements<T>], int e,
                                                   int step, int end) {
  using A = Accumulator<T>;
  constexpr int E = kElements<T>;
  Moments<T> st;
  if (!center) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      float q = 0.f;
#pragma unroll
      for (int j = 0; j < E; j++) q = fmaf(h[i][j], h[i][j], q);
      st.m2 += q;
    }
    st.m2 = lanes_sum<L>(st.m2);
    return st;
  }
  // First a mean that is about right, so that the deviations from it have all digits.
  A sum = 0;
  int count = 0;
  const int first = e - static_cast<int>(threadIdx.x % L) * E;
#pragma unroll
  for (int i = 0; i < V; i++) {
    count += max(min(end - first - i * step, L * E), 0);
    float t = h[i][0];
#pragma unroll
    for (int j = 1; j < E; j++) t += h[i][j];
    sum += t;
  }
  sum = lanes_sum<L>(sum);
  if (count == 0) return st;
  st.count = static_cast<float>(count);
  const float mean = static_cast<float>(sum / st.count);
  A rest = 0;  // what float32 rows still deviate from it
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int left = end - e - i * step;
    if (left <= 0) break;
    float t = 0.f, q = 0.f;
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float d = !Unaligned || j < left ? h[i][j] - mean : 0.f;
      if constexpr (sizeof(T) == 4) t += d;
      q = fmaf(d, d, q);
    }
    if constexpr (sizeof(T) == 4) rest += t;
    st.m2 += q;
  }
  st.m2 = lanes_sum<L>(st.m2);
  st.mean = mean;
  if constexpr (sizeof(T) == 4) {
    rest = lanes_sum<L>(rest) / st.count;
    st.mean += rest;
    st.m2 -= rest * rest * st.count;
  }
  return st;
}

// Stores one vector of y, whatever the types are. Four elements at a time take few registers. origin: where
// column e = 0 is in the weights.
template <bool Unaligned, class T, int E>
__device__ __forceinline__ void store_norm(const NormArgs& a, const NormScalars<T>& sc, void* y,
                                           int64_t origin, int e, Bounds s, const float (&h)[E]) {
#pragma unroll
  for (int k = 0; k < E; k += 4) {
    float w[4], b[4], out[4];
    load_scale<Unaligned>(a, origin, e + k, s, w);
    load_bias<Unaligned>(a, origin, e + k, s, b);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float xhat = normalized(sc, h[k + j]);
      out[j] = fmaf(a.round_normalized ? rounded<T>(xhat) : xhat, w[j], b[j]);
    }
    store_floats(y, a.rows.y_type, e + k, s, out);
  }
}

// Prefetches into L2 the rows of a CTA that starts later (see prefetch_later_rows in rows.cuh).
template <class T, bool Cluster>
__device__ __forceinline__ void prefetch_later_sums(const NormArgs& a, int rows, int slice) {
#ifdef GANDER_SM90
  const Rows& r = a.rows;
  const int64_t next = static_cast<int64_t>(blockIdx.x) * rows + r.prefetch_distance;
  if (r.prefetch_distance == 0 || threadIdx.x != 0 || blockIdx.x < r.prefetch_from || next + rows > r.m)
    return;
  int64_t origin = 0, count = rows * r.n;
  if constexpr (Cluster) {
    origin = static_cast<int64_t>(cluster_rank()) * slice;
    count = min(r.n - origin, static_cast<int64_t>(slice));
    if (count <= 0) return;
  }
  const auto fetch = [&](const void* x, int32_t type, int64_t stride) {
    if (rows == 1 || stride == r.n)
      prefetch_l2(advance(x, type, next * stride + origin), count * type_size(type));
  };
  fetch(r.a, kDType<T>, r.a_stride);
  if (r.b) fetch(r.b, r.b_type, r.b_stride);
#endif
}

// Rows of whole vectors that begin at multiples of a vector.
template <class T, int TPR, int V, unsigned Flags>
__device__ __forceinline__ void norm_rows_body(const NormArgs& a) {
  using State = Moments<T>;
  using Place = RowPlace<TPR, V>;
  constexpr int E = kElements<T>, kRows = Place::kRows, kWarps = Place::kMaxWarps, kStep = Place::kNext * E;
  constexpr bool Cluster = Flags & kCluster, kEarly = !(Flags & kLateWeights);
  prefetch_later_sums<T, Cluster>(a, kRows, Place::capacity() * E);
  const int thread = threadIdx.x % TPR;
  const int64_t row = Place::row();
  int e = Place::first(thread) * E;
  __shared__ Slot<State> warp_slots[kWarps > 1 ? kRows * kWarps : 1];
#ifdef GANDER_SM90
  __shared__ Slot<State> cluster_slots[Cluster ? 16 : 1];
  __shared__ uint64_t barrier;
  if constexpr (Cluster) {
    e += cluster_rank() * Place::capacity() * E;
    cluster_begin(&barrier, sizeof(State));
  }
#else
  if constexpr (Cluster) return;
#endif
  const bool active = kRows == 1 || row < a.rows.m;
  bool leader = active && thread == 0;
#ifdef GANDER_SM90
  if constexpr (Cluster) leader = leader && cluster_rank() == 0;
#endif
  const int end = active ? static_cast<int>(a.rows.n) : 0;
  const Bounds s = {0, end, end};
  const int64_t r = active ? row : 0;
  float h[V][E];
  load_sum<T, V, false>(a, r, 0, e, kStep, s, h);
  // Weights, biases and results are usually of x's type. Then they need no conditions.
  const bool plain = (!a.weight || a.weight_type == kDType<T>) && (!a.bias || a.bias_type == kDType<T>) &&
                     a.rows.y_type == kDType<T>;
  const bool adjusts = a.weight_offset != 0.f || a.round_normalized;
  const int64_t parameters = parameters_of(a, r);
  const T* const weight = opaque(static_cast<T*>(const_cast<void*>(a.weight)) + parameters + e);
  const T* const bias = opaque(static_cast<T*>(const_cast<void*>(a.bias)) + parameters + e);
  uint4 w[kEarly ? V : 1], b[kEarly ? V : 1];
  const auto load_operands = [&](int i, uint4& w, uint4& b) {
    const bool in = e + i * kStep < end;
    w = load_vector_if(in && a.weight, weight + i * kStep, ones_vector<T>());
    b = load_vector_if(in && a.bias, bias + i * kStep, zero_vector());
  };
  if constexpr (kEarly)
    if (plain)
#pragma unroll
      for (int i = 0; i < V; i++) load_operands(i, w[i], b[i]);
  if (a.z) {
    void* const z = advance(a.z, a.z_type, r * a.z_stride);
#pragma unroll
    for (int i = 0; i < V; i++) {
      if (e + i * kStep >= end) break;
      if (a.z_type == kDType<T>) store_vector(static_cast<T*>(z) + e + i * kStep, h[i]);
      else store_floats(z, a.z_type, e + i * kStep, s, h[i]);
    }
  }
  State st = tile_moments<T, Place::kLanes, V, false>(a.center, h, e, kStep, end);
  if constexpr (kWarps > 1) reduce_warps<kWarps>(st, warp_slots, Place::warps());
#ifdef GANDER_SM90
  if constexpr (Cluster) {
    cluster_wait();
    reduce_cluster(st, cluster_slots, &barrier, 0);
  }
#endif
  const NormScalars<T> sc(a, r, st, leader);
  if (plain) {
    T* const y = opaque(static_cast<T*>(a.rows.y) + r * a.rows.y_stride + e);
#pragma unroll
    for (int i = 0; i < V; i++) {
      if (e + i * kStep >= end) break;
      if constexpr (!kEarly) load_operands(i, w[0], b[0]);
      float fw[E], fb[E], out[E];
      unpack(T(), w[kEarly ? i : 0], fw);
      unpack(T(), b[kEarly ? i : 0], fb);
#pragma unroll
      for (int j = 0; j < E; j++) out[j] = normalized(sc, h[i][j]);
      if (adjusts) {
#pragma unroll
        for (int j = 0; j < E; j++) {
          if (a.round_normalized) out[j] = rounded<T>(out[j]);
          fw[j] += a.weight_offset;
        }
      }
#pragma unroll
      for (int j = 0; j < E; j++) out[j] = fmaf(out[j], fw[j], fb[j]);
      store_vector(y + i * kStep, out);
    }
    return;
  }
  void* const y = advance(a.rows.y, a.rows.y_type, r * a.rows.y_stride);
#pragma unroll
  for (int i = 0; i < V; i++) {
    if (e + i * kStep >= end) break;
    store_norm<false>(a, sc, y, parameters, e + i * kStep, s, h[i]);
  }
}

// The state of one chunk of a row, forward or backward.
template <class T, int V, bool Unaligned, bool Backward>
__device__ __forceinline__ void norm_partial_body(const NormArgs& a) {
  using State = std::conditional_t<Backward, GradientSums<T>, Moments<T>>;
  constexpr int E = kElements<T>, kStep = kChunkThreads * E;
  __shared__ Slot<State> warp_slots[kChunkThreads / 32];
  let_next_launch_start();
  const Chunk c = Chunk::of<T>(a.rows, blockIdx.x);
  State st;
  if constexpr (Backward) {
    const T* const x = static_cast<const T*>(a.rows.a) + c.row * a.rows.a_stride + c.origin;
    const void* const dy = advance(a.rows.b, a.rows.b_type, c.row * a.rows.b_stride + c.origin);
    const float mean = a.center ? static_cast<const float*>(a.mean)[c.row] : 0.f;
    const int64_t parameters = parameters_of(a, c.row) + c.origin;
    for (int e = threadIdx.x * E; e < c.bounds.hi; e += kStep) {
      float h[E], g[E], w[E];
      load_floats<Unaligned>(x, kDType<T>, e, c.bounds, h);
      load_floats<Unaligned>(dy, a.rows.b_type, e, c.bounds, g);
      load_scale<Unaligned>(a, parameters, e, c.bounds, w);
#pragma unroll
      for (int j = 0; j < E; j++) {
        g[j] *= w[j], h[j] -= mean;
        if (sizeof(T) == 4 && Unaligned && e + j >= c.bounds.hi) h[j] = 0.f;
      }
      st.add(g, h, true);
    }
    st.template reduce_lanes<32>();
  } else {
    for (int e = threadIdx.x * E; e < c.bounds.hi; e += V * kStep) {
      float h[V][E];
      load_sum<T, V, Unaligned>(a, c.row, c.origin, e, kStep, c.bounds, h);
      st.merge(tile_moments<T, 1, V, Unaligned>(a.center, h, e, kStep, c.bounds.hi));
    }
    st.template reduce_lanes<32>();
  }
  reduce_warps<kChunkThreads / 32>(st, warp_slots);
  wait_for_previous_launch();  // so that a launch that waits for this one has also waited for the one before
  if (threadIdx.x == 0) static_cast<Slot<State>*>(a.rows.partial)[blockIdx.x].set(st);
}

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void norm_apply_body(const NormArgs& a) {
  constexpr int E = kElements<T>, kStep = kChunkThreads * E;
  // Chunks are taken in reverse order, because L2 still holds those that norm_partial_body read last.
  const Chunk c = Chunk::of<T>(a.rows, gridDim.x - 1 - blockIdx.x);
  wait_for_previous_launch();
  const Moments<T> st = row_state<Moments<T>>(a.rows, c.row);
  const NormScalars<T> sc(a, c.row, st, threadIdx.x == 0 && c.origin == 0);
  const int64_t parameters = parameters_of(a, c.row) + c.origin;
  void* const y = advance(a.rows.y, a.rows.y_type, c.row * a.rows.y_stride + c.origin);
  void* const z = advance(a.z, a.z_type, c.row * a.z_stride + c.origin);
  for (int e = threadIdx.x * E; e < c.bounds.hi; e += V * kStep) {
    float h[V][E];
    load_sum<T, V, Unaligned>(a, c.row, c.origin, e, kStep, c.bounds, h);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int ei = e + i * kStep;
      if (ei >= c.bounds.hi) break;
      if (a.z) store_floats(z, a.z_type, ei, c.bounds, h[i]);
      store_norm<Unaligned>(a, sc, y, parameters, ei, c.bounds, h[i]);
    }
  }
}

// ---- Backward.

struct NormGradientScalars {
  float mean = 0.f, rstd = 0.f;
  float mean_g = 0.f, mean_gx = 0.f;  // the means of g and of g * xhat
  float rest = 0.f;                   // what the mean has lost to rounding
  NormGradientScalars() = default;
  __device__ __forceinline__ NormGradientScalars(const NormArgs& a, int64_t row) {
    mean = a.center ? static_cast<const float*>(a.mean)[row] : 0.f;
    rstd = static_cast<const float*>(a.rstd)[row];
  }
  template <class T>
  __device__ __forceinline__ void finalize(const NormArgs& a, GradientSums<T>& st) {
    if constexpr (sizeof(T) == 4)
      if (a.center) rest = st.correct(mean, a.inv_n);
    mean_g = a.center ? static_cast<float>(st.g) * a.inv_n : 0.f;
    mean_gx = static_cast<float>(st.gh) * rstd * a.inv_n;
  }
  // dx of one element, from h - mean.
  __device__ __forceinline__ float dx(float h, float dy, float w) const {
    return fmaf(dy * w, rstd, fmaf(h, -rstd * rstd * mean_gx, -mean_g * rstd));
  }
};

// Loads a vector of E elements of a run-time type from shared memory.
template <int E>
__device__ __forceinline__ void read_floats(const void* p, int32_t type, int e, float (&f)[E]) {
  if (type == kBFloat16) load_aligned(static_cast<const bf16*>(p) + e, f);
  else if (type == kFloat16) load_aligned(static_cast<const f16*>(p) + e, f);
  else load_aligned(static_cast<const f32*>(p) + e, f);
}

// Rows of whole vectors that begin at multiples of a vector. TPR threads work on a row, and a CTA on as many
// rows as it has room for. It loops over such groups of rows, which arrive by bulk copies in a ring of
// `stages` groups in shared memory. Each thread keeps dw and db of its columns in registers. All rows of a
// CTA are of the same head. Groups of several rows are one piece of memory, unless there are heads. In a
// cluster each CTA has a part of the columns of one row.
template <class T, int TPR, int V, bool Cluster>
__device__ __forceinline__ void norm_ring_body(const NormArgs& a) {
#ifdef GANDER_SM90
  using State = GradientSums<T>;
  constexpr int E = kElements<T>, kMaxStages = 16, kCTA = TPR < kChunkThreads ? kChunkThreads : TPR;
  constexpr int kRows = kCTA / TPR, kWarps = TPR / 32;
  constexpr int kNext = kRows > 1 ? TPR : 32;  // from a thread's vector to its next
  static_assert(!Cluster || kRows == 1);
  extern __shared__ __align__(128) uint4 buffer[];
  __shared__ Slot<State> warp_slots[2][kWarps > 1 ? kRows * kWarps : 1], cluster_slots[2][Cluster ? 16 : 1];
  __shared__ uint64_t full[kMaxStages], merged[2];
  let_next_launch_start();
  const int tid = threadIdx.x, group = kRows > 1 ? tid / TPR : 0, stages = a.rows.stages;
  const int own = kRows > 1 ? tid % TPR : RowPlace<TPR, V>::first(tid);  // a thread's first vector
  const int slice = kRows > 1 ? TPR * V : RowPlace<TPR, V>::capacity();
  const uint32_t size = Cluster ? cluster_size() : 1, rank = Cluster ? cluster_rank() : 0;
  // Row i of those that the CTA works on is row i * heads + head of the matrix.
  const int heads = a.heads, head = heads == 1 ? 0 : blockIdx.x % heads;
  const bool gather = kRows > 1 && heads > 1;
  const auto matrix_row = [&](int64_t i) { return i * heads + head; };
  const int64_t rows = heads == 1 ? a.rows.m : a.rows.m / heads, n = a.rows.n,
                origin = static_cast<int64_t>(rank) * slice * E;
  const int columns = static_cast<int>(max(min(n - origin, static_cast<int64_t>(slice) * E), int64_t(0)));
  const Bounds s = {0, columns, columns};
  const int dy_size = type_size(a.rows.b_type);
  // A stage: the rows of x, of dout, and of dresidual_out if there is one.
  const int pitch = kRows > 1 ? columns : slice * E;  // elements from row to row
  const int x_bytes = kRows * pitch * static_cast<int>(sizeof(T)), dy_bytes = kRows * pitch * dy_size;
  const int stage_bytes = x_bytes + dy_bytes + (a.c ? x_bytes : 0);
  char* const ring = reinterpret_cast<char*>(buffer);
  init_ring<Cluster>(full, stages, merged);

  const int64_t groups = (rows + kRows - 1) / kRows;
  const int64_t start = heads == 1 ? blockIdx.x : blockIdx.x / heads;
  const int64_t step = heads == 1 ? gridDim.x : gridDim.x / heads;
  // Thread 0 copies a group, or with heads each thread of warp 0 one of its rows.
  const bool fetches = tid < (gather ? 32 : 1);
  const auto fetch = [&](int64_t g, int stage) {
    const int64_t first = g * kRows;
    const int group_rows = static_cast<int>(min(rows - first, static_cast<int64_t>(kRows)));
    if (columns == 0) return;
    const auto copy = [&](int at, int count) {
      const int64_t row = matrix_row(first + at);
      const auto bytes = [&](int element) { return static_cast<uint32_t>(count * columns * element); };
      char* const to = ring + stage * stage_bytes;
      const int offset = at * pitch;
      const T* const x = static_cast<const T*>(a.rows.a) + row * a.rows.a_stride + origin;
      bulk_copy(to + offset * static_cast<int>(sizeof(T)), x, bytes(sizeof(T)), full + stage);
      bulk_copy(to + x_bytes + offset * dy_size,
                advance(a.rows.b, a.rows.b_type, row * a.rows.b_stride + origin), bytes(dy_size),
                full + stage);
      if (a.c)
        bulk_copy(to + x_bytes + dy_bytes + offset * static_cast<int>(sizeof(T)),
                  static_cast<const T*>(a.c) + row * a.c_stride + origin, bytes(sizeof(T)), full + stage);
    };
    if (tid == 0)
      barrier_expect(full + stage, static_cast<uint32_t>(group_rows * columns) *
                                       static_cast<uint32_t>(sizeof(T) * (a.c ? 2 : 1) + dy_size));
    if (!gather) {
      copy(0, group_rows);
    } else {
      __syncwarp();
      if (tid < group_rows) copy(tid, 1);
    }
  };
  if (fetches)
    for (int i = 0; i < stages && start + i * step < groups; i++) fetch(start + i * step, i);

  Accumulator<T> dw[V][E] = {};
  Accumulator<T> db[V][E] = {};
  const auto scalars = [&](int64_t g) {
    const int64_t row = g * kRows + group;
    return row < rows ? NormGradientScalars(a, matrix_row(row)) : NormGradientScalars();
  };
  const int64_t parameters = head * n + origin;
  const auto loop = [&](auto plain) {
    constexpr bool kPlain = decltype(plain)::value;
    uint4 weights[kPlain ? V : 1];
    if constexpr (kPlain) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int e = (own + i * kNext) * E;
        weights[i] = load_vector_if(a.weight && e < columns, static_cast<const T*>(a.weight) + parameters + e,
                                    ones_vector<T>());
      }
    }
    const auto weight = [&](int i, float (&w)[E]) {
      if constexpr (kPlain) {
        unpack(T(), weights[i], w);
        if (a.weight_offset != 0.f) {
#pragma unroll
          for (int j = 0; j < E; j++) w[j] += a.weight_offset;
        }
      } else {
        load_scale<false>(a, parameters, (own + i * kNext) * E, s, w);
      }
    };
    int stage = 0, set = 0;
    uint32_t phase = 0, merged_phase = 0;
    auto next = scalars(start);
    for (int64_t g = start; g < groups; g += step) {
      auto sc = next;
      next = scalars(g + step);
      const int64_t row = matrix_row(g * kRows + group);
      const bool active = g * kRows + group < rows;
      if (Cluster && tid == 0) barrier_expect(merged + set, size * sizeof(State));
      if (columns) barrier_wait(full + stage, phase);
      const char* const from = ring + stage * stage_bytes;
      uint4 x[V], dres[V], dy_vectors[kPlain ? V : 1];
      float dy_floats[kPlain ? 1 : V][E];
      const auto get_dy = [&](int i, float (&f)[E]) {
        if constexpr (kPlain) {
          unpack(T(), dy_vectors[i], f);
        } else {
#pragma unroll
          for (int j = 0; j < E; j++) f[j] = dy_floats[i][j];
        }
      };
      State st;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int e = (own + i * kNext) * E, at = group * pitch + e;
        const auto vector = [&](int offset) {
          return *reinterpret_cast<const uint4*>(reinterpret_cast<const T*>(from + offset) + at);
        };
        x[i] = dres[i] = zero_vector();
        if constexpr (kPlain) {
          dy_vectors[i] = zero_vector();
        } else {
#pragma unroll
          for (int j = 0; j < E; j++) dy_floats[i][j] = 0.f;
        }
        if (active && e < columns) {
          x[i] = vector(0);
          if constexpr (kPlain) dy_vectors[i] = vector(x_bytes);
          else read_floats(from + x_bytes, a.rows.b_type, at, dy_floats[i]);
          if (a.c) dres[i] = vector(x_bytes + dy_bytes);
        }
        float h[E], g[E], w[E];
        unpack(T(), x[i], h);
        get_dy(i, g);
        weight(i, w);
#pragma unroll
        for (int j = 0; j < E; j++) g[j] *= w[j], h[j] -= sc.mean;
        st.add(g, h, active && e < columns);
      }
      st.template reduce_lanes<(TPR < 32 ? TPR : 32)>();
      // After the barrier all threads have read the stage.
      if constexpr (kWarps > 1)
        reduce_warps<kWarps>(st, warp_slots[set], kRows > 1 ? kWarps : RowPlace<TPR, V>::warps());
      else __syncthreads();
      if (fetches && g + stages * step < groups) fetch(g + stages * step, stage);
      if constexpr (Cluster) reduce_cluster(st, cluster_slots[set], merged + set, merged_phase);
      sc.finalize(a, st);
      const float slope = -sc.rstd * sc.rstd * sc.mean_gx, rest = -sc.mean_g * sc.rstd;
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int e = (own + i * kNext) * E;
        if (!active || e >= columns) break;
        float h[E], dy[E], w[E], out[E], xhat[E];
        rematerialize<T>(x[i], a.rows.opaque_zero);
        if constexpr (kPlain) rematerialize<T>(dy_vectors[i], a.rows.opaque_zero);
        unpack(T(), x[i], h);
        unpack(T(), dres[i], out);
        get_dy(i, dy);
        weight(i, w);
#pragma unroll
        for (int j = 0; j < E; j++) {
          h[j] -= sc.mean;
          if constexpr (sizeof(T) == 4) h[j] -= sc.rest;
          xhat[j] = h[j] * sc.rstd;
          out[j] += fmaf(dy[j] * w[j], sc.rstd, fmaf(h[j], slope, rest));
        }
        if (a.round_normalized) {
#pragma unroll
          for (int j = 0; j < E; j++)
            xhat[j] = kPlain ? rounded<T>(xhat[j]) : rounded(a.rows.y_type, xhat[j]);
        }
#pragma unroll
        for (int j = 0; j < E; j++) dw[i][j] += dy[j] * xhat[j];
        if (a.db)
#pragma unroll
          for (int j = 0; j < E; j++) db[i][j] += dy[j];
        void* const y = advance(a.rows.y, a.rows.y_type, row * a.rows.y_stride + origin);
        if constexpr (kPlain) store_vector(static_cast<T*>(y) + e, out);
        else store_floats(y, a.rows.y_type, e, s, out);
        if (a.z) store_floats(advance(a.z, a.z_type, row * a.z_stride + origin), a.z_type, e, s, out);
      }
      if (++stage == stages) stage = 0, phase ^= 1;
      merged_phase ^= set;
      set ^= 1;
    }
  };
  // All types are usually x's. Then there are no conditions on them in the loop.
  if ((!a.weight || a.weight_type == kDType<T>) && a.rows.b_type == kDType<T> && a.rows.y_type == kDType<T>)
    loop(std::true_type());
  else loop(std::false_type());
  // The CTA's partial sums. Those of several rows are added in a fixed order.
  const PartialRow partial(a);
  const auto store_sums = [&](const auto& sums, int64_t offset) {
    Accumulator<T>* const to =
        static_cast<Accumulator<T>*>(a.partial_sums) + blockIdx.x * partial.width + offset + origin;
    if constexpr (kRows == 1) {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int e = (own + i * kNext) * E;
        if (e < columns)
#pragma unroll
          for (int j = 0; j < E; j++) to[e + j] = sums[i][j];
      }
    } else {
      Accumulator<T>* const all = reinterpret_cast<Accumulator<T>*>(buffer);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int e = (own + i * kNext) * E;
        if (e < columns)
#pragma unroll
          for (int j = 0; j < E; j++) all[group * columns + e + j] = sums[i][j];
      }
      __syncthreads();
      for (int c = tid; c < columns; c += kCTA) {
        Accumulator<T> sum = all[c];
        for (int k = 1; k < kRows; k++) sum += all[k * columns + c];
        to[c] = sum;
      }
    }
  };
  if (a.dw) store_sums(dw, 0);
  if (a.db) store_sums(db, partial.db);
  // The CTA may exit: it has received all that others send to its shared memory.
#endif
}

// Any rows: any alignment, length and types. norm_partial_body has computed the rows' states. A CTA owns a
// tile of columns, and a block of rows which it walks down. A thread's elements are 256 columns apart, so
// that a warp's accesses are adjacent.
template <class T>
__device__ __forceinline__ void norm_columns_body(const NormArgs& a) {
  constexpr int E = kElements<T>, kTile = kChunkThreads * E;
  wait_for_previous_launch();
  const int64_t n = a.rows.n, tiles = (n + kTile - 1) / kTile, begin = blockIdx.x % tiles * kTile;
  const int64_t part = blockIdx.x / tiles, heads = a.heads, head = part % heads, block = part / heads;
  const int64_t blocks = gridDim.x / tiles / heads, rows = a.rows.m / heads;
  const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
  const int64_t parameters = head * n + begin;
  const int end = static_cast<int>(min(n - begin, static_cast<int64_t>(kTile)));
  const auto column = [](int j) { return static_cast<int>(threadIdx.x) + j * kChunkThreads; };
  Accumulator<T> dw[E] = {}, db[E] = {};
  float w[E];
#pragma unroll
  for (int j = 0; j < E; j++)
    w[j] = a.weight && column(j) < end
               ? load_float(a.weight, a.weight_type, parameters + column(j)) + a.weight_offset
               : 1.f;
  for (int64_t i = first; i < last; i++) {
    const int64_t row = i * heads + head;
    const T* const x = static_cast<const T*>(a.rows.a) + row * a.rows.a_stride + begin;
    const void* const dy = advance(a.rows.b, a.rows.b_type, row * a.rows.b_stride + begin);
    const void* const dres = advance(a.c, a.c_type, row * a.c_stride + begin);
    void* const y = advance(a.rows.y, a.rows.y_type, row * a.rows.y_stride + begin);
    void* const z = advance(a.z, a.z_type, row * a.z_stride + begin);
    GradientSums<T> st;
    const auto* slots = static_cast<const Slot<GradientSums<T>>*>(a.rows.partial) + row * a.rows.splits;
    for (int i = threadIdx.x % 32; i < a.rows.splits; i += 32) st.merge(slots[i].load());
    st.template reduce_lanes<32>();
    NormGradientScalars sc(a, row);
    sc.finalize(a, st);
#pragma unroll
    for (int j = 0; j < E; j++) {
      const int c = column(j);
      if (c >= end) break;
      const float deviation = to_float(x[c]) - sc.mean, d = load_float(dy, a.rows.b_type, c);
      const float h = sizeof(T) == 4 ? deviation - sc.rest : deviation;
      const float more = a.c ? load_float(dres, a.c_type, c) : 0.f;
      if (a.round_normalized) dw[j] += static_cast<Accumulator<T>>(d) * rounded(a.rows.y_type, h * sc.rstd);
      else dw[j] += static_cast<Accumulator<T>>(d) * h * sc.rstd;
      db[j] += d;
      const float dx = sc.dx(h, d, w[j]) + more;
      store_float(y, a.rows.y_type, c, dx);
      if (a.z) store_float(z, a.z_type, c, dx);
    }
  }
  const PartialRow partial(a);
  Accumulator<T>* const to = static_cast<Accumulator<T>*>(a.partial_sums) + part * partial.width + begin;
#pragma unroll
  for (int j = 0; j < E; j++) {
    if (column(j) >= end) break;
    if (a.dw) to[column(j)] = dw[j];
    if (a.db) to[partial.db + column(j)] = db[j];
  }
}

// dw and db: sums the rows of partial sums in a fixed order. `Parts` threads share a column.
template <class T, int Threads, int Parts>
__device__ __forceinline__ void norm_finish_body(const NormArgs& a) {
  const PartialRow partial(a);
  // The partial sums of all heads, one after the other, are one row here.
  const int rows = a.heads == 1 ? a.partials : a.partials / a.heads;
  int64_t c, parameters = 0;
  double sum;
  if (!sum_column<Threads, Parts>(static_cast<const Accumulator<T>*>(a.partial_sums), partial.width * a.heads,
                                  rows, c, sum))
    return;
  if (a.heads > 1) {
    const int64_t head = c / partial.width;
    c -= head * partial.width;
    parameters = head * a.rows.n;
  }
  if (a.dw && c < a.rows.n) store_float(a.dw, a.dw_type, parameters + c, sum);
  else store_float(a.db, a.db_type, parameters + c - partial.db, sum);
}

}  // namespace gander
