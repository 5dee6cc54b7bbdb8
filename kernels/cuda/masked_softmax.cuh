// Softmax and log-softmax with options, forward and backward. Softmax without options has kernels of its own
// (softmax.cuh). With h = x * scale + mask:
//   y = exp(h - max h) / sum exp(h - max h),  or with log  y = (h - max h) - log(sum exp(h - max h))
//   dx = scale * (dy - sum(dy * y)) * y,      or with log  dx = scale * (dy - exp(y) * sum(dy))
// Masked elements are left out of maxima and sums, whatever they are. Forward takes their h as -inf. A causal
// mask is a bound: of a row, only the elements before it are read.
//
// Which options a call uses is decided at run time, as are the types of all operands but the first.
//
//   masked_rows_*     a row lies in the registers of TPR threads of a CTA, or of a cluster
//   masked_partial_*  the state of one chunk of a row
//   masked_apply_*    merges the states of a row's chunks, and maps one of the chunks
#pragma once
#include "masked_softmax_args_gen.cuh"
#include "operands.cuh"

namespace gander {

constexpr float kLowest = -3.402823466e+38f;  // the lowest finite float

// ---- Masks.

// Divides a row's number by a number whose inverse is known. Row numbers are less than 2^51.
struct Division {
  int64_t quotient, rest;
  __device__ __forceinline__ Division(int64_t row, int64_t by, double inverse)
      : quotient(static_cast<int64_t>(static_cast<double>(row) * inverse)), rest(row - quotient * by) {
    if (rest < 0) quotient--, rest += by;
    if (rest >= by) quotient++, rest -= by;
  }
};

__device__ __forceinline__ bool is_boolean(int32_t type) { return type == kBool || type == kUint8; }

// The mask of a row, or of a chunk of one that begins `origin` elements after the row's first.
struct RowMask {
  const void* p = nullptr;  // the mask's element for e = 0; 0 if all elements have the same
  int32_t type;
  int open;         // elements from here on are masked: they are past the end, or the causal mask's
  float all = 0.f;  // added to each element if p is 0

  __device__ __forceinline__ RowMask(const MaskedSoftmaxArgs& a, int64_t row, int64_t origin, int end)
      : type(a.mask_type), open(end) {
    if (a.queries) {
      const int64_t query = Division(row, a.queries, a.queries_inverse).rest;
      open = static_cast<int>(max(min(query + 1 - origin, static_cast<int64_t>(end)), int64_t(0)));
    }
    if (!a.mask) return;
    const Division inner(row, a.mask_extent0, a.mask_inverse0);
    const Division outer(inner.quotient, a.mask_extent1, a.mask_inverse1);
    const int64_t at = inner.rest * a.mask_stride0 + outer.rest * a.mask_stride1 +
                       outer.quotient * a.mask_stride2 + origin * a.mask_column;
    const void* const m = static_cast<const char*>(a.mask) + at * (is_boolean(type) ? 1 : type_size(type));
    if (a.mask_column) {
      p = m;
      return;
    }
    if (is_boolean(type)) all = *static_cast<const uint8_t*>(m) ? 0.f : -kInfinity;
    else all = load_float(m, type, 0);
    if (all == -kInfinity) open = 0;
  }
};

__device__ __forceinline__ unsigned load_word_if(bool in, const void* p) {
  unsigned v = 0;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.u32 %0, [%1];\n}"
               : "+r"(v)
               : "l"(p), "r"(static_cast<unsigned>(in)));
  return v;
}

