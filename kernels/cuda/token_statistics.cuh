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
  float others = 0.f, m = -kInfinity, depth = 0.f, padding = 0.f;

  __device__ __forceinline__ static float reference(float m) { return GeneralSum<T>::reference(m); }
  // For a maximum of `top`, which is at least m. Below it, the element that had m is one of the others.
  __device__ __forceinline__ void rebase(float top) {
    if (m < top) {
      if (m > -kInfinity) {
        const float f = exp_difference<T>(m, top), sum = 1.f + others;
        depth = f == 0.f ? 0.f : f * fmaf(top - m, sum, depth);
        others = f * sum;
        if constexpr (All) this->squares = f * f * (1.f + this->squares);
      }
      if constexpr (All) this->column = kNoColumn;
      m = top;
    }
  }
  // Counts elements that have the maximum, but for one.
  __device__ __forceinline__ void add_equals(float count) {
    others += count;
    if constexpr (All) this->squares += count;
  }
  __device__ __forceinline__ void merge(TokenSum o) {
    const float top = fmaxf(m, o.m);
    const bool both = m == o.m && top > -kInfinity;
    rebase(top), o.rebase(top);
    others += o.others, depth += o.depth;
    if constexpr (All) {
      this->squares += o.squares, this->total += o.total;
      this->column = min(this->column, o.column);
    }
    add_equals(both ? 1.f : 0.f);
  }
  template <int L>
  __device__ __forceinline__ void reduce_lanes() {
    const float top = lanes_max<L>(m);
    const bool has_max = m == top && top > -kInfinity;
    rebase(top);
    sum_lanes<L>(has_max);
  }
  // For lanes that have the maximum in common. leaves_out: whether this lane's sums are without one element
  // that has it.
  template <int L>
  __device__ __forceinline__ void sum_lanes(bool leaves_out) {
    const float having = lanes_sum<L>(leaves_out ? 1.f : 0.f);
    others = lanes_sum<L>(others), depth = lanes_sum<L>(depth);
    if constexpr (All) {
      this->squares = lanes_sum<L>(this->squares), this->total = lanes_sum<L>(this->total);
#pragma unroll
      for (int k = L / 2; k; k /= 2)
        this->column = min(this->column, __shfl_xor_sync(kAllLanes, this->column, k));
    }
    add_equals(fmaxf(having - 1.f, 0.f));
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
  // Streams: a thread's maximum rises less and less often.
  template <class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step) {
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    const float high = Loss::template highest<V>(a, tile, p, e, step);
    const bool rises = high > st.m;
    if (rises) st.rebase(high);
    add_tile(a, st, tile, p, e, step, high, rises);
  }
  // Rows in registers: lanes agree on the maximum first, so that few of them look for the element that has
  // it.
  template <int L, class Tile, class View>
  __device__ __forceinline__ static void reduce(const Args& a, State& st, Tile& tile, const View& p, int e,
                                                int step) {
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    const float high = Loss::template highest<V>(a, tile, p, e, step);
    st.m = lanes_max<L>(high);
    const bool has_max = high == st.m && high > -kInfinity;
    add_tile(a, st, tile, p, e, step, high, has_max);
    st.template sum_lanes<L>(has_max);
  }
  // Adds a tile, relative to st.m. leaves_out: without one element that is `high`, the first.
  template <class Tile, class View>
  __device__ __forceinline__ static void add_tile(const Args& a, State& st, const Tile& tile, const View& p,
                                                  int e, int step, float high, bool leaves_out) {
    constexpr int V = sizeof(tile.a) / sizeof(tile.a[0]);
    if (a.inner == 0.f) add_mapped<V, false>(a, st, tile, p, e, step, high, leaves_out);
    else add_mapped<V, true>(a, st, tile, p, e, step, high, leaves_out);
  }

  // Sums over elements of v = exp(z - m): of v, of v times its exponent, and of v^2. Exponents of 16-bit rows
  // are to the base of 2.
  struct Sums {
    float sum = 0.f, depth = 0.f, squares = 0.f;
    __device__ __forceinline__ void add(float exponent, bool counts = true) {
      const float v = !counts ? 0.f : sizeof(T) == 4 ? expf(exponent) : quick_exp2(exponent);
      sum += v;
      depth = fmaf(v, fmaxf(exponent, kDeepest), depth);
      if constexpr (All) squares = fmaf(v, v, squares);
    }
    __device__ __forceinline__ void add(const Sums& o) {
      sum += o.sum, depth += o.depth;
      if constexpr (All) squares += o.squares;
    }
  };
  // The exponents of a vector. Those of 16-bit rows without a cap are slope x - offset in one operation.
  // `lost` is what the offset has lost to rounding: a factor that all v have alike.
  template <bool Capped>
  struct Reference {
    const Args& a;
    float m, slope = 0.f, offset = 0.f, lost = 0.f;
    static constexpr bool kLinear = sizeof(T) == 2 && !Capped;
    __device__ __forceinline__ Reference(const Args& a, float m) : a(a), m(m) {
      if constexpr (kLinear) {
        const float x = __fdividef(m, a.outer);
        slope = a.outer * kLog2E, offset = slope * x, lost = fmaf(slope, x, -offset);
      }
    }
    // Calls each(j, exponent).
    template <int E, class View, class Each>
    __device__ __forceinline__ void exponents(const float (&x)[E], const View& p, int e,
                                              const Each& each) const {
      if constexpr (kLinear) {  // out of bounds x is -inf
#pragma unroll
        for (int j = 0; j < E; j++) each(j, fmaf(slope, x[j], -offset));
      } else if constexpr (sizeof(T) == 2) {
        MappedVector<E, Capped> z(a, x);
        if (e < p.bounds.lo || e + E > p.bounds.hi) {
#pragma unroll
          for (int j = 0; j < E; j++)
            if (e + j < p.bounds.lo || e + j >= p.bounds.hi) z.omit(j);
        }
#pragma unroll
        for (int j = 0; j < E; j++) each(j, z.exponent(a, m, j));
      } else {
        float z[E];
        map_logits<T>(a, p, e, x, z);
#pragma unroll
        for (int j = 0; j < E; j++) each(j, z[j] - m);
      }
    }
    // Adds the sums to a state.
    __device__ __forceinline__ void add(State& st, const Sums& s) const {
      constexpr float kUnit = sizeof(T) == 4 ? 1.f : kLn2;
      const float by = -lost * kLn2;  // exp(by) is 1 + by
      st.others += fmaf(s.sum, by, s.sum);
      const float depth = fmaf(-lost, s.sum, s.depth);
      st.depth = fmaf(-kUnit, fmaf(depth, by, depth), st.depth);
      if constexpr (All) st.squares += fmaf(s.squares, 2.f * by, s.squares);
    }
  };
  template <int V, bool Capped, class Tile, class View>
  __device__ __forceinline__ static void add_mapped(const Args& a, State& st, const Tile& tile, const View& p,
                                                    int e, int step, float high, bool leaves_out) {
    constexpr int E = kElements<T>;
    const Reference<Capped> reference(a, State::reference(st.m));
    int vector = -1;
    Sums rest;  // of that vector, without the element
    if (leaves_out) {
      uint4 having[1];
#pragma unroll
      for (int i = V - 1; i >= 0; i--) {
        const uint4 one[1] = {tile.a[i]};
        const int at = e + i * step;
        if (at < p.bounds.hi && at + E > p.bounds.lo && MappedLogit<T>(a, tile_max(T(), one)).value == high)
          vector = i, having[0] = one[0];
      }
      float x[E];
      unpack(T(), having[0], x);
      const int first = e + vector * step;
      int element = -1;
      map_each<T>(a, x, [&](int j, MappedLogit<T> z) {
        const bool in = first + j >= p.bounds.lo && first + j < p.bounds.hi;
        if (element < 0 && in && z.value == high) element = j;
      });
      reference.exponents(x, p, first, [&](int j, float exponent) { rest.add(exponent, j != element); });
      if constexpr (All) st.column = p.origin + first + element;
    }
    Sums sums;
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int first = e + i * step;
      float x[E];
      Sums own;
      tile.get_a(i, x);
      reference.exponents(x, p, first, [&](int, float exponent) { own.add(exponent); });
      if (i == vector) own = rest;
      sums.add(own);
      if constexpr (All) st.total += total_of<Capped>(a, p, first, x);
    }
    reference.add(st, sums);
  }
  // The sum of z, without a cap of x, in a vector.
  template <bool Capped, int E, class View>
  __device__ __forceinline__ static float total_of(const Args& a, const View& p, int first,
                                                   const float (&x)[E]) {
    float total = 0.f;
    const auto add = [&](int j, float x) {
      if constexpr (Capped) x = MappedLogit<T>(a, x).value;
      total += x;
    };
    if (first >= p.bounds.lo && first + E <= p.bounds.hi) {
#pragma unroll
      for (int j = 0; j < E; j++) add(j, x[j]);
    } else {
#pragma unroll
      for (int j = 0; j < E; j++)
        if (first + j >= p.bounds.lo && first + j < p.bounds.hi) add(j, x[j]);
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
    const float d = z.value - sc.max, p = exp_difference<T>(z.value, sc.max) * sc.scale;
    const float others = d == 0.f && sc.log_sum < 0.25f ? one_minus_exp(sc.log_sum) : 1.f - p;
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
