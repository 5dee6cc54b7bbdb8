// Long rows, some of which clusters do not hold: CTAs on all SMs hold a row, or a few, between them. They tell each other what their
// parts of it came to through global memory. Of many rows, a `team` takes one after the other; of few, all are `held` at once.
#pragma once
#include "rows.cuh"

namespace gander {

// What a CTA makes of its part of a row, for the other members of its team: two halves of 64 bits, each beside the number of the step.
// 8 bytes are written and read at once, so that who finds the number has the half.
struct TaggedState {
  template <class T>
  __device__ __forceinline__ static uint64_t encode(const Sum<T>& st) { return __double_as_longlong(st.s); }
  template <class T, class A>
  __device__ __forceinline__ static uint64_t encode(const MaxSum<T, A>& st) {
    return static_cast<uint64_t>(__float_as_uint(st.m)) << 32 | __float_as_uint(static_cast<float>(st.s));
  }
  template <class T>
  __device__ __forceinline__ static void decode_bits(uint64_t bits, Sum<T>& st) { st.s = __longlong_as_double(bits); }
  template <class T, class A>
  __device__ __forceinline__ static void decode_bits(uint64_t bits, MaxSum<T, A>& st) {
    st.m = __uint_as_float(bits >> 32), st.s = __uint_as_float(static_cast<uint32_t>(bits));
  }

  template <class State>
  __device__ __forceinline__ static void publish(ulonglong2* slot, const State& st, uint32_t number) {
    const uint64_t bits = encode(st), tag = static_cast<uint64_t>(number) << 32;
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(slot), "l"(tag | static_cast<uint32_t>(bits)),
                 "l"(tag | bits >> 32)
                 : "memory");
  }
  __device__ __forceinline__ static ulonglong2 load(const ulonglong2* slot) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(slot) : "memory");
    return v;
  }
  // As `put`, unless it is there: of memory that was cleared.
  template <class State>
  __device__ __forceinline__ static void publish_if_absent(ulonglong2* slot, const State& st, uint32_t number) {
    const uint64_t bits = encode(st), tag = static_cast<uint64_t>(number) << 32;
    atomicCAS(&slot->x, 0ull, tag | static_cast<uint32_t>(bits));
    atomicCAS(&slot->y, 0ull, tag | bits >> 32);
  }
  __device__ __forceinline__ static bool ready(ulonglong2 v, uint32_t number) { return v.x >> 32 == number && v.y >> 32 == number; }
  template <class State>
  __device__ __forceinline__ static State decode(ulonglong2 v) {
    State st;
    decode_bits(v.x & 0xffffffffu | v.y << 32, st);
    return st;
  }
  template <class State>
  __device__ __forceinline__ static State wait(const ulonglong2* slot, ulonglong2 v, uint32_t number) {
    while (!ready(v, number)) v = load(slot);
    return decode<State>(v);
  }
};

// A CTA publishes its sum for step i only after it has written step i - 1 - lag, and it writes a step only once all CTAs have
// published their sums for it. So the sums of 2 * lag + 2 steps can be in use at once: kTeamSteps slots allow a lag of 31.

// Shares are told from what was in their memory by the step's number, so that it has to be cleared before: number 0 is no step's. A slot
// to each thread, and memory for all of them.
template <class Args>
__device__ __forceinline__ void clear(const Args& args) {
  let_next_launch_start();
  static_cast<ulonglong2*>(args.rows.partial)[blockIdx.x * blockDim.x + threadIdx.x] = make_ulonglong2(0, 0);
}

