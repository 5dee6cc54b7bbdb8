// What norms do most, over aligned rows whose operands all have one type: LayerNorm without a residual, and
// RMSNorm with one, forward and backward. norm.cuh has all other norms, and the formulas. Rows stay packed in
// registers here, which leaves room for weights and biases.
#pragma once
#include "norm_args_gen.cuh"
#include "ring.cuh"

namespace gander {

// 1 / x for x >= 1, to half an ulp of A or, if that is double, nearly.
template <class A>
__device__ __forceinline__ A inverse(float x) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(x));
  const A r = guess;
  return fma(r, fma(-static_cast<A>(x), r, static_cast<A>(1)), r);
}

// The number of elements, their mean, and the sum of their squared deviations from it. For RMSNorm count and
// mean are 0, and m2 is the sum of squares.
//
// Parts are merged in two steps, too: their common mean, then m2 with the deviations of their means from it.
// So no digits cancel, whatever the mean is (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
// Algorithm for Computing Sample Variances", 1979).
template <class T>
struct alignas(8) Moments {
  using A = Accumulator<T>;
  static constexpr bool kMaxFirst = false;
  A mean = 0, m2 = 0;
  float count = 0.f;

  __device__ __forceinline__ void merge(const Moments& o) {
    const float all = count + o.count;
    const A delta = o.mean - mean, share = all > 0.f ? static_cast<A>(o.count) / all : 0;
    m2 += o.m2 + delta * delta * count * share;
    mean += delta * share;
    count = all;
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    if (!__any_sync(kAllLanes, count > 0.f)) {
      m2 = lanes_sum<L>(m2);
      return;
    }
    // Rows of a few vectors have one part in most of their merges, whose mean is to keep its bits.
    const A first = __shfl_sync(kAllLanes, mean, 0, L);
    const bool only = __shfl_sync(kAllLanes, count, 0, L) == lanes_sum<L>(count);
    reduce_centered<L>();
    if (only) mean = first;
  }
  template <int L>
  __device__ __forceinline__ void reduce_centered() {
    const float all = lanes_sum<L>(count);
    const A common = lanes_sum<L>(mean * count) * inverse<A>(fmaxf(all, 1.f));
    const A delta = count > 0.f ? mean - common : static_cast<A>(0);  // 0 times infinity would be NaN
    m2 = lanes_sum<L>(fma(delta * delta, static_cast<A>(count), m2));
    mean = common, count = all;
  }
};

// Moments of which all are about a mean.
template <class T>
struct CenteredMoments : Moments<T> {
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    this->template reduce_centered<L>();
  }
};

// The sums of g and of g * (h - mean), or of g * xhat.
template <class T>
struct alignas(8) GradientSums {
  using A = Accumulator<T>;
  static constexpr bool kMaxFirst = false;
  A g = 0, gh = 0;
  __device__ __forceinline__ void merge(const GradientSums& o) { g += o.g, gh += o.gh; }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    g = lanes_sum<L>(g), gh = lanes_sum<L>(gh);
  }
  template <int E>
  __device__ __forceinline__ void add(const float (&gs)[E], const float (&hs)[E], bool) {
    float s = 0.f, t = 0.f;
#pragma unroll
    for (int j = 0; j < E; j++) s += gs[j], t = fmaf(gs[j], hs[j], t);
    g += s, gh += t;
  }
};

// The mean that is saved is rounded to float32. In a float32 row whose deviations are small beside its mean
// this is much of them. So h, whose sum would be 0, is summed as well: in float, whose rounding is as small
// beside the elements' as theirs.
template <>
struct alignas(8) GradientSums<f32> {
  using A = double;
  static constexpr bool kMaxFirst = false;
  A g = 0, gh = 0;
  float h = 0.f;
  __device__ __forceinline__ void merge(const GradientSums& o) { g += o.g, gh += o.gh, h += o.h; }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    g = lanes_sum<L>(g), gh = lanes_sum<L>(gh), h = lanes_sum<L>(h);
  }
  // Of elements out of bounds gs are 0. in: these elements are in bounds, or hs are 0 too.
  template <int E>
  __device__ __forceinline__ void add(const float (&gs)[E], const float (&hs)[E], bool in) {
    float s = 0.f, t = 0.f, u = 0.f;
#pragma unroll
    for (int j = 0; j < E; j++) s += gs[j], t = fmaf(gs[j], hs[j], t), u += hs[j];
    g += s, gh += t, h += in ? u : 0.f;
  }
  // Returns the mean of h, and makes gh the sum for h without it. `mean` has the unit of h. A mean of h that
  // is more than the rounding of `mean` explains is not due to that: then `mean` is not that of the row, or
  // too small for its rounding to matter.
  __device__ __forceinline__ float correct(float mean, float inv_n) {
    const float rest = h * inv_n;
    if (!(fabsf(rest) <= fabsf(mean) * 0x1p-23f)) return 0.f;
    gh -= rest * g;
    return rest;
  }
};

