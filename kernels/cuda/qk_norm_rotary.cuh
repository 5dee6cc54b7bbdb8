// RMSNorm of each head of q and k, and rotary position embeddings, in one pass. Both are in rotary.cuh and in
// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
//
// A head lies in the registers of `lanes` adjacent threads of a warp, a power of two. Each has the pairs of
// items lane, lane + lanes and so on, P of them at most. Sums over the head are exchanged between lanes.
#pragma once
#include "qk_norm_rotary_args_gen.cuh"
#include "rotary.cuh"

namespace gander {

constexpr int kMostNormalized = 512;  // columns of a head

// The most items of a head that a lane has.
template <class T, bool Unaligned>
constexpr int kItems = Unaligned        ? 8
                       : sizeof(T) == 4 ? 2
                                        : 1;

// The sum over the lanes of a head, in an order that does not depend on where they lie in the warp.
__device__ __forceinline__ float sum_of_lanes(float v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// Heads of a token that a thread works on, all of q or all of k. q's come first: parts of HeadsPerThread.
struct PartOfHeads {
  PartOfToken at;
  bool of_k;
  int first, count;  // 0 heads where there is no part
  __device__ __forceinline__ PartOfHeads(const QKNormRotaryArgs& args, int64_t index)
      : at(args, index, args.groups), of_k(at.part >= args.q_parts) {
    first = (of_k ? at.part - args.q_parts : at.part) * args.heads_per_thread;
    count = min((of_k ? args.heads - args.q_heads : args.q_heads) - first, args.heads_per_thread);
    if (!at.there) count = 0;
  }
  // The first of the heads, of a tensor for q and one for k.
  template <class P>
  __device__ __forceinline__ P* of(P* q, const HeadStrides& q_strides, P* k,
                                   const HeadStrides& k_strides) const {
    return of_k ? k + at.at(k_strides, first) : q + at.at(q_strides, first);
  }
};

// weight + offset for an item's elements, 1 without a weight.
template <int E>
__device__ __forceinline__ void load_weights(const QKNormRotaryArgs& args, bool of_k, Item<E> item,
                                             float (&a)[E], float (&b)[E]) {
  const void* const weight = of_k ? args.k_weight : args.q_weight;
#pragma unroll
  for (int i = 0; i < E; i++) a[i] = b[i] = 1.f;
  if (weight == nullptr || !item.there) return;
  with_type(weight, of_k ? args.k_weight_type : args.q_weight_type, [&](auto* typed) {
    load_numbers(typed + item.first, a);
    load_numbers(typed + (item.has_second ? item.second : item.first), b);
  });
#pragma unroll
  for (int i = 0; i < E; i++) a[i] += args.weight_offset, b[i] += args.weight_offset;
}

// A column of q's weight and k's, one behind the other, and the offset.
__device__ __forceinline__ float weight_at(const QKNormRotaryArgs& args, int column) {
  const bool of_k = column >= args.cols;
  const void* const weight = of_k ? args.k_weight : args.q_weight;
  if (weight == nullptr) return 1.f;
  const int32_t type = of_k ? args.k_weight_type : args.q_weight_type;
  return load_float(weight, type, of_k ? column - args.cols : column) + args.weight_offset;
}

// 1 / sqrt(mean of squares + eps) of a head whose elements are 0 where there are none.
template <class T, int E, int P>
__device__ __forceinline__ float rstd_of(const QKNormRotaryArgs& args, const Elements<T, E> (&a)[P],
                                         const Elements<T, E> (&b)[P]) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < P; p++) {
    float x[E], y[E];
    a[p].get(x), b[p].get(y);
#pragma unroll
    for (int i = 0; i < E; i++) sum = fmaf(x[i], x[i], fmaf(y[i], y[i], sum));
  }
  return __frsqrt_rn(fmaf(sum_of_lanes(sum, args.lanes), args.inv_n, args.eps));
}

// Rounds an item's elements to T. One branch for all of them, which threads take alike.
template <class T, int E>
__device__ __forceinline__ void round_if(bool round, float (&a)[E], float (&b)[E]) {
  if (!round) return;
#pragma unroll
  for (int i = 0; i < E; i++) a[i] = rounded_in_pair<T>(a[i]), b[i] = rounded_in_pair<T>(b[i]);
}