// E elements of an aligned mask of type S, which are loaded at once.
template <class S, int E>
struct MaskVector {
  static constexpr int F = kElements<S>, K = E > F ? E / F : 1;
  uint4 v[K];
  __device__ __forceinline__ void load(bool in, const S* p) {
    if constexpr (E < F) {
      const uint2 half = load_half_vector_if(in, p);
      v[0] = make_uint4(half.x, half.y, 0, 0);
    } else {
#pragma unroll
      for (int k = 0; k < K; k++) v[k] = load_vector_if(in, p + k * F, zero_vector());
    }
  }
  // What is added to each element: -inf masks it.
  __device__ __forceinline__ void addends(float (&m)[E]) const {
#pragma unroll
    for (int k = 0; k < K; k++) {
      float g[F];
      unpack(S(), v[k], g);
#pragma unroll
      for (int j = 0; j < F && k * F + j < E; j++) m[k * F + j] = g[j];
    }
  }
};

template <int E>
struct MaskVector<uint8_t, E> {
  uint2 v;
  __device__ __forceinline__ void load(bool in, const uint8_t* p) {
    if constexpr (E == 8) v = load_half_vector_if(in, p);
    else v = make_uint2(load_word_if(in, p), 0);
  }
  __device__ __forceinline__ void addends(float (&m)[E]) const {
#pragma unroll
    for (int j = 0; j < E; j++) m[j] = ((j < 4 ? v.x : v.y) >> (j % 4 * 8) & 0xff) ? 0.f : -kInfinity;
  }
};

// Calls each(i, m) for each of V vectors, `step` elements apart, with what is added to its elements. Vectors
// are loaded together, before the first is used.
template <class S, int V, int E, class Each>
__device__ __forceinline__ void aligned_addends(const void* p, int e, int step, int open, Each each) {
  // Vectors at a time: those of 32 bytes of the mask. All of them would take too many registers.
  constexpr int B = V <= 2 || sizeof(S) == 1 ? V : 32 / (E * sizeof(S));
  const S* const at = opaque(const_cast<S*>(static_cast<const S*>(p)) + e);
#pragma unroll
  for (int first = 0; first < V; first += B) {
    MaskVector<S, E> v[B];
#pragma unroll
    for (int i = 0; i < B; i++) v[i].load(e + (first + i) * step < open, at + (first + i) * step);
#pragma unroll
    for (int i = 0; i < B; i++) {
      float m[E];
      v[i].addends(m);
      each(first + i, m);
    }
  }
}

// Loads what is added to the E elements from element e on, of a mask of any type and alignment.
template <bool Unaligned, int E>
__device__ __forceinline__ void load_addends(const RowMask& mask, int e, Bounds s, float (&m)[E]) {
  if (!mask.p) {
#pragma unroll
    for (int j = 0; j < E; j++) m[j] = mask.all;
  } else if (is_boolean(mask.type)) {
    const uint8_t* const p = static_cast<const uint8_t*>(mask.p);
    if constexpr (!Unaligned) {
      MaskVector<uint8_t, E> v;
      v.load(e < s.hi, p + e);
      v.addends(m);
    } else {
#pragma unroll
      for (int j = 0; j < E; j++) m[j] = e + j < s.hi && p[e + j] ? 0.f : -kInfinity;
    }
  } else {
    load_floats<Unaligned>(mask.p, mask.type, e, s, m);
  }
}

// Calls each(i, m) as aligned_addends does, for a mask of any type.
template <int V, int E, class Each>
__device__ __forceinline__ void each_addends(const RowMask& mask, int e, int step, Each each) {
  if (!mask.p) {
    float m[E];
#pragma unroll
    for (int j = 0; j < E; j++) m[j] = mask.all;
#pragma unroll
    for (int i = 0; i < V; i++) each(i, m);
  } else if (is_boolean(mask.type)) {
    aligned_addends<uint8_t, V, E>(mask.p, e, step, mask.open, each);
  } else if (mask.type == kBFloat16) {
    aligned_addends<bf16, V, E>(mask.p, e, step, mask.open, each);
  } else if (mask.type == kFloat16) {
    aligned_addends<f16, V, E>(mask.p, e, step, mask.open, each);
  } else {
    aligned_addends<f32, V, E>(mask.p, e, step, mask.open, each);
  }
}

// ---- Forward.

