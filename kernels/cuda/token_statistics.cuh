// Statistics of tokens' logits, and the gradient of log-probability and entropy. Logits x are first mapped to
// z as in general_cross_entropy.cuh. With m the row's maximum, C classes and p = softmax(z):
//   r = sum exp(z - m) - 1, without the largest element's own 1
//   e = sum (m - z) exp(z - m)
//   q = sum exp(2 (z - m)) - 1
//   log p[t] = z[t] - m - log1p(r)
//   entropy = log1p(r) + e / (1 + r)
//   log sum p^2 = log1p(q) - 2 log1p(r)
//   dz[j] = dlog_prob ([j = t] - p[j]) - dentropy p[j] ((z[j] - m) + e / (1 + r))
// r, e and q are sums of numbers that are not negative, so no digits cancel.
#pragma once
#include "general_cross_entropy.cuh"
#include "token_statistics_args_gen.cuh"

namespace gander {

constexpr int64_t kNoColumn = INT64_MAX;
constexpr float kLn2 = 0.6931471805599453f;

// What backward of a slice takes in place of an index, as in kernels.go.
constexpr int64_t kInNoSlice = -2, kLeftOut = -3;

// (z - m) exp(z - m) is 0 to all digits below this z - m, and it is not 0 * inf.
constexpr float kDeepest = -1e4f;

// With a maximum beyond this, 16-bit logits have exponentials of 1 and next to 0, and that of the maximum has
// to be said to be 1: its exponent, the difference of two products, is 0 but for their rounding.
constexpr float kFar = 0x1p13f;

// What a row's state has beside m, r and e: q; the sum of z, without a cap that of x; and the first column
// that has the maximum.
struct AllSums {
  float squares = 0.f, total = 0.f;
  int64_t column = kNoColumn;
};
struct NoSums {};

template <class T, bool All>
struct alignas(16) TokenSum : std::conditional_t<All, AllSums, NoSums> {
  using Partial = TokenSum;
  static constexpr bool kMaxFirst = false;
  // own: 1 if an element that has the maximum m is left out of the sums, else 0. In a row's complete state
  // one is, unless m is -inf. The m of a thread may be that of another one's element.
  float others = 0.f, m = -kInfinity, depth = 0.f, own = 0.f;