// All loads come before the first sum.
template <class T, int V, bool Unaligned>
__device__ __forceinline__ void qk_norm_rotate_body(const QKNormRotaryArgs& args) {
  constexpr int E = Unaligned ? 1 : kElements<T>, P = kItems<T, Unaligned>;
  const int lane = threadIdx.x & (args.lanes - 1), shift = __ffs(args.lanes) - 1;
  const PartOfHeads heads(
      args, static_cast<int64_t>(blockIdx.x) * (kChunkThreads >> shift) + (threadIdx.x >> shift));
  const int64_t step = heads.of_k ? args.k_strides.head : args.q_strides.head;
  const T* const x =
      heads.of(static_cast<const T*>(args.q), args.q_strides, static_cast<const T*>(args.k), args.k_strides);
  Elements<T, E> a[V][P], b[V][P];
#pragma unroll
  for (int v = 0; v < V; v++) {
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * args.lanes);
      a[v][p].load_if(v < heads.count && item.there, x + v * step + item.first);
      b[v][p].load_if(v < heads.count && item.has_second, x + v * step + item.second);
    }
  }
  const Place place = heads.count ? place_of(args, heads.at) : Place{0, -1};
  Rotation<E> rotation[P];
  float w[P][E], u[P][E];
#pragma unroll
  for (int p = 0; p < P; p++) {
    const Item<E> item(args, lane + p * args.lanes);
    if (item.rotates && place.position >= 0)
      rotation[p] = rotation_at<E>(args, place, item.pair, item.first, item.second);
    load_weights(args, heads.of_k, item, w[p], u[p]);
  }
  float rstd[V];
#pragma unroll
  for (int v = 0; v < V; v++) rstd[v] = rstd_of(args, a[v], b[v]);
  const int64_t out_step = heads.of_k ? args.k_out_strides.head : args.q_out_strides.head;
  T* const y = heads.of(static_cast<T*>(args.q_out), args.q_out_strides, static_cast<T*>(args.k_out),
                        args.k_out_strides);
#pragma unroll
  for (int v = 0; v < V; v++) {
    if (v >= heads.count) return;
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * args.lanes);
      float m[E], n[E];
      a[v][p].get(m), b[v][p].get(n);
#pragma unroll
      for (int i = 0; i < E; i++) m[i] *= rstd[v], n[i] *= rstd[v];
      round_if<T>(args.round_normalized, m, n);
#pragma unroll
      for (int i = 0; i < E; i++) m[i] *= w[p][i], n[i] *= u[p][i];
      round_if<T>(args.round, m, n);
      if (item.rotates && place.position >= 0) turn<T>(args, rotation[p], m, n);
      a[v][p].set(m), b[v][p].set(n);
      if (item.there) a[v][p].store(y + v * out_step + item.first);
      if (item.has_second) b[v][p].store(y + v * out_step + item.second);
    }
  }
}

// A CTA's sums for the weights' gradients, of the elements that a thread has in each head: item p, its first
// or second vector, element i. In shared memory, since registers are full.
template <int E, int P>
struct WeightSums {
  static constexpr int kVectors = 2 * P * E / 4;
  static_assert(kVectors * 4 == 2 * P * E);
  float4 of_thread[kVectors][kChunkThreads];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int k = 0; k < kVectors; k++) of_thread[k][threadIdx.x] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  __device__ __forceinline__ void add_products(const float (&a)[P][2][E], const float (&b)[P][2][E]) {
    const float* const x = &a[0][0][0];
    const float* const y = &b[0][0][0];
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      float4 s = of_thread[k][threadIdx.x];
      s.x = fmaf(x[4 * k], y[4 * k], s.x), s.y = fmaf(x[4 * k + 1], y[4 * k + 1], s.y);
      s.z = fmaf(x[4 * k + 2], y[4 * k + 2], s.z), s.w = fmaf(x[4 * k + 3], y[4 * k + 3], s.w);
      of_thread[k][threadIdx.x] = s;
    }
  }
  // Element `index` of a lane, over the CTA's groups of q's heads or of k's. `part` is that of the first
  // group.
  __device__ __forceinline__ float total(const QKNormRotaryArgs& args, int lane, int index, bool of_k,
                                         int part) const {
    const float* const from = &of_thread[index / 4][lane].x + index % 4;
    float sum = 0;
    for (int thread = 0; thread < kChunkThreads; thread += args.lanes) {
      if ((part >= args.q_parts) == of_k) sum += from[4 * thread];
      if (++part == args.groups) part = 0;
    }
    return sum;
  }
};

