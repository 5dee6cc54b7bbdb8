// Cross-entropy over rows of logits: loss, log-sum-exp, gradient, and the total over rows.
#pragma once
#include "cross_entropy_args_gen.cuh"
#include "elementwise.cuh"

namespace gander {

constexpr float kNaN = __builtin_nanf("");

// A row's target and the weight of the row. The weight is 0 if the row is ignored: then its logits must not
// matter, not even if there is a NaN among them. It is NaN if the target is not a class: then no element is
// read at the target.
struct Label {
  int64_t index;  // kNoTarget in both cases
  float weight;
};
constexpr int64_t kNoTarget = INT64_MIN / 2;

// Optional: a launch for log-sum-exp alone has no targets. Then each row has the weight 1 and no target.
template <bool Optional>
__device__ __forceinline__ int64_t load_target(const CrossEntropyArgs& a, int64_t row) {
  if (Optional && !a.target) return kNoTarget;
  const int64_t i = row * a.target_stride;
  if (a.target_type == kInt64) return static_cast<const int64_t*>(a.target)[i];
  return static_cast<const int32_t*>(a.target)[i];
}

__device__ __forceinline__ bool is_column(const CrossEntropyArgs& a, int64_t target) {
  return target >= 0 && target < a.rows.n;
}

// The target, or kNoTarget if the row is ignored or the target is not a column.
__device__ __forceinline__ int64_t column_of(const CrossEntropyArgs& a, int64_t target) {
  return target != a.ignore_index && is_column(a, target) ? target : kNoTarget;
}

// outside: the weight of a row whose target is not a column. Each branch delays the warp of the thread that
// computes this, so only class weights have one.
template <bool Optional>
__device__ __forceinline__ Label label(const CrossEntropyArgs& a, int64_t target, float outside = kNaN) {
  const int64_t column = column_of(a, target);
  const float without = Optional && !a.target ? 1.f : target == a.ignore_index ? 0.f : outside;
  float weight = column == kNoTarget ? without : 1.f;
  if (a.weight && column != kNoTarget) weight = load_float(a.weight, a.weight_type, column);
  return {column, weight};
}

// What losses and gradients are divided by. It is read past L1: the previous launch may have written it.
__device__ __forceinline__ float load_divisor(const CrossEntropyArgs& a) {
  return __ldcg(static_cast<const float*>(a.divisor));
}

// The gradient of a row's unweighted loss. Forward and backward compute it by the same operations, so that dx
// has the same bits whichever of them writes it.
__device__ __forceinline__ float row_gradient(const CrossEntropyArgs& a, float upstream, float weight) {
  if (weight == 0.f) return 0.f;
  const float gradient = upstream * weight;
  return a.divisor ? gradient / load_divisor(a) : gradient;
}

// In place of a row's gradient: none is to be made. A row's gradient that is NaN has other bits.
constexpr int kNoGradient = 0x7fc0ffee;

// Sums pairs over all rows, with one CTA or one cluster. `at(row)` returns a row's pair. True is returned in
// the one thread that has the sums. The order of summation depends on the number of rows alone. Sums are in
// double: there are few terms, and a result of one number shows each rounding error.
template <int T, bool Cluster, class At>
__device__ __forceinline__ bool sum_rows(int64_t rows, double2& sum, At at) {
  constexpr int U = 8;  // rows that a thread loads at a time
  __shared__ double2 warps[T / 32];
  int64_t first = threadIdx.x, step = T;
#ifdef GANDER_SM90
  __shared__ double2 slots[Cluster ? 16 : 1];
  __shared__ uint64_t barrier;
  if constexpr (Cluster) {
    cluster_begin(&barrier, sizeof(double2));
    first += cluster_rank() * T;
    step *= cluster_size();
  }
#endif
  sum = make_double2(0, 0);
  for (int64_t i = first; i < rows; i += U * step) {
    float2 v[U];
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = i + u * step < rows ? at(i + u * step) : make_float2(0.f, 0.f);
#pragma unroll
    for (int u = 0; u < U; u++) sum.x += v[u].x, sum.y += v[u].y;
  }
  const auto reduce = [](double2 v) { return make_double2(lanes_sum<32>(v.x), lanes_sum<32>(v.y)); };
  const int lane = threadIdx.x % 32;
  sum = reduce(sum);
  if (lane == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = reduce(lane < T / 32 ? warps[lane] : make_double2(0, 0));
#ifdef GANDER_SM90
  if constexpr (Cluster) {
    cluster_wait();
    const uint32_t size = cluster_size();
    if (threadIdx.x < size) {
      uint64_t* slot = reinterpret_cast<uint64_t*>(slots + cluster_rank());
      send(slot, __double_as_longlong(sum.x), &barrier, threadIdx.x);
      send(slot + 1, __double_as_longlong(sum.y), &barrier, threadIdx.x);
    }
    barrier_wait(&barrier, 0);
    sum = reduce(lane < size ? slots[lane] : make_double2(0, 0));
    return threadIdx.x == 0 && cluster_rank() == 0;
  }
#endif
  return threadIdx.x == 0;
}

// Writes the total and the denominator. The total is the sum of all rows' losses, divided by the sum of their
// weights for a mean, else by the divisor.
__device__ __forceinline__ void write_total(const CrossEntropyArgs& a, double2 sum) {
  if (a.total) {
    const double by = a.mean ? sum.y : a.divisor ? load_divisor(a) : 1.;
    *static_cast<float*>(a.total) = sum.x / by;
  }
  if (a.denominator && !a.one_pass) *static_cast<float*>(a.denominator) = sum.y;
}

// The total in a launch of its own, of what the launch before it has stored.
template <int T, bool Cluster>
__device__ __forceinline__ void total(const CrossEntropyArgs& a) {
  wait_for_previous_launch();
  const float2* rows = static_cast<const float2*>(a.row_losses);
  double2 sum;
  if (sum_rows<T, Cluster>(a.rows.m, sum, [=](int64_t i) { return __ldcg(rows + i); })) write_total(a, sum);
}

// The loss and weight of each row, in launches of a single CTA that also compute the total
// (single_cta_total).
constexpr int kMaxRowsPerCTA = 16;
__device__ __forceinline__ float2* cta_row_losses() {
  __shared__ float2 rows[kMaxRowsPerCTA];
  return rows;
}

// The total in a launch of a single CTA, by its first warp. It adds in the order in which sum_rows adds so
// few rows.
__device__ __forceinline__ void single_cta_total(const CrossEntropyArgs& a) {
  __syncthreads();
  const unsigned lane = thread_number_again();
  if (lane >= 32) return;
  const float2 row = lane < a.rows.m ? cta_row_losses()[lane] : make_float2(0.f, 0.f);
  const double2 sum = {lanes_sum<32>(static_cast<double>(row.x)), lanes_sum<32>(static_cast<double>(row.y))};
  if (lane == 0) write_total(a, sum);
}

// The sum of the rows' weights, for a pass over the rows that divides by it.
template <int T, bool Cluster>
__device__ __forceinline__ void denominator(const CrossEntropyArgs& a) {
  double2 sum;
  const auto weight = [&a](int64_t i) {
    return make_float2(label<false>(a, load_target<false>(a, i)).weight, 0.f);
  };
  if (sum_rows<T, Cluster>(a.rows.m, sum, weight)) *static_cast<float*>(a.denominator) = sum.x;
}

// log(s) as two terms: log(s) = k log(2) + log(f), where s = 2^k f and 2^-1/2 <= f < 2^1/2. Adding them in
// float would round to the magnitude of the sum. s is 0 if all elements of the row are -inf. rest is s - 1,
// which may have digits that s has not: log(s) is nearly proportional to it.
//
// log(1 + t) is t times a polynomial, the best of its degree between those f. With its rounding it is off by
// at most 1.02 x 2^-23 of its value.
__device__ __forceinline__ float2 log_parts(float s, float rest) {
  const int bits = __float_as_int(s), k = (bits - 0x3f3504f3) >> 23;
  constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;  // log(2) = kHigh + kLow; k * kHigh is exact
  constexpr float kSeries[] = {0x1.084cf2p-3f,  -0x1.0f374ap-3f, 0x1.2270ccp-3f,
                               -0x1.542754p-3f, 0x1.99a3fep-3f,  -0x1.000428p-2f,
                               0x1.555550p-2f,  -0x1.fffff8p-2f, 1.f};
  const float t = __int_as_float(bits - (k << 23)) - 1.f;
  float factor = -0x1.383b64p-4f;
#pragma unroll
  for (const float c : kSeries) factor = fmaf(factor, t, c);
  const float2 log = {k * kHigh, k == 0 ? rest * factor : fmaf(k, kLow, t * factor)};
  return s > 0.f ? log : make_float2(s == 0.f ? -kInfinity : s, 0.f);  // if s is NaN, NaN
}

// a + b as its rounding and what that has lost (Knuth). Not for infinities.
__device__ __forceinline__ float2 exact_sum(float a, float b) {
  const float sum = __fadd_rn(a, b), other = __fsub_rn(sum, a);
  return {sum, __fadd_rn(__fsub_rn(a, __fsub_rn(sum, other)), __fsub_rn(b, other))};
}

// weight * (log.x + log.y + m - logit), with what the sums lose to rounding. Arithmetic in double would have
// the whole CTA wait for the thread that does it. log.y is used last: all else is there before it.
__device__ __forceinline__ float row_loss(float2 log, float m, float logit, float weight) {
  const float2 difference = exact_sum(m, -logit), sum = exact_sum(difference.x, log.x);
  const float loss = fmaf(weight, sum.x, weight * ((sum.y + difference.y) + log.y));
  return isfinite(loss) ? loss : weight * sum.x;  // what an infinity has lost is NaN
}

// 1 - exp(-y) for 0 <= y < 1/4, by its series up to y^6: the first term that is left out is 2^-24 of it
__device__ __forceinline__ float one_minus_exp(float y) {
  float v = 1.f;
#pragma unroll
  for (int i = 6; i > 1; i--) v = fmaf(v, -y * (1.f / i), 1.f);
  return v * y;
}

// Where element i of a row is in a view, or ~0u if it is before the view or far behind it. That is the same
// for all vectors, so that it takes one register. `origin` is the view's origin.
__device__ __forceinline__ unsigned position_in_view(int64_t i, int64_t origin) {
  const int64_t left = i - origin;
  return left < 0 || left > INT32_MAX ? ~0u : static_cast<unsigned>(left);
}

// Replaces element i of the row by value(element), if the vector v at element e of a view contains it. Only
// one vector of a row contains it, so the branch costs little. The loop uses constant indices, which keeps v
// in registers.
template <int E, class Value>
__device__ __forceinline__ void replace_at(int64_t i, int64_t origin, int e, float (&v)[E], Value value) {
  const unsigned j = position_in_view(i, origin) - e;
  if (j >= E) return;
  float old = 0.f;
#pragma unroll
  for (unsigned k = 0; k < E; k++) old = j == k ? v[k] : old;
  const float replacement = value(old);
#pragma unroll
  for (unsigned k = 0; k < E; k++) v[k] = j == k ? replacement : v[k];
}

// Takes element i of the row out of a thread's vectors, which are `Step` elements apart, the first at element
// e: -infinity takes its place. True in the thread that had it. The row's other threads wait for that one, so
// the element is picked by masks of the four words of its vector: selecting would be more instructions.
template <class T, int Step, int V>
__device__ __forceinline__ bool take_column(int64_t i, int64_t origin, int e, uint4 (&v)[V], float& taken) {
  constexpr unsigned E = kElements<T>, kPerWord = 4 / sizeof(T);
  const unsigned at = position_in_view(i, origin + e), vector = at / Step, j = at % Step;
  if (j >= E || vector >= V) return false;
  const unsigned bits = kPerWord == 1 ? ~0u : j % 2 ? 0xffff0000u : 0xffffu;
  const auto mask = [=](unsigned word) { return j / kPerWord == word ? bits : 0; };
  const uint4 masks = make_uint4(mask(0), mask(1), mask(2), mask(3));
  unsigned old = 0;
#pragma unroll
  for (unsigned k = 0; k < V; k++) {
    if (k != vector) continue;
    const auto pick = [&](unsigned& w, unsigned mask) {
      old |= w & mask;
      w = w & ~mask | lowest_vector<T>().x & mask;
    };
    pick(v[k].x, masks.x), pick(v[k].y, masks.y), pick(v[k].z, masks.z), pick(v[k].w, masks.w);
  }
  float element[E];
  unpack(T(), make_uint4(kPerWord == 2 && j % 2 ? old >> 16 : old, 0, 0, 0), element);
  taken = element[0];
  return true;
}

// What forward keeps of a row for a backward with the same bits: the sum of exp(x - max); or if the target
// has most of it, minus the sum of the others, because 1 and a small sum would not keep its digits. The sign
// says which.
struct SavedSum {
  float bits;
  __device__ __forceinline__ static SavedSum of(float sum, float others, bool confident) {
    return {confident ? -others : sum};
  }
  __device__ __forceinline__ bool confident() const { return signbit(bits); }
  __device__ __forceinline__ float sum() const { return confident() ? 1.f - bits : bits; }
};

// loss = weight * (log sum exp(x - max) + max - x[target])
//
// Gradient: the same pass computes dx = upstream * weight * (softmax(x) - onehot(target)) / divisor. The
// divisor of a mean is the sum of the weights.
//
// The target stays out of the sum. A loss near 0 is then log1p of the others' sum, and the gradient at the
// target has a factor of that sum: neither is a small difference. Only short rows are summed whole, for speed
// (see short_rows_body).
template <class T_, bool Gradient>
struct CrossEntropyForward : RowOperator<CrossEntropyForward<T_, Gradient>> {
  using T = T_;
  // float suffices: the logarithm makes the error of the sum small. Quick for 16-bit rows, whose elements
  // have the hardware's exponential anyway. A log-sum-exp alone may be +inf.
  using State = MaxSum<T, float, sizeof(T) == 2, !Gradient>;
  using Args = CrossEntropyArgs;
  static constexpr bool kHasOutput = Gradient;
  static constexpr bool kMayCacheExp = false;  // the gradient has the bits that backward would compute
  static constexpr bool kTakes = true;
  static constexpr bool kFinishesRow = Gradient;
  static constexpr bool kFirstWarpFinalizes = !Gradient;
  struct Scalars {
    int64_t index;  // of the target, or kNoTarget
    float logit;    // x[target], -inf without a target
    float max, scale;
    float at_target;  // the gradient there
    float grad;       // see row_gradient, or kNoGradient
  };
  // A complete row. sum: of exp(x - m) over all classes. others: without the target.
  struct Total {
    float m, sum, others;
    float e;  // exp(x[target] - m)
    // The target has the maximum, and more than half of the sum.
    __device__ __forceinline__ bool confident() const { return e == 1.f && others < 1.f; }
  };
  // What the first thread of a CTA with one row computes. The others read weight and grad after a barrier.
  // The rest is what that thread itself records later.
  struct RowValues {
    float weight;
    float grad;
    float logit;
    Total total;
  };
  __device__ __forceinline__ static RowValues& row_values() {
    __shared__ RowValues values;
    return values;
  }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    Scalars sc = {};
    sc.index = load_target<!Gradient>(a, row);
    return sc;
  }
  // The target's logit is among the row's elements: see take.
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t, Scalars& sc, bool) {
    if (threadIdx.x == 0) {
      const float weight = label<!Gradient>(a, sc.index).weight;
      row_values().weight = weight;
      row_values().grad = Gradient ? gradient(a, weight) : 0.f;
    }
    sc.index = column_of(a, sc.index);
    sc.logit = -kInfinity;
  }
  // The thread that has a row's target may be another one, so the leader loads its logit.
  __device__ __forceinline__ static void resolve_part(const Args& a, int64_t row, Scalars& sc, bool leader) {
    if (leader) row_values().weight = label<!Gradient>(a, sc.index).weight;
    sc.index = column_of(a, sc.index);
    sc.logit = leader ? load_logit(a, row, sc.index) : -kInfinity;
  }
  __device__ __forceinline__ static float load_logit(const Args& a, int64_t row, int64_t column) {
    if (column < 0) return -kInfinity;
    return to_float(static_cast<const T*>(a.rows.a)[row * a.rows.a_stride + column]);
  }
  __device__ __forceinline__ static float gradient(const Args& a, float weight) {
    if (a.one_pass && a.mean) wait_for_previous_launch();  // it sums the weights while this one loads the row
    const float upstream = a.upstream ? *static_cast<const float*>(a.upstream) : 1.f;
    if (a.sums && isnan(upstream)) return __int_as_float(kNoGradient);
    const float gradient = row_gradient(a, upstream, weight);
    return isnan(gradient) ? kNaN : gradient;
  }
  template <int Step, int V>
  __device__ __forceinline__ static bool take(Scalars& sc, int64_t origin, int e, uint4 (&v)[V]) {
    return take_column<T, Step>(sc.index, origin, e, v, sc.logit);
  }
  __device__ __forceinline__ static unsigned taken_at(const Scalars& sc, int64_t origin) {
    return position_in_view(sc.index, origin);
  }
  __device__ __forceinline__ static void save_scalars(const Args& a, int64_t row, const Scalars& sc) {
    static_cast<float*>(a.target_logits)[row] = sc.logit;
  }
  __device__ __forceinline__ static Scalars restore_scalars(const Args& a, int64_t row) {
    Scalars sc = load_scalars(a, row, false);
    resolve_scalars(a, row, sc, false);
    sc.logit = static_cast<const float*>(a.target_logits)[row];
    return sc;
  }
  __device__ __forceinline__ static void finalize(const Args& a, int64_t row, Scalars& sc, const State& st,
                                                  bool leader) {
    if (!Gradient && !leader) return;
    const Total total = add_target(sc.logit, st);
    if constexpr (Gradient) {
      if (leader) row_values().logit = sc.logit, row_values().total = total;
      prepare(sc, total, row_values().grad);
    } else {
      record_without_gradient(a, row, sc.logit, row_values().weight, total);
    }
  }
  // A logit of +inf makes a loss NaN. Where there is a gradient, the sum is NaN by itself.
  __device__ __forceinline__ static void record_without_gradient(const Args& a, int64_t row, float logit,
                                                                 float weight, Total total) {
    if (a.target && total.m == kInfinity) total.sum = kNaN;
    record(a, row, logit, weight, total);
  }
  __device__ __forceinline__ static void finish_row(const Args& a, int64_t row) {
    record(a, row, row_values().logit, row_values().weight, row_values().total);
  }
  __device__ __forceinline__ static void finalize_and_finish(const Args& a, int64_t row, Scalars& sc,
                                                             const State& st, bool leader) {
    const Total total = add_target(sc.logit, st);
    if (leader) record(a, row, sc.logit, row_values().weight, total);
    prepare(sc, total, row_values().grad);
  }
  __device__ __forceinline__ static Total add_target(float logit, const State& others) {
    const float m = fmaxf(others.m, logit), r = State::reference(m);
    const float e = exp_difference<T>(logit, r);
    const float rest =
        __fmul_rn(others.s, exp_difference<T>(others.m, r));  // no FMA: backward adds these too
    return {m, rest + e, rest, e};
  }
  // The same from a state that includes the target. Where that has the maximum, its exponential is 1, and the
  // subtraction is exact.
  __device__ __forceinline__ static Total take_target(float logit, const State& all) {
    return {all.m, all.s, all.s - 1.f, exp_difference<T>(logit, State::reference(all.m))};
  }
  // Computes what `map` needs from the state of a complete row.
  __device__ __forceinline__ static void prepare(Scalars& sc, const Total& total, float grad) {
    const float scale = grad / total.sum;
    sc.grad = grad;
    sc.scale = grad == 0.f ? 0.f : scale + 0.f;  // -0 becomes 0: backward stores that too
    sc.max = sc.scale == 0.f ? 0.f : total.m;
    sc.at_target = grad == 0.f ? 0.f : gradient_at_target(total, scale, grad);
  }
  // Backward computes it by the same operations.
  __device__ __forceinline__ static float gradient_at_target(const Total& total, float scale, float grad) {
    const bool confident = total.confident();
    return __fmul_rn(confident ? -total.others : total.e, scale) - (confident ? 0.f : grad);
  }
  // Stores the statistics of a row: its loss, and its log-sum-exp. Where only losses are wanted, one branch
  // is faster than five stores by predicates: the CTA's registers wait for this thread.
  __device__ __forceinline__ static void record(const Args& a, int64_t row, float logit, float weight,
                                                const Total& total) {
    const bool confident = total.confident();
    const float2 log = log_parts(total.sum, confident ? total.others : total.sum - 1.f);
    const float log_sum = log.x + log.y;
    const float loss = weight == 0.f ? 0.f : row_loss(log, total.m, logit, weight);
    if (!Gradient && a.only_losses) {
      static_cast<float*>(a.loss)[row * a.loss_stride] = loss;
      return;
    }
    if (a.single_cta_total) cta_row_losses()[row] = make_float2(loss, weight);
    store_if(a.row_losses, static_cast<float2*>(a.row_losses) + row, make_float2(loss, weight));
    store_if(a.loss, static_cast<float*>(a.loss) + row * a.loss_stride,
             a.loss && a.divisor ? loss / load_divisor(a) : loss);
    store_if(a.log_sum, static_cast<float*>(a.log_sum) + row * a.log_sum_stride,
             a.sums ? SavedSum::of(total.sum, total.others, confident).bits : log_sum);
    store_if(a.max, static_cast<float*>(a.max) + row * a.max_stride, a.log_sum ? total.m : total.m + log_sum);
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args&, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View& p, int e, float (&dx)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) dx[j] = scaled<Cached>(sc, x[j]);
  }
  __device__ __forceinline__ static bool ignores(const Scalars& sc) { return sc.scale == 0.f; }
  __device__ __forceinline__ static bool omits_output(const Scalars& sc) {
    return __float_as_int(sc.grad) == kNoGradient;
  }
  // The gradient at the target, by the thread that has stored the vector around it. Comparing the target with
  // each vector's position would be more instructions, for all threads. All vectors are of the row, or of one
  // chunk: chunks are multiples of V x Step.
  template <int Step, int V, class View>
  __device__ __forceinline__ static void patch(const Scalars& sc, const View& p, int e) {
    const unsigned at = position_in_view(sc.index, p.origin + e);
    if (at % Step < kElements<T> && at / Step < V) static_cast<T*>(p.y)[e + at] = from_float<T>(sc.at_target);
  }
  // The gradient of any element but the target's. The product is rounded by itself, as in backward.
  template <bool Cached>
  __device__ __forceinline__ static float scaled(const Scalars& sc, float x) {
    return __fmul_rn(Cached ? x : exp_difference<T>(x, sc.max), sc.scale);
  }
  __device__ __forceinline__ static void finish_launch(const Args& a) {
    if (a.single_cta_total) single_cta_total(a);
  }
};