// A step is R rows, so that they share the time it takes; G groups of `Threads` threads work on them side by side. A step's rows are
// summed, and their sums are shared by one warp. Others take what all shared, a step each at a time, for it takes about as long as
// several steps do. Then step i - lag, which has stayed in shared memory, is mapped; and one more warp brings rows as their places become
// free. All CTAs must be resident at once, and all of them are one team, of which each group leaves one row of partial dw.
//
// What a thread keeps of its columns: `Columns` gives reduce(part, tile) over a warp, map(scalars, tile, row), and finish(group).
template <class Op, template <class, int, int> class Columns, int Threads, int V, int R, int G>
__device__ __forceinline__ void team_body(const typename Op::Args& args) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  using State = typename Op::State;
  using Partial = typename State::Partial;
  static_assert(R % G == 0);
  constexpr int E = kElements<T>, kWarps = Threads / 32, kComputeWarps = G * kWarps, kInputs = Op::kInputs, kMaxStages = kTeamStages, kSlots = 32, kMergeWarps = 4,
                kMergeDelay = R > 1 ? 6 : 8;  // more rows take longer to take
  extern __shared__ __align__(128) uint4 buffer[];  // stages x R x inputs x slice
  __shared__ Slot<Partial> warp_slots[kSlots][R][kWarps];
  __shared__ typename Op::Scalars scalars[kSlots][R];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages], summed[kSlots], merged[kSlots];
  let_next_launch_start();
  const Rows& r = args.rows;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, stages = r.stages, depth = r.lag, ctas = gridDim.x, cta = blockIdx.x;
  const int64_t vectors = r.n / E, begin = vectors * cta / ctas;
  const int count = static_cast<int>(vectors * (cta + 1) / ctas - begin);
  const int slice = static_cast<int>((vectors + ctas - 1) / ctas), row_size = kInputs * slice, stage_size = R * row_size;
  const int64_t rows = r.m, steps = (rows + R - 1) / R;
  if (tid == 0) {
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1), barrier_init(empty + i, kComputeWarps);
    for (int i = 0; i < kSlots; i++) barrier_init(summed + i, kComputeWarps), barrier_init(merged + i, 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  ulonglong2* slots = static_cast<ulonglong2*>(r.partial);
  if (warp == kComputeWarps) {
    for (int64_t i = 0; i < steps; i++) {
      const int slot = i % kSlots;
      barrier_wait(summed + slot, i / kSlots & 1);
#pragma unroll
      for (int j = 0; j < R; j++) {
        const Partial st = merge_slots<32, Partial>(warp_slots[slot][j], kWarps);
        if (lane == j) TaggedState::publish(slots + (i % kTeamSteps * R + j) * ctas + cta, st, static_cast<uint32_t>(i + 1));
      }
    }
  } else if (warp > kComputeWarps + 1) {
    for (int64_t i = warp - kComputeWarps - 2; i < steps; i += kMergeWarps) {
      const ulonglong2* published = slots + i % kTeamSteps * R * ctas;
      const uint32_t number = static_cast<uint32_t>(i + 1);
      typename Op::Scalars sc[R];
#pragma unroll
      for (int j = 0; j < R; j++) sc[j] = Op::load_scalars(args, min(i * R + j, rows - 1), false);
      // By when this CTA has summed some steps more, the others are likely to have shared this one: looking in vain costs all of them time.
      const int64_t later = min(i + min(kMergeDelay, depth), steps - 1);
      barrier_wait(summed + later % kSlots, later / kSlots & 1);
      State st[R];
      constexpr int U = 5;  // loads at a time: 160 SMs
      for (int k = lane; k < ctas; k += 32 * U) {
        ulonglong2 v[R][U];
#pragma unroll
        for (int j = 0; j < R; j++)
#pragma unroll
          for (int u = 0; u < U; u++)
            if (k + 32 * u < ctas) v[j][u] = TaggedState::load(published + j * ctas + k + 32 * u);
#pragma unroll
        for (int j = 0; j < R; j++) {
          State part[U];
#pragma unroll
          for (int u = 0; u < U; u++)
            if (k + 32 * u < ctas) part[u] = TaggedState::wait<State>(published + j * ctas + k + 32 * u, v[j][u], number);
          st[j].merge(part);
        }
      }
      const int slot = i % kSlots;
#pragma unroll
      for (int j = 0; j < R; j++) {
        st[j].template reduce_lanes<32>();
        const bool in = i * R + j < rows;
        if (in) Op::finalize(args, i * R + j, sc[j], st[j], cta == 0 && lane == 0);
        if (lane == 0) scalars[slot][j] = sc[j];
      }
      if (lane == 0) barrier_arrive(merged + slot);
    }
  } else if (warp > kComputeWarps) {
    if (lane) return;
    const T* a = static_cast<const T*>(r.a) + begin * E;
    const T* b = static_cast<const T*>(r.b) + begin * E;
    int stage = 0;
    uint32_t phase = 1;  // of a barrier that nobody has waited for yet: the first round passes
    for (int64_t i = 0; i < steps; i++) {
      barrier_wait(empty + stage, phase);
      const int n = rows - i * R < R ? static_cast<int>(rows - i * R) : R;
      barrier_expect(full + stage, n * count * kInputs * 16);
      for (int j = 0; j < n; j++) {
        uint4* to = buffer + stage * stage_size + j * row_size;
        bulk_copy(to, a + (i * R + j) * r.a_stride, count * 16, full + stage);
        if constexpr (kInputs > 1) bulk_copy(to + slice, b + (i * R + j) * r.b_stride, count * 16, full + stage);
      }
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  } else {
    const int group = tid / Threads, thread = tid % Threads;
    Columns<Op, Threads, V> columns(args, begin * E, thread * E, count * E);
    // V vectors of each input of one row, as a tile.
    const auto read = [&](int stage, int j, Tile<Op, V, false, false, true>& tile) {
      const uint4* from = buffer + stage * stage_size + j * row_size + thread;
#pragma unroll
      for (int k = 0; k < V; k++) {
        const bool in = thread + k * Threads < count;
        tile.a[k] = in ? from[k * Threads] : Op::fill();
        if constexpr (kInputs > 1) tile.b[k] = in ? from[k * Threads + slice] : zero_vector();
      }
    };
    int stage = 0, last = 0;
    uint32_t phase = 0;
    for (int64_t i = 0; i < steps + depth; i++) {
      if (i < steps) {
        barrier_wait(full + stage, phase);
        const int slot = i % kSlots;
        Partial st[R / G];
#pragma unroll
        for (int j = 0; j < R / G; j++) {
          Tile<Op, V, false, false, true> tile;
          read(stage, j * G + group, tile);
          columns.reduce(st[j], tile);
        }
#pragma unroll
        for (int j = 0; j < R / G; j++)
          if (lane == 0) warp_slots[slot][j * G + group][warp % kWarps].set(st[j]);
        if (lane == 0) barrier_arrive(summed + slot);
        if (++stage == stages) stage = 0, phase ^= 1;
      }
      if (i < depth) continue;
      const int64_t step = i - depth;
      const int slot = step % kSlots;
      barrier_wait(merged + slot, step / kSlots & 1);
#pragma unroll
      for (int j = group; j < R; j += G) {
        if (step * R + j >= rows) break;
        Tile<Op, V, false, false, true> tile;
        read(last, j, tile);
        columns.map(scalars[slot][j], tile, step * R + j);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + last);
      if (++last == stages) last = 0;
    }
    columns.finish(group);
  }
#endif
}

// The columns of an op that keeps nothing of them from row to row.
template <class Op, int Threads, int V>
struct NothingKept {
  using T = typename Op::T;
  static constexpr int kStep = Threads * kElements<T>;
  const typename Op::Args& args;
  RowView<T> p;
  int e;

  __device__ __forceinline__ NothingKept(const typename Op::Args& args, int64_t origin, int e, int end) : args(args), e(e) {
    p.origin = origin;
    p.bounds = {0, end, end};
  }
  template <class Tile>
  __device__ __forceinline__ void reduce(typename Op::State::Partial& st, Tile& tile) const {
    if constexpr (Op::State::kMaxFirst) {
      st.template reduce_tile<32>(tile.a, tile.exps);
    } else {
      Op::accumulate(args, st, tile, p, e, kStep);
      st.template reduce_lanes<32>();
    }
  }
  template <class Tile>
  __device__ __forceinline__ void map(const typename Op::Scalars& sc, const Tile& tile, int64_t row) {
    p.y = static_cast<T*>(args.rows.y) + row * args.rows.y_stride + p.origin;
    tile.map(args, sc, p, e, kStep, typename Op::template EpilogueOperands<V, kStep, false, false>(args, p, e));
  }
  __device__ __forceinline__ void finish(int) const {}
};

// A few long rows, of which each CTA takes a part: it brings the first `lag` tiles into shared memory and reads the others through
// registers, shares what the part came to, and maps it once all of its row are there. What is not held is read again, from its end, of which
// L2 has the most.
//
// CTAs need not be resident at once. Who has waited long for a share makes it himself, lest the CTA that owes it is waiting for this one's
// SM: in the same order, so that the bits are the same, and never over one that is there, for then y may be written already where x was.
template <class Op, int Threads, int V>
__device__ __forceinline__ void held_body(const typename Op::Args& args) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  using State = typename Op::State;
  constexpr int E = kElements<T>, kWarps = Threads / 32, kStep = Threads * E, kTile = V * kStep, kInputs = Op::kInputs, kMaxTiles = kHeldTiles;
  constexpr int64_t kMinWait = 1 << 16;  // cycles, some 40 us, and no less than this CTA's own part took
  extern __shared__ __align__(128) uint4 buffer[];  // held x inputs x V x threads
  __shared__ Slot<State> warp_slots[2][kWarps];
  __shared__ uint64_t loaded[kMaxTiles];
  __shared__ int missing, chosen;
  const Rows& r = args.rows;
  const int tid = threadIdx.x, parts = r.splits, own_part = blockIdx.x % parts;
  const int64_t row = blockIdx.x / parts;
  ulonglong2* const published = static_cast<ulonglong2*>(r.partial) + row * parts;
  const RowView<T> own = row_view<Op, false, false>(r, row, own_part);
  const int tiles = (own.bounds.hi + kTile - 1) / kTile, cached = min(r.lag, tiles);
  if (tid == 0) {
    for (int t = 0; t < cached; t++) barrier_init(loaded + t, 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int t = 0; t < cached; t++) {
      const uint32_t bytes = min(kTile, own.bounds.hi - t * kTile) * sizeof(T);
      uint4* const to = buffer + t * kInputs * V * Threads;
      barrier_expect(loaded + t, kInputs * bytes);
      bulk_copy_once(to, own.a + t * kTile, bytes, loaded + t);
      if constexpr (kInputs > 1) bulk_copy_once(to + V * Threads, static_cast<const T*>(own.b) + t * kTile, bytes, loaded + t);
    }
  }
  __syncthreads();
  const auto at = [&](int tile) { return tile * kTile + tid * E; };
  const auto read = [&](int tile, Tile<Op, V, false, false, true>& to) {
    const uint4* const from = buffer + tile * kInputs * V * Threads + tid;
#pragma unroll
    for (int k = 0; k < V; k++) {
      const bool in = at(tile) + k * kStep < own.bounds.hi;
      to.a[k] = in ? from[k * Threads] : Op::fill();
      if constexpr (kInputs > 1) to.b[k] = in ? from[(V + k) * Threads] : zero_vector();
    }
  };
  struct Step {
    Tile<Op, V, false, false, true> tile;
    typename Op::template EpilogueOperands<V, kStep, false, true> operands;
  };
  typename Op::Scalars sc = {};
  // Of one part, whose first tiles are `here`.
  const auto sum = [&](int part, int here) {
    const RowView<T> p = row_view<Op, false, false>(r, row, part);
    const int tiles = (p.bounds.hi + kTile - 1) / kTile;
    State st;
    Tile<Op, V, false, false, true> next;
    if (here < tiles) next.load(p, at(here), kStep);
    for (int t = 0; t < tiles; t++) {
      Tile<Op, V, false, false, true> tile;
      if (t < here) {
        barrier_wait(loaded + t, 0);
        read(t, tile);
      } else {
        tile = next;
        if (t + 1 < tiles) next.load(p, at(t + 1), kStep);
      }
      Op::accumulate(args, st, tile, p, at(t), kStep);
    }
    st.template reduce_lanes<32>();
    reduce_warps<kWarps>(st, warp_slots[0]);
    return st;
  };
  const int64_t begun = clock64();
  State st = sum(own_part, cached);
  const int64_t summed = clock64(), deadline = summed + max(summed - begun, kMinWait);
  wait_for_previous_launch();  // which cleared the shares
  if (tid == 0) TaggedState::publish(published + own_part, st, 1);
  // The last two tiles are on their way while the shares are.
  Step a = {{}, {args, own, at(tiles - 1)}}, b = {{}, {args, own, at(max(tiles - 2, 0))}};
  const auto load = [&](Step& s, int tile) {
    if (tile >= cached) s.tile.load(own, at(tile), kStep);
  };
  const auto fetch = [&](Step& s, int tile) {
    load(s, tile);
    s.operands.load(own, at(tile));
  };
  load(a, tiles - 1);
  load(b, max(tiles - 2, 0));
  // The states of all parts; or one part of those that are missing is `chosen`, another one by each of the CTAs that wait.
  const auto complete = [&] {
    st = State();
    int none = -1;
    for (int i = tid; i < parts; i += Threads) {
      ulonglong2 v = TaggedState::load(published + i);
      while (!TaggedState::ready(v, 1) && clock64() < deadline) v = TaggedState::load(published + i);
      if (TaggedState::ready(v, 1)) st.merge(TaggedState::decode<State>(v));
      else none = i;
    }
    if (!__syncthreads_or(none >= 0)) return true;
    if (tid == 0) missing = 0;
    __syncthreads();
    const int rank = none < 0 ? -1 : atomicAdd(&missing, 1);
    __syncthreads();
    if (rank == own_part % missing) chosen = none;
    __syncthreads();
    return false;
  };
  if (!complete()) {
    do {
      const int part = chosen;
      st = sum(part, 0);
      if (tid == 0) TaggedState::publish_if_absent(published + part, st, 1);
    } while (!complete());
    fetch(a, tiles - 1);  // rather than to keep them in registers meanwhile
    fetch(b, max(tiles - 2, 0));
  }
  st.template reduce_lanes<32>();
  reduce_warps<kWarps>(st, warp_slots[1]);
  Op::finalize(args, row, sc, st, tid == 0 && own_part == 0);
  const auto use = [&](Step& s, int tile) {
    if (tile < cached) read(tile, s.tile);
    s.tile.map(args, sc, own, at(tile), kStep, s.operands);
    if (tile > 1) fetch(s, tile - 2);
  };
  for (int t = tiles - 1; t >= 0; t -= 2) {
    use(a, t);
    if (t > 0) use(b, t - 1);
  }
#endif
}

}  // namespace gander
