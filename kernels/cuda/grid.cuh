// Kernel bodies for long rows, each of which is spread over CTAs of the whole grid. The CTAs exchange the
// states of their parts through global memory.
//
//   grid_cooperative_body    many rows: all CTAs, which are persistent, work on one row after the other
//   grid_shared_memory_body  few rows: each CTA works on a part of one row, all rows at once
#pragma once
#include "rows.cuh"

namespace gander {

// The exchange of states between CTAs. A slot is 16 bytes: two halves of a state, of 32 bits each, and beside
// each half a tag of 32 bits. A half and its tag are one word of 64 bits, which is written and read at once.
// So a reader that finds the expected tag has the data that belongs to it.
struct TaggedState {
  template <class T>
  __device__ __forceinline__ static uint64_t encode(const Sum<T>& st) {
    return __double_as_longlong(st.s);
  }
  template <class T, class A>
  __device__ __forceinline__ static uint64_t encode(const MaxSum<T, A>& st) {
    return static_cast<uint64_t>(__float_as_uint(st.m)) << 32 | __float_as_uint(static_cast<float>(st.s));
  }
  template <class T>
  __device__ __forceinline__ static void decode_bits(uint64_t bits, Sum<T>& st) {
    st.s = __longlong_as_double(bits);
  }
  template <class T, class A>
  __device__ __forceinline__ static void decode_bits(uint64_t bits, MaxSum<T, A>& st) {
    st.m = __uint_as_float(bits >> 32), st.s = __uint_as_float(static_cast<uint32_t>(bits));
  }

  template <class State>
  __device__ __forceinline__ static void publish(ulonglong2* slot, const State& st, uint32_t tag) {
    const uint64_t bits = encode(st), high = static_cast<uint64_t>(tag) << 32;
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(slot),
                 "l"(high | static_cast<uint32_t>(bits)), "l"(high | bits >> 32)
                 : "memory");
  }
  __device__ __forceinline__ static ulonglong2 load(const ulonglong2* slot) {
    ulonglong2 v;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(v.x), "=l"(v.y)
                 : "l"(slot)
                 : "memory");
    return v;
  }
  // Publishes a state unless the slot has one already. The slot must have been cleared before.
  template <class State>
  __device__ __forceinline__ static void publish_if_absent(ulonglong2* slot, const State& st, uint32_t tag) {
    const uint64_t bits = encode(st), high = static_cast<uint64_t>(tag) << 32;
    atomicCAS(&slot->x, 0ull, high | static_cast<uint32_t>(bits));
    atomicCAS(&slot->y, 0ull, high | bits >> 32);
  }
  __device__ __forceinline__ static bool ready(ulonglong2 v, uint32_t tag) {
    return v.x >> 32 == tag && v.y >> 32 == tag;
  }
  template <class State>
  __device__ __forceinline__ static State decode(ulonglong2 v) {
    State st;
    decode_bits(v.x & 0xffffffffu | v.y << 32, st);
    return st;
  }
  // v is what was loaded from the slot before.
  template <class State>
  __device__ __forceinline__ static State wait(const ulonglong2* slot, ulonglong2 v, uint32_t tag) {
    while (!ready(v, tag)) v = load(slot);
    return decode<State>(v);
  }
};

// Clears the slots for the next launch. Each launch uses the same tags, so old ones must not remain. 0 is
// never a tag. There must be a thread for each slot.
template <class Args>
__device__ __forceinline__ void clear_slots(const Args& args) {
  let_next_launch_start();
  static_cast<ulonglong2*>(args.rows.partial)[blockIdx.x * blockDim.x + threadIdx.x] = make_ulonglong2(0, 0);
}