// dx = dloss * weight * (softmax(x) - onehot(target)) / divisor
//
// It uses the log-sum-exp of forward, so that nothing is reduced.
template <class T_>
struct CrossEntropyBackward : RowOperator<CrossEntropyBackward<T_>> {
  using T = T_;
  using Args = CrossEntropyArgs;
  // True if forward has computed this gradient already: for an upstream gradient of the same bits. For NaN
  // it has computed none.
  __device__ __forceinline__ static bool already_done(const Args& a) {
    if (!a.one_pass) return false;
    const float expected = a.upstream ? *static_cast<const float*>(a.upstream) : 1.f;
    return !isnan(expected) &&
           __float_as_int(*static_cast<const float*>(a.dloss)) == __float_as_int(expected);
  }
  struct Scalars {
    int64_t index;
    float max, scale, grad;
    float second;  // the second part of the log-sum-exp: a logarithm, or a SavedSum
  };
  __device__ __forceinline__ static uint4 fill() { return lowest_vector<T>(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t row, bool) {
    Scalars sc;
    sc.index = load_target<true>(a, row);
    sc.grad = static_cast<const float*>(a.dloss)[row * a.dloss_stride];
    sc.max = static_cast<const float*>(a.max)[row * a.max_stride];
    sc.second = a.log_sum ? static_cast<const float*>(a.log_sum)[row * a.log_sum_stride] : 0.f;
    return sc;
  }
  __device__ __forceinline__ static void resolve_scalars(const Args& a, int64_t, Scalars& sc, bool) {
    const Label l = label<true>(a, sc.index, a.slice ? 1.f : kNaN);
    sc.index = l.index;
    sc.grad = row_gradient(a, sc.grad, l.weight);
    // Maximum and log-sum are separate. So the log-sum is small, and its exponential is accurate to a few
    // ulp, even if the logits are large. With one_pass the sum itself is there, and the operations are those
    // of CrossEntropyForward::prepare.
    sc.scale = a.sums ? sc.grad / SavedSum{sc.second}.sum() : expf(-sc.second) * sc.grad;
    // If the target is no class, a slice sees that only by a log-sum-exp of NaN, which makes scale NaN.
    const bool invalid = a.slice && l.weight != 0.f && isnan(sc.second);
    if (sc.grad == 0.f && !invalid) sc.scale = 0.f;
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args& a, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View& p, int e, float (&dx)[E]) {
    const bool zero = sc.scale == 0.f;
#pragma unroll
    for (int j = 0; j < E; j++) dx[j] = zero ? 0.f : __fmul_rn(exp_difference<T>(x[j], sc.max), sc.scale);
    replace_at(sc.index, p.origin, e, dx, [&](float softmax) { return at_target(a, sc, softmax); });
  }
  // The gradient at the target. softmax: its probability times the row's gradient. Where that is nearly all
  // of the gradient, their difference would lose the others' share.
  __device__ __forceinline__ static float at_target(const Args& a, const Scalars& sc, float softmax) {
    if (sc.grad == 0.f) return 0.f;
    if (a.sums) return SavedSum{sc.second}.confident() ? __fmul_rn(sc.second, sc.scale) : softmax - sc.grad;
    // If the target has the maximum, its exponential is 1.
    if (softmax == sc.scale && sc.second < 0.25f) return -sc.grad * one_minus_exp(sc.second);
    return softmax - sc.grad;
  }
};

// y = x * (dloss / upstream), for gradients that forward has made for another upstream gradient than came.
template <class T_>
struct Rescale : RowOperator<Rescale<T_>> {
  using T = T_;
  using Args = CrossEntropyArgs;
  struct Scalars {
    float factor;
  };
  __device__ __forceinline__ static bool already_done(const Args& a) {
    return CrossEntropyBackward<T>::already_done(a);
  }
  __device__ __forceinline__ static uint4 fill() { return zero_vector(); }
  __device__ __forceinline__ static Scalars load_scalars(const Args& a, int64_t, bool) {
    const float dloss = *static_cast<const float*>(a.dloss);
    return {a.upstream ? dloss / *static_cast<const float*>(a.upstream) : dloss};
  }
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const Args&, const Scalars& sc, const float (&x)[E],
                                             const float (&)[E], const View&, int, float (&y)[E]) {
#pragma unroll
    for (int j = 0; j < E; j++) y[j] = x[j] * sc.factor;
  }
};

