// RMSNorm of each head of q and k, and rotary position embeddings, in one pass. Both are in rotary.cuh and in
// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
//
// A head lies in the registers of `lanes` adjacent threads of a warp, a power of two. Each has the pairs of
// items lane, lane + lanes and so on, P of them at most. Sums over the head are exchanged between lanes.
#pragma once
#include "qk_norm_rotary_args_gen.cuh"
#include "rotary.cuh"

namespace gander {

// The most items of a head of 512 columns that a lane has.
template <class T, bool Unaligned>
constexpr int kItems = Unaligned        ? 8
                       : sizeof(T) == 4 ? 2
                                        : 1;

// The sum over the lanes of a head, in an order that does not depend on where they lie in the warp.
__device__ __forceinline__ float sum_of_lanes(float v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// weight + offset for an item's elements, 1 without a weight.
template <int E>
__device__ __forceinline__ void load_weights(const QKNormRotaryArgs& args, bool of_k, Item<E> item,
                                             float (&a)[E], float (&b)[E]) {
  const void* const weight = of_k ? args.k_weight : args.q_weight;
  const int32_t type = of_k ? args.k_weight_type : args.q_weight_type;
#pragma unroll
  for (int i = 0; i < E; i++) a[i] = b[i] = 1.f;
  if (weight == nullptr) return;
  if (item.there) load_numbers(weight, type, item.first, a);
  if (item.has_second) load_numbers(weight, type, item.second, b);
#pragma unroll
  for (int i = 0; i < E; i++) a[i] += args.weight_offset, b[i] += args.weight_offset;
}

// Rotates an item's elements where the token has a rotation.
template <class T, int E>
__device__ __forceinline__ void turn(const RotaryArgs& args, Place place, Item<E> item, float (&a)[E],
                                     float (&b)[E]) {
  if (!item.rotates || place.position < 0) return;
  turn<T>(args, rotation_at<E>(args, place, item.pair, item.first, item.second), a, b);
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

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void qk_norm_rotate_body(const QKNormRotaryArgs& args) {
  constexpr int E = Unaligned ? 1 : kElements<T>, P = kItems<T, Unaligned>;
  const int lane = threadIdx.x & (args.lanes - 1);
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kChunkThreads + threadIdx.x) / args.lanes;
  const PartOfToken first(args, group * V, args.heads);
  PartOfToken at = first;
  Elements<T, E> a[V][P], b[V][P];
#pragma unroll
  for (int v = 0; v < V; v++) {
    const int of_k = at.part - args.q_heads;
    const T* x = of_k < 0 ? static_cast<const T*>(args.q) + at.at(args.q_strides, at.part)
                          : static_cast<const T*>(args.k) + at.at(args.k_strides, of_k);
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * args.lanes);
      a[v][p].load_if(at.there && item.there, x + item.first);
      b[v][p].load_if(at.there && item.has_second, x + item.second);
    }
    at.advance(args, args.heads);
  }
  // Most heads have the token of the one before, and the same weight.
  Rotation<E> rotation[P];
  Place place{0, -1};
  float w[P][E], u[P][E];
  int64_t token = -1;
  bool with_k = false;
  at = first;
#pragma unroll
  for (int v = 0; v < V; v++) {
    const float rstd = rstd_of(args, a[v], b[v]);
    if (!at.there) continue;
    const int of_k = at.part - args.q_heads;
    const bool new_weight = v == 0 || with_k != (of_k >= 0), new_token = at.token != token;
    with_k = of_k >= 0, token = at.token;
    if (new_token) place = place_of(args, at);
    T* y = of_k < 0 ? static_cast<T*>(args.q_out) + at.at(args.q_out_strides, at.part)
                    : static_cast<T*>(args.k_out) + at.at(args.k_out_strides, of_k);
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * args.lanes);
      const bool turns = item.rotates && place.position >= 0;
      if (turns && new_token) rotation[p] = rotation_at<E>(args, place, item.pair, item.first, item.second);
      if (new_weight) load_weights(args, with_k, item, w[p], u[p]);
      float m[E], n[E];
      a[v][p].get(m), b[v][p].get(n);
#pragma unroll
      for (int i = 0; i < E; i++) m[i] *= rstd, n[i] *= rstd;
      round_if<T>(args.round_normalized, m, n);
#pragma unroll
      for (int i = 0; i < E; i++) m[i] *= w[p][i], n[i] *= u[p][i];
      round_if<T>(args.round, m, n);
      if (turns) turn<T>(args, rotation[p], m, n);
      a[v][p].set(m), b[v][p].set(n);
      if (item.there) a[v][p].store(y + item.first);
      if (item.has_second) b[v][p].store(y + item.second);
    }
    at.advance(args, args.heads);
  }
}

template <int E>
__device__ __forceinline__ void add_products(const float (&a)[E], const float (&b)[E], const float (&c)[E],
                                             const float (&d)[E], float (&sums)[2][E]) {
#pragma unroll
  for (int i = 0; i < E; i++) {
    sums[0][i] = fmaf(a[i], b[i], sums[0][i]);
    sums[1][i] = fmaf(c[i], d[i], sums[1][i]);
  }
}

