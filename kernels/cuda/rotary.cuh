// Rotary position embeddings: pairs of elements of each head are rotated by angles that depend on the token's
// position (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021).
//
// A thread rotates the same pairs of V heads of a token: it loads their cosines and sines once. The heads of
// q and k are numbered as one list, so one launch serves both. Adjacent threads have adjacent vectors of a
// head, then those of the next one. A thread reads its elements before it writes any, so outputs may be the
// inputs.
#pragma once
#include "operands.cuh"
#include "rotary_args_gen.cuh"

namespace gander {

// Calls with(p), p with the type of its numbers. One branch for all that a thread loads: loads in branches of
// their own would wait for each other.
template <class With>
__device__ __forceinline__ void with_type(const void* p, int32_t type, const With& with) {
  if (type == kBFloat16) with(static_cast<const bf16*>(p));
  else if (type == kFloat16) with(static_cast<const f16*>(p));
  else with(static_cast<const f32*>(p));
}

// E numbers: whole vectors if E is more than 1.
template <class S, int E>
__device__ __forceinline__ void load_numbers(const S* p, float (&f)[E]) {
  if constexpr (E == 1) f[0] = to_float(*p);
  else load_aligned(p, f);
}

// a / b of what is not negative. 64 bits take five times as long as 32.
__device__ __forceinline__ int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32) return a / b;
  return static_cast<unsigned>(a) / static_cast<unsigned>(b);
}

// The elements of two vectors a and b, in pairs: those with the same index, or adjacent ones, which then are
// side by side in the two vectors together.
template <int E>
__device__ __forceinline__ void adjacent_as_pairs(float (&a)[E], float (&b)[E]) {
  if constexpr (E > 1) {
    float both[2 * E];
#pragma unroll
    for (int i = 0; i < E; i++) both[i] = a[i], both[E + i] = b[i];
#pragma unroll
    for (int i = 0; i < E; i++) a[i] = both[2 * i], b[i] = both[2 * i + 1];
  }
}

template <int E>
__device__ __forceinline__ void adjacent_from_pairs(float (&a)[E], float (&b)[E]) {
  if constexpr (E > 1) {
    float both[2 * E];
#pragma unroll
    for (int i = 0; i < E; i++) both[2 * i] = a[i], both[2 * i + 1] = b[i];
#pragma unroll
    for (int i = 0; i < E; i++) a[i] = both[i], b[i] = both[E + i];
  }
}

__device__ __forceinline__ int64_t index_at(const void* p, int32_t type, int64_t i) {
  return type == kInt32 ? static_cast<const int32_t*>(p)[i] : static_cast<const int64_t*>(p)[i];
}

// A token, and one of as many parts as each token has. Threads that have none take part in exchanges all the
// same.
struct PartOfToken {
  int64_t token, sequence, in_sequence;
  int part;
  bool there;
  __device__ __forceinline__ PartOfToken(const RotaryArgs& args, int64_t index, int per_token) {
    token = quotient(index, per_token);
    there = token < args.total;
    if (!there) token = 0;
    part = static_cast<int>(index - token * per_token);
    sequence = quotient(token, args.tokens);
    in_sequence = token - sequence * args.tokens;
  }
  __device__ __forceinline__ int64_t at(const HeadStrides& s, int head) const {
    return sequence * s.sequence + in_sequence * s.token + head * s.head;
  }
};

// A token's sequence, and its position in it: -1 if it is in none.
struct Place {
  int64_t sequence, position;
};

__device__ __forceinline__ Place place_of(const RotaryArgs& args, const PartOfToken& at) {
  if (args.cu_seqlens == nullptr) return {at.sequence, at.in_sequence};
  const int64_t token = at.token;
  // The last sequence that begins at the token or before it. Empty ones begin where the next one does.
  int64_t low = 0, high = args.sequences;  // the first is at low or after it, the last before high
  while (low < high) {
    const int64_t middle = (low + high) >> 1;
    if (index_at(args.cu_seqlens, args.cu_seqlens_type, middle) <= token) low = middle + 1;
    else high = middle;
  }
  const int64_t sequence = low - 1;
  if (sequence < 0 || token >= index_at(args.cu_seqlens, args.cu_seqlens_type, args.sequences))
    return {0, -1};
  return {sequence, token - index_at(args.cu_seqlens, args.cu_seqlens_type, sequence)};
}

// What a pair (a, b) becomes: (a c1 + b s1, b c2 + a s2).
template <int E>
struct Rotation {
  float c1[E], c2[E], s1[E], s2[E];
};

// The rotation at a position, for the pairs from the given one on, whose elements are those from `first` and
// from `second` on.
template <int E>
__device__ __forceinline__ Rotation<E> rotation_at(const RotaryArgs& args, Place place, int pair, int first,
                                                   int second) {
  Rotation<E> r;
  int64_t row = place.position + args.offset;
  if (args.offsets != nullptr) row += index_at(args.offsets, args.offsets_type, place.sequence);
  if (row < 0 || row >= args.positions) {
#pragma unroll
    for (int i = 0; i < E; i++) r.c1[i] = r.c2[i] = r.s1[i] = r.s2[i] = __int_as_float(0x7fffffff);  // NaN
    return r;
  }
  const int64_t cos = place.sequence * args.cos_sequence + row * args.cos_row;
  const int64_t sin = place.sequence * args.sin_sequence + row * args.sin_row;
  // With a number for each pair, `pair` twice: a branch would wait for the first load before the second.
  if (!args.per_element) first = second = pair;
  with_type(args.cos, args.cos_type, [&](auto* typed) {
    const auto* const sines = static_cast<decltype(typed)>(args.sin) + sin;
    typed += cos;
    load_numbers(typed + first, r.c1), load_numbers(typed + second, r.c2);
    load_numbers(sines + first, r.s1), load_numbers(sines + second, r.s2);
  });
  if (args.per_element && args.interleaved) adjacent_as_pairs(r.c1, r.c2), adjacent_as_pairs(r.s1, r.s2);
#pragma unroll
  for (int i = 0; i < E; i++) {
    const float s1 = r.s1[i], s2 = r.s2[i];
    r.s1[i] = args.backward ? s2 : -s1;
    r.s2[i] = args.backward ? -s1 : s2;
  }
  return r;
}