// The loss of rows whose classes are divided into slices, by one thread for each row. See
// kernels.ShardedCrossEntropy for the parts of a slice, and table.go in internal/operators for the formula.
//
// The loss is that of the slice with the target, as a class among the slices, plus that of the target within
// its slice. Neither is negative, so the sum loses no digits. If the target's slice has most of the sum, the
// first is log1p of the others' share, and backward finds those digits in log_sum too.
__device__ __forceinline__ void combine_slices_body(const CrossEntropyArgs& a) {
  const int64_t rows = a.rows.m, row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const bool weighted = a.rows.a_stride == 4 * rows;
  const auto part = [&](int64_t slice, int i) {
    return static_cast<const float*>(a.rows.a)[slice * a.rows.a_stride + i * rows + row];
  };
  const Label label = gander::label<false>(a, load_target<false>(a, row));
  float high = -kInfinity, within = 0.f, weight = weighted ? 0.f : 1.f;
  int64_t owner = -1;
  for (int64_t i = 0; i < a.ranks; i++) {
    high = fmaxf(high, part(i, 0));
    const float loss = part(i, 2);
    if (!isnan(loss)) owner = i, within = loss;
    if (weighted) weight += part(i, 3);
  }
  if (label.index == kNoTarget) weight = label.weight;
  // exp(v) does not overflow: v is at most the logarithm of the slice's number of classes. Without an owner
  // the slice of the target is all -inf, or has a NaN.
  float others = 0.f, logit = -kInfinity;
  const float reference = high == -kInfinity ? 0.f : high;
  for (int64_t i = 0; i < a.ranks; i++) {
    const float v = (part(i, 0) - reference) + part(i, 1);
    if (i == owner) logit = v;
    else others += expf(v);
  }
  const float target = expf(logit), log_others = log1pf(others / target);
  const bool most = target > others;
  const float log_sum = most ? logit + log_others : logf(others + target);  // neither term is negative
  const float among = most ? log_others : log_sum - logit;
  const float loss = weight == 0.f ? 0.f : weight * (among + within);
  if (a.loss) static_cast<float*>(a.loss)[row] = loss;
  if (a.row_losses) static_cast<float2*>(a.row_losses)[row] = make_float2(loss, weight);
  if (a.weights) static_cast<float*>(a.weights)[row] = weight;
  static_cast<float*>(a.max)[row] = high;
  static_cast<float*>(a.log_sum)[row] = isnan(label.weight) ? kNaN : log_sum;
}