// The gradients: a persistent grid, so that a thread sums the weights' gradients of its columns in registers.
// Then a CTA sums those of its threads, and writes them as one row of (CTAs, 2, N).
template <class T, bool Unaligned>
__device__ __forceinline__ void qk_norm_rotate_backward_body(const QKNormRotaryArgs& args) {
  constexpr int E = Unaligned ? 1 : kElements<T>, P = kItems<T, Unaligned>;
  const int lanes = args.lanes, lane = threadIdx.x & (lanes - 1);
  const int groups = kChunkThreads / lanes;  // heads that a CTA works on at a time
  float sums[2][P][2][E] = {};               // of q's weight and of k's
  const int64_t heads = args.total * args.heads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < heads;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const PartOfToken at(args, first + threadIdx.x / lanes, args.heads);
    const int of_k = at.part - args.q_heads;
    const T* x = of_k < 0 ? static_cast<const T*>(args.q) + at.at(args.q_strides, at.part)
                          : static_cast<const T*>(args.k) + at.at(args.k_strides, of_k);
    const T* dy = of_k < 0 ? static_cast<const T*>(args.dq_out) + at.at(args.dq_out_strides, at.part)
                           : static_cast<const T*>(args.dk_out) + at.at(args.dk_out_strides, of_k);
    Elements<T, E> a[P], b[P], c[P], d[P];
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * lanes);
      a[p].load_if(at.there && item.there, x + item.first);
      b[p].load_if(at.there && item.has_second, x + item.second);
      c[p].load_if(at.there && item.there, dy + item.first);
      d[p].load_if(at.there && item.has_second, dy + item.second);
    }
    const float rstd = rstd_of(args, a, b);
    const Place place = at.there ? place_of(args, at) : Place{0, -1};
    float product = 0, g[P][2][E];
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * lanes);
      float (&dm)[E] = g[p][0], (&dn)[E] = g[p][1];
      c[p].get(dm), d[p].get(dn);
      turn<T>(args, place, item, dm, dn);
      round_if<T>(args.round, dm, dn);
      if (at.there) {
        float m[E], n[E];
        a[p].get(m), b[p].get(n);
#pragma unroll
        for (int i = 0; i < E; i++) m[i] *= rstd, n[i] *= rstd;
        round_if<T>(args.round_normalized, m, n);
        if (of_k < 0) add_products(dm, m, dn, n, sums[0][p]);
        else add_products(dm, m, dn, n, sums[1][p]);
      }
      float m[E], n[E], w[E], u[E];
      load_weights(args, of_k >= 0, item, w, u);
      a[p].get(m), b[p].get(n);
#pragma unroll
      for (int i = 0; i < E; i++) {
        dm[i] *= w[i], dn[i] *= u[i];
        product = fmaf(dm[i], m[i] * rstd, fmaf(dn[i], n[i] * rstd, product));
      }
    }
    const float mean = sum_of_lanes(product, lanes) * args.inv_n;
    T* dx = of_k < 0 ? static_cast<T*>(args.q_out) + at.at(args.q_out_strides, at.part)
                     : static_cast<T*>(args.k_out) + at.at(args.k_out_strides, of_k);
    if (!at.there || (of_k >= 0 && args.k_out == nullptr)) continue;
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * lanes);
      float m[E], n[E];
      a[p].get(m), b[p].get(n);
#pragma unroll
      for (int i = 0; i < E; i++) {
        m[i] = (g[p][0][i] - m[i] * rstd * mean) * rstd;
        n[i] = (g[p][1][i] - n[i] * rstd * mean) * rstd;
      }
      a[p].set(m), b[p].set(n);
      if (item.there) a[p].store(dx + item.first);
      if (item.has_second) b[p].store(dx + item.second);
    }
  }
  if (args.partials == nullptr) return;
  // A column at a time of each thread: part of each item's first or second elements.
  __shared__ float shared[kChunkThreads];
  float* const out = static_cast<float*>(args.partials) + static_cast<int64_t>(blockIdx.x) * 2 * args.cols;
#pragma unroll
  for (int which = 0; which < 2; which++) {
#pragma unroll
    for (int p = 0; p < P; p++) {
      const Item<E> item(args, lane + p * lanes);
#pragma unroll
      for (int part = 0; part < 2; part++) {
#pragma unroll
        for (int i = 0; i < E; i++) {
          __syncthreads();
          shared[threadIdx.x] = sums[which][p][part][i];
          __syncthreads();
          if (threadIdx.x >= lanes || !(part ? item.has_second : item.there)) continue;
          float sum = 0;
          for (int group = 0; group < groups; group++) sum += shared[group * lanes + lane];
          out[which * args.cols + (part ? item.second : item.first) + i] = sum;
        }
      }
    }
  }
}

// The weights' gradients: a warp sums a column of (partial_rows, 2, N).
__device__ __forceinline__ void qk_norm_weights_body(const QKNormRotaryArgs& args) {
  wait_for_previous_launch();
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int column = blockIdx.x * (kChunkThreads / 32) + warp;
  if (column >= 2 * args.cols) return;
  const bool of_k = column >= args.cols;
  void* const out = of_k ? args.dk_weight : args.dq_weight;
  if (out == nullptr) return;
  float sum = 0;
  for (int row = lane; row < args.partial_rows; row += 32)
    sum += static_cast<const float*>(args.partials)[static_cast<int64_t>(row) * 2 * args.cols + column];
  sum = sum_of_lanes(sum, 32);
  if (lane > 0) return;
  const int at = of_k ? column - args.cols : column;
  const int32_t type = of_k ? args.dk_weight_type : args.dq_weight_type;
  if (type == kBFloat16) static_cast<bf16*>(out)[at] = from_float<bf16>(sum);
  else if (type == kFloat16) static_cast<f16*>(out)[at] = from_float<f16>(sum);
  else static_cast<f32*>(out)[at] = sum;
}

}  // namespace gander
