// Element types, and 16-byte vectors of elements: how they are loaded, converted and stored.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "args_gen.cuh"

namespace gander {

using f16 = __half;
using bf16 = __nv_bfloat16;
using f32 = float;

// The DType that stands for an element type at run time.
template <class T>
constexpr DType kDType = std::is_same_v<T, f16>    ? kFloat16
                         : std::is_same_v<T, bf16> ? kBFloat16
                                                   : kFloat32;

template <class T>
constexpr int kElements = 16 / sizeof(T);  // elements of a 16-byte vector

constexpr float kInfinity = __builtin_huge_valf();

// ---- Conversion between one vector of T and floats.
// 16-bit elements stay packed in registers. They are converted again each time they are needed.

__device__ __forceinline__ void unpack(f32, uint4 v, float (&f)[4]) {
  f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y);
  f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ void unpack(bf16, uint4 v, float (&f)[8]) {
  const unsigned u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f[2 * i] = __uint_as_float(u[i] << 16);
    f[2 * i + 1] = __uint_as_float(u[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(f16, uint4 v, float (&f)[8]) {
  const unsigned u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 p = __half22float2(reinterpret_cast<const __half2&>(u[i]));
    f[2 * i] = p.x, f[2 * i + 1] = p.y;
  }
}

__device__ __forceinline__ uint4 pack(f32, const float (&f)[4]) {
  return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                    __float_as_uint(f[3]));
}

__device__ __forceinline__ unsigned pack2(bf16, float a, float b) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const unsigned&>(p);
}

__device__ __forceinline__ unsigned pack2(f16, float a, float b) {
  const __half2 p = __floats2half2_rn(a, b);
  return reinterpret_cast<const unsigned&>(p);
}

template <class T>
__device__ __forceinline__ uint4 pack(T t, const float (&f)[8]) {
  return make_uint4(pack2(t, f[0], f[1]), pack2(t, f[2], f[3]), pack2(t, f[4], f[5]), pack2(t, f[6], f[7]));
}

template <class T>
__device__ __forceinline__ float to_float(T v) {
  if constexpr (sizeof(T) == 4) return v;
  else if constexpr (std::is_same_v<T, bf16>) return __bfloat162float(v);
  else return __half2float(v);
}

template <class T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (sizeof(T) == 4) return v;
  else if constexpr (std::is_same_v<T, bf16>) return __float2bfloat16_rn(v);
  else return __float2half_rn(v);
}

// Vectors of the values that elements out of bounds have: -infinity or zero.
template <class T>
__device__ __forceinline__ uint4 lowest_vector() {
  constexpr unsigned bits16 = std::is_same_v<T, bf16> ? 0xff80ff80u : 0xfc00fc00u;
  constexpr unsigned bits = sizeof(T) == 4 ? 0xff800000u : bits16;
  return make_uint4(bits, bits, bits, bits);
}
__device__ __forceinline__ uint4 zero_vector() { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ uint4 operator&(uint4 a, uint4 b) {
  return make_uint4(a.x & b.x, a.y & b.y, a.z & b.z, a.w & b.w);
}

// Makes the compiler convert v again instead of keeping earlier conversions in registers. Floats take twice
// the registers of 16-bit elements, and converting again is cheap. `zero` is a kernel argument that is always
// 0. ptxas cannot know that, so the XOR hides the value from it. An empty asm statement would hide it from
// the front end alone.
template <class T>
__device__ __forceinline__ void rematerialize(uint4& v, unsigned zero) {
  if constexpr (sizeof(T) == 2) v = make_uint4(v.x ^ zero, v.y ^ zero, v.z ^ zero, v.w ^ zero);
}

// The largest element of V vectors. NaNs are ignored here: they appear in the sum of exponentials later.
// Packed maxima of 16-bit elements are exact and take half the instructions.
template <int V>
__device__ __forceinline__ float tile_max(f32, const uint4 (&v)[V]) {
  float m = -kInfinity;
#pragma unroll
  for (int i = 0; i < V; i++) {
    float f[4];
    unpack(f32(), v[i], f);
    m = fmaxf(m, fmaxf(fmaxf(f[0], f[1]), fmaxf(f[2], f[3])));
  }
  return m;
}

template <class T, int V>
__device__ __forceinline__ float tile_max(T, const uint4 (&v)[V]) {
  using T2 = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
  unsigned m = lowest_vector<T>().x;
  const auto take = [&m](unsigned u) {
    const T2 r = __hmax2(reinterpret_cast<const T2&>(m), reinterpret_cast<const T2&>(u));
    m = reinterpret_cast<const unsigned&>(r);
  };
#pragma unroll
  for (int i = 0; i < V; i++) take(v[i].x), take(v[i].y), take(v[i].z), take(v[i].w);
  const T2 r = reinterpret_cast<const T2&>(m);
  return fmaxf(to_float(r.x), to_float(r.y));
}

// ---- Bounds of a row, or of a part of it: its elements are p[lo] to p[hi - 1] for some pointer p.
//
// Aligned kernels: p is the start of the row, and lo is 0. All vectors are aligned, and none is cut by hi.
//
// Unaligned kernels: p lies up to one vector before the row, where vectors of the output are aligned. An
// input may be misaligned there. It is then loaded as aligned vectors, which are shifted into place. A vector
// load reads 16 aligned bytes with at least one element of the row. `load_end` keeps such loads from passing
// the end of the tensor in its last row.
struct Bounds {
  int lo, hi;
  int load_end;  // 16-byte loads must end here at the latest
  // No element is in bounds, nor is one near them. At lo = hi = 0 a shifted vector would still touch them.
  __device__ __forceinline__ void clear() { lo = hi = INT32_MIN / 2; }
  template <int E>
  __device__ __forceinline__ bool whole(int e) const {
    return e >= lo && e + E <= hi;
  }
  template <int E>
  __device__ __forceinline__ bool touches(int e) const {
    return e < hi && e + E > lo;
  }
};

// How many elements p lies after the last 16-byte boundary.
template <class T>
__device__ __forceinline__ int vector_offset(const T* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) / sizeof(T);
}