// Prefetches into L2 what a CTA of elementwise_body maps later.
template <class Op>
__device__ __forceinline__ void prefetch_later_part(const typename Op::Args& args, unsigned part) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  const Rows& r = args.rows;
  const unsigned parts = args.parts;
  const int64_t rows_per_cta = args.rows_per_cta;
  const unsigned later = part + r.prefetch_distance;
  if (r.prefetch_distance == 0 || threadIdx.x != 0 || part < r.prefetch_from || later >= parts) return;
  const int64_t row = later / r.splits * rows_per_cta, chunk = r.chunk * kElements<T>;
  const int64_t first = later % r.splits * chunk;
  const int64_t count = rows_per_cta == 1 ? min(chunk, r.n - first) : min(rows_per_cta, r.m - row) * r.n;
  if ((rows_per_cta == 1 || r.a_stride == r.n) && !Op::skips(args, row))
    prefetch_l2(static_cast<const T*>(r.a) + row * r.a_stride + first, count * sizeof(T));
  if constexpr (Op::kInputs > 1) {
    if (rows_per_cta == 1 || r.b_stride == r.n)
      prefetch_l2(advance(r.b, r.b_type, row * r.b_stride + first), count * type_size(r.b_type));
  }
#endif
}

// V vectors of an operator's second input, if it has one. In unaligned kernels that may have any float type.
template <class Op, int V, bool Unaligned>
struct SecondInput {
  using T = typename Op::T;
  static constexpr int E = kElements<T>;
  static constexpr bool kExists = Op::kInputs > 1;
  uint4 raw[kExists && !Unaligned ? V : 1];
  float floats[kExists && Unaligned ? V : 1][E];
  __device__ __forceinline__ void load(const RowView<T>& p, int e, int step, const Bounds& s) {
    if constexpr (kExists && Unaligned) {
#pragma unroll
      for (int i = 0; i < V; i++) load_floats<true>(p.b, p.b_type, e + i * step, s, floats[i]);
    } else if constexpr (kExists) {
      gander::load<false, false>(static_cast<const T*>(p.b), e, step, s, zero_vector(), raw);
    }
  }
  __device__ __forceinline__ void get(int i, float (&f)[E]) const {
    if constexpr (kExists && Unaligned) memcpy(f, floats[i], sizeof(f));
    else if constexpr (kExists) unpack(T(), raw[i], f);
  }
};