  __device__ __forceinline__ static float reference(float m) { return GeneralSum<T>::reference(m); }
  // For a maximum of `top`, which is at least m. Below it, the element that had m is one of the others.
  __device__ __forceinline__ void rebase(float top) {
    if (m < top) {
      if (m > -kInfinity) {
        const float f = exp_difference<T>(m, top), sum = own + others;
        depth = f == 0.f ? 0.f : f * fmaf(top - m, sum, depth);
        others = f * sum;
        if constexpr (All) this->squares = f * f * (own + this->squares);
      }
      if constexpr (All) this->column = kNoColumn;
      m = top, own = 0.f;
    }
  }
  // Counts elements that have the maximum. Only the first is left out.
  __device__ __forceinline__ void add_equals(float count) {
    const float first = fminf(count, 1.f - own);
    own += first, others += count - first;
    if constexpr (All) this->squares += count - first;
  }
  __device__ __forceinline__ void merge(TokenSum o) {
    const float top = fmaxf(m, o.m);
    rebase(top), o.rebase(top);
    others += o.others, depth += o.depth;
    if constexpr (All) {
      this->squares += o.squares, this->total += o.total;
      this->column = min(this->column, o.column);
    }
    add_equals(o.own);
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    rebase(lanes_max<L>(m));
    sum_lanes<L>();
  }
  // For lanes that have the maximum in common.
  template <int L>
  __device__ __forceinline__ void sum_lanes() {
    const float having = lanes_sum<L>(own);
    own = 0.f;
    others = lanes_sum<L>(others), depth = lanes_sum<L>(depth);
    if constexpr (All) {
      this->squares = lanes_sum<L>(this->squares), this->total = lanes_sum<L>(this->total);
#pragma unroll
      for (int k = L / 2; k; k /= 2)
        this->column = min(this->column, __shfl_xor_sync(kAllLanes, this->column, k));
    }
    add_equals(having);
  }
};

// Whether the row's mask leaves it out.
__device__ __forceinline__ bool is_masked(const TokenStatisticsArgs& a, int64_t row) {
  if (!a.row_mask) return false;
  const int64_t i = row * a.row_mask_stride;
  if (a.row_mask_bytes == 1) return static_cast<const uint8_t*>(a.row_mask)[i] == 0;
  if (a.row_mask_bytes == 4) return static_cast<const int32_t*>(a.row_mask)[i] == 0;
  return static_cast<const int64_t*>(a.row_mask)[i] == 0;
}

// The column of a token, or kNoTarget if it is none, or in another slice.
__device__ __forceinline__ int64_t column_in_slice(const TokenStatisticsArgs& a, int64_t index) {
  const uint64_t column = static_cast<uint64_t>(index) - static_cast<uint64_t>(a.first);
  return column < static_cast<uint64_t>(a.rows.n) ? static_cast<int64_t>(column) : kNoTarget;
}

// Many long rows wait for their index too. Others would take longer.
constexpr int64_t kLongRow = 1 << 14, kManyRows = 512;
__device__ __forceinline__ bool is_skipped(const TokenStatisticsArgs& a, int64_t row) {
  if (is_masked(a, row)) return true;
  const bool waits = a.rows.n >= kLongRow && a.rows.m >= kManyRows;
  return waits && load_target<false>(a, row) == a.ignore_index;
}

template <class T_, bool All>
struct TokenStatisticsForward : RowOperator<TokenStatisticsForward<T_, All>> {
  using T = T_;
  using State = TokenSum<T, All>;
  using Args = TokenStatisticsArgs;
  using Loss = GeneralCrossEntropyForward<T, false>;
  static constexpr bool kHasOutput = false;
  static constexpr bool kFirstWarpFinalizes = true;
  struct Scalars {
    int64_t index;
    bool left_out;
    float logit;
  };
  __device__ __forceinline__ static bool skips(const Args& a, int64_t row) { return is_skipped(a, row); }
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    return {load_target<false>(a, row), is_masked(a, row), 0.f};
  }
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t row, Scalars& sc,
                                                         bool leader) {
    resolve_index(a, sc);
    if (leader) sc.logit = MappedLogit<T>(a, Loss::Plain::load_logit(a, row, sc.index)).value;
  }
  __device__ __forceinline__ static void resolve_index(const Args& a, Scalars& sc) {
    sc.left_out |= sc.index == a.ignore_index;
    sc.index = column_in_slice(a, sc.index);
  }
  __device__ __forceinline__ static void save_scalars(const Args& a, int64_t row, const Scalars& sc) {
    static_cast<float*>(a.target_logits)[row] = sc.logit;
  }
  __device__ __forceinline__ static Scalars restore_scalars(const Args& a, int64_t row) {
    Scalars sc = load_scalars(a, row, false);
    resolve_index(a, sc);
    sc.logit = __ldcg(static_cast<const float*>(a.target_logits) + row);
    return sc;
  }
  // Streams. A warp's maximum rises less and less often, and then one of its lanes has it. Lanes beyond the
  // row's end are not here: then each goes by its own maximum.
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step) {
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    const float high = Loss::template highest<V>(a, tile, p, e, step);
    const int last = 31 - static_cast<int>(threadIdx.x) % 32;  // from this lane
    const float top = e + last * kElements<T> < p.bounds.hi ? lanes_max<32>(high) : high;
    if (top > st.m || top == st.m && fabsf(top) > kFar) {
      st.rebase(top);
      add_tile<true>(a, st, tile, p, e, step, high, high == top && high > -kInfinity);
    } else {
      add_tile<false>(a, st, tile, p, e, step, high, false);
    }
  }
  // Rows in registers: lanes agree on the maximum first.
  template <int L, class Tile, class View>
  __device__ __forceinline__ static void reduce(const Args& a, State& st, Tile& tile, const View& p, int e,
                                                int step) {
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    const float high = Loss::template highest<V>(a, tile, p, e, step);
    st.m = lanes_max<L>(high);
    add_tile<true>(a, st, tile, p, e, step, high, high == st.m && high > -kInfinity);
    st.template sum_lanes<L>();
  }
  // Adds a tile, of which `high` is the maximum, relative to st.m. Rises: its elements are compared with
  // st.m, and has_max says whether `high` is that.
  template <bool Rises, class Tile, class View>
  __device__ __forceinline__ static void add_tile(const Args& a, State& st, const Tile& tile, const View& p,
                                                  int e, int step, float high, bool has_max) {
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    if (a.inner == 0.f) add_mapped<V, false, Rises>(a, st, tile, p, e, step, high, has_max);
    else add_mapped<V, true, Rises>(a, st, tile, p, e, step, high, has_max);
  }

  // Sums over elements of v = exp(z - m): of v, of v times its exponent, and of v^2.
  struct Sums {
    float sum = 0.f, depth = 0.f, squares = 0.f;
    int ones = 0, first = INT32_MAX;
    // finite: the exponent, but not -inf.
    __device__ __forceinline__ void add(float exponent, float finite) {
      const float v = exponential(exponent);
      sum += v, depth = fmaf(v, finite, depth);
      if constexpr (All) squares = fmaf(v, v, squares);
    }
    // An element whose key is at least `top` has the maximum: it is in none of the sums, `ones` counts it,
    // and `first` is the lowest number of one. Predicated: to select takes more instructions.
    __device__ __forceinline__ void add(float exponent, float finite, float key, float top, int number) {
      const float v = exponential(exponent);
      // clang-format off
      asm("{\n.reg .pred p;\n"
          "setp.ge.f32 p, %5, %6;\n"
          "@!p add.f32 %0, %0, %3;\n"
          "@!p fma.rn.f32 %1, %3, %4, %1;\n"
          "@p add.s32 %2, %2, 1;\n}"
          : "+f"(sum), "+f"(depth), "+r"(ones) : "f"(v), "f"(finite), "f"(key), "f"(top));
      if constexpr (All)
        asm("{\n.reg .pred p;\n"
            "setp.ge.f32 p, %4, %5;\n"
            "@!p fma.rn.f32 %0, %2, %2, %0;\n"
            "@p min.s32 %1, %1, %3;\n}"
            : "+f"(squares), "+r"(first) : "f"(v), "r"(number), "f"(key), "f"(top));
      // clang-format on
    }
    __device__ __forceinline__ static float exponential(float exponent) {
      return sizeof(T) == 4 ? expf(exponent) : quick_exp2(exponent);
    }
    __device__ __forceinline__ void add(const Sums& o) {
      sum += o.sum, depth += o.depth, ones += o.ones;
      if constexpr (All) squares += o.squares, first = min(first, o.first);
    }
  };
  // A vector's exponents. Those of 16-bit rows are to the base of 2, and without a cap slope x - offset in
  // one operation. `lost` is what the offset has lost to rounding: a factor that all exponentials have alike.
  template <bool Capped>
  struct Exponents {
    static constexpr int E = kElements<T>;
    static constexpr bool kLinear = sizeof(T) == 2 && !Capped;
    const Args& a;
    float m, slope = 0.f, offset = 0.f, lost = 0.f;
    float exponent[E];
    float key[E];    // z, or the logit of 16-bit rows
    float value[E];  // z, or without a cap x
    __device__ __forceinline__ Exponents(const Args& a, float m) : a(a), m(m) {
      if constexpr (kLinear) {
        const float x = to_float(from_float<T>(__fdividef(m, a.outer)));  // the logit that m is
        slope = a.outer * (fabsf(m) < 1e38f ? kLog2E : 0.25f);            // the product stays finite
        offset = slope * x, lost = fmaf(slope, x, -offset);
      }
    }
    template <class View>
    __device__ __forceinline__ void of(const float (&x)[E], const View& p, int e) {
      if constexpr (kLinear) {  // out of bounds x is -inf
#pragma unroll
        for (int j = 0; j < E; j++) exponent[j] = fmaf(slope, x[j], -offset), key[j] = value[j] = x[j];
      } else if constexpr (sizeof(T) == 2) {
        const MappedVector<E, true> z(a, x);
#pragma unroll
        for (int j = 0; j < E; j++) exponent[j] = z.exponent(a, m, j), key[j] = x[j], value[j] = z.z(a, j);
        if (e >= p.bounds.lo && e + E <= p.bounds.hi) return;
#pragma unroll
        for (int j = 0; j < E; j++)
          if (e + j < p.bounds.lo || e + j >= p.bounds.hi) exponent[j] = kDeepest, key[j] = kNaN;
      } else {
        map_logits<T>(a, p, e, x, key);
#pragma unroll
        for (int j = 0; j < E; j++) exponent[j] = key[j] - m, value[j] = Capped ? key[j] : x[j];
      }
    }
    __device__ __forceinline__ float finite(int j) const {
      return sizeof(T) == 2 && Capped ? exponent[j] : fmaxf(exponent[j], kDeepest);
    }
    // Adds the sums to a state.
    __device__ __forceinline__ void add(State& st, const Sums& s) const {
      constexpr float kUnit = sizeof(T) == 4 ? 1.f : kLn2;
      const float by = -lost * kLn2;  // exp(by) is 1 + by
      st.others += fmaf(s.sum, by, s.sum);
      const float depth = fmaf(-lost, s.sum, s.depth);
      st.depth = fmaf(-kUnit, fmaf(depth, by, depth), st.depth);
      if constexpr (All) st.squares += fmaf(s.squares, 2.f * by, s.squares);
      if (s.ones) st.add_equals(static_cast<float>(s.ones));
    }
  };
  // The lowest 16-bit logit that is mapped to `high`, as x is. With a cap it may be far below x.
  __device__ __forceinline__ static float lowest_of_maximum(const Args& a, float x, float high) {
    const auto logit = [](int i) {  // in ascending order
      const uint16_t bits = static_cast<uint16_t>(i < 0 ? 0x8000 - i : i);
      T value;
      memcpy(&value, &bits, sizeof(bits));
      return to_float(value);
    };
    const T value = from_float<T>(x);
    uint16_t bits;
    memcpy(&bits, &value, sizeof(bits));
    int has = bits & 0x8000 ? 0x8000 - bits : bits, below = -0x7fff;
    for (int i = has - 1; has - below > 1; i = has - (has - below) / 2)
      (MappedLogit<T>(a, logit(i)).value == high ? has : below) = i;
    return logit(has);
  }
  template <int V, bool Capped, bool Rises, class Tile, class View>
  __device__ __forceinline__ static void add_mapped(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step, float high, bool has_max) {
    constexpr int E = kElements<T>;
    Exponents<Capped> exponents(a, State::reference(st.m));
    float top = kNaN;  // no key is as high
    if (Rises && has_max) {
      if constexpr (sizeof(T) == 4) top = high;
      else top = lowest_of_maximum(a, tile_max(T(), tile.a), high);
    }
    Sums sums;
#pragma unroll
    for (int i = 0; i < V; i++) {
      float x[E];
      Sums of_vector;
      tile.get_a(i, x);
      exponents.of(x, p, e + i * step);
#pragma unroll
      for (int j = 0; j < E; j++) {
        if constexpr (Rises)
          of_vector.add(exponents.exponent[j], exponents.finite(j), exponents.key[j], top, i * E + j);
        else of_vector.add(exponents.exponent[j], exponents.finite(j));
      }
      sums.add(of_vector);
      if constexpr (All) st.total += total_of(p, e + i * step, exponents.value);
    }
    exponents.add(st, sums);
    if constexpr (All && Rises) {
      if (sums.ones) st.column = min(st.column, p.origin + e + sums.first / E * step + sums.first % E);
    }
  }
  template <int E, class View>
  __device__ __forceinline__ static float total_of(const View& p, int e, const float (&values)[E]) {
    float total = 0.f;
    if (e >= p.bounds.lo && e + E <= p.bounds.hi) {
#pragma unroll
      for (int j = 0; j < E; j++) total += values[j];
    } else {
#pragma unroll
      for (int j = 0; j < E; j++)
        if (e + j >= p.bounds.lo && e + j < p.bounds.hi) total += values[j];
    }
    return total;
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, const Scalars& sc,
                                                  const State& st, bool leader) {
    if (!leader) return;
    // A row that is -inf alone is NaN, as is one with +inf or a NaN.
    const bool finite = st.m > -kInfinity && st.m < kInfinity;
    const float others = finite ? st.others : kNaN, sum = 1.f + others;
    const float2 log = log_parts(sum, others);
    const float log_sum = log.x + log.y, depth = st.depth / sum;
    const auto put = [&](void* to, float value) {
      store_if(to, static_cast<float*>(to) + row, sc.left_out ? 0.f : value);
    };
    put(a.log_prob, sc.index == kNoTarget ? kNaN : 0.f - row_loss(log, st.m, sc.logit, 1.f));
    put(a.entropy, log_sum + depth);
    const bool nothing = st.m == -kInfinity && !isnan(st.others);
    const float state[] = {st.m, nothing ? -kInfinity : log_sum, depth}, left_out = a.slice ? kNaN : 0.f;
#pragma unroll
    for (int i = 0; i < 3; i++)
      store_if(a.max, static_cast<float*>(a.max) + row * a.max_stride + i, sc.left_out ? left_out : state[i]);
    if constexpr (All) {
      const float2 of_squares = log_parts(1.f + st.squares, st.squares);
      put(a.log_sum_sq_probs, finite ? fmaf(-2.f, log_sum, of_squares.x + of_squares.y) : kNaN);
      put(a.mean_logit, (a.inner == 0.f ? a.outer * st.total : st.total) / static_cast<float>(a.classes));
      const int64_t column = sc.left_out || isnan(st.others) || st.m == kInfinity ? -1
                             : st.column == kNoColumn                             ? 0
                                                                                  : st.column;
      if (a.predicted) static_cast<int64_t*>(a.predicted)[row] = column < 0 ? column : a.first + column;
      if (a.is_top1) static_cast<uint8_t*>(a.is_top1)[row] = column >= 0 && column == sc.index;
    }
  }
};