// Loads a vector if `in` holds, else returns `other`. The load is predicated: without branches, all loads of
// a tile are issued together. It is inline assembly, which the compiler neither moves nor repeats. It has no
// streaming hint: `.cs` on loads cost 2 to 3 % of the bandwidth on an H100.
__device__ __forceinline__ uint4 load_vector_if(bool in, const void* p, uint4 other) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(other.x), "+r"(other.y), "+r"(other.z), "+r"(other.w)
               : "l"(p), "r"(static_cast<unsigned>(in)));
  return other;
}

// Stores v if `in` holds. It is predicated too: branches around the results that a caller may leave out would
// take longer than the stores.
__device__ __forceinline__ void store_if(bool in, float* p, float v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p st.global.f32 [%0], %1;\n}" ::"l"(p), "f"(v),
               "r"(static_cast<unsigned>(in))
               : "memory");
}
__device__ __forceinline__ void store_if(bool in, float2* p, float2 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(p),
               "f"(v.x), "f"(v.y), "r"(static_cast<unsigned>(in))
               : "memory");
}

// Hides from the compiler how p was computed. Accesses at constant distances from p then use the
// instruction's immediate offset, instead of an address register for each.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Shifts w down by `bytes`, an even number from 0 to 14. Only the first N words of the result are valid.
template <int N, int W>
__device__ __forceinline__ void shift_words(unsigned (&w)[W], int bytes) {
  static_assert(W >= N + 3);
#pragma unroll
  for (int i = 0; i < W - 2; i++) w[i] = bytes & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < N + 1 && i < W - 3; i++) w[i] = bytes & 4 ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < N; i++) w[i] = __funnelshift_r(w[i], w[i + 1], (bytes & 2) * 8);
}