// Many rows. A CTA owns a range of columns, and all CTAs work on a row at the same time. All must be resident
// at once (cooperative launch). A step is R rows, which share the latency of the exchange.
//
// The warps of a CTA have different roles:
//   compute    G groups of `Threads` threads. In iteration i they reduce the rows of step i, each group
//              different ones. Then they map the rows of step i - depth, which are still in shared memory
//   publisher  one warp, which stores the CTA's states of a step to global memory
//   mergers    kMergeWarps warps, which poll the states of all CTAs and merge them. Each works on a different
//              step, because a merge takes as long as several steps
//   loader     one warp, which copies the CTA's columns of the next steps to a ring of `stages` stages in
//              shared memory, as stages become free
//
// A CTA publishes its states of step i only after it has mapped step i - 1 - depth, and it maps a step only
// after all CTAs have published theirs. So the slots of 2 * depth + 2 steps can be in use at once, and
// kGridSteps = 64 slots allow a depth of 31.
//
// `Columns` holds what a thread keeps for its columns from row to row. It has reduce(state, tile), which
// reduces over a warp, map(scalars, tile, row), and finish(group), which stores what was summed over rows
// (partial dw).
template <class Op, template <class, int, int, unsigned> class Columns, int Threads, int V, int R, int G,
          unsigned Flags>
__device__ __forceinline__ void grid_cooperative_body(const typename Op::Args& args) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  using State = typename Op::State;
  using Partial = typename State::Partial;
  static_assert(R % G == 0);
  constexpr int E = kElements<T>, kWarps = Threads / 32, kComputeWarps = G * kWarps, kInputs = Op::kInputs;
  constexpr int kMaxStages = kGridStages, kMergeWarps = 4;
  constexpr int kSlots = 32;                        // steps with states in shared memory: more than depth
  constexpr int kMergeDelay = R > 1 ? 6 : 8;        // in steps
  extern __shared__ __align__(128) uint4 buffer[];  // stages x R x inputs x slice
  __shared__ Slot<Partial> warp_slots[kSlots][R][kWarps];
  __shared__ typename Op::Scalars scalars[kSlots][R];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages], summed[kSlots], merged[kSlots];
  let_next_launch_start();
  const Rows& r = args.rows;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, ctas = gridDim.x, cta = blockIdx.x;
  const int stages = r.stages, depth = r.depth;
  const int64_t vectors = r.n / E, begin = vectors * cta / ctas;
  const int count = static_cast<int>(vectors * (cta + 1) / ctas - begin);
  const int slice = static_cast<int>((vectors + ctas - 1) / ctas);
  const int row_size = kInputs * slice, stage_size = R * row_size;
  const int64_t rows = r.m, steps = (rows + R - 1) / R;
  if (tid == 0) {
    for (int i = 0; i < stages; i++) barrier_init(full + i, 1), barrier_init(empty + i, kComputeWarps);
    for (int i = 0; i < kSlots; i++) barrier_init(summed + i, kComputeWarps), barrier_init(merged + i, 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  ulonglong2* slots = static_cast<ulonglong2*>(r.partial);
  if (warp == kComputeWarps) {  // publisher
    for (int64_t i = 0; i < steps; i++) {
      const int slot = i % kSlots;
      barrier_wait(summed + slot, i / kSlots & 1);
#pragma unroll
      for (int j = 0; j < R; j++) {
        const Partial st = merge_slots<32, Partial>(warp_slots[slot][j], kWarps);
        if (lane == j)
          TaggedState::publish(slots + (i % kGridSteps * R + j) * ctas + cta, st,
                               static_cast<uint32_t>(i + 1));
      }
    }
  } else if (warp > kComputeWarps + 1) {  // mergers
    for (int64_t i = warp - kComputeWarps - 2; i < steps; i += kMergeWarps) {
      const ulonglong2* published = slots + i % kGridSteps * R * ctas;
      const uint32_t tag = static_cast<uint32_t>(i + 1);
      typename Op::Scalars sc[R];
#pragma unroll
      for (int j = 0; j < R; j++) sc[j] = Op::load_scalars(args, min(i * R + j, rows - 1), false);
      // Waits until this CTA has summed some later step. By then the others are likely to have published step
      // i. Polling earlier would slow all CTAs down.
      const int64_t later = min(i + min(kMergeDelay, depth), steps - 1);
      barrier_wait(summed + later % kSlots, later / kSlots & 1);
      State st[R];
      constexpr int U = 5;  // loads of a lane at a time: enough for 160 CTAs
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
            if (k + 32 * u < ctas)
              part[u] = TaggedState::wait<State>(published + j * ctas + k + 32 * u, v[j][u], tag);
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
  } else if (warp > kComputeWarps) {  // loader
    if (lane) return;
    const T* a = static_cast<const T*>(r.a) + begin * E;
    const T* b = static_cast<const T*>(r.b) + begin * E;
    int stage = 0;
    uint32_t phase = 1;  // a new barrier counts as past this phase, so that the first round does not wait
    for (int64_t i = 0; i < steps; i++) {
      barrier_wait(empty + stage, phase);
      const int n = rows - i * R < R ? static_cast<int>(rows - i * R) : R;
      barrier_expect(full + stage, n * count * kInputs * 16);
      for (int j = 0; j < n; j++) {
        uint4* to = buffer + stage * stage_size + j * row_size;
        bulk_copy(to, a + (i * R + j) * r.a_stride, count * 16, full + stage);
        if constexpr (kInputs > 1)
          bulk_copy(to + slice, b + (i * R + j) * r.b_stride, count * 16, full + stage);
      }
      if (++stage == stages) stage = 0, phase ^= 1;
    }
  } else {
    const int group = tid / Threads, thread = tid % Threads;
    Columns<Op, Threads, V, Flags> columns(args, begin * E, thread * E, count * E);
    // Reads V vectors of each input of a row as a tile.
    const auto read = [&](int stage, int j, Tile<Op, V, false, false, true>& tile) {
      const uint4* from = buffer + stage * stage_size + j * row_size + thread;
#pragma unroll
      for (int k = 0; k < V; k++) {
        const bool in = thread + k * Threads < count;
        tile.a[k] = in ? from[k * Threads] : Op::fill();
        if constexpr (kInputs > 1) tile.b[k] = in ? from[k * Threads + slice] : zero_vector();
      }
    };
    int stage = 0, map_stage = 0;  // of the steps that are reduced and mapped
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
        read(map_stage, j, tile);
        columns.map(scalars[slot][j], tile, step * R + j);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + map_stage);
      if (++map_stage == stages) map_stage = 0;
    }
    columns.finish(group);
  }
#endif
}