// It uses the state of forward, so that nothing is reduced.
template <class T_>
struct TokenStatisticsBackward : RowOperator<TokenStatisticsBackward<T_>> {
  using T = T_;
  using Args = TokenStatisticsArgs;
  struct Scalars {
    int64_t index;
    bool left_out;
    float max, log_sum, depth;
    float of_log_prob, of_entropy;  // upstream
    float scale;                    // of exp(z - max): 1 over the row's sum
    float constant;                 // dz = p (constant - of_entropy (z - max))
  };
  __device__ __forceinline__ static bool already_done(const Args&) { return false; }
  __device__ __forceinline__ static bool skips(const Args& a, int64_t row) { return is_skipped(a, row); }
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    Scalars sc;
    sc.index = load_target<false>(a, row);
    sc.left_out = is_masked(a, row);
    const float* const state = static_cast<const float*>(a.max) + row * a.max_stride;
    sc.max = state[0], sc.log_sum = state[1], sc.depth = state[2];
    const auto upstream = [&](const void* of, int64_t stride) {
      return of ? static_cast<const float*>(of)[row * stride] : 0.f;
    };
    sc.of_log_prob = upstream(a.d_log_prob, a.d_log_prob_stride);
    sc.of_entropy = upstream(a.d_entropy, a.d_entropy_stride);
    return sc;
  }
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t, Scalars& sc, bool) {
    sc.left_out |= sc.index == a.ignore_index;
    const bool may_be_elsewhere = a.slice && sc.index != kInNoSlice;
    sc.index = column_of(a, sc.index);
    if (sc.index == kNoTarget && a.d_log_prob && !may_be_elsewhere) sc.of_log_prob = kNaN;
    sc.scale = expf(-sc.log_sum);
    sc.constant = fmaf(-sc.of_entropy, sc.depth, -sc.of_log_prob);
    // No logit matters: not even a NaN.
    sc.left_out |= sc.of_log_prob == 0.f && sc.of_entropy == 0.f;
    if (sc.left_out) sc.index = kNoTarget;
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View& p, int e, float (&dx)[E]) {
    if (sc.left_out) {
#pragma unroll
      for (int j = 0; j < E; j++) dx[j] = 0.f;
      return;
    }
    if constexpr (sizeof(T) == 2) {
      if (a.inner == 0.f) map_vector<false>(a, sc, x, dx);
      else map_vector<true>(a, sc, x, dx);
    } else {
      map_each<T>(a, x, [&](int j, MappedLogit<T> z) {
        const float d = z.value - sc.max;
        dx[j] = expf(d) * sc.scale * fmaf(-sc.of_entropy, fmaxf(d, kDeepest), sc.constant) * z.derivative;
      });
    }
    const unsigned j = position_in_view(sc.index, p.origin) - e;
    if (j >= E) return;
    float logit = 0.f;
#pragma unroll
    for (unsigned k = 0; k < E; k++) logit = j == k ? x[k] : logit;
    const float replacement = at_index(sc, MappedLogit<T>(a, logit));
#pragma unroll
    for (unsigned k = 0; k < E; k++) dx[k] = j == k ? replacement : dx[k];
  }
  template <bool Capped, int E>
  __device__ __forceinline__ static void map_vector(const Args& a, const Scalars& sc, const float (&x)[E],
                                                    float (&dx)[E]) {
    const MappedVector<E, Capped> z(a, x);
    const float by = MappedVector<E, Capped>::derivative(a) * sc.scale;
    const float constant = by * sc.constant, slope = -kLn2 * by * sc.of_entropy;
#pragma unroll
    for (int j = 0; j < E; j++) {
      const float d = z.exponent(a, sc.max, j);
      dx[j] = quick_exp2(d) * fmaf(slope, fmaxf(d, kDeepest), constant) * z.derivative(j);
    }
  }
  // Where p is nearly 1, the difference 1 - p would lose the others' share.
  __device__ __forceinline__ static float at_index(const Scalars& sc, MappedLogit<T> z) {
    float log_sum = sc.log_sum;
    asm volatile("" : "+f"(log_sum));  // what is computed of it here takes no registers before
    const float d = z.value - sc.max, p = exp_difference<T>(z.value, sc.max) * sc.scale;
    const float others = d == 0.f && log_sum < 0.25f ? one_minus_exp(log_sum) : 1.f - p;
    const float of_entropy = -sc.of_entropy * p * (fmaxf(d, kDeepest) + sc.depth);
    return fmaf(sc.of_log_prob, others, of_entropy) * z.derivative;
  }
};