// E elements: a 16-byte vector, or one.
template <class T, int E>
struct Elements {
  uint4 bits;
  __device__ __forceinline__ void load_if(bool in, const T* p) {  // else 0
    if constexpr (E > 1) bits = load_vector_if(in, p, zero_vector());
    else reinterpret_cast<T&>(bits) = in ? *p : from_float<T>(0.f);
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (E > 1) __stcs(reinterpret_cast<uint4*>(p), bits);
    else *p = reinterpret_cast<const T&>(bits);
  }
  __device__ __forceinline__ void get(float (&f)[E]) const {
    if constexpr (E > 1) unpack(T(), bits, f);
    else f[0] = to_float(reinterpret_cast<const T&>(bits));
  }
  __device__ __forceinline__ void set(const float (&f)[E]) {
    if constexpr (E > 1) bits = pack(T(), f);
    else reinterpret_cast<T&>(bits) = from_float<T>(f[0]);
  }
};

// Where a thread's elements of an item lie in a head: two vectors of pairs, or behind those two that are
// copied.
template <int E>
struct Item {
  int pair, first, second;
  bool there, rotates, has_second;
  __device__ __forceinline__ Item(const RotaryArgs& args, int item) {
    const int half = args.rotated / 2, pairs = half / E;
    there = item < args.items;
    rotates = item < pairs;
    pair = item * E;
    first = rotates ? args.interleaved ? 2 * pair : pair : args.rotated + 2 * E * (item - pairs);
    second = first + (rotates && !args.interleaved ? half : E);
    has_second = there && second < args.cols;
  }
};

// rounded() by the conversion of two numbers to bfloat16: with 0 in the lower half they are the float32 that
// is wanted. That of one number takes another instruction (F2F), and a shift. General norms would spill.
template <class T>
__device__ __forceinline__ float rounded_in_pair(float v) {
  if constexpr (std::is_same_v<T, bf16>) return __uint_as_float(pack2(bf16(), 0.f, v));
  else return rounded<T>(v);
}

// (a c1 + b s1, b c2 + a s2). With `round` the products are rounded first, as operators of their own would
// do.
template <class T, int E>
__device__ __forceinline__ void turn_pairs(bool round, const Rotation<E>& r, float (&a)[E], float (&b)[E]) {
  const auto product = [](float x, float y) { return rounded_in_pair<T>(__fmul_rn(x, y)); };
  if (round) {  // once for all pairs, not for each
#pragma unroll
    for (int i = 0; i < E; i++) {
      const float u = __fadd_rn(product(a[i], r.c1[i]), product(b[i], r.s1[i]));
      b[i] = __fadd_rn(product(b[i], r.c2[i]), product(a[i], r.s2[i])), a[i] = u;
    }
  } else {
#pragma unroll
    for (int i = 0; i < E; i++) {
      const float u = fmaf(a[i], r.c1[i], b[i] * r.s1[i]);
      b[i] = fmaf(b[i], r.c2[i], a[i] * r.s2[i]), a[i] = u;
    }
  }
}

// Rotates pairs of a head's elements.
template <class T, int E>
__device__ __forceinline__ void turn(const RotaryArgs& args, const Rotation<E>& r, float (&a)[E],
                                     float (&b)[E]) {
  if (args.interleaved) {
    adjacent_as_pairs(a, b);
    turn_pairs<T>(args.round, r, a, b);
    adjacent_from_pairs(a, b);
  } else {
    turn_pairs<T>(args.round, r, a, b);
  }
}

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void rotary_body(const RotaryArgs& args) {
  constexpr int E = Unaligned ? 1 : kElements<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kChunkThreads + threadIdx.x;
  const PartOfToken at(args, index, args.groups * args.items);
  if (!at.there) return;
  const int group = static_cast<unsigned>(at.part) / args.items;
  const Item<E> item(args, at.part - group * args.items);

  Elements<T, E> a[V], b[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int head = group + i * args.groups, of_k = head - args.q_heads;
    const T* p = of_k < 0 ? static_cast<const T*>(args.q) + at.at(args.q_strides, head)
                          : static_cast<const T*>(args.k) + at.at(args.k_strides, of_k);
    a[i].load_if(head < args.heads, p + item.first);
    b[i].load_if(head < args.heads && item.has_second, p + item.second);
  }
  const Place place = item.rotates ? place_of(args, at) : Place{0, -1};
  const bool turns = place.position >= 0;
  Rotation<E> r;
  if (turns) r = rotation_at<E>(args, place, item.pair, item.first, item.second);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const int head = group + i * args.groups, of_k = head - args.q_heads;
    if (head >= args.heads) break;
    if (turns) {
      float x[E], y[E];
      a[i].get(x), b[i].get(y);
      turn<T>(args, r, x, y);
      a[i].set(x), b[i].set(y);
    }
    T* p = of_k < 0 ? static_cast<T*>(args.q_out) + at.at(args.q_out_strides, head)
                    : static_cast<T*>(args.k_out) + at.at(args.k_out_strides, of_k);
    a[i].store(p + item.first);
    if (item.has_second) b[i].store(p + item.second);
  }
}

}  // namespace gander