// The h of E elements: -inf where they are masked. any: whether an element takes part is added to it.
template <int E>
__device__ __forceinline__ void scores(const float (&x)[E], const float (&m)[E], int e, int open, float scale,
                                       float (&h)[E], bool& any) {
#pragma unroll
  for (int j = 0; j < E; j++) {
    const bool taken = e + j < open && m[j] != -kInfinity;
    h[j] = taken ? fmaf(x[j], scale, m[j]) : -kInfinity;
    any |= taken;
  }
}

// What `any` elements with a maximum of top count as. The maximum of a row is -inf only if it is masked
// whole. If all elements that take part are -inf, the sum is 0, so that the row becomes NaN.
__device__ __forceinline__ float maximum_of(float top, bool any) { return any ? fmaxf(top, kLowest) : top; }

template <int V, int E>
__device__ __forceinline__ float largest(const float (&h)[V][E]) {
  float top = -kInfinity;
#pragma unroll
  for (int i = 0; i < V; i++)
#pragma unroll
    for (int j = 0; j < E; j++) top = fmaxf(top, h[i][j]);
  return top;
}

// The sum of exp(h - m). Keep: stores the exponentials in place of h.
template <class T, int V, bool Keep = false, class Scores>
__device__ __forceinline__ Accumulator<T> exponentials(Scores& h, float m) {
  Accumulator<T> sum = 0;  // each vector is summed by itself: one long chain of additions would lose digits
#pragma unroll
  for (int i = 0; i < V; i++) {
    float t = 0.f;
#pragma unroll
    for (int j = 0; j < kElements<T>; j++) {
      const float exponential = exp_difference<T>(h[i][j], m);
      t += exponential;
      if constexpr (Keep) h[i][j] = exponential;
    }
    sum += t;
  }
  return sum;
}

// What maps a row's elements.
template <class T>
struct MaskedScalars {
  float shift;     // the row's maximum
  float gain;      // y = e * gain + e * rest for e = exp(h - own), or with log y = (h - shift) - gain
  float rest = 0;  // float32 only: what gain has lost to rounding
  // own is what exponentials are relative to, if they were computed before the row's maximum was known.
  __device__ __forceinline__ MaskedScalars(const MaskedSoftmaxArgs& a, const MaxSum<T, Accumulator<T>>& st,
                                           float own)
      : shift(st.m) {
    if (st.m == -kInfinity) {
      shift = 0.f;
      gain = a.masked_zero ? 0.f : __int_as_float(0x7fffffff);
    } else if (a.log) {
      gain = log1pf(static_cast<float>(st.s - 1));
    } else if constexpr (sizeof(T) == 4) {
      // The inverse of the sum is one Newton step from its float approximation: a division in double has a
      // slow path that is a function call.
      const double guess = 1.f / static_cast<float>(st.s);
      const double exact = rescale_factor<double>(own, shift) * fma(guess, fma(-st.s, guess, 1.), guess);
      gain = static_cast<float>(exact);
      rest = static_cast<float>(exact - gain);
    } else {
      gain = rescale_factor<float>(own, shift) * (1.f / st.s);
    }
  }
  // e is h with log, and its exponential without.
  __device__ __forceinline__ float map(const MaskedSoftmaxArgs& a, float e) const {
    if (a.log) return (e - shift) - gain;
    if constexpr (sizeof(T) == 4) return fmaf(e, gain, e * rest);
    return e * gain;
  }
};

// Stores E elements that are aligned to 16 bytes, or to all of them if they have fewer.
template <class S, int E>
__device__ __forceinline__ void store_whole(S* p, const float (&f)[E]) {
  constexpr int F = kElements<S>;
#pragma unroll
  for (int i = 0; i < E; i += F) {
    float g[F] = {};
#pragma unroll
    for (int j = 0; j < F && i + j < E; j++) g[j] = f[i + j];
    const uint4 v = pack(S(), g);
    if constexpr (E < F) __stcs(reinterpret_cast<uint2*>(p), make_uint2(v.x, v.y));
    else __stcs(reinterpret_cast<uint4*>(p + i), v);
  }
}