template <class T>
__device__ __forceinline__ uint4 ones_vector() {
  constexpr unsigned bits16 = std::is_same_v<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
  constexpr unsigned bits = sizeof(T) == 4 ? 0x3f800000u : bits16;
  return make_uint4(bits, bits, bits, bits);
}

// 1 / sqrt(sum / n + eps), where sum is one of squares. A rounded 1 / n would put an error on whole rows of
// float32, whose sums have more digits.
template <class T>
__device__ __forceinline__ float inverse_root(const NormArgs& a, Accumulator<T> sum) {
  if constexpr (sizeof(T) == 4) {
    const double one_nth = inverse<double>(static_cast<float>(a.rows.n));
    return __frsqrt_rn(static_cast<float>(fma(sum, one_nth, static_cast<double>(a.eps))));
  }
  return __frsqrt_rn(fmaf(static_cast<float>(sum), a.inv_n, a.eps));
}

template <class T>
struct NormScalars {
  float mean, rstd;
  float shift;  // what xhat is beside (h - mean) * rstd for float32 rows, or beside h * rstd for others
  NormScalars() = default;
  // Computes what the map needs, and stores the row's statistics.
  __device__ __forceinline__ NormScalars(const NormArgs& a, int64_t row, const Moments<T>& st, bool leader) {
    mean = static_cast<float>(st.mean);
    rstd = inverse_root<T>(a, st.m2);
    // The mean of float32 rows is known to more digits than a float has. -0 changes no bit.
    const float rest = sizeof(T) == 4 ? static_cast<float>(st.mean - mean) : mean;
    shift = a.center ? -rest * rstd : -0.f;
    if (!leader) return;
    if (a.rstd) static_cast<float*>(a.rstd)[row] = rstd;
    if (a.mean) static_cast<float*>(a.mean)[row] = mean;
  }
};

// xhat of one element.
template <class T>
__device__ __forceinline__ float normalized(const NormScalars<T>& sc, float h) {
  return fmaf(sizeof(T) == 4 ? h - sc.mean : h, sc.rstd, sc.shift);
}

// The rows of partial sums that CTAs leave, each of one head: dw, then db, of N columns each, if they are
// wanted.
struct PartialRow {
  int64_t width, db;
  __device__ __forceinline__ explicit PartialRow(const NormArgs& a)
      : width((a.dw ? a.rows.n : 0) + (a.db ? a.rows.n : 0)), db(a.dw ? a.rows.n : 0) {}
};

// The weights and biases of V vectors, the first at element e. InRegisters: weights are loaded when the
// object is constructed, otherwise in `map`, as biases are. Both would take too many registers.
template <class Op, int V, int Step, bool InRegisters>
struct AffineOperands {
  using T = typename Op::T;
  static constexpr int E = kElements<T>;
  const T *weight, *bias;
  bool has_weight, has_bias;
  uint4 w[InRegisters ? V : 1];

  __device__ __forceinline__ AffineOperands(const NormArgs& args, const RowView<T>& p, int e)
      : weight(opaque(static_cast<T*>(const_cast<void*>(args.weight)) + e)),
        bias(opaque(static_cast<T*>(const_cast<void*>(args.bias)) + e)),
        has_weight(args.weight),
        has_bias(args.bias) {
    if constexpr (InRegisters) {
#pragma unroll
      for (int i = 0; i < V; i++) w[i] = load_weight(p, e, i);
    }
  }
  __device__ __forceinline__ uint4 load_weight(const RowView<T>& p, int e, int i) const {
    return load_vector_if(has_weight && e + i * Step < p.bounds.hi, weight + i * Step, ones_vector<T>());
  }
  __device__ __forceinline__ uint4 load_bias(const RowView<T>& p, int e, int i) const {
    return load_vector_if(has_bias && e + i * Step < p.bounds.hi, bias + i * Step, zero_vector());
  }
  template <bool Cached, class Each>
  __device__ __forceinline__ void map(const typename Op::Scalars& sc, const RowView<T>& p, int e,
                                      Each each) const {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const uint4 wi = InRegisters ? w[i] : load_weight(p, e, i);
      const uint4 bi = Op::kHasBias ? load_bias(p, e, i) : zero_vector();
      each(i, [&](const float (&x)[E], const float (&r)[E], float (&y)[E]) {
        float fw[E], fb[E];
        unpack(T(), wi, fw);
        unpack(T(), bi, fb);
#pragma unroll
        for (int j = 0; j < E; j++) y[j] = Op::normalized(sc, x[j], r[j], fw[j], fb[j]);
      });
    }
  }
};