// The gradients: a persistent grid. A thread always has the same heads, of one token after another, so that
// it needs one weight, and sums its gradients in its columns. A CTA adds these to a row of (CTAs, 2, N).
template <class T, bool Unaligned>
__device__ __forceinline__ void qk_norm_rotate_backward_body(const QKNormRotaryArgs& args) {
  constexpr int E = Unaligned ? 1 : kElements<T>, P = kItems<T, Unaligned>;
  const int lane = threadIdx.x & (args.lanes - 1), shift = __ffs(args.lanes) - 1;
  const int group = blockIdx.x * (kChunkThreads >> shift) + (threadIdx.x >> shift);
  const int tokens = gridDim.x * (kChunkThreads >> shift) / args.groups;  // at a time
  const bool of_k = group % args.groups >= args.q_parts, stores = !of_k || args.k_out != nullptr;
  using Sums = WeightSums<E, P>;
  __shared__ Sums sums;
  sums.clear();
  __shared__ __align__(16) float weights[2][kMostNormalized];
  for (int c = threadIdx.x; c < 2 * args.cols; c += kChunkThreads)
    weights[c >= args.cols][c >= args.cols ? c - args.cols : c] = weight_at(args, c);
  __syncthreads();
  // The next head's vectors are copied while a head is worked on, where shared memory suffices. A thread has
  // read its own before: memory operations of a warp begin in order.
  constexpr bool kAhead = !Unaligned && P == 1;
  __shared__ uint4 ahead[kAhead ? 4 : 1][kChunkThreads];
  const auto fetch = [&](bool there, const T* x, const T* dy) {
    const Item<E> item(args, lane);
    const int first = there && item.there ? 16 : 0, second = there && item.has_second ? 16 : 0;  // bytes
    copy_async<16>(&ahead[0][threadIdx.x], x + item.first, first);
    copy_async<16>(&ahead[1][threadIdx.x], x + item.second, second);
    copy_async<16>(&ahead[2][threadIdx.x], dy + item.first, first);
    copy_async<16>(&ahead[3][threadIdx.x], dy + item.second, second);
    copies_commit();
  };
  for (int round = 0; static_cast<int64_t>(round) * tokens < args.total; round++) {
    // Groups beyond those of whole tokens have none.
    const int64_t index = group < tokens * args.groups
                              ? static_cast<int64_t>(round) * tokens * args.groups + group
                              : args.total * args.groups;
    const PartOfHeads heads(args, index);
    const T* x = heads.of(static_cast<const T*>(args.q), args.q_strides, static_cast<const T*>(args.k),
                          args.k_strides);
    const T* dy = heads.of(static_cast<const T*>(args.dq_out), args.dq_out_strides,
                           static_cast<const T*>(args.dk_out), args.dk_out_strides);
    if constexpr (kAhead) fetch(heads.count > 0, x, dy);
    const Place place = heads.count ? place_of(args, heads.at) : Place{0, -1};
    Rotation<E> rotation[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * args.lanes);
      if (item.rotates && place.position >= 0)
        rotation[p] = rotation_at<E>(args, place, item.pair, item.first, item.second);
    }
    T* dx = heads.of(static_cast<T*>(args.q_out), args.q_out_strides, static_cast<T*>(args.k_out),
                     args.k_out_strides);
    for (int v = 0; v < args.heads_per_thread; v++) {
      const bool there = v < heads.count;
      Elements<T, E> a[P], b[P], c[P], d[P];
      if constexpr (kAhead) {
        copies_wait<0>();
        a[0].bits = ahead[0][threadIdx.x], b[0].bits = ahead[1][threadIdx.x];
        c[0].bits = ahead[2][threadIdx.x], d[0].bits = ahead[3][threadIdx.x];
      } else {
#pragma unroll
        for (int p = 0; p < P; p++) {
          const Item<E> item(args, lane + p * args.lanes);
          a[p].load_if(there && item.there, x + item.first);
          b[p].load_if(there && item.has_second, x + item.second);
          c[p].load_if(there && item.there, dy + item.first);
          d[p].load_if(there && item.has_second, dy + item.second);
        }
      }
      x += of_k ? args.k_strides.head : args.q_strides.head;
      dy += of_k ? args.dk_out_strides.head : args.dq_out_strides.head;
      if constexpr (kAhead) {
        if (v + 1 < args.heads_per_thread) fetch(v + 1 < heads.count, x, dy);
      }
      const float of_head = rstd_of(args, a, b), rstd = there ? of_head : 0.f;  // else infinite without eps
      float product = 0, g[P][2][E], normalized[P][2][E];                       // g: gradients of these
#pragma unroll
      for (int p = 0; p < P; p++) {
        const Item<E> item(args, lane + p * args.lanes);
        float (&dm)[E] = g[p][0], (&dn)[E] = g[p][1], (&m)[E] = normalized[p][0], (&n)[E] = normalized[p][1];
        c[p].get(dm), d[p].get(dn);
        if (item.rotates && place.position >= 0) turn<T>(args, rotation[p], dm, dn);
        round_if<T>(args.round, dm, dn);
        a[p].get(m), b[p].get(n);
#pragma unroll
        for (int i = 0; i < E; i++) m[i] *= rstd, n[i] *= rstd;
        round_if<T>(args.round_normalized, m, n);
      }
      if (args.partials != nullptr) sums.add_products(g, normalized);
#pragma unroll
      for (int p = 0; p < P; p++) {
        const Item<E> item(args, lane + p * args.lanes);
        float m[E], n[E], w[E], u[E];
        a[p].get(m), b[p].get(n);
        load_numbers(weights[of_k] + (item.there ? item.first : 0), w);
        load_numbers(weights[of_k] + (item.has_second ? item.second : 0), u);
#pragma unroll
        for (int i = 0; i < E; i++) {
          g[p][0][i] *= w[i], g[p][1][i] *= u[i];
          product = fmaf(g[p][0][i], m[i], fmaf(g[p][1][i], n[i], product));
        }
      }
      const float mean = sum_of_lanes(product, args.lanes) * args.inv_n * rstd * rstd;
      if (there && stores) {
#pragma unroll
        for (int p = 0; p < P; p++) {
          const Item<E> item(args, lane + p * args.lanes);
          float m[E], n[E];
          a[p].get(m), b[p].get(n);
#pragma unroll
          for (int i = 0; i < E; i++) {
            m[i] = (g[p][0][i] - m[i] * mean) * rstd;
            n[i] = (g[p][1][i] - n[i] * mean) * rstd;
          }
          a[p].set(m), b[p].set(n);
          if (item.there) a[p].store(dx + item.first);
          if (item.has_second) b[p].store(dx + item.second);
        }
      }
      dx += of_k ? args.k_out_strides.head : args.q_out_strides.head;
    }
  }
  if (args.partials == nullptr) return;
  __syncthreads();
  float* const out = static_cast<float*>(args.partials) + static_cast<int64_t>(blockIdx.x) * 2 * args.cols;
  const int first = blockIdx.x * (kChunkThreads >> shift) % args.groups;
  for (int index = threadIdx.x >> shift; index < 2 * 2 * P * E; index += kChunkThreads >> shift) {
    const bool k = index >= 2 * P * E;
    const int within = k ? index - 2 * P * E : index, p = within / (2 * E), second = within / E % 2;
    const Item<E> item(args, lane + p * args.lanes);
    if (!(second ? item.has_second : item.there)) continue;
    const int column = (second ? item.second : item.first) + within % E;
    out[(k ? args.cols : 0) + column] = sums.total(args, lane, within, k, first);
  }
}