// Maps rows whose statistics are known: nothing is reduced.
template <class Op, int V, bool Unaligned>
__device__ __forceinline__ void map_part(const typename Op::Args& args, unsigned part) {
  using T = typename Op::T;
  constexpr int E = kElements<T>;
  const Rows& r = args.rows;
  prefetch_later_part<Op>(args, part);
  const ThreadInRow thread(args, part);
  if (thread.is_idle) return;
  const int64_t row = thread.row;
  const RowView<T> p = row_view<Op, Unaligned, false>(r, row, part % r.splits);
  Bounds load_bounds = Unaligned ? p.load_bounds() : p.bounds;
  if (Op::skips(args, row)) load_bounds.clear();
  auto sc = Op::load_scalars(args, row, false);
  T* const y = static_cast<T*>(p.y);
  const int step = thread.threads * E;
  int e = thread.lane * E;
  uint4 v[V];
  SecondInput<Op, V, Unaligned> second;
  load<Unaligned, false>(p.a, e, step, load_bounds, Op::fill(), v);
  second.load(p, e, step, load_bounds);
  Op::resolve_scalars(args, row, sc, false);
  while (true) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      const int at = e + i * step;
      if (at >= p.bounds.hi) break;
      float x[E], other[E], out[E];
      unpack(T(), v[i], x);
      second.get(i, other);
      Op::template map<Unaligned, false>(args, sc, x, Op::kInputs > 1 ? other : x, p, at, out);
      store<Unaligned>(y, at, p.bounds, out);
    }
    e += V * step;
    if (e >= p.bounds.hi) break;
    load<Unaligned, false>(p.a, e, step, load_bounds, Op::fill(), v);
    second.load(p, e, step, load_bounds);
  }
}