template <class T_>
struct LayerNormForward : RowOperator<LayerNormForward<T_>> {
  using T = T_;
  using State = CenteredMoments<T>;
  using Args = NormArgs;
  using Scalars = NormScalars<T>;
  static constexpr bool kHasBias = true;
  template <int V, int Step, bool Unaligned, bool InRegisters, bool = false>
  using EpilogueOperands = AffineOperands<LayerNormForward, V, Step, InRegisters>;
  __device__ __forceinline__ static float normalized(const Scalars& sc, float x, float, float w, float b) {
    return fmaf(gander::normalized(sc, x), w, b);
  }
  // The L lanes compute their mean first, then the squares of deviations from it: so no digits cancel,
  // whatever the mean of the row is. There is no branch: it would keep all elements as floats.
  template <int L, class Tile, class View>
  __device__ __forceinline__ static void reduce(const Args& a, State& st, Tile& tile, const View& p, int e,
                                                int step) {
    using A = Accumulator<T>;
    constexpr int E = kElements<T>, V = std::extent_v<decltype(tile.a)>;
    const int base = e - static_cast<int>(threadIdx.x % L) * E;  // the lanes' first element
    int count = 0;
    if (step == L * E) count = max(min(p.bounds.hi - base, V * L * E), 0);
    else
#pragma unroll
      for (int i = 0; i < V; i++) count += max(min(p.bounds.hi - base - i * step, L * E), 0);
    st.count = static_cast<float>(count);
    const A inverse_count = inverse<A>(fmaxf(st.count, 1.f));
    float x[E];
    A sum = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
      tile.get_a(i, x);
      float t = x[0];
#pragma unroll
      for (int j = 1; j < E; j++) t += x[j];
      sum += t;
    }
    const float mean = static_cast<float>(lanes_sum<L>(sum) * inverse_count);
    tile.rematerialize(a.rows.opaque_zero);
    A rest = 0, squares = 0;  // rest: what the deviations of float32 rows from the rounded mean sum to
#pragma unroll
    for (int i = 0; i < V; i++) {
      tile.get_a(i, x);
      const float shift = e + i * step < p.bounds.hi ? mean : 0.f;  // what is out of bounds is 0
      float t = 0.f, q = 0.f;
#pragma unroll
      for (int j = 0; j < E; j++) {
        const float d = x[j] - shift;
        if constexpr (sizeof(T) == 4) t += d;
        q = j ? fmaf(d, d, q) : d * d;
      }
      rest += t, squares += q;
    }
    st.mean = mean, st.m2 = lanes_sum<L>(squares);
    if constexpr (sizeof(T) == 4) {
      rest = lanes_sum<L>(rest);
      st.mean += rest * inverse_count;
      st.m2 -= rest * rest * inverse_count;
    }
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, Scalars& sc, const State& st,
                                                  bool leader) {
    sc = Scalars(a, row, st, leader);
  }
};

// h = x + residual, which is stored as soon as it is there; y = h * rstd * weight.
template <class T_>
struct RMSNormResidualForward : RowOperator<RMSNormResidualForward<T_>> {
  using T = T_;
  using State = Sum<T>;
  using Args = NormArgs;
  static constexpr int kInputs = 2;
  static constexpr bool kHasBias = false;
  template <int V, int Step, bool Unaligned, bool InRegisters, bool = false>
  using EpilogueOperands = AffineOperands<RMSNormResidualForward, V, Step, InRegisters>;
  struct Scalars {
    float rstd;
  };
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step) {
    constexpr int E = kElements<T>;
    T* const z = opaque(static_cast<T*>(a.z) + p.row * a.z_stride + e);
#pragma unroll
    for (int i = 0; i < std::extent_v<decltype(tile.a)>; i++) {
      float h[E], r[E];
      tile.get_a(i, h);
      tile.get_b(i, r);
#pragma unroll
      for (int j = 0; j < E; j++) h[j] += r[j];
      st.add(h, h);
      if (e + i * step < p.bounds.hi) store_vector(z + i * step, h);
    }
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, Scalars& sc, const State& st,
                                                  bool leader) {
    sc.rstd = inverse_root<T>(a, st.s);
    if (leader && a.rstd) static_cast<float*>(a.rstd)[row] = sc.rstd;
  }
  __device__ __forceinline__ static float normalized(const Scalars& sc, float x, float r, float w, float) {
    return (x + r) * sc.rstd * w;
  }
};

