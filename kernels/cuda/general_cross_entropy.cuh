// Cross-entropy with options, forward and backward. What has none has kernels of its own
// (cross_entropy.cuh). Logits x are first mapped to z = outer * tanh(inner * x), or outer * x without a cap.
// With e for label_smoothing, C classes of weights w, W for their sum, p = softmax(z), lse for its log-sum:
//   loss = (1 - e) w[t] (lse - z[t]) + e / C sum w[c] (lse - z[c]) + z_loss lse^2
//   dz[c] = (1 - e) w[t] (p[c] - [c = t]) + e / C (W p[c] - w[c]) + 2 z_loss lse p[c]
// All options are branches that a launch takes alike.
#pragma once
#include "cross_entropy.cuh"
#include "general_cross_entropy_args_gen.cuh"
#include "operands.cuh"

namespace gander {

// A mapped logit, and on request the derivative. Nothing contracts with what comes after, so that a logit has
// the same bits wherever it is mapped. Increasing: the mapped maximum is the maximum of what is mapped.
template <class T>
struct MappedLogit {
  float value, derivative;
  __device__ __forceinline__ MappedLogit(const GeneralCrossEntropyArgs& a, float x) {
    *this = a.inner == 0.f ? plain(a, x) : capped(a, x);
  }
  __device__ __forceinline__ static MappedLogit plain(const GeneralCrossEntropyArgs& a, float x) {
    return MappedLogit(__fmul_rn(a.outer, x), a.outer);
  }
  __device__ __forceinline__ static MappedLogit capped(const GeneralCrossEntropyArgs& a, float x) {
    if constexpr (sizeof(T) == 4) {
      const float t = tanhf(__fmul_rn(a.inner, x));
      return MappedLogit(__fmul_rn(a.outer, t), a.outer * a.inner * ((1.f - t) * (1.f + t)));
    } else {
      // tanh(u) = 1 - 2 r, by the hardware's exponential and reciprocal: off by 2^-23 of 1, and not of a
      // small result.
      float r;  // 1 / (1 + exp(2 u))
      const float e = quick_exp2(__fmul_rn(a.inner * (2.f * kLog2E), x));
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.f + e));
      return MappedLogit(fmaf(-2.f * a.outer, r, a.outer), 4.f * a.outer * a.inner * fmaf(-r, r, r));
    }
  }

 private:
  __device__ __forceinline__ MappedLogit(float value, float derivative)
      : value(value), derivative(derivative) {}
};

// A vector of 16-bit logits, mapped. Its exponentials and derivatives may be off those of MappedLogit by a
// few bits of float32, so that of the element that has the maximum may be off 1.
template <int E, bool Capped>
struct MappedVector {
  float x[E];
  __device__ __forceinline__ MappedVector(const GeneralCrossEntropyArgs& a, const float (&x)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) this->x[j] = x[j];
  }
  __device__ __forceinline__ float z(const GeneralCrossEntropyArgs& a, int j) const {
    return __fmul_rn(a.outer, x[j]);
  }
  // log2(exp(z - reference)).
  __device__ __forceinline__ float exponent(const GeneralCrossEntropyArgs& a, float reference, int j) const {
    return fmaf(a.outer, x[j], -reference) * kLog2E;
  }
  __device__ __forceinline__ float exponential(const GeneralCrossEntropyArgs& a, float reference,
                                               int j) const {
    return quick_exp2(exponent(a, reference, j));
  }
  // The derivative is that of all elements times that of one.
  __device__ __forceinline__ static float derivative(const GeneralCrossEntropyArgs& a) { return a.outer; }
  __device__ __forceinline__ float derivative(int) const { return 1.f; }
  __device__ __forceinline__ void omit(int j) { x[j] = -kInfinity; }
};