// The `Columns` of an operator that keeps nothing for its columns from row to row.
template <class Op, int Threads, int V, unsigned>
struct NoColumnState {
  using T = typename Op::T;
  static constexpr int kStep = Threads * kElements<T>;
  const typename Op::Args& args;
  RowView<T> p;
  int e;

  __device__ __forceinline__ NoColumnState(const typename Op::Args& args, int64_t origin, int e, int end)
      : args(args), e(e) {
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
    using Operands = typename Op::template EpilogueOperands<V, kStep, false, false>;
    tile.map(args, sc, p, e, kStep, Operands(args, p, e));
  }
  __device__ __forceinline__ void finish(int) const {}
};

// Few rows. A CTA owns a part of one row, in tiles. It copies its first `r.depth` tiles to shared memory,
// where they stay, and streams the others through registers. It publishes the state of its part, waits for
// the states of the row's other parts, and maps its tiles. Tiles that are not in shared memory are read
// again, last first, because L2 still holds those that were read last.
//
// CTAs need not be resident at once. A CTA that has waited for long computes a missing state itself: the CTA
// that should compute it may not be resident, so that waiting forever could deadlock. It reduces in the same
// order and so gets the same bits. It never replaces a published state: an owner that has published may have
// written its output over its input already, and what was computed from that would be wrong.
template <class Op, int Threads, int V>
__device__ __forceinline__ void grid_shared_memory_body(const typename Op::Args& args) {
#ifdef GANDER_SM90
  using T = typename Op::T;
  using State = typename Op::State;
  constexpr int E = kElements<T>, kWarps = Threads / 32, kStep = Threads * E, kTile = V * kStep;
  constexpr int kInputs = Op::kInputs, kMaxTiles = kGridTiles;
  constexpr int64_t kMinWait = 1 << 16;             // cycles: about 40 us
  extern __shared__ __align__(128) uint4 buffer[];  // cached tiles x inputs x V x threads
  __shared__ Slot<State> warp_slots[2][kWarps];
  __shared__ uint64_t loaded[kMaxTiles];
  __shared__ int missing, chosen;
  const Rows& r = args.rows;
  const int tid = threadIdx.x, parts = r.splits, own_part = blockIdx.x % parts;
  const int64_t row = blockIdx.x / parts;
  ulonglong2* const published = static_cast<ulonglong2*>(r.partial) + row * parts;
  const RowView<T> own = row_view<Op, false, false>(r, row, own_part);
  const int tiles = (own.bounds.hi + kTile - 1) / kTile, cached = min(r.depth, tiles);
  if (tid == 0) {
    for (int t = 0; t < cached; t++) barrier_init(loaded + t, 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (int t = 0; t < cached; t++) {
      const uint32_t bytes = min(kTile, own.bounds.hi - t * kTile) * sizeof(T);
      uint4* const to = buffer + t * kInputs * V * Threads;
      barrier_expect(loaded + t, kInputs * bytes);
      bulk_copy_once(to, own.a + t * kTile, bytes, loaded + t);
      if constexpr (kInputs > 1)
        bulk_copy_once(to + V * Threads, static_cast<const T*>(own.b) + t * kTile, bytes, loaded + t);
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
  // The state of one part of the row, whose first `in_shared` tiles are in shared memory.
  const auto reduce_part = [&](int part, int in_shared) {
    const RowView<T> p = row_view<Op, false, false>(r, row, part);
    const int tiles = (p.bounds.hi + kTile - 1) / kTile;
    State st;
    Tile<Op, V, false, false, true> next;
    if (in_shared < tiles) next.load(p, at(in_shared), kStep);
    for (int t = 0; t < tiles; t++) {
      Tile<Op, V, false, false, true> tile;
      if (t < in_shared) {
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
  const int64_t begin = clock64();
  State st = reduce_part(own_part, cached);
  const int64_t end = clock64(), deadline = end + max(end - begin, kMinWait);
  wait_for_previous_launch();  // which cleared the slots
  if (tid == 0) TaggedState::publish(published + own_part, st, 1);
  // The last two tiles are loaded while the states are exchanged.
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
  // Merges the states of all parts. If some are missing at the deadline, `chosen` becomes one of these. CTAs
  // that wait for the same states choose different ones.
  const auto merge_parts = [&] {
    st = State();
    int absent = -1;
    for (int i = tid; i < parts; i += Threads) {
      ulonglong2 v = TaggedState::load(published + i);
      while (!TaggedState::ready(v, 1) && clock64() < deadline) v = TaggedState::load(published + i);
      if (TaggedState::ready(v, 1)) st.merge(TaggedState::decode<State>(v));
      else absent = i;
    }
    if (!__syncthreads_or(absent >= 0)) return true;
    if (tid == 0) missing = 0;
    __syncthreads();
    const int rank = absent < 0 ? -1 : atomicAdd(&missing, 1);
    __syncthreads();
    if (rank == own_part % missing) chosen = absent;
    __syncthreads();
    return false;
  };
  if (!merge_parts()) {
    do {
      const int part = chosen;
      st = reduce_part(part, 0);
      if (tid == 0) TaggedState::publish_if_absent(published + part, st, 1);
    } while (!merge_parts());
    fetch(a, tiles - 1);  // again: keeping these tiles in registers meanwhile would take too many
    fetch(b, max(tiles - 2, 0));
  }
  st.template reduce_lanes<32>();
  reduce_warps<kWarps>(st, warp_slots[1]);
  Op::finalize(args, row, sc, st, tid == 0 && own_part == 0);
  const auto map = [&](Step& s, int tile) {
    if (tile < cached) read(tile, s.tile);
    s.tile.map(args, sc, own, at(tile), kStep, s.operands);
    if (tile > 1) fetch(s, tile - 2);
  };
  for (int t = tiles - 1; t >= 0; t -= 2) {
    map(a, t);
    if (t > 0) map(b, t - 1);
  }
#endif
}

}  // namespace gander