template <int E>
__device__ __forceinline__ void store_whole(void* p, int32_t type, int e, const float (&f)[E]) {
  if (type == kBFloat16) store_whole(static_cast<bf16*>(p) + e, f);
  else if (type == kFloat16) store_whole(static_cast<f16*>(p) + e, f);
  else store_whole(static_cast<f32*>(p) + e, f);
}

// What prefetch_later_rows needs to know of an operator.
template <class T_, int Inputs>
struct PrefetchedRows {
  using T = T_;
  static constexpr int kInputs = Inputs;
  static constexpr bool kHasOutput = true;
};

// Rows of whole vectors that begin at multiples of a vector.
template <class T, int TPR, int V, bool Cluster>
__device__ __forceinline__ void masked_rows_forward(const MaskedSoftmaxArgs& a) {
  using State = MaxSum<T, Accumulator<T>>;
  using Place = RowPlace<TPR, V>;
  constexpr int E = kElements<T>, kRows = Place::kRows, kWarps = Place::kMaxWarps, kStep = Place::kNext * E;
  if (!a.queries) prefetch_later_rows<PrefetchedRows<T, 1>, Cluster>(a.rows, kRows, Place::capacity() * E);
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
  const int end = active ? static_cast<int>(a.rows.n) : 0;
  const int64_t r = active ? row : 0;
  const RowMask mask(a, r, 0, end);
  const T* const x = opaque(static_cast<T*>(const_cast<void*>(a.rows.a)) + r * a.rows.a_stride + e);
  uint4 raw[V];
#pragma unroll
  for (int i = 0; i < V; i++)
    raw[i] = load_vector_if(e + i * kStep < mask.open, x + i * kStep, zero_vector());
  float h[V][E];
  bool any = false;
  each_addends<V, E>(mask, e, kStep, [&](int i, const float (&m)[E]) {
    float f[E];
    unpack(T(), raw[i], f);
    scores(f, m, e + i * kStep, mask.open, a.scale, h[i], any);
  });
  State st;
  st.m = lanes_max<Place::kLanes>(maximum_of(largest(h), any));
  const float own = State::reference(st.m);
  if (a.log) st.s = exponentials<T, V>(h, own);
  else st.s = exponentials<T, V, true>(h, own);
  st.s = lanes_sum<Place::kLanes>(st.s);
  if constexpr (kWarps > 1) reduce_warps<kWarps>(st, warp_slots, Place::warps());
#ifdef GANDER_SM90
  if constexpr (Cluster) {
    cluster_wait();
    reduce_cluster(st, cluster_slots, &barrier, 0);
  }
#endif
  const MaskedScalars<T> sc(a, st, own);
  void* const y = advance(a.rows.y, a.rows.y_type, r * a.rows.y_stride);
#pragma unroll
  for (int i = 0; i < V; i++) {
    if (e + i * kStep >= end) break;
#pragma unroll
    for (int j = 0; j < E; j++) h[i][j] = sc.map(a, h[i][j]);
    store_whole(y, a.rows.y_type, e + i * kStep, h[i]);
  }
}