// The statistics of rows whose tokens are divided into slices, by one thread for each row. See
// kernels.ShardedTokenStatistics for the parts of a slice, and cpu.CombineTokenStatistics for the formulas.
__device__ __forceinline__ void combine_token_statistics_body(const TokenStatisticsArgs& a) {
  const int64_t rows = a.rows.m, row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const bool narrow = a.rows.a_stride == 4 * rows;
  const auto slice = [&](int64_t i) { return static_cast<const float*>(a.rows.a) + i * a.rows.a_stride; };
  const int64_t index = load_target<false>(a, row);
  const bool left_out = is_masked(a, row) || index == a.ignore_index;

  float high = -kInfinity;
  bool is_unknown = false;
  for (int64_t i = 0; i < a.ranks; i++) {
    const float m = slice(i)[3 * row];
    high = fmaxf(high, m), is_unknown |= isnan(m);
  }
  float others = 0.f, depth = 0.f, q = 0.f, mean = 0.f, below = -kInfinity;
  int64_t column = kNoColumn;
  bool found = false;  // whether one of the slices that have the maximum is among those before
  for (int64_t i = 0; i < a.ranks; i++) {
    const float* const state = slice(i) + 3 * row;
    const float* const numbers = slice(i) + 3 * rows + row;
    const float m = state[0], log_sum = state[1], log_prob = numbers[0];
    float log_squares = 0.f;
    if (!narrow) {
      log_squares = numbers[rows], mean += numbers[2 * rows];
      // Maybe not aligned to 8 bytes.
      const auto* const halves = reinterpret_cast<const uint32_t*>(slice(i) + 6 * rows) + 2 * row;
      const auto predicted = static_cast<int64_t>(static_cast<uint64_t>(halves[1]) << 32 | halves[0]);
      if (m == high || predicted < 0) column = min(column, predicted);
    }
    if (log_sum == -kInfinity) continue;  // nothing but -inf, maybe the index too
    const float d = high - m, factor = expf(-d), r = expm1f(log_sum), sum = factor * (1.f + r);
    const float square = fmaxf(expm1f(fmaf(2.f, log_sum, log_squares)), 0.f);
    if (!isnan(log_prob)) below = fminf(log_prob + log_sum, 0.f) - d;
    depth = fmaf(sum, state[2] + fminf(d, -kDeepest), depth);
    if (m == high && !found) {
      others += r, q += square, found = true;
    } else {
      others += sum, q += factor * factor * (1.f + square);
    }
  }
  if (!found) others = -1.f, q = kNaN;
  if (is_unknown) high = others = q = mean = kNaN, column = -1;
  if (left_out) column = -1;
  const float log_sum = log1pf(others);
  depth /= 1.f + others;
  const bool is_token = index >= 0 && index < a.classes;
  const auto put = [&](void* to, float value) {
    if (to) static_cast<float*>(to)[row] = left_out ? 0.f : value;
  };
  put(a.log_prob, is_token ? below - log_sum : kNaN);
  put(a.entropy, log_sum + depth);
  put(a.log_sum_sq_probs, fmaf(-2.f, log_sum, log1pf(q)));
  put(a.mean_logit, mean);
  if (a.is_top1) static_cast<uint8_t*>(a.is_top1)[row] = column >= 0 && column == index;
  if (a.predicted) static_cast<int64_t*>(a.predicted)[row] = column;
  if (a.max) {
    const float state[] = {high, log_sum, depth};
#pragma unroll
    for (int i = 0; i < 3; i++) static_cast<float*>(a.max)[3 * row + i] = left_out ? 0.f : state[i];
  }
  if (a.local) {
    const int64_t local = max(index - a.first, static_cast<int64_t>(-1));
    static_cast<int64_t*>(a.local)[row] = left_out ? kLeftOut : is_token ? local : kInNoSlice;
  }
}

}  // namespace gander