// The 16 bytes that begin `bytes` after the start of the adjacent vectors a and b.
__device__ __forceinline__ uint4 shifted(uint4 a, uint4 b, int bytes) {
  unsigned w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  shift_words<4>(w, bytes);
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Replaces the elements of v outside of [lo, hi) by those of `fill`.
template <class T>
__device__ __forceinline__ uint4 masked(uint4 v, int lo, int hi, uint4 fill) {
  unsigned w[4] = {v.x, v.y, v.z, v.w};
  const unsigned f[4] = {fill.x, fill.y, fill.z, fill.w};
#pragma unroll
  for (int j = 0; j < kElements<T>; j++) {
    const unsigned mask = sizeof(T) == 4 ? ~0u : j % 2 ? 0xffff0000u : 0xffffu;
    unsigned& word = w[j * sizeof(T) / 4];
    if (j < lo || j >= hi) word = (word & ~mask) | (f[j * sizeof(T) / 4] & mask);
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Loads the elements [lo, hi) of a vector one by one. The others are those of `fill`.
template <class T>
__device__ __forceinline__ uint4 load_elements(const T* p, int lo, int hi, uint4 fill) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  constexpr int E = kElements<T>;
  Bits b[E];
#pragma unroll
  for (int j = 0; j < E; j++) b[j] = j >= lo && j < hi ? reinterpret_cast<const Bits*>(p)[j] : 0;
  uint4 v;
  memcpy(&v, b, sizeof(v));
  return masked<T>(v, lo, hi, fill);
}

// load where p is aligned to 16 bytes, no e is negative and s.lo is within the first vector. Then only the
// first and the last vector of a row have elements out of bounds, and other threads compare once for each
// vector.
template <class T, int V>
__device__ __forceinline__ void load_same_offset(const T* p, int e, int step, Bounds s, uint4 fill,
                                                 uint4 (&v)[V]) {
  constexpr int E = kElements<T>;
  const T* const from = opaque(p + e);
  const int end = min(s.hi, s.load_end - (E - 1));
#pragma unroll
  for (int i = 0; i < V; i++) v[i] = load_vector_if(e + i * step < end, from + i * step, fill);
  if (e < s.lo) v[0] = masked<T>(v[0], s.lo - e, E, fill);
  // Hidden, or all that follows from it would be computed before a loop and kept in registers.
  int last = s.hi & -E;
  asm volatile("" : "+r"(last));
  const int from_first = last - e;  // of this thread's vectors
  if (last == s.hi || from_first < 0 || from_first % step != 0 || from_first >= V * step) return;
  if (last + E > s.load_end) {
    const uint4 edge = load_elements(p + last, s.lo - last, s.hi - last, fill);
#pragma unroll
    for (int i = 0; i < V; i++)
      if (from_first == i * step) v[i] = edge;
  } else {
#pragma unroll
    for (int i = 0; i < V; i++)
      if (from_first == i * step) v[i] = masked<T>(v[i], s.lo - last, s.hi - last, fill);
  }
}

// Loads V vectors, the first at element e, each `step` elements after the one before. Elements out of bounds
// are those of `fill`. Unaligned: p may have any alignment, unless SameOffset promises that p is aligned to
// 16 bytes.
template <bool Unaligned, bool SameOffset, class T, int V>
__device__ __forceinline__ void load(const T* p, int e, int step, Bounds s, uint4 fill, uint4 (&v)[V]) {
  constexpr int E = kElements<T>;
  if constexpr (!Unaligned) {
    const T* const at = opaque(p + e);
#pragma unroll
    for (int i = 0; i < V; i++) v[i] = load_vector_if(e + i * step < s.hi, at + i * step, fill);
  } else if constexpr (SameOffset) {
    load_same_offset(p, e, step, s, fill, v);
  } else {
    const int k = vector_offset(p);
    const auto aligned = [&](int g) {
      return load_vector_if(s.touches<E>(g) && g + E <= s.load_end, p + g, fill);
    };
    if (k == 0) {
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = aligned(e + i * step);
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int ei = e + i * step;
        const uint4 first = aligned(ei - k), second = aligned(ei - k + E);
        v[i] = s.touches<E>(ei) ? shifted(first, second, k * sizeof(T)) : fill;
      }
    }
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int ei = e + i * step, last = ei + E + (k ? E - k : 0);
      if (!s.touches<E>(ei) || s.whole<E>(ei) && last <= s.load_end) continue;
      if (last > s.load_end) v[i] = load_elements(p + ei, s.lo - ei, s.hi - ei, fill);
      else v[i] = masked<T>(v[i], s.lo - ei, s.hi - ei, fill);
    }
  }
}