// The h of one vector of a chunk. s.hi is mask.open.
template <class T, bool Unaligned>
__device__ __forceinline__ void load_scores(const MaskedSoftmaxArgs& a, const RowMask& mask, const T* x,
                                            int e, Bounds s, float (&h)[kElements<T>], bool& any) {
  constexpr int E = kElements<T>;
  float f[E], m[E];
  load_floats<Unaligned>(x, kDType<T>, e, s, f);
  load_addends<Unaligned>(mask, e, s, m);
  scores(f, m, e, mask.open, a.scale, h, any);
}

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void masked_partial_forward(const MaskedSoftmaxArgs& a) {
  using State = MaxSum<T, Accumulator<T>>;
  constexpr int E = kElements<T>, kStep = kChunkThreads * E;
  __shared__ Slot<State> warp_slots[kChunkThreads / 32];
  let_next_launch_start();
  const Chunk c = Chunk::of<T>(a.rows, blockIdx.x);
  const RowMask mask(a, c.row, c.origin, c.bounds.hi);
  const Bounds s = {0, mask.open, c.bounds.load_end};
  const T* const x = static_cast<const T*>(a.rows.a) + c.row * a.rows.a_stride + c.origin;
  State st;
  for (int e = threadIdx.x * E; e < mask.open; e += V * kStep) {
    float h[V][E];
    bool any = false;
#pragma unroll
    for (int i = 0; i < V; i++) load_scores<T, Unaligned>(a, mask, x, e + i * kStep, s, h[i], any);
    const float top = fmaxf(st.m, maximum_of(largest(h), any)), r = State::reference(top);
    st.s = st.s * rescale_factor<Accumulator<T>>(st.m, r) + exponentials<T, V>(h, r);
    st.m = top;
  }
  st.template reduce_lanes<32>();
  reduce_warps<kChunkThreads / 32>(st, warp_slots);
  wait_for_previous_launch();  // so that a launch that waits for this one has also waited for the one before
  if (threadIdx.x == 0) static_cast<Slot<State>*>(a.rows.partial)[blockIdx.x].set(st);
}

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void masked_apply_forward(const MaskedSoftmaxArgs& a) {
  using State = MaxSum<T, Accumulator<T>>;
  constexpr int E = kElements<T>, kStep = kChunkThreads * E;
  static_assert(V == 1);
  // Chunks are taken in reverse order, because L2 still holds those that masked_partial_forward read last.
  const Chunk c = Chunk::of<T>(a.rows, gridDim.x - 1 - blockIdx.x);
  const RowMask mask(a, c.row, c.origin, c.bounds.hi);
  const Bounds s = {0, mask.open, c.bounds.load_end};
  const T* const x = static_cast<const T*>(a.rows.a) + c.row * a.rows.a_stride + c.origin;
  void* const y = advance(a.rows.y, a.rows.y_type, c.row * a.rows.y_stride + c.origin);
  wait_for_previous_launch();
  const State st = row_state<State>(a.rows, c.row);
  const float own = State::reference(st.m);
  const MaskedScalars<T> sc(a, st, own);
  for (int e = threadIdx.x * E; e < c.bounds.hi; e += kStep) {
    float h[E];
    bool any = false;
    load_scores<T, Unaligned>(a, mask, x, e, s, h, any);
#pragma unroll
    for (int j = 0; j < E; j++) h[j] = sc.map(a, a.log ? h[j] : exp_difference<T>(h[j], own));
    store_floats(y, a.rows.y_type, e, c.bounds, h);
  }
}

// ---- Backward.

// What maps a row's gradients.
template <class T>
struct MaskedGradient {
  float dot, rest;  // the row's sum is dot + rest; only float32 rows use rest
  __device__ __forceinline__ explicit MaskedGradient(const Sum<T>& st)
      : dot(st.s), rest(sizeof(T) == 4 ? static_cast<float>(st.s - dot) : 0.f) {}
  // y is exp(y) with log.
  __device__ __forceinline__ float map(const MaskedSoftmaxArgs& a, float dy, float y) const {
    float dx;
    if (a.log) {
      dx = fmaf(-y, dot, dy);
      if constexpr (sizeof(T) == 4) dx = fmaf(-y, rest, dx);
    } else {
      dx = dy - dot;
      if constexpr (sizeof(T) == 4) dx -= rest;
      dx *= y;
    }
    return dx * a.scale;
  }
};

