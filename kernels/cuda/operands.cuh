// Operands whose types are known at run time, and chunks of rows that have them. Norms and softmax with
// options use both.
#pragma once
#include "rows.cuh"

namespace gander {

__device__ __forceinline__ uint2 load_half_vector_if(bool in, const void* p) {
  uint2 v = make_uint2(0, 0);
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p ld.global.v2.u32 {%0, %1}, [%2];\n}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(p), "r"(static_cast<unsigned>(in)));
  return v;
}

// Loads V times E elements, `step` elements apart, to f, or with Add adds them. Loads are issued together,
// before the first is used. Elements out of bounds are 0.
template <bool Add, class S, int V, int E>
__device__ __forceinline__ void load_vectors(const S* p, int e, int step, int end, float (&f)[V][E]) {
  constexpr int F = kElements<S>, K = E > F ? E / F : 1;
  p = opaque(const_cast<S*>(p) + e);
  if constexpr (E < F) {
    uint2 raw[V];
#pragma unroll
    for (int i = 0; i < V; i++) raw[i] = load_half_vector_if(e + i * step < end, p + i * step);
#pragma unroll
    for (int i = 0; i < V; i++) {
      float g[F];
      unpack(S(), make_uint4(raw[i].x, raw[i].y, 0, 0), g);
#pragma unroll
      for (int j = 0; j < E; j++) f[i][j] = Add ? f[i][j] + g[j] : g[j];
    }
  } else {
    constexpr int B =
        K > 1 && V > 2 ? V / 2 : V;  // vectors at a time: all at once would take too many registers
#pragma unroll
    for (int first = 0; first < V; first += B) {
      uint4 raw[B][K];
#pragma unroll
      for (int i = 0; i < B; i++)
#pragma unroll
        for (int k = 0; k < K; k++)
          raw[i][k] =
              load_vector_if(e + (first + i) * step < end, p + (first + i) * step + k * F, zero_vector());
#pragma unroll
      for (int i = 0; i < B; i++)
#pragma unroll
        for (int k = 0; k < K; k++) {
          float g[F];
          unpack(S(), raw[i][k], g);
#pragma unroll
          for (int j = 0; j < F; j++) {
            float& to = f[first + i][k * F + j];
            to = Add ? to + g[j] : g[j];
          }
        }
    }
  }
}

template <int V, int E>
__device__ __forceinline__ void add_vectors(const void* p, int32_t type, int e, int step, int end,
                                            float (&f)[V][E]) {
  if (type == kBFloat16) load_vectors<true>(static_cast<const bf16*>(p), e, step, end, f);
  else if (type == kFloat16) load_vectors<true>(static_cast<const f16*>(p), e, step, end, f);
  else load_vectors<true>(static_cast<const f32*>(p), e, step, end, f);
}

template <class T>
__device__ __forceinline__ float rounded(float v) {
  return to_float(from_float<T>(v));
}

__device__ __forceinline__ float rounded(int32_t type, float v) {
  return type == kBFloat16 ? rounded<bf16>(v) : type == kFloat16 ? rounded<f16>(v) : v;
}

// The chunk of a row that a CTA works on: its first element in the row, and its bounds from there.
struct Chunk {
  int64_t row, origin;
  Bounds bounds;
  template <class T>
  __device__ __forceinline__ static Chunk of(const Rows& r, uint32_t block) {
    Chunk c;
    c.row = block / r.splits;
    const int64_t size = r.chunk * kElements<T>;
    c.origin = block % r.splits * size;
    const int64_t left = r.n - c.origin;
    c.bounds = {0, static_cast<int>(min(left, size)), static_cast<int>(min(left, size + 16))};
    return c;
  }
};

// Merges the states of a row's chunks.
template <class State>
__device__ __forceinline__ State row_state(const Rows& r, int64_t row) {
  __shared__ Slot<State> warp_slots[kChunkThreads / 32];
  const Slot<State>* const slots = static_cast<const Slot<State>*>(r.partial) + row * r.splits;
  State st;
  for (int i = threadIdx.x; i < r.splits; i += kChunkThreads) st.merge(slots[i].load());
  st.template reduce_lanes<32>();
  reduce_warps<kChunkThreads / 32>(st, warp_slots);
  return st;
}

}  // namespace gander