__device__ __forceinline__ bool aligned16(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

template <class T>
__device__ __forceinline__ void store_vector(T* p, const float (&f)[kElements<T>]) {
  __stcs(reinterpret_cast<uint4*>(p), pack(T(), f));
}

// Stores elements e to e + E - 1 of a row to p, except for those before lo or from hi on.
template <class T, int E>
__device__ __forceinline__ void store_within(T* p, int e, int lo, int hi, const float (&f)[E]) {
#pragma unroll
  for (int j = 0; j < E; j++)
    if (e + j >= lo && e + j < hi) p[j] = from_float<T>(f[j]);
}

// Stores the vector at element e, except for elements out of bounds.
template <bool Unaligned, class T>
__device__ __forceinline__ void store(T* p, int e, Bounds s, const float (&f)[kElements<T>]) {
  constexpr int E = kElements<T>;
  if (Unaligned ? s.whole<E>(e) && aligned16(p + e) : e < s.hi) {
    store_vector(p + e, f);
  } else if constexpr (Unaligned) {
    store_within(p + e, e, s.lo, s.hi, f);
  }
}

// ---- Operands whose element type is known at run time only.

// Loads E adjacent elements. They are aligned to 16 bytes, or to E elements if these have fewer bytes.
template <class T, int E>
__device__ __forceinline__ void load_aligned(const T* p, float (&f)[E]) {
  constexpr int F = kElements<T>;
  if constexpr (E < F) {  // four 16-bit elements: half a vector
    static_assert(2 * E == F);
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    float g[F];
    unpack(T(), make_uint4(v.x, v.y, 0, 0), g);
#pragma unroll
    for (int j = 0; j < E; j++) f[j] = g[j];
  } else {
#pragma unroll
    for (int i = 0; i < E; i += F) {
      float g[F];
      unpack(T(), *reinterpret_cast<const uint4*>(p + i), g);
#pragma unroll
      for (int j = 0; j < F; j++) f[i + j] = g[j];
    }
  }
}

template <bool Unaligned, class T, int E>
__device__ __forceinline__ void load_floats_as(const T* p, int e, Bounds s, float (&f)[E]) {
  if constexpr (!Unaligned) {
    if (e < s.hi) {
      load_aligned(p + e, f);
    } else {
#pragma unroll
      for (int j = 0; j < E; j++) f[j] = 0.f;
    }
  } else {
    constexpr int F = kElements<T>, kLoads = (E + F - 1) / F + 1;
    const int k = vector_offset(p + e);
    if (s.whole<E>(e) && e - k + (k + E + F - 1) / F * F <= s.load_end) {
      unsigned w[4 * kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; i++) {
        const uint4 v = i * F < k + E ? *reinterpret_cast<const uint4*>(p + e - k + i * F) : zero_vector();
        memcpy(w + 4 * i, &v, sizeof(v));
      }
      constexpr int kWords = E * sizeof(T) / 4;
      shift_words<kWords>(w, k * sizeof(T));
      T values[E];
      memcpy(values, w, sizeof(values));
#pragma unroll
      for (int j = 0; j < E; j++) f[j] = to_float(values[j]);
      return;
    }
#pragma unroll
    for (int j = 0; j < E; j++) f[j] = e + j >= s.lo && e + j < s.hi ? to_float(p[e + j]) : 0.f;
  }
}

// Loads E elements from element e on, as floats. Elements out of bounds are 0.
template <bool Unaligned, int E>
__device__ __forceinline__ void load_floats(const void* p, int32_t type, int e, Bounds s, float (&f)[E]) {
  if (type == kBFloat16) load_floats_as<Unaligned>(static_cast<const bf16*>(p), e, s, f);
  else if (type == kFloat16) load_floats_as<Unaligned>(static_cast<const f16*>(p), e, s, f);
  else load_floats_as<Unaligned>(static_cast<const f32*>(p), e, s, f);
}

template <class T, int E>
__device__ __forceinline__ void store_floats_as(T* p, int e, Bounds s, const float (&f)[E]) {
  constexpr int F = kElements<T>;
  if (!s.whole<E>(e) || reinterpret_cast<uintptr_t>(p + e) % (E < F ? E * sizeof(T) : 16)) {
    store_within(p + e, e, s.lo, s.hi, f);
    return;
  }
#pragma unroll
  for (int i = 0; i < E; i += F) {
    float g[F] = {};
#pragma unroll
    for (int j = 0; j < F && i + j < E; j++) g[j] = f[i + j];
    const uint4 v = pack(T(), g);
    if constexpr (E < F) __stcs(reinterpret_cast<uint2*>(p + e), make_uint2(v.x, v.y));
    else __stcs(reinterpret_cast<uint4*>(p + e + i), v);
  }
}

template <int E>
__device__ __forceinline__ void store_floats(void* p, int32_t type, int e, Bounds s, const float (&f)[E]) {
  if (type == kBFloat16) store_floats_as(static_cast<bf16*>(p), e, s, f);
  else if (type == kFloat16) store_floats_as(static_cast<f16*>(p), e, s, f);
  else store_floats_as(static_cast<f32*>(p), e, s, f);
}

__device__ __forceinline__ float load_float(const void* p, int32_t type, int64_t i) {
  if (type == kBFloat16) return to_float(static_cast<const bf16*>(p)[i]);
  if (type == kFloat16) return to_float(static_cast<const f16*>(p)[i]);
  return static_cast<const f32*>(p)[i];
}

__device__ __forceinline__ void store_float(void* p, int32_t type, int64_t i, float v) {
  if (type == kBFloat16) static_cast<bf16*>(p)[i] = from_float<bf16>(v);
  else if (type == kFloat16) static_cast<f16*>(p)[i] = from_float<f16>(v);
  else static_cast<f32*>(p)[i] = v;
}

// Pointer arithmetic on elements of a run-time type.
__device__ __forceinline__ int type_size(int32_t type) { return type == kFloat32 ? 4 : 2; }
__device__ __forceinline__ const void* advance(const void* p, int32_t type, int64_t elements) {
  return static_cast<const char*>(p) + elements * type_size(type);
}
__device__ __forceinline__ void* advance(void* p, int32_t type, int64_t elements) {
  return static_cast<char*>(p) + elements * type_size(type);
}

// Copies `Size` bytes to shared memory asynchronously (cp.async). Only the first `bytes` are read, and the
// rest is filled with zeros. If the copying thread alone uses the data, it needs no barrier.
template <int Size>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (Size == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(global), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace gander