// Returns the elements that take part, a bit for each. Clears dy of the others.
template <int E>
__device__ __forceinline__ unsigned take(const float (&m)[E], int e, int open, float (&dy)[E]) {
  unsigned taken = 0;
#pragma unroll
  for (int j = 0; j < E; j++) {
    const bool in = e + j < open && m[j] != -kInfinity;
    taken |= in ? 1u << j : 0u;
    dy[j] = in ? dy[j] : 0.f;
  }
  return taken;
}

// Turns y into exp(y) with log.
template <class T, int E>
__device__ __forceinline__ void factors(const MaskedSoftmaxArgs& a, float (&y)[E]) {
  if (!a.log) return;
#pragma unroll
  for (int j = 0; j < E; j++) y[j] = exp_difference<T>(y[j], 0.f);
}

// Adds dy * y, or with log dy, of the elements that take part. The products are summed in F (see Sum::add).
template <class F, class T, int E>
__device__ __forceinline__ void add_gradients(const MaskedSoftmaxArgs& a, Sum<T>& st, unsigned taken,
                                              const float (&dy)[E], const float (&y)[E]) {
  float weights[E];
#pragma unroll
  for (int j = 0; j < E; j++) weights[j] = a.log ? 1.f : taken >> j & 1 ? y[j] : 0.f;
  st.template add<F>(dy, weights);
}

// Rows of whole vectors that begin at multiples of a vector. y has dy's type.
template <class T, int TPR, int V, bool Cluster>
__device__ __forceinline__ void masked_rows_backward(const MaskedSoftmaxArgs& a) {
  using State = Sum<T>;
  using Place = RowPlace<TPR, V>;
  constexpr int E = kElements<T>, kRows = Place::kRows, kWarps = Place::kMaxWarps, kStep = Place::kNext * E;
  if (!a.queries) prefetch_later_rows<PrefetchedRows<T, 2>, Cluster>(a.rows, kRows, Place::capacity() * E);
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
  const int end = active ? static_cast<int>(a.rows.n) : 0;
  const int64_t r = active ? row : 0;
  const RowMask mask(a, r, 0, end);
  const auto load = [&](const void* from, int64_t stride, uint4(&v)[V]) {
    const T* const at = opaque(static_cast<T*>(const_cast<void*>(from)) + r * stride + e);
#pragma unroll
    for (int i = 0; i < V; i++)
      v[i] = load_vector_if(e + i * kStep < mask.open, at + i * kStep, zero_vector());
  };
  uint4 raw_dy[V], raw_y[V];
  load(a.rows.a, a.rows.a_stride, raw_dy);
  load(a.rows.b, a.rows.b_stride, raw_y);
  unsigned taken[V];
  State st;
  each_addends<V, E>(mask, e, kStep, [&](int i, const float (&m)[E]) {
    float dy[E], y[E];
    unpack(T(), raw_dy[i], dy);
    unpack(T(), raw_y[i], y);
    taken[i] = take(m, e + i * kStep, mask.open, dy);
    factors<T>(a, y);
    if constexpr (sizeof(T) == 4) raw_y[i] = pack(T(), y);
    add_gradients<float>(a, st, taken[i], dy, y);
  });
  st.template reduce_lanes<Place::kLanes>();
  if constexpr (kWarps > 1) reduce_warps<kWarps>(st, warp_slots, Place::warps());
#ifdef GANDER_SM90
  if constexpr (Cluster) {
    cluster_wait();
    reduce_cluster(st, cluster_slots, &barrier, 0);
  }
#endif
  const MaskedGradient<T> sc(st);
  void* const dx = advance(a.rows.y, a.rows.y_type, r * a.rows.y_stride);
#pragma unroll
  for (int i = 0; i < V; i++) {
    if (e + i * kStep >= end) break;
    float dy[E], y[E], out[E];
    // Converted again, because floats would take twice the registers.
    rematerialize<T>(raw_dy[i], a.rows.opaque_zero);
    rematerialize<T>(raw_y[i], a.rows.opaque_zero);
    unpack(T(), raw_dy[i], dy);
    unpack(T(), raw_y[i], y);
    if constexpr (sizeof(T) == 2) factors<T>(a, y);
#pragma unroll
    for (int j = 0; j < E; j++) out[j] = taken[i] >> j & 1 ? sc.map(a, dy[j], y[j]) : 0.f;
    store_whole(dx, a.rows.y_type, e + i * kStep, out);
  }
}

