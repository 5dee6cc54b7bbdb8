// Cross-entropy with label smoothing, forward and backward. What has no options has kernels of its own
// (cross_entropy.cuh). With e for label_smoothing, C classes of weights w, W for their sum, p = softmax(x):
//   loss = (1 - e) w[t] (lse - x[t]) + e / C sum w[c] (lse - x[c])
//   dx[c] = (1 - e) w[t] (p[c] - [c = t]) + e / C (W p[c] - w[c])
// The target stays in the sum of exponentials: with smoothing, neither the loss nor the gradient of a certain
// target is near 0.
#pragma once
#include "cross_entropy.cuh"
#include "general_cross_entropy_args_gen.cuh"
#include "operands.cuh"

namespace gander {

// Online softmax, and the sum of w[c] (max - x[c]): no term is negative, so that no digits cancel. weight is
// the sum of w[c]. All four are of the elements so far. In place of a maximum of -inf, 0 is subtracted.
template <class T>
struct alignas(16) SmoothedSum {
  using Partial = SmoothedSum;
  static constexpr bool kMaxFirst = false;
  float s = 0.f, m = -kInfinity, depth = 0.f, weight = 0.f;

  __device__ __forceinline__ static float reference(float m) { return m == -kInfinity ? 0.f : m; }
  // What the sums are for a maximum of `top`, which is at least m.
  __device__ __forceinline__ void rebase(float top) {
    const float from = reference(m), to = reference(top);
    if (from != to) s *= exp_difference<T>(m, to), depth += weight == 0.f ? 0.f : weight * (to - from);
    m = top;
  }
  __device__ __forceinline__ void merge(SmoothedSum o) {
    const float top = fmaxf(m, o.m);
    rebase(top), o.rebase(top);
    s += o.s, depth += o.depth, weight += o.weight;
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    rebase(lanes_max<L>(m));
    s = lanes_sum<L>(s), depth = lanes_sum<L>(depth), weight = lanes_sum<L>(weight);
  }
};

// The class weights of a vector, ones if there are none. Out of bounds they are 0.
template <bool Unaligned, int E, class View>
__device__ __forceinline__ void load_class_weights(const CrossEntropyArgs& a, const View& p, int e,
                                                   float (&w)[E]) {
  if (a.weight) {
    load_floats<Unaligned>(advance(a.weight, a.weight_type, p.origin), a.weight_type, e, p.bounds, w);
    return;
  }
#pragma unroll
  for (int j = 0; j < E; j++) w[j] = e + j >= p.bounds.lo && e + j < p.bounds.hi ? 1.f : 0.f;
}

// What the gradient of a row is made of: dx = exp(x - max) * scale - others * w, at the target less by own.
struct SmoothedGradient {
  bool ignored;
  float max, scale, own, others;