// CTAs take parts in turns, where there are fewer CTAs: those that may find their work done (already_done).
// As a loop it is faster for them all: 8192 x 128256 bfloat16 takes 0.96, 16384 x 8192 float32 0.91 of the
// time that a CTA for each part took without a loop (H200).
template <class Op, int V, bool Unaligned>
__device__ __forceinline__ void elementwise_body(const typename Op::Args& args) {
  if (Op::already_done(args)) return;
  for (unsigned part = blockIdx.x; part < args.parts; part += gridDim.x)
    map_part<Op, V, Unaligned>(args, part);
}

// An operator that replaces the target's gradient in its vector. `patch`, which stores it by itself, takes
// fewer instructions but more registers.
template <class Op>
struct ReplacesTarget : Op {
  template <bool Unaligned, bool Cached, int E, class View>
  __device__ __forceinline__ static void map(const typename Op::Args& args, const typename Op::Scalars& sc,
                                             const float (&x)[E], const float (&none)[E], const View& p,
                                             int e, float (&dx)[E]) {
    Op::template map<Unaligned, Cached>(args, sc, x, none, p, e, dx);
    replace_at(sc.index, p.origin, e, dx, [&](float) { return sc.at_target; });
  }
};

// Forward, for short rows. Several rows share a warp. Computing one row's loss on one lane still costs the
// whole warp those instructions, about a quarter of the row's. So the first threads of the CTA each compute
// the loss of a different row. These statistics threads also load the labels and the targets' logits, and
// pass the labels to the threads of the rows through shared memory. They are in the first warp, and no warp
// waits for more than it needs: the other warps for the first one's labels, and it for their states at the
// end. With a barrier of the CTA in the middle each row would wait for the slowest.
template <class Op, int TPR, int V, unsigned Flags>
__device__ __forceinline__ void short_rows_body(const typename Op::Args& args) {
  using T = typename Op::T;
  using State = typename Op::State;
  constexpr int kRows = kThreads<TPR> / TPR, kStep = TPR * kElements<T>;
  static_assert(TPR <= 32);
  constexpr bool Unaligned = Flags & kUnaligned, SameOffset = Flags & kSameOffset;
  constexpr bool kCacheExp = Flags & kKeepsExp, kPatch = Flags & kPatchesTarget;
  constexpr bool kExclude = Flags & kExcludesTarget;
  static_assert(Op::kHasOutput || !kCacheExp && !kPatch, "there is no gradient");
  const auto total = [](float logit, const State& st) {
    if constexpr (kExclude) return Op::add_target(logit, st);
    else return Op::take_target(logit, st);
  };
  // What a statistics thread passes on, and keeps there.
  struct Target {
    Label label;
    float logit, grad;
  };
  constexpr int kLabels = 1, kStates = 2;  // barriers
  __shared__ Slot<State> states[kRows];
  __shared__ Target targets[Op::kHasOutput ? kRows : 1];
  const unsigned tid = threadIdx.x, lane = tid % TPR, group = tid / TPR;
  const int64_t base = static_cast<int64_t>(blockIdx.x) * kRows, row = base + group;
  const bool active = row < args.rows.m, stats_thread = tid < kRows && base + tid < args.rows.m;
  int e = lane * kElements<T>;
  RowView<T> p = row_view<Op, Unaligned, true>(args.rows, active ? row : 0);
  if (!active) p.bounds.clear();
  const int64_t own_target = stats_thread ? load_target<!Op::kHasOutput>(args, base + tid) : kNoTarget;
  int64_t target = kNoTarget;
  if constexpr (kExclude) target = load_target<!Op::kHasOutput>(args, active ? row : 0);
  using Mapped = std::conditional_t<Op::kHasOutput && !kPatch, ReplacesTarget<Op>, Op>;
  Tile<Mapped, V, Unaligned, false, SameOffset, kCacheExp> tile;
  tile.load(p, e, kStep);
  prefetch_later_rows<Op, false>(args.rows, kRows);  // a little faster here than before tile.load
  Target own = {};
  if (stats_thread) {
    own.label = label<!Op::kHasOutput>(args, own_target);
    own.logit = Op::load_logit(args, base + tid, own.label.index);
    if constexpr (Op::kHasOutput) {
      own.grad = Op::gradient(args, own.label.weight);
      targets[tid] = own;
    }
  }
  if (Op::kHasOutput && tid < 32) {
    __syncwarp();
    arrive_at<kLabels>(kThreads<TPR>);
  }
  const float row_max = lanes_max<TPR>(tile_max(T(), tile.a));
  if constexpr (kExclude) {
    float unused;
    take_column<T, kStep>(column_of(args, target), p.origin, e, tile.a, unused);
  }
  State st;
  st.template reduce_below<TPR, kCacheExp>(row_max, tile.a, tile.exps);
  if (lane == 0) states[group].set(st);
  if (tid >= 32) {
    if constexpr (Op::kHasOutput) wait_at<kLabels>(kThreads<TPR>);
    arrive_at<kStates>(kThreads<TPR>);
  }
  if constexpr (Op::kHasOutput) {
    typename Op::Scalars sc = {};
    sc.index = targets[group].label.index, sc.logit = targets[group].logit;
    Op::prepare(sc, total(sc.logit, st), targets[group].grad);
    if (!Op::omits_output(sc)) {
      if constexpr (!kCacheExp) tile.rematerialize(args.rows.opaque_zero);
      if constexpr (Unaligned) {
        p = row_view<Op, Unaligned, true>(args.rows, (active ? row : 0) + args.rows.opaque_zero);
        if (!active) p.bounds.clear();
        e += args.rows.opaque_zero;
      }
      if (Op::ignores(sc)) tile.clear();
      using Operands =
          NoEpilogueOperands<Mapped, V, kStep, Unaligned>;  // EpilogueOperands would call Op's map
      tile.map(args, sc, p, e, kStep, Operands(args, p, e));
      if constexpr (kPatch)
        if (active) Op::template patch<kStep, V>(sc, p, e);
    }
  }
  const unsigned self = thread_number_again();  // stats_thread, kept until here, would cost a register too
  if (self < 32) wait_at<kStates>(kThreads<TPR>);
  if (self < kRows && base + self < args.rows.m) {
    if constexpr (Op::kHasOutput) {
      own = targets[self];
      Op::record(args, base + self, own.logit, own.label.weight, total(own.logit, states[self].get()));
    } else {
      Op::record_without_gradient(args, base + self, own.logit, own.label.weight,
                                  total(own.logit, states[self].get()));
    }
  }
  Op::finish_launch(args);
}

}  // namespace gander