// One vector of a chunk. s.hi is mask.open.
template <class T, bool Unaligned>
__device__ __forceinline__ unsigned load_gradients(const MaskedSoftmaxArgs& a, const RowMask& mask,
                                                   const Chunk& c, int e, Bounds s, float (&dy)[kElements<T>],
                                                   float (&y)[kElements<T>]) {
  const T* const from = static_cast<const T*>(a.rows.a) + c.row * a.rows.a_stride + c.origin;
  const void* const other = advance(a.rows.b, a.rows.b_type, c.row * a.rows.b_stride + c.origin);
  float m[kElements<T>];
  load_floats<Unaligned>(from, kDType<T>, e, s, dy);
  load_floats<Unaligned>(other, a.rows.b_type, e, s, y);
  load_addends<Unaligned>(mask, e, s, m);
  factors<T>(a, y);
  return take(m, e, mask.open, dy);
}

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void masked_partial_backward(const MaskedSoftmaxArgs& a) {
  using State = Sum<T>;
  constexpr int E = kElements<T>, kStep = kChunkThreads * E;
  static_assert(V == 1);
  __shared__ Slot<State> warp_slots[kChunkThreads / 32];
  let_next_launch_start();
  const Chunk c = Chunk::of<T>(a.rows, blockIdx.x);
  const RowMask mask(a, c.row, c.origin, c.bounds.hi);
  const Bounds s = {0, mask.open, c.bounds.load_end};
  State st;
  for (int e = threadIdx.x * E; e < mask.open; e += kStep) {
    float dy[E], y[E];
    const unsigned taken = load_gradients<T, Unaligned>(a, mask, c, e, s, dy, y);
    // Rows of a few elements have sums as small as one element. Float products would show in the result.
    add_gradients<std::conditional_t<Unaligned, Accumulator<T>, float>>(a, st, taken, dy, y);
  }
  st.template reduce_lanes<32>();
  reduce_warps<kChunkThreads / 32>(st, warp_slots);
  wait_for_previous_launch();  // so that a launch that waits for this one has also waited for the one before
  if (threadIdx.x == 0) static_cast<Slot<State>*>(a.rows.partial)[blockIdx.x].set(st);
}

template <class T, int V, bool Unaligned>
__device__ __forceinline__ void masked_apply_backward(const MaskedSoftmaxArgs& a) {
  constexpr int E = kElements<T>, kStep = kChunkThreads * E;
  static_assert(V == 1);
  // Chunks are taken in reverse order, because L2 still holds those that masked_partial_backward read last.
  const Chunk c = Chunk::of<T>(a.rows, gridDim.x - 1 - blockIdx.x);
  const RowMask mask(a, c.row, c.origin, c.bounds.hi);
  const Bounds s = {0, mask.open, c.bounds.load_end};
  void* const dx = advance(a.rows.y, a.rows.y_type, c.row * a.rows.y_stride + c.origin);
  wait_for_previous_launch();
  const MaskedGradient<T> sc(row_state<Sum<T>>(a.rows, c.row));
  for (int e = threadIdx.x * E; e < c.bounds.hi; e += kStep) {
    float dy[E], y[E];
    const unsigned taken = load_gradients<T, Unaligned>(a, mask, c, e, s, dy, y);
#pragma unroll
    for (int j = 0; j < E; j++) dy[j] = taken >> j & 1 ? sc.map(a, dy[j], y[j]) : 0.f;
    store_floats(dx, a.rows.y_type, e, c.bounds, dy);
  }
}

}  // namespace gander