// Center: LayerNorm, else RMSNorm. Third: the gradient of residual_out is added to dx.
template <class T_, bool Center, bool Third>
struct AlignedNormBackward : RowOperator<AlignedNormBackward<T_, Center, Third>> {
  using T = T_;
  using State = std::conditional_t<Center, GradientSums<T>, Sum<T>>;
  using Args = NormArgs;
  static constexpr int kInputs = Third ? 3 : 2;
  struct Scalars {
    float mean, rstd;
    float mean_g, mean_gx;  // the means of g and of g * xhat, times -rstd
    float rest;             // what the mean has lost to rounding, in units of xhat; 0 until it is known
    __device__ __forceinline__ float normalized(float x) const {
      if constexpr (!Center) return x * rstd;
      if constexpr (sizeof(T) == 4) return fmaf(x - mean, rstd, -rest);
      return fmaf(x, rstd, -mean * rstd);
    }
  };
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    const float mean = Center ? static_cast<const float*>(a.mean)[row] : 0.f;
    return {mean, static_cast<const float*>(a.rstd)[row], 0.f, 0.f, 0.f};
  }
  template <bool Unaligned, int E>
  __device__ __forceinline__ static void load_weight(const Args& a, int64_t origin, int e, Bounds s,
                                                     float (&w)[E]) {
    static_assert(!Unaligned);
    const T* const p = static_cast<const T*>(a.weight) + origin + e;
    unpack(T(), load_vector_if(a.weight && e < s.hi, p, ones_vector<T>()), w);
  }
  template <int E>
  __device__ __forceinline__ static void reduce_columns(const Scalars& sc, State& st, const float (&x)[E],
                                                        const float (&dy)[E], const float (&w)[E], bool in) {
    float g[E], h[E];
#pragma unroll
    for (int j = 0; j < E; j++) g[j] = dy[j] * w[j], h[j] = sc.normalized(x[j]);
    if constexpr (Center) st.add(g, h, in);
    else st.add(g, h);
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t, Scalars& sc, State& st, bool) {
    if constexpr (Center) {
      if constexpr (sizeof(T) == 4) sc.rest = st.correct(sc.mean * sc.rstd, a.inv_n);
      sc.mean_g = static_cast<float>(st.g) * a.inv_n * -sc.rstd;
      sc.mean_gx = static_cast<float>(st.gh) * a.inv_n * -sc.rstd;
    } else {
      sc.mean_gx = static_cast<float>(st.s) * a.inv_n * -sc.rstd;
    }
  }
  template <int V>
  struct ColumnSums {
    static constexpr int E = kElements<T>;
    Accumulator<T> dw[V][E] = {};
    Accumulator<T> db[Center ? V : 1][E] = {};
    __device__ __forceinline__ void map(const Scalars& sc, int i, const float (&x)[E], const float (&dy)[E],
                                        const float (&w)[E], float (&dx)[E]) {
#pragma unroll
      for (int j = 0; j < E; j++) {
        const float h = sc.normalized(x[j]);
        dw[i][j] += dy[j] * h;
        if constexpr (Center) db[i][j] += dy[j];
        dx[j] = fmaf(dy[j] * w[j], sc.rstd, Center ? fmaf(h, sc.mean_gx, sc.mean_g) : h * sc.mean_gx);
      }
    }
    template <bool Unaligned>
    __device__ __forceinline__ void store(const Args& a, int64_t run, int64_t origin, int i, int e,
                                          Bounds s) const {
      const PartialRow partial(a);
      Accumulator<T>* const to = static_cast<Accumulator<T>*>(a.partial_sums) + run * partial.width + origin;
      if (a.dw) store_partial<Unaligned>(to, e, s, dw[i]);
      if constexpr (Center)
        if (a.db) store_partial<Unaligned>(to + partial.db, e, s, db[i]);
    }
  };
};

template <class T>
using LayerNormBackward = AlignedNormBackward<T, true, false>;
template <class T>
using RMSNormResidualBackward = AlignedNormBackward<T, false, true>;

}  // namespace gander