// The weights' gradients: a CTA sums 32 columns of (partial_rows, 2, N), a warp each of its rows.
__device__ __forceinline__ void qk_norm_weights_body(const QKNormRotaryArgs& args) {
  constexpr int kWarps = kChunkThreads / 32;
  __shared__ float shared[kWarps][32];
  wait_for_previous_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.x * 32 + lane;
  float sum = 0;
  if (column < 2 * args.cols) {
    const float* const partials = static_cast<const float*>(args.partials) + column;
#pragma unroll 8
    for (int row = warp; row < args.partial_rows; row += kWarps)
      sum += partials[static_cast<int64_t>(row) * 2 * args.cols];
  }
  shared[warp][lane] = sum;
  __syncthreads();
  const bool of_k = column >= args.cols;
  void* const out = of_k ? args.dk_weight : args.dq_weight;
  if (warp > 0 || column >= 2 * args.cols || out == nullptr) return;
#pragma unroll
  for (int w = 1; w < kWarps; w++) sum += shared[w][lane];
  const int at = of_k ? column - args.cols : column;
  const int32_t type = of_k ? args.dk_weight_type : args.dq_weight_type;
  if (type == kBFloat16) static_cast<bf16*>(out)[at] = from_float<bf16>(sum);
  else if (type == kFloat16) static_cast<f16*>(out)[at] = from_float<f16>(sum);
  else static_cast<f32*>(out)[at] = sum;
}

}  // namespace gander
