// Cross-entropy with class probabilities, forward and backward. Logits x are first mapped to z as in
// general_cross_entropy.cuh. With e for label_smoothing, C classes of weights w and probabilities q,
// v[c] = w[c] ((1 - e) q[c] + e / C), V for the sum of v, p = softmax(z), and lse for z's log-sum-exp:
//   loss = sum v[c] (lse - z[c]) + z_loss lse^2
//   dz[c] = V p[c] - v[c] + 2 z_loss lse p[c]
// With m the row's maximum, sum v[c] (m - z[c]) and V are sums in which no term is negative if no q is, so no
// digits cancel.
#pragma once
#include "general_cross_entropy.cuh"
#include "soft_cross_entropy_args_gen.cuh"

namespace gander {

// v of a vector, from q. Out of bounds it is 0.
template <bool Unaligned, int E, class View>
__device__ __forceinline__ void soft_targets(const GeneralCrossEntropyArgs& a, const float (&q)[E],
                                             const View& p, int e, float (&v)[E]) {
#pragma unroll
  for (int j = 0; j < E; j++) v[j] = q[j];
  if (!a.weight && a.label_smoothing == 0.f) return;
  const float own = 1.f - a.label_smoothing, each = a.label_smoothing / static_cast<float>(a.rows.n);
  float w[E];
  load_class_weights<Unaligned>(a, p, e, w);
#pragma unroll
  for (int j = 0; j < E; j++) v[j] = w[j] * fmaf(own, q[j], each);
}

// What GeneralSum has as w: v.
struct SoftClasses {
  __device__ __forceinline__ static bool are_summed(const GeneralCrossEntropyArgs&) { return true; }
  template <class Tile, int E, class View>
  __device__ __forceinline__ static void load(const GeneralCrossEntropyArgs& a, const Tile& tile, int i,
                                              const View& p, int e, float (&v)[E]) {
    float q[E];
    tile.get_b(i, q);
    soft_targets<Tile::kUnaligned>(a, q, p, e, v);
  }
};

template <class T_>
struct SoftCrossEntropyForward : RowOperator<SoftCrossEntropyForward<T_>> {
  using T = T_;
  using State = GeneralSum<T>;
  using Args = SoftCrossEntropyArgs;
  static constexpr int kInputs = 2;
  static constexpr bool kHasOutput = false;
  static constexpr bool kFirstWarpFinalizes = true;
  struct Scalars {};
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step) {
    GeneralCrossEntropyForward<T, false, SoftClasses>::accumulate(a, st, tile, p, e, step);
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, const Scalars&, const State& st,
                                                  bool leader) {
    if (!leader) return;
    // A row that is -inf alone is NaN, as is one with +inf or a NaN.
    const float others = st.m > -kInfinity && st.m < kInfinity ? st.others : kNaN;
    const float2 log = log_parts(1.f + others, others);
    const float log_sum = log.x + log.y, lse = st.m + log_sum;
    float loss = fmaf(st.weight, log_sum, st.depth);
    if (a.z_loss != 0.f) loss = fmaf(a.z_loss * lse, lse, loss);
    const float2 counted = make_float2(loss, 1.f);
    if (a.single_cta_total) cta_row_losses()[row] = counted;
    store_if(a.row_losses, static_cast<float2*>(a.row_losses) + row, counted);
    store_if(a.loss, static_cast<float*>(a.loss) + row * a.loss_stride,
             a.loss && a.divisor ? loss / load_divisor(a) : loss);
    const auto keep = [&](void* to, float value) {
      store_if(to, static_cast<float*>(to) + row * a.max_stride, value);
    };
    keep(a.max, st.m), keep(a.log_sum, log_sum), keep(a.target_weight, st.weight);
  }
  __device__ __forceinline__ static void finish_launch(const Args& a) {
    if (a.single_cta_total) single_cta_total(a);
  }
};

// It uses the state of forward, so that nothing is reduced.
template <class T_>
struct SoftCrossEntropyBackward : RowOperator<SoftCrossEntropyBackward<T_>> {
  using T = T_;
  using Args = SoftCrossEntropyArgs;
  static constexpr int kInputs = 2;
  struct Scalars {
    float gradient, max, log_sum, weight;
    float rest;    // dz = p rest - gradient v
    float scale;   // rest over the sum of exp(z - max)
    float others;  // 1 - p of the largest element, where that is small
    float most;    // exp(z - max) above this is that element's
  };
  __device__ __forceinline__ static bool already_done(const Args&) { return false; }
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    const auto kept = [&](const void* from) { return static_cast<const float*>(from)[row * a.max_stride]; };
    Scalars sc;
    sc.gradient = static_cast<const float*>(a.dloss)[row * a.dloss_stride];
    sc.max = kept(a.max), sc.log_sum = kept(a.log_sum), sc.weight = kept(a.target_weight);
    return sc;
  }
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t, Scalars& sc, bool) {
    sc.gradient *= a.inverse_rows;
    if (a.divisor) sc.gradient /= load_divisor(a);
    sc.rest = sc.gradient * sc.weight;
    if (a.z_loss != 0.f) sc.rest = fmaf(2.f * a.z_loss * sc.gradient, sc.max + sc.log_sum, sc.rest);
    sc.scale = sc.rest * expf(-sc.log_sum);
    // Where p is nearly 1, p - v would lose the others' share. No other element is above a half then.
    const bool confident = sc.log_sum < 0.25f;
    sc.others = confident ? one_minus_exp(sc.log_sum) : 0.f;
    sc.most = confident ? 0.5f : kInfinity;
  }
  // From exp(z - max) and v.
  __device__ __forceinline__ static float dz(const Scalars& sc, float e, float v) {
    const float at_most = fmaf(-sc.rest, sc.others, fmaf(-sc.gradient, v, sc.rest));
    return e > sc.most ? at_most : fmaf(e, sc.scale, -sc.gradient * v);
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&q)[E], const View& p, int e, float (&dx)[E]) {
    float v[E];
    soft_targets<Unaligned>(a, q, p, e, v);
    if constexpr (sizeof(T) == 2) {
      if (a.inner == 0.f) map_vector<false>(a, sc, x, v, dx);
      else map_vector<true>(a, sc, x, v, dx);
    } else {
      map_each<T>(a, x, [&](int j, MappedLogit<T> z) {
        dx[j] = dz(sc, exp_difference<T>(z.value, sc.max), v[j]) * z.derivative;
      });
    }
  }
  template <bool Capped, int E>
  __device__ __forceinline__ static void map_vector(const Args& a, const Scalars& sc, const float (&x)[E],
                                                    const float (&v)[E], float (&dx)[E]) {
    const MappedVector<E, Capped> z(a, x);
    const float by = MappedVector<E, Capped>::derivative(a);
#pragma unroll
    for (int j = 0; j < E; j++) dx[j] = dz(sc, z.exponential(a, sc.max, j), v[j]) * (by * z.derivative(j));
  }
};

}  // namespace gander
