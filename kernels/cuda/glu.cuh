// Gated linear units: y = act(gate) * up, element by element (Shazeer, "GLU Variants Improve Transformer",
// 2020).
//
// Each vector of the gate meets those of the other inputs at the same place, and nothing is reduced.
// Backward may write over gate and up: a thread reads all inputs of its elements before it writes any.
#pragma once
#include "elementwise.cuh"
#include "glu_args_gen.cuh"
#include "operands.cuh"

namespace gander {

// x / (1 + e). Results of 16 bits take the hardware's reciprocal. For float32 results the quotient gets back
// what the sum and the division have lost by rounding, if these numbers are finite.
template <class T>
__device__ __forceinline__ float over_one_plus(float x, float e) {
  const float d = 1.f + e;
  if constexpr (sizeof(T) == 2) return __fdividef(x, d);
  const float q = x / d, most = __fsub_rn(d, 1.f);
  const float lost = __fadd_rn(__fsub_rn(1.f, __fsub_rn(d, most)), __fsub_rn(e, most));
  const float more = __fdividef(fmaf(-q, lost, fmaf(-q, d, x)), d);
  return fabsf(more) < kInfinity ? q + more : q;
}

// The sigmoid s of v, from e = exp(-v). rest is 1 - s, with the digits that s loses where it is nearly 1.
template <class T>
struct Sigmoid {
  float e;
  __device__ __forceinline__ explicit Sigmoid(float v) : e(exp_difference<T>(0.f, v)) {}
  __device__ __forceinline__ float times(float x) const { return over_one_plus<T>(x, e); }
  __device__ __forceinline__ float rest(float s) const { return e < 1.f ? s * e : 1.f - s; }
};

// act(x) and its derivative.
template <class T>
struct SiLU {
  Sigmoid<T> sigmoid;
  float x;
  __device__ __forceinline__ explicit SiLU(float x) : sigmoid(x), x(x) {}
  __device__ __forceinline__ float value() const { return sigmoid.times(x); }
  __device__ __forceinline__ float derivative() const {
    const float s = sigmoid.times(1.f);
    return fmaf(s * sigmoid.rest(s), x, s);
  }
};

template <class T>
struct GELU {
  static constexpr float kDensityAt0 = 0.398942280401432678f;  // 1 / sqrt(2 pi)

  float below, x;  // the share of the normal distribution below x
  __device__ __forceinline__ explicit GELU(float x) : below(share(x)), x(x) {}
  // For float32 results, the density's Taylor series around 0, integrated, where normcdff is off by more than
  // the rounding of the sum: sum of (-x^2 / 2)^k x / (k! (2 k + 1)).
  __device__ __forceinline__ static float share(float x) {
    const float far = normcdff(x);
    if constexpr (sizeof(T) == 2) return far;
    const float square = x * x;
    float sum = -kDensityAt0 / 9676800;
    constexpr float kTerms[] = {1.f / 599040, -1.f / 42240, 1.f / 3456, -1.f / 336, 1.f / 40, -1.f / 6, 1.f};
#pragma unroll
    for (float term : kTerms) sum = fmaf(sum, square, kDensityAt0 * term);
    return fabsf(x) < 1.f ? fmaf(sum, x, 0.5f) : far;
  }
  __device__ __forceinline__ float value() const { return x * below; }
  __device__ __forceinline__ float derivative() const {
    return fmaf(x, kDensityAt0 * exp_difference<T>(0.f, 0.5f * x * x), below);
  }
};

// GELU with 0.5 (1 + tanh(u)) for the distribution. That is the sigmoid of 2 u, which keeps its digits where
// tanh(u) is nearly -1.
template <class T>
struct GELUTanh {
  static constexpr float kTwice = 2 * 0.797884560802865356f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
  Sigmoid<T> sigmoid;
  float x;
  __device__ __forceinline__ explicit GELUTanh(float x)
      : sigmoid(kTwice * fmaf(kCubic * x * x, x, x)), x(x) {}
  __device__ __forceinline__ float value() const { return sigmoid.times(x); }
  __device__ __forceinline__ float derivative() const {
    const float s = sigmoid.times(1.f);
    return fmaf(s * sigmoid.rest(s) * x, kTwice * fmaf(3 * kCubic * x, x, 1.f), s);
  }
};

// What row_view asks of an operator.
template <class T_>
struct GLUOperands {
  using T = T_;
  static constexpr int kInputs = 2;
  static constexpr bool kHasOutput = true;
};

template <class Activation, class T, int V, bool Unaligned, bool Backward>
__device__ __forceinline__ void map_glu(const GLUArgs& args) {
  constexpr int E = kElements<T>;
  const Rows& r = args.rows;
  const unsigned part = blockIdx.x;
  const ThreadInRow thread(args, part);
  if (thread.is_idle) return;
  const int64_t row = thread.row;
  const RowView<T> p = row_view<GLUOperands<T>, Unaligned, false>(r, row, part % r.splits);
  Bounds loads = Unaligned ? p.load_bounds() : p.bounds;
  const T* dy = nullptr;
  T* dup = nullptr;
  if constexpr (Backward) {
    dy = static_cast<const T*>(args.c) + row * args.c_stride + p.origin;
    dup = static_cast<T*>(args.z) + row * args.z_stride + p.origin;
    if (Unaligned && (r.m - 1 - row) * args.c_stride < E) loads.load_end = p.bounds.load_end;
  }
  const T* const up = static_cast<const T*>(p.b);
  T* const y = static_cast<T*>(p.y);
  const int step = thread.threads * E;
  for (int e = thread.lane * E; e < p.bounds.hi; e += V * step) {
    uint4 gates[V], ups[V], dys[V];
    load<Unaligned, false>(p.a, e, step, loads, zero_vector(), gates);
    load<Unaligned, false>(up, e, step, loads, zero_vector(), ups);
    if constexpr (Backward) load<Unaligned, false>(dy, e, step, loads, zero_vector(), dys);
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int at = e + i * step;
      if (at >= p.bounds.hi) break;
      float g[E], u[E], d[E], out[E], out2[E];
      unpack(T(), gates[i], g);
      unpack(T(), ups[i], u);
      if constexpr (Backward) unpack(T(), dys[i], d);
#pragma unroll
      for (int j = 0; j < E; j++) {
        const Activation act(g[j]);
        const float value = args.round_activation ? rounded<T>(act.value()) : act.value();
        if constexpr (Backward) {
          const float product = d[j] * u[j];
          out[j] = (args.round_activation ? rounded<T>(product) : product) * act.derivative();
          out2[j] = d[j] * value;
        } else {
          out[j] = value * u[j];
        }
      }
      store<Unaligned>(y, at, p.bounds, out);
      if constexpr (Backward) store<Unaligned>(dup, at, p.bounds, out2);
    }
  }
}

template <class T, int V, bool Unaligned, bool Backward>
__device__ __forceinline__ void glu_body(const GLUArgs& args) {
  if (args.activation == kSiLU) map_glu<SiLU<T>, T, V, Unaligned, Backward>(args);
  else if (args.activation == kGELU) map_glu<GELU<T>, T, V, Unaligned, Backward>(args);
  else map_glu<GELUTanh<T>, T, V, Unaligned, Backward>(args);
}

}  // namespace gander