// Below a cap: r of MappedLogit, of which z is outer - 2 outer r. Four share one reciprocal: 1 / a = b c d /
// (a b c d). The hardware's exponential and reciprocal are what limits kernels, at 16 a cycle. Beyond 2^30 of
// a number r makes no difference, and the product of four stays finite.
template <int E>
struct MappedVector<E, true> {
  float r[E];
  __device__ __forceinline__ MappedVector(const GeneralCrossEntropyArgs& a, const float (&x)[E]) {
    static_assert(E % 4 == 0);
#pragma unroll
    for (int i = 0; i < E; i += 4) {
      float d[4], share;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float u;  // NaN stays
        asm("min.NaN.f32 %0, %1, %2;"
            : "=f"(u)
            : "f"(__fmul_rn(a.inner * 2.f * kLog2E, x[i + j])), "f"(30.f));
        d[j] = 1.f + quick_exp2(u);
      }
      const float ab = d[0] * d[1], cd = d[2] * d[3];
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(ab * cd));
      const float of_ab = share * cd, of_cd = share * ab;
      r[i] = of_ab * d[1], r[i + 1] = of_ab * d[0], r[i + 2] = of_cd * d[3], r[i + 3] = of_cd * d[2];
    }
  }
  __device__ __forceinline__ float z(const GeneralCrossEntropyArgs& a, int j) const {
    return fmaf(-2.f * a.outer, r[j], a.outer);
  }
  __device__ __forceinline__ float exponent(const GeneralCrossEntropyArgs& a, float reference, int j) const {
    return fmaf(-2.f * kLog2E * a.outer, r[j], (a.outer - reference) * kLog2E);
  }
  __device__ __forceinline__ float exponential(const GeneralCrossEntropyArgs& a, float reference,
                                               int j) const {
    return quick_exp2(exponent(a, reference, j));
  }
  __device__ __forceinline__ static float derivative(const GeneralCrossEntropyArgs& a) {
    return 4.f * a.outer * a.inner;
  }
  __device__ __forceinline__ float derivative(int j) const { return fmaf(-r[j], r[j], r[j]); }
  __device__ __forceinline__ void omit(int j) { r[j] = kInfinity; }
};

// Maps a vector, and calls take(j, mapped) for each element. One branch serves all of them.
template <class T, int E, class Take>
__device__ __forceinline__ void map_each(const GeneralCrossEntropyArgs& a, const float (&x)[E],
                                         const Take& take) {
  if (a.inner == 0.f) {
#pragma unroll
    for (int j = 0; j < E; j++) take(j, MappedLogit<T>::plain(a, x[j]));
  } else {
#pragma unroll
    for (int j = 0; j < E; j++) take(j, MappedLogit<T>::capped(a, x[j]));
  }
}

// Maps a vector. A cap would make what is out of bounds finite: it stays -inf.
template <class T, int E, class View>
__device__ __forceinline__ void map_logits(const GeneralCrossEntropyArgs& a, const View& p, int e,
                                           const float (&x)[E], float (&z)[E]) {
  map_each<T>(a, x, [&](int j, MappedLogit<T> mapped) { z[j] = mapped.value; });
  if (a.inner == 0.f || (e >= p.bounds.lo && e + E <= p.bounds.hi)) return;
#pragma unroll
  for (int j = 0; j < E; j++) z[j] = e + j >= p.bounds.lo && e + j < p.bounds.hi ? z[j] : -kInfinity;
}

// Online softmax of mapped logits. The element that has the maximum m adds 1 to the sum of exp(z - m), and
// `others` is without that 1: the logarithm of a sum that is nearly 1 keeps its digits. depth is the sum of
// w (m - z), in which no term is negative, so that no digits cancel, and weight the sum of w; both are 0
// without label smoothing. All are of the elements so far. In place of a maximum of -inf, 0 is subtracted.
template <class T>
struct alignas(16) GeneralSum {
  using Partial = GeneralSum;
  static constexpr bool kMaxFirst = false;
  float others = 0.f, m = -kInfinity, depth = 0.f, weight = 0.f;

