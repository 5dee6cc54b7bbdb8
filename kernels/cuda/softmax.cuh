// Softmax over rows, forward and backward.
#pragma once
#include "grid.cuh"
#include "softmax_args_gen.cuh"

namespace gander {

// y = exp(x - max) / sum exp(x - max)
template <class T_>
struct SoftmaxForward : RowOperator<SoftmaxForward<T_>> {
  using T = T_;
  using State = MaxSum<T, Accumulator<T>>;
  using Args = SoftmaxArgs;
  struct Scalars {
    float max;
    float sum, rest;  // the sum in double is sum + rest; only float32 rows use rest
    float scale;      // 1 / sum, unless rebase_scale has changed it
  };
  __device__ __forceinline__ static void finalize(const Args&, int64_t, Scalars& sc, const State& st, bool) {
    const float sum = st.s;
    sc = {st.m, sum, static_cast<float>(st.s - sum), 1.f / sum};
  }
  // From here on, scale is exp(m - max) / sum. For float32 rows scale + rest is, in double.
  __device__ __forceinline__ static void rebase_scale(Scalars& sc, float m) {
    if constexpr (sizeof(T) < 4) {
      sc.scale *= rescale_factor<float>(m, State::reference(sc.max));
    } else {
      // One Newton step from the float inverse. A division in double has a slow path that is a function call.
      const double sum = static_cast<double>(sc.sum) + sc.rest, guess = sc.scale;
      const double inverse = fma(guess, fma(-sum, guess, 1.), guess);
      const double scale = rescale_factor<double>(m, State::reference(sc.max)) * inverse;
      sc.scale = scale, sc.rest = scale - sc.scale;
    }
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args&, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View&, int, float (&y)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      if constexpr (Cached) {
        y[j] = sizeof(T) == 4 ? fmaf(x[j], sc.scale, x[j] * sc.rest) : x[j] * sc.scale;
        continue;
      }
      const float e = exp_difference<T>(x[j], sc.max);
      y[j] = e * sc.scale;
      if constexpr (sizeof(T) == 4)  // corrects y to the rounded quotient e / (sum + rest)
        y[j] = fmaf(fmaf(-y[j], sc.rest, fmaf(-y[j], sc.sum, e)), sc.scale, y[j]);
    }
  }
};

// dx = (dy - sum(dy * y)) * y
template <class T_>
struct SoftmaxBackward : RowOperator<SoftmaxBackward<T_>> {
  using T = T_;
  using State = Sum<T>;
  using Args = SoftmaxArgs;
  static constexpr int kInputs = 2;
  struct Scalars {
    float dot, rest;  // the sum in double is dot + rest; only float32 rows use rest
  };
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args&, State& st, const Tile& t, const View&, int,
                                                    int) {
#pragma unroll
    for (int i = 0; i < std::extent_v<decltype(t.a)>; i++) {
      float dy[Tile::E], y[Tile::E];
      t.get_a(i, dy);
      t.get_b(i, y);
      // Sums of few elements may be as small as one of them. Float products would show in the result.
      st.template add<std::conditional_t<Tile::kFewElements, Accumulator<T>, float>>(dy, y);
    }
  }
  __device__ __forceinline__ static void finalize(const Args&, int64_t, Scalars& sc, const State& st, bool) {
    sc.dot = st.s;
    sc.rest = st.s - sc.dot;
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args&, const Scalars& sc, const float (&dy)[E],
                                             const float (&y)[E], const View&, int, float (&dx)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float p = dy[j] * y[j];
      dx[j] = fmaf(-sc.dot, y[j], p);
      // Adds what p and dot have lost to rounding, which matters where p and dot * y nearly cancel.
      if constexpr (sizeof(T) == 4) dx[j] += fmaf(-sc.rest, y[j], fmaf(dy[j], y[j], -p));
    }
  }
};

}  // namespace gander