  // scale is still without the factor 1 / sum exp(x - max). gradient: of the row's loss.
  __device__ __forceinline__ static SmoothedGradient of(const GeneralCrossEntropyArgs& a, float gradient,
                                                        const Label& label, bool ignored) {
    if (ignored) return {true, 0.f, 0.f, 0.f, 0.f};
    float classes = static_cast<float>(a.rows.n), count = classes;
    if (a.class_weights) {
      wait_for_previous_launch();
      classes = __ldcg(static_cast<const float*>(a.class_weights));
    }
    if (a.divisor) gradient /= load_divisor(a);
    const float own = gradient * (1.f - a.label_smoothing) * label.weight;
    const float others = gradient * a.label_smoothing / count;
    return {false, 0.f, fmaf(others, classes, own), own, others};
  }
  template <class T, bool Unaligned, int E, class View>
  __device__ __forceinline__ void map(const CrossEntropyArgs& a, int64_t target, const float (&x)[E],
                                      const View& p, int e, float (&dx)[E]) const {
    float w[E];
    load_class_weights<Unaligned>(a, p, e, w);
#pragma unroll
    for (int j = 0; j < E; j++)
      dx[j] = ignored ? 0.f : fmaf(-others, w[j], __fmul_rn(exp_difference<T>(x[j], max), scale));
    const float less = own;
    replace_at(target, p.origin, e, dx, [=](float v) { return v - less; });
  }
};

template <class T_, bool Gradient>
struct GeneralCrossEntropyForward : RowOperator<GeneralCrossEntropyForward<T_, Gradient>> {
  using T = T_;
  using State = SmoothedSum<T>;
  using Args = GeneralCrossEntropyArgs;
  using Plain = CrossEntropyForward<T, Gradient>;
  static constexpr bool kHasOutput = Gradient;
  struct Scalars {
    Label label;
    bool ignored, omitted;
    float logit;
    SmoothedGradient gradient;
  };
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    Scalars sc = {};
    sc.label.index = load_target<false>(a, row);
    return sc;
  }
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t row, Scalars& sc, bool) {
    resolve_part(a, row, sc, true);
  }
  // The logit is read before dx may be written over it.
  __device__ __forceinline__ static void resolve_part(const Args& a, int64_t row, Scalars& sc, bool leader) {
    resolve_label(a, sc);
    sc.logit = leader ? Plain::load_logit(a, row, sc.label.index) : -kInfinity;
    __syncwarp();
  }
  __device__ __forceinline__ static void resolve_label(const Args& a, Scalars& sc) {
    sc.ignored = sc.label.index == a.ignore_index;
    sc.label = label<false>(a, sc.label.index);
  }
  __device__ __forceinline__ static void save_scalars(const Args& a, int64_t row, const Scalars& sc) {
    static_cast<float*>(a.target_logits)[row] = sc.logit;
  }
  __device__ __forceinline__ static Scalars restore_scalars(const Args& a, int64_t row) {
    Scalars sc = load_scalars(a, row, false);
    resolve_label(a, sc);
    sc.logit = __ldcg(static_cast<const float*>(a.target_logits) + row);
    return sc;
  }
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step) {
    constexpr int E = kElements<T>;
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    st.rebase(fmaxf(st.m, tile_max(T(), tile.a)));
    const float r = State::reference(st.m);
#pragma unroll
    for (int i = 0; i < V; i++) {
      float x[E], w[E], sum = 0.f, depth = 0.f, weight = 0.f;  // see MaxSum::exponentials
      tile.get_a(i, x);
      load_class_weights<Tile::kUnaligned>(a, p, e + i * step, w);
#pragma unroll
      for (int j = 0; j < E; j++) {
        sum += exp_difference<T>(x[j], r);
        depth += w[j] == 0.f ? 0.f : w[j] * (r - x[j]);  // a class of weight 0 may be at -inf
        weight += w[j];
      }
      st.s += sum, st.depth += depth, st.weight += weight;
    }
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, Scalars& sc, const State& st,
                                                  bool leader) {
    if (leader) record(a, row, sc, st);
    if constexpr (Gradient) {
      if (a.one_pass && a.mean) wait_for_previous_launch();  // it sums the rows' weights
      const float upstream = a.upstream ? *static_cast<const float*>(a.upstream) : 1.f;
      sc.omitted = a.sums && isnan(upstream);
      sc.gradient = SmoothedGradient::of(a, upstream, sc.label, sc.ignored);
      sc.gradient.max = sc.ignored ? 0.f : st.m;
      sc.gradient.scale /= sc.ignored ? 1.f : st.s;
    }
  }
  __device__ __forceinline__ static void record(const Args& a, int64_t row, const Scalars& sc,
                                                const State& st) {
    const float2 log = log_parts(st.s, st.s - 1.f);
    const float log_sum = log.x + log.y, own = (1.f - a.label_smoothing) * sc.label.weight;
    float loss = 0.f;
    if (!sc.ignored) {
      loss = a.label_smoothing / static_cast<float>(a.rows.n) * fmaf(st.weight, log_sum, st.depth);
      if (own != 0.f) loss += row_loss(log, st.m, sc.logit, own);
    }
    if (a.single_cta_total) cta_row_losses()[row] = make_float2(loss, sc.label.weight);
    store_if(a.row_losses, static_cast<float2*>(a.row_losses) + row, make_float2(loss, sc.label.weight));
    store_if(a.loss, static_cast<float*>(a.loss) + row * a.loss_stride,
             a.loss && a.divisor ? loss / load_divisor(a) : loss);
    store_if(a.log_sum, static_cast<float*>(a.log_sum) + row * a.log_sum_stride, a.sums ? st.s : log_sum);
    store_if(a.max, static_cast<float*>(a.max) + row * a.max_stride, a.log_sum ? st.m : st.m + log_sum);
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View& p, int e, float (&dx)[E]) {
    sc.gradient.template map<T, Unaligned>(a, sc.label.index, x, p, e, dx);
  }
  __device__ __forceinline__ static bool omits_output(const Scalars& sc) { return sc.omitted; }
  __device__ __forceinline__ static void finish_launch(const Args& a) {
    if (a.single_cta_total) single_cta_total(a);
  }
};

// It uses the log-sum-exp of forward, so that nothing is reduced.
template <class T_>
struct GeneralCrossEntropyBackward : RowOperator<GeneralCrossEntropyBackward<T_>> {
  using T = T_;
  using Args = GeneralCrossEntropyArgs;
  struct Scalars {
    int64_t index;
    float dloss, max, second;
    SmoothedGradient gradient;
  };
  __device__ __forceinline__ static bool already_done(const Args& a) {
    return CrossEntropyBackward<T>::already_done(a);
  }
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    Scalars sc;
    sc.index = load_target<false>(a, row);
    sc.dloss = static_cast<const float*>(a.dloss)[row * a.dloss_stride];
    sc.max = static_cast<const float*>(a.max)[row * a.max_stride];
    sc.second = a.log_sum ? static_cast<const float*>(a.log_sum)[row * a.log_sum_stride] : 0.f;
    return sc;
  }
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t, Scalars& sc, bool) {
    const bool ignored = sc.index == a.ignore_index;
    const Label l = label<false>(a, sc.index);
    sc.index = l.index;
    sc.gradient = SmoothedGradient::of(a, sc.dloss, l, ignored);
    if (ignored) return;
    sc.gradient.max = sc.max;
    if (a.sums) sc.gradient.scale /= SavedSum{sc.second}.sum();  // by the operations of forward
    else sc.gradient.scale *= expf(-sc.second);
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View& p, int e, float (&dx)[E]) {
    sc.gradient.template map<T, Unaligned>(a, sc.index, x, p, e, dx);
  }
};

// The sum of the class weights, for gradients. Its launch may come second, and the next one waits for it
// alone.
template <int T, bool Cluster>
__device__ __forceinline__ void class_weights(const GeneralCrossEntropyArgs& a) {
  double2 sum;
  const auto weight = [&a](int64_t i) { return make_float2(load_float(a.weight, a.weight_type, i), 0.f); };
  const bool first = sum_rows<T, Cluster>(a.rows.n, sum, weight);
  wait_for_previous_launch();
  if (first) *static_cast<float*>(a.class_weights) = sum.x;
}

}  // namespace gander