  __device__ __forceinline__ static float reference(float m) { return m == -kInfinity ? 0.f : m; }
  // NaN where a logit is +inf, as in torch.
  __device__ __forceinline__ float sum() const {
    return m == -kInfinity ? others : m == kInfinity ? kNaN : 1.f + others;
  }
  // What forward keeps of the sum for a backward with the same bits.
  __device__ __forceinline__ SavedSum saved() const {
    return SavedSum::of(sum(), others, m > -kInfinity && m < kInfinity);
  }
  // For a maximum of `top`, which is at least m. Below it, the element that had m is one of the others.
  __device__ __forceinline__ void rebase(float top) {
    if (m < top) {
      const float from = reference(m);
      if (m > -kInfinity) others = (1.f + others) * exp_difference<T>(m, top);
      depth += weight == 0.f ? 0.f : weight * (top - from);
      m = top;
    }
  }
  __device__ __forceinline__ void merge(GeneralSum o) {
    const float top = fmaxf(m, o.m);
    const bool both = m == o.m && top > -kInfinity;
    rebase(top), o.rebase(top);
    others += o.others + (both ? 1.f : 0.f), depth += o.depth, weight += o.weight;
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    const float top = lanes_max<L>(m);
    const float having = lanes_sum<L>(m == top && top > -kInfinity ? 1.f : 0.f);
    rebase(top);
    others = lanes_sum<L>(others) + fmaxf(having - 1.f, 0.f);
    depth = lanes_sum<L>(depth), weight = lanes_sum<L>(weight);
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

// What GeneralSum has as w: the class weights, with label smoothing.
struct SmoothedClasses {
  __device__ __forceinline__ static bool are_summed(const GeneralCrossEntropyArgs& a) {
    return a.label_smoothing != 0.f;
  }
  template <class Tile, int E, class View>
  __device__ __forceinline__ static void load(const GeneralCrossEntropyArgs& a, const Tile&, int,
                                              const View& p, int e, float (&w)[E]) {
    load_class_weights<Tile::kUnaligned>(a, p, e, w);
  }
};

// Whether a row is ignored because its target's class has weight 0, which neither smoothing nor the z-loss
// has.
__device__ __forceinline__ bool counts_for_nothing(const GeneralCrossEntropyArgs& a, const Label& label) {
  return label.weight == 0.f && a.label_smoothing == 0.f && a.z_loss == 0.f;
}

// What the gradient of a row is made of: dz = exp(z - max) * scale - others * w, at the target less by own.
// In an ignored row scale, others and own are 0, and no logit matters.
struct GeneralGradient {
  float max, scale, others, own;
  float of_max;  // dz of a target that has the maximum

  // gradient: of the row's loss. log_sum: the logarithm of the sum of exp(z - max). saved: that sum, from
  // which forward and backward make the same bits, or null.
  __device__ __forceinline__ static GeneralGradient of(const GeneralCrossEntropyArgs& a, float gradient,
                                                       const Label& label, bool ignored, float max,
                                                       float log_sum, const SavedSum* saved) {
    GeneralGradient g = {};
    if (ignored) return g;
    const float count = static_cast<float>(a.rows.n);
    float classes = count;
    if (a.class_weights) {
      wait_for_previous_launch();
      classes = __ldcg(static_cast<const float*>(a.class_weights));
    }
    if (a.divisor) gradient /= load_divisor(a);
    const float own = gradient * (1.f - a.label_smoothing) * label.weight;
    g.max = max, g.others = gradient * a.label_smoothing / count;
    float rest = g.others * classes;
    if (a.z_loss != 0.f) rest = fmaf(2.f * a.z_loss * gradient, max + log_sum, rest);
    const float p = saved ? 1.f / saved->sum() : expf(-log_sum);  // of a class that has the maximum
    const float share = saved             ? (saved->confident() ? -saved->bits * p : 1.f)
                        : log_sum < 0.25f ? one_minus_exp(log_sum)
                                          : 1.f;  // of the others, if it is small
    g.scale = (rest + own) * p, g.own = fmaf(g.others, label.weight, own);
    g.of_max =
        g.scale - g.own;  // where the target has nearly all of the sum, this would lose the others' share
    if (share < 0.25f) g.of_max = fmaf(-own, share, rest * p) - g.others * label.weight;
    return g;
  }
  // scaled and smoothed: factor and summand of exp(z - max), both times what derivatives have in common.
  template <bool Capped, int E>
  __device__ __forceinline__ void map_vector(const GeneralCrossEntropyArgs& a, const float (&x)[E],
                                             float scaled, const float (&smoothed)[E], float (&dx)[E]) const {
    const MappedVector<E, Capped> z(a, x);
#pragma unroll
    for (int j = 0; j < E; j++) dx[j] = fmaf(z.exponential(a, max, j), scaled, smoothed[j]) * z.derivative(j);
  }
  template <class T, bool Unaligned, int E, class View>
  __device__ __forceinline__ void map(const GeneralCrossEntropyArgs& a, int64_t target, const float (&x)[E],
                                      const View& p, int e, float (&dx)[E]) const {
    const bool nothing = scale == 0.f && others == 0.f;
    const float by = sizeof(T) == 4   ? 1.f
                     : a.inner == 0.f ? MappedVector<E, false>::derivative(a)
                                      : MappedVector<E, true>::derivative(a);
    float w[E] = {};
    if (a.label_smoothing != 0.f) {
      load_class_weights<Unaligned>(a, p, e, w);
#pragma unroll
      for (int j = 0; j < E; j++) w[j] *= -others * by;
    }
    if constexpr (sizeof(T) == 2) {
      if (nothing) {
#pragma unroll
        for (int j = 0; j < E; j++) dx[j] = 0.f;
      } else if (a.inner == 0.f) {
        map_vector<false>(a, x, scale * by, w, dx);
      } else {
        map_vector<true>(a, x, scale * by, w, dx);
      }
    } else {
      map_each<T>(a, x, [&](int j, MappedLogit<T> z) {
        const float v = fmaf(exp_difference<T>(z.value, max), scale, w[j]);
        dx[j] = nothing ? 0.f : v * z.derivative;
      });
    }
    const unsigned j = position_in_view(target, p.origin) - e;
    if (j >= E || own == 0.f) return;
    float logit = 0.f;
#pragma unroll
    for (unsigned k = 0; k < E; k++) logit = j == k ? x[k] : logit;
    const MappedLogit<T> own_z(a, logit);
    const float v = __fmul_rn(exp_difference<T>(own_z.value, max), scale);
    const float replacement = (v == scale && scale != 0.f ? of_max : v - own) * own_z.derivative;
#pragma unroll
    for (unsigned k = 0; k < E; k++) dx[k] = j == k ? replacement : dx[k];
  }
};

template <class T_, bool Gradient, class Classes = SmoothedClasses>
struct GeneralCrossEntropyForward : RowOperator<GeneralCrossEntropyForward<T_, Gradient, Classes>> {
  using T = T_;
  using State = GeneralSum<T>;
  using Args = GeneralCrossEntropyArgs;
  using Plain = CrossEntropyForward<T, Gradient>;
  static constexpr bool kHasOutput = Gradient;
  struct Scalars {
    Label label;
    bool ignored, omitted;
    float logit;
    GeneralGradient gradient;
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
    sc.logit = leader ? MappedLogit<T>(a, Plain::load_logit(a, row, sc.label.index)).value : -kInfinity;
    __syncwarp();
  }
  __device__ __forceinline__ static void resolve_label(const Args& a, Scalars& sc) {
    sc.ignored = sc.label.index == a.ignore_index;
    sc.label = label<false>(a, sc.label.index);
    sc.ignored |= counts_for_nothing(a, sc.label);
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
    float ones = 0.f;  // elements that have the maximum
    const float high = highest<V>(a, tile, p, e, step);
    const bool adds_max = high > st.m;
    st.rebase(fmaxf(st.m, high));
    const float r = State::reference(st.m);
    if constexpr (sizeof(T) == 2) {
      const float highest = high == st.m ? tile_max(T(), tile.a) : kNaN;
      if (a.inner == 0.f) accumulate_vectors<false>(a, st, tile, p, e, step, highest, r, ones);
      else accumulate_vectors<true>(a, st, tile, p, e, step, highest, r, ones);
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) {
        float x[E], z[E], sum = 0.f, count = 0.f;  // see MaxSum::exponentials
        tile.get_a(i, x);
        map_logits<T>(a, p, e + i * step, x, z);
#pragma unroll
        for (int j = 0; j < E; j++) {
          const bool has_max = z[j] == r;
          sum += has_max ? 0.f : exp_difference<T>(z[j], r);
          count += has_max ? 1.f : 0.f;
        }
        st.others += sum, ones += count;
        if (Classes::are_summed(a)) add_depth(a, st, tile, i, p, e + i * step, z, r);
      }
    }
    if (st.m > -kInfinity) st.others += ones - (adds_max ? 1.f : 0.f);
  }
  // 16-bit logits, of which those that are `highest` have the maximum.
  template <bool Capped, class Tile, class View>
  __device__ __forceinline__ static void accumulate_vectors(const Args& a, State& st, const Tile& tile,
                                                            const View& p, int e, int step, float highest,
                                                            float r, float& ones) {
    constexpr int E = kElements<T>;
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    int count = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int first = e + i * step;
      float x[E], sum = 0.f;
      tile.get_a(i, x);
      MappedVector<E, Capped> z(a, x);
      if (first < p.bounds.lo || first + E > p.bounds.hi) {
#pragma unroll
        for (int j = 0; j < E; j++)
          if (first + j < p.bounds.lo || first + j >= p.bounds.hi) x[j] = kNaN, z.omit(j);
      }
#pragma unroll
      for (int j = 0; j < E; j++) {
        const bool has_max = x[j] == highest;
        sum += has_max ? 0.f : z.exponential(a, r, j);
        if (has_max) count++;
      }
      st.others += sum;
      if (Classes::are_summed(a)) {
        float mapped[E];
#pragma unroll
        for (int j = 0; j < E; j++) mapped[j] = z.z(a, j);
        add_depth(a, st, tile, i, p, first, mapped, r);
      }
    }
    ones = static_cast<float>(count);
  }
  // The maximum of a tile's mapped logits. A cap makes -inf finite, and what is out of bounds stays -inf.
  template <int V, class Tile, class View>
  __device__ __forceinline__ static float highest(const Args& a, const Tile& tile, const View& p, int e,
                                                  int step) {
    const float high = tile_max(T(), tile.a);
    bool any = a.inner == 0.f || high > -kInfinity;
    if (!any) {
#pragma unroll
      for (int i = 0; i < V; i++)
        any |= e + i * step < p.bounds.hi && e + i * step + kElements<T> > p.bounds.lo;
    }
    return any ? MappedLogit<T>(a, high).value : -kInfinity;
  }
  template <class Tile, int E, class View>
  __device__ __forceinline__ static void add_depth(const Args& a, State& st, const Tile& tile, int i,
                                                   const View& p, int e, const float (&z)[E], float r) {
    float w[E], depth = 0.f, weight = 0.f;
    Classes::load(a, tile, i, p, e, w);
#pragma unroll
    for (int j = 0; j < E; j++) {
      depth += w[j] == 0.f ? 0.f : w[j] * (r - z[j]);  // a class of weight 0 may be at -inf
      weight += w[j];
    }
    st.depth += depth, st.weight += weight;
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, Scalars& sc, const State& st,
                                                  bool leader) {
    const float2 log = log_parts(st.sum(), st.others);
    if (leader) record(a, row, sc, st, log);
    if constexpr (Gradient) {
      if (a.one_pass && a.mean) wait_for_previous_launch();  // it sums the rows' weights
      const float upstream = a.upstream ? *static_cast<const float*>(a.upstream) : 1.f;
      sc.omitted = a.sums && isnan(upstream);
      const SavedSum saved = st.saved();
      sc.gradient = GeneralGradient::of(a, upstream, sc.label, sc.ignored, st.m, log.x + log.y, &saved);
    }
  }
  __device__ __forceinline__ static void record(const Args& a, int64_t row, const Scalars& sc,
                                                const State& st, float2 log) {
    const float log_sum = log.x + log.y, own = (1.f - a.label_smoothing) * sc.label.weight;
    float loss = 0.f;
    if (!sc.ignored) {
      if (a.label_smoothing != 0.f)
        loss = a.label_smoothing / static_cast<float>(a.rows.n) * fmaf(st.weight, log_sum, st.depth);
      if (own != 0.f) loss += row_loss(log, st.m, sc.logit, own);
      if (a.z_loss != 0.f) loss += a.z_loss * (st.m + log_sum) * (st.m + log_sum);
    }
    if (a.single_cta_total) cta_row_losses()[row] = make_float2(loss, sc.label.weight);
    store_if(a.row_losses, static_cast<float2*>(a.row_losses) + row, make_float2(loss, sc.label.weight));
    store_if(a.loss, static_cast<float*>(a.loss) + row * a.loss_stride,
             a.loss && a.divisor ? loss / load_divisor(a) : loss);
    store_if(a.log_sum, static_cast<float*>(a.log_sum) + row * a.log_sum_stride,
             a.sums ? st.saved().bits : log_sum);
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
    GeneralGradient gradient;
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
    const Label l = label<false>(a, sc.index, a.slice ? 1.f : kNaN);
    const bool ignored = sc.index == a.ignore_index || counts_for_nothing(a, l);
    sc.index = l.index;
    if (!a.sums) {
      sc.gradient = GeneralGradient::of(a, sc.dloss, l, ignored, sc.max, sc.second, nullptr);
      return;
    }
    const SavedSum saved{sc.second};  // by the operations of forward
    const float2 log = log_parts(saved.sum(), saved.confident() ? -saved.bits : saved.bits - 1.f);
    sc.gradient = GeneralGradient::of(a, sc.dloss, l, ignored, sc.max, log.x + log.y, &saved);
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
