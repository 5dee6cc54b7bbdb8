// Kernel bodies that serve all operators. An operator (softmax.cuh, ...) says how elements are accumulated to
// a row's state, what is computed from the complete state, and how each element is mapped. The bodies move
// the data.
//
//   rows_body     a row lies in the registers of threads of a CTA, or of all threads of a cluster
//   loop_body     like rows_body, for short rows: persistent CTAs load the next rows while they compute
//   partial_body  a CTA streams through one chunk of a row and stores the chunk's state
//   apply_body    a CTA merges the states of a row's chunks, then reads and maps one chunk
//
// Bodies for rows that are spread over the whole grid are in grid.cuh. RMSNorm and cross-entropy have some of
// their own.
//
// An unaligned kernel takes rows of any length, stride and alignment. The others, aligned kernels,
// need rows that begin at 16-byte boundaries and consist of whole vectors.
#pragma once
#include "reduce.cuh"

namespace gander {

// Threads of a CTA whose rows have TPR threads each.
template <int TPR>
constexpr int kThreads = TPR < kMinThreads ? kMinThreads : TPR;

// Which vectors of a row a thread holds. A row has TPR threads. ExactWarps (Variant.ExactWarps in
// kernels/variants.go): if these are a whole CTA, the row has only as many warps as it needs, each with V x
// 32 adjacent vectors. So whatever its length, no more than one warp is partly idle, and the distance between
// a thread's vectors is a constant.
template <int TPR, int V, bool ExactWarps = true>
struct RowPlace {
  static constexpr int kRows = kThreads<TPR> / TPR;          // of a CTA
  static constexpr int kLanes = TPR < 32 ? TPR : 32;         // of a warp that share a row
  static constexpr int kMaxWarps = TPR < 32 ? 1 : TPR / 32;  // of a row
  static constexpr bool kExact = ExactWarps && kRows == 1;
  static constexpr int kNext = kExact ? 32 : TPR;  // from a thread's vector to its next
  static __device__ __forceinline__ int warps() { return kExact ? blockDim.x / 32 : kMaxWarps; }
  // The first vector of thread number threadIdx.x % TPR.
  static __device__ __forceinline__ int first(int thread) {
    return kExact ? thread / 32 * (32 * V) + thread % 32 : thread;
  }
  // How many vectors of a row a CTA holds.
  static __device__ __forceinline__ int capacity() { return (kExact ? blockDim.x : TPR) * V; }
  static __device__ __forceinline__ int64_t row() {
    return kRows == 1 ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / TPR;
  }
};

// A row, or one chunk of it. The same element index e applies to all pointers and bounds (see Bounds). In an
// unaligned kernel e = 0 is where a vector of the output is aligned, or one of the first input if the
// operator has no output.
template <class T>
struct RowView {
  const T* a;
  const void* b;
  int32_t b_type;
  void* y;
  int64_t origin;  // position in the row of e = 0; may be negative
  Bounds bounds;
  int overread;  // elements of the tensor after the row's end that a 16-byte load may touch
  int64_t row;

  __device__ __forceinline__ Bounds load_bounds() const {
    return {bounds.lo, bounds.hi, bounds.load_end + overread};
  }
};

// The view of a chunk. FullRow: a row is a single chunk.
template <class Op, bool Unaligned, bool FullRow>
__device__ __forceinline__ RowView<typename Op::T> row_view(const Rows& r, int64_t row, int64_t chunk = 0) {
  using T = typename Op::T;
  constexpr int E = kElements<T>;
  const T* a = static_cast<const T*>(r.a) + row * r.a_stride;
  if constexpr (FullRow && !Unaligned) {
    RowView<T> p = {a, nullptr, 0, nullptr, 0, {0, static_cast<int>(r.n), 0}, 0, row};
    if constexpr (Op::kInputs > 1) p.b = static_cast<const T*>(r.b) + row * r.b_stride;
    if constexpr (Op::kHasOutput) p.y = static_cast<T*>(r.y) + row * r.y_stride;
    return p;
  }
  int shift = 0;  // from the view's e = 0 to the first element of the row
  if (Unaligned && r.ignore_alignment) {
    shift = 0;  // whatever the alignment is, so that results do not depend on it
  } else if constexpr (Unaligned && Op::kHasOutput) {
    const auto y = reinterpret_cast<uintptr_t>(advance(r.y, r.y_type, row * r.y_stride));
    const int size = type_size(r.y_type);
    shift = (y & (E * size < 16 ? E * size - 1 : 15)) / size;
  } else if constexpr (Unaligned) {
    shift = vector_offset(a);
  }
  const int64_t origin = chunk * r.chunk * E - shift;
  const int64_t left = r.n - origin;
  const int64_t most = r.chunk * E;
  RowView<T> p;
  p.a = a + origin;
  p.b_type = r.b_type;
  p.row = row;
  if constexpr (Op::kInputs > 1) p.b = advance(r.b, r.b_type, row * r.b_stride + origin);
  if constexpr (Op::kHasOutput) p.y = advance(r.y, r.y_type, row * r.y_stride + origin);
  p.origin = origin;
  p.bounds = {origin < 0 ? static_cast<int>(-origin) : 0, static_cast<int>(left < most ? left : most)};
  if constexpr (Unaligned) {
    p.bounds.load_end = static_cast<int>(left < most + 4 * E ? left : most + 4 * E);
    const int64_t rest = r.m - 1 - row;
    const bool row_follows =
        rest * r.a_stride >= E && (Op::kInputs < 2 || rest * r.b_stride * type_size(r.b_type) >= 16);
    p.overread = row_follows ? E : 0;
  }
  return p;
}

// The epilogue operands of an operator that has none (see RowOperator).
template <class Op, int V, int Step, bool Unaligned>
struct NoEpilogueOperands {
  using T = typename Op::T;
  static constexpr int E = kElements<T>;
  const typename Op::Args& args;
  __device__ __forceinline__ NoEpilogueOperands(const typename Op::Args& args, const RowView<T>&, int)
      : args(args) {}
  __device__ __forceinline__ void load(const RowView<T>&, int) {}
  // Calls each(i, map) for each vector i. map(a, b, y) computes vector i of the output from those of the
  // inputs.
  template <bool Cached, class Each>
  __device__ __forceinline__ void map(const typename Op::Scalars& sc, const RowView<T>& p, int e,
                                      Each each) const {
#pragma unroll
    for (int i = 0; i < V; i++)
      each(i, [&](const float (&a)[E], const float (&b)[E], float (&y)[E]) {
        Op::template map<Unaligned, Cached>(args, sc, a, b, p, e + i * Step, y);
      });
  }
};

// The base of an operator: the hooks that it can replace, and their defaults. An operator also has to define
//   T        the element type
//   State    what a row is reduced to
//   Args     the kernel's argument
//   Scalars  values of one row
//   finalize(args, row, scalars, state, leader)
//       computes what `map` needs from a row's complete state, and stores the row's statistics
//   map<Unaligned, Cached>(args, scalars, a, b, view, e, out)
//       computes one vector of the output. Cached: `a` holds exponentials of the elements
//   rebase_scale(scalars, m)
//       for states with kMaxFirst: cached exponentials are relative to m, not to the row's maximum
// `leader` is true in one thread of a row, which stores the row's statistics.
template <class Op>
struct RowOperator {
  // 1 or 2. The second input has the type T. In unaligned kernels of partial_body and apply_body it may have
  // any float type.
  static constexpr int kInputs = 1;
  static constexpr bool kHasOutput = true;       // `map` is called, and its result stored
  static constexpr bool kMayCacheExp = true;     // kept exponentials may be relative to a warp's maximum
  static constexpr bool kAnyOutputType = false;  // in unaligned kernels the output has any float type, else T

  // What `map` needs beside the row, such as weights, for V vectors that are `Step` elements apart.
  // InRegisters: the constructor loads them into registers. So these loads overlap with those of the row.
  // LateWide: but not operands that are wider than the row's elements.
  template <int V, int Step, bool Unaligned, bool InRegisters, bool LateWide = false>
  using EpilogueOperands = NoEpilogueOperands<Op, V, Step, Unaligned>;

  // The value that elements of the first input have out of bounds.
  __device__ __forceinline__ static uint4 fill() {
    if constexpr (Op::State::kMaxFirst) return lowest_vector<typename Op::T>();
    else return zero_vector();
  }
  // Whether a row's elements are not even loaded. Its loads wait for the answer.
  template <class Args>
  __device__ __forceinline__ static bool skips(const Args&, int64_t row) {
    return false;
  }
  // Loads of a row's scalars that depend on no other load. They are issued before the loads of the row.
  template <class Args>
  __device__ __forceinline__ static auto load_scalars(const Args&, int64_t row, bool leader) {
    return typename Op::Scalars{};
  }
  // Loads that depend on these. They are issued while the row is being loaded.
  template <class Args, class Scalars>
  __device__ __forceinline__ static void resolve_scalars(const Args&, int64_t row, Scalars&, bool leader) {}
  // The same in partial_body, whose leader finalizes the row or saves its scalars.
  template <class Args, class Scalars>
  __device__ __forceinline__ static void resolve_part(const Args& args, int64_t row, Scalars& sc,
                                                      bool leader) {
    Op::resolve_scalars(args, row, sc, leader);
  }
  // kTakes: one element of a row is not reduced. `take` takes it out of a thread's vectors, which are `Step`
  // elements apart, the first at element e, and is true in the thread that has it, in scalars.logit. taken_at
  // says where it is in the row.
  static constexpr bool kTakes = false;
  template <int Step, class Scalars, int V>
  __device__ __forceinline__ static bool take(Scalars&, int64_t origin, int e, uint4 (&v)[V]) {
    return false;
  }
  // partial_body saves scalars and apply_body restores them. The default loads them again.
  template <class Args, class Scalars>
  __device__ __forceinline__ static void save_scalars(const Args&, int64_t row, const Scalars&) {}
  template <class Args>
  __device__ __forceinline__ static auto restore_scalars(const Args& args, int64_t row) {
    auto sc = Op::load_scalars(args, row, false);
    Op::resolve_scalars(args, row, sc, false);
    return sc;
  }
  // Adds a tile to a thread's state.
  template <class Args, class State, class Tile, class View>
  __device__ __forceinline__ static void accumulate(const Args&, State& st, const Tile& tile, const View&,
                                                    int e, int step) {
    static_assert(State::kMaxFirst, "an operator of sums has to define accumulate");
    st.add(tile.a);
  }
  // Reduces the tiles of L lanes to one state, unless the state's kMaxFirst does that.
  template <int L, class Args, class State, class Tile, class View>
  __device__ __forceinline__ static void reduce(const Args& args, State& st, Tile& tile, const View& p, int e,
                                                int step) {
    Op::accumulate(args, st, tile, p, e, step);
    st.template reduce_lanes<L>();
  }
  // Whether the row's elements must not matter. Then rows_body, short_rows_body and apply_body give `map` 0
  // for each, or for its exponential. To select in `map` would be an instruction for each element.
  template <class Scalars>
  __device__ __forceinline__ static bool ignores(const Scalars&) {
    return false;
  }
  // Whether a row's output is not stored, which is the same for all rows of a launch.
  template <class Scalars>
  __device__ __forceinline__ static bool omits_output(const Scalars&) {
    return false;
  }
  // rows_body and apply_body call it after `map`, for what a thread has stored: V vectors that are `Step`
  // elements apart, the first at element e. It may replace one of their elements.
  template <int Step, int V, class Scalars, class View>
  __device__ __forceinline__ static void patch(const Scalars&, const View&, int e) {}
  // kFinishesRow: what the leader stores may wait until `map` has stored the row. Then the rest of its warp
  // does not wait for it, and `map` has its registers: rows_body calls finish_row for what finalize has kept.
  // Where all CTAs of a cluster would wait for its end, finalize_and_finish takes the place of finalize.
  static constexpr bool kFinishesRow = false;
  template <class Args>
  __device__ __forceinline__ static void finish_row(const Args&, int64_t row) {}
  // Whether only the leader of a row needs its complete state.
  static constexpr bool kFirstWarpFinalizes = false;
  // The last step of each CTA.
  template <class Args>
  __device__ __forceinline__ static void finish_launch(const Args&) {}
};

// V vectors of each input. RuntimeTypeB: the second input has a type known at run time, and is stored as
// floats. CacheExp: exponentials of the first input are stored too. FewElements: the tile is for
// short rows, which may have a single element.
template <class Op, int V, bool Unaligned, bool RuntimeTypeB, bool SameOffset, bool CacheExp = false,
          bool FewElements = false>
struct Tile {
  using T = typename Op::T;
  static constexpr bool kUnaligned = Unaligned, kCacheExp = CacheExp, kFewElements = FewElements;
  static constexpr int E = kElements<T>, kB = Op::kInputs > 1 ? V : 1;
  uint4 a[V];
  uint4 b[RuntimeTypeB ? 1 : kB];
  float b_floats[RuntimeTypeB ? kB : 1][E];
  float exps[CacheExp ? V : 1][E];

  template <bool Cached = false>
  __device__ __forceinline__ void get_a(int i, float (&f)[E]) const {
    if constexpr (Cached) memcpy(f, exps[i], sizeof(f));
    else unpack(T(), a[i], f);
  }
  __device__ __forceinline__ void get_b(int i, float (&f)[E]) const {
    if constexpr (Op::kInputs > 1 && RuntimeTypeB) {
#pragma unroll
      for (int j = 0; j < E; j++) f[j] = b_floats[i][j];
    } else if constexpr (Op::kInputs > 1) {
      unpack(T(), b[i], f);
    }
  }

  // Loads vectors that are `step` elements apart, the first at element e.
  __device__ __forceinline__ void load(const RowView<T>& p, int e, int step) {
    const Bounds s = Unaligned ? p.load_bounds() : p.bounds;
    gander::load<Unaligned, SameOffset>(p.a, e, step, s, Op::fill(), a);
    if constexpr (Op::kInputs > 1 && !RuntimeTypeB)
      gander::load<Unaligned, SameOffset>(static_cast<const T*>(p.b), e, step, s, zero_vector(), b);
    if constexpr (Op::kInputs > 1 && RuntimeTypeB)
#pragma unroll
      for (int i = 0; i < V; i++) load_floats<true>(p.b, p.b_type, e + i * step, s, b_floats[i]);
  }

  __device__ __forceinline__ void rematerialize(unsigned zero) {
#pragma unroll
    for (int i = 0; i < V; i++) {
      gander::rematerialize<T>(a[i], zero);
      if constexpr (Op::kInputs > 1 && !RuntimeTypeB) gander::rematerialize<T>(b[i], zero);
    }
  }

  // Forgets the first input's elements.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < V; i++) {
      a[i] = zero_vector();
      if constexpr (CacheExp)
#pragma unroll
        for (int j = 0; j < E; j++) exps[i][j] = 0.f;
    }
  }

  template <class Operands>
  __device__ __forceinline__ void map(const typename Op::Args& args, const typename Op::Scalars& sc,
                                      const RowView<T>& p, int e, int step, const Operands& operands) const {
    if constexpr (!Unaligned) {
      T* const y = opaque(static_cast<T*>(p.y) + e);
      operands.template map<CacheExp>(sc, p, e, [&](int i, auto map) {
        if (e + i * step >= p.bounds.hi) return;
        float fa[E], fb[E], out[E];
        get_a<CacheExp>(i, fa);
        get_b(i, fb);
        map(fa, fb, out);
        store_vector(y + i * step, out);
      });
    } else if constexpr (SameOffset && !Op::kAnyOutputType) {
      T* const y = opaque(static_cast<T*>(p.y) + e);
      const int lo = p.bounds.lo, hi = p.bounds.hi;
      const unsigned whole = max(hi - lo - (E - 1), 0);  // how many e from lo on begin a whole vector
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int ei = e + i * step;
        if (ei >= hi) continue;
        float fa[E], fb[E], out[E];
        get_a<CacheExp>(i, fa);
        get_b(i, fb);
        Op::template map<Unaligned, CacheExp>(args, sc, fa, fb, p, ei, out);
        if (static_cast<unsigned>(ei - lo) < whole) store_vector(y + i * step, out);
        else store_within(y + i * step, ei, lo, hi, out);
      }
    } else {
#pragma unroll
      for (int i = 0; i < V; i++) {
        const int ei = e + i * step;
        if (!p.bounds.template touches<E>(ei)) continue;
        float fa[E], fb[E], out[E];
        get_a<CacheExp>(i, fa);
        get_b(i, fb);
        Op::template map<Unaligned, CacheExp>(args, sc, fa, fb, p, ei, out);
        if constexpr (Op::kAnyOutputType) store_floats(p.y, args.rows.y_type, ei, p.bounds, out);
        else store<Unaligned>(static_cast<T*>(p.y), ei, p.bounds, out);
      }
    }
  }
};

// Reduces the tiles of L lanes to one state.
template <class Op, int L, class Tile>
__device__ __forceinline__ void reduce_tile(const typename Op::Args& args, typename Op::State& st, Tile& tile,
                                            const RowView<typename Op::T>& p, int e, int step) {
  if constexpr (Op::State::kMaxFirst) st.template reduce_tile<L, Tile::kCacheExp>(tile.a, tile.exps);
  else Op::template reduce<L>(args, st, tile, p, e, step);
}

// Prefetches into L2 the rows of a CTA that starts later. Registers and shared memory alone do not hold
// enough loads in flight to saturate memory while rows are also written. A CTA works on `rows` rows, or in a
// cluster on `slice` elements of one row. It prefetches what lies `r.prefetch_distance` rows further on. CTAs
// with numbers below `r.prefetch_from` do not prefetch.
template <class Op, bool Cluster>
__device__ __forceinline__ void prefetch_later_rows(const Rows& r, int rows, int slice = 0) {
#ifdef GANDER_SM90
  if constexpr (!Op::kHasOutput) return;  // reads alone saturate memory
  using T = typename Op::T;
  const int64_t next = static_cast<int64_t>(blockIdx.x) * rows + r.prefetch_distance;
  if (r.prefetch_distance == 0 || threadIdx.x != 0 || blockIdx.x < r.prefetch_from || next + rows > r.m)
    return;
  int64_t origin = 0, count = rows * r.n;
  if constexpr (Cluster) {
    origin = static_cast<int64_t>(cluster_rank()) * slice;
    count = min(r.n - origin, static_cast<int64_t>(slice));
    if (count <= 0) return;
  }
  const auto fetch = [&](const void* x, int64_t stride) {
    if (rows == 1 || stride == r.n)
      prefetch_l2(static_cast<const T*>(x) + next * stride + origin, count * sizeof(T));
  };
  fetch(r.a, r.a_stride);
  if constexpr (Op::kInputs > 1) fetch(r.b, r.b_stride);
#endif
}

// The end of a CTA whose only row is skipped.
template <class Op>
__device__ __forceinline__ void finish_skipped(const typename Op::Args& args, int64_t row, bool leader) {
  if (leader) {
    auto sc = Op::load_scalars(args, row, true);
    Op::resolve_scalars(args, row, sc, false);
    Op::finalize(args, row, sc, typename Op::State(), true);
  }
  Op::finish_launch(args);
}

// Flags: what the kernel's row of kernels/variants.txt decides.
template <class Op, int TPR, int V, unsigned Flags>
__device__ __forceinline__ void rows_body(const typename Op::Args& args) {
  using T = typename Op::T;
  using State = typename Op::State;
  constexpr bool Unaligned = Flags & kUnaligned, SameOffset = Flags & kSameOffset, Cluster = Flags & kCluster;
  using Place = RowPlace<TPR, V, (Flags & kExactWarps) != 0>;
  constexpr int E = kElements<T>, kRows = Place::kRows, kWarps = Place::kMaxWarps;
  constexpr int kStep = Place::kNext * E;
  constexpr bool kOperandsInRegisters = !Unaligned && !(Flags & kLateWeights);
  // Kept exponentials are relative to the warp's maximum. Where they must have the bits that they would have
  // if computed again, all warps agree on the row's maximum first.
  constexpr bool kCacheExp = Flags & kKeepsExp;
  constexpr bool kMaxOfWarp = kCacheExp && Op::kMayCacheExp, kMaxOfRow = kCacheExp && !Op::kMayCacheExp;
  static_assert(!kCacheExp || State::kMaxFirst && Op::kHasOutput, "there are no exponentials");
  static_assert(!kMaxOfRow || kWarps > 1 && !Cluster, "the row's maximum is exchanged in one CTA");
  constexpr bool kToFirstWarp = Op::kFirstWarpFinalizes && !Cluster && kRows == 1 && kWarps > 1;
  constexpr bool kFromThreads = Flags & kMergesThreads;
  static_assert(!kFromThreads || kToFirstWarp, "a warp merges the states of a CTA's threads");
  prefetch_later_rows<Op, Cluster>(args.rows, kRows, Place::capacity() * E);
  const int thread = threadIdx.x % TPR;
  const int64_t row = Place::row();
  int e = Place::first(thread) * E;
  __shared__ Slot<State> slots[kFromThreads ? TPR - 32 : kWarps > 1 ? kRows * kWarps : 1];
  static_assert(!Op::kTakes || kRows == 1 && kWarps > 1,
                "what is taken is exchanged with the states of warps");
  __shared__ float taken[kRows], warp_max[kMaxOfRow ? kRows * kWarps : 1];
#ifdef GANDER_SM90
  __shared__ Slot<State> cluster_slots[Cluster ? 16 : 1];
  __shared__ uint64_t barrier, cluster_taken;
  if constexpr (Cluster) {
    e += cluster_rank() * Place::capacity() * E;
    cluster_begin(&barrier, sizeof(State), Op::kTakes ? sizeof(cluster_taken) : 0);
  }
#else
  if constexpr (Cluster) return;
#endif
  const bool active = kRows == 1 || row < args.rows.m;
  bool leader = active && thread == 0;
#ifdef GANDER_SM90
  if constexpr (Cluster) leader = leader && cluster_rank() == 0;
#endif
  RowView<T> p = row_view<Op, Unaligned, true>(args.rows, active ? row : 0);
  const bool skipped = active && Op::skips(args, row);
  if constexpr (kRows == 1 && !Op::kHasOutput && !Cluster)
    if (skipped) return finish_skipped<Op>(args, row, leader);
  if (!active || skipped) p.bounds.clear();
  Tile<Op, V, Unaligned, false, SameOffset, kCacheExp, Unaligned && TPR <= 32> tile;
  tile.load(p, e, kStep);
  auto sc = Op::load_scalars(args, active ? row : 0, leader);  // after the row's loads: it may wait
  using Operands = typename Op::template EpilogueOperands<V, kStep, Unaligned, kOperandsInRegisters,
                                                          (Flags & kLateWideWeights) != 0>;
  const Operands operands(args, p, e);
  Op::resolve_scalars(args, active ? row : 0, sc, leader);
  float row_max = 0.f;
  if constexpr (kMaxOfRow)
    row_max = warps_max<kWarps>(lanes_max<32>(tile_max(T(), tile.a)), warp_max, Place::warps());
  if constexpr (Op::kTakes)  // the index is 0: said like this, it saves a register
    if (Op::template take<kStep>(sc, p.origin, e, tile.a)) taken[threadIdx.x / TPR] = sc.logit;
  State st;
  if constexpr (kMaxOfRow) st.template reduce_below<32, true>(row_max, tile.a, tile.exps);
  else reduce_tile<Op, kFromThreads ? 1 : Place::kLanes>(args, st, tile, p, e, kStep);
  const State own = st;
  if constexpr (kFromThreads) {
    if (!reduce_threads_to_first_warp<kWarps>(st, slots, Place::warps())) return Op::finish_launch(args);
  } else if constexpr (kToFirstWarp) {
    if (!reduce_to_first_warp<kWarps>(st, slots, Place::warps())) return Op::finish_launch(args);
  } else if constexpr (kWarps > 1) {
    reduce_warps<kWarps>(st, slots, Place::warps());
  }
#ifdef GANDER_SM90
  if constexpr (Cluster) {
    cluster_wait();
    if constexpr (Op::kTakes) {  // the CTA that has the element sends it; if none has, the last one sends
      if (threadIdx.x < cluster_size()) {
        const uint32_t at = Op::taken_at(sc, p.origin), owner = at / (Place::capacity() * E);
        if (min(owner, cluster_size() - 1) == cluster_rank())
          send(&cluster_taken, __float_as_uint(at == ~0u ? sc.logit : taken[0]), &barrier, threadIdx.x);
      }
    }
    reduce_cluster(st, cluster_slots, &barrier, 0);
    if constexpr (Op::kTakes) sc.logit = __uint_as_float(cluster_taken);
  }
#endif
  if constexpr (Op::kTakes && !Cluster)
    if (Op::taken_at(sc, p.origin) != ~0u) sc.logit = taken[threadIdx.x / TPR];
  if constexpr (Op::kFinishesRow && Cluster) Op::finalize_and_finish(args, row, sc, st, leader);
  else if (active) Op::finalize(args, row, sc, st, leader);
  if constexpr (Op::kHasOutput) {
    if (!Op::omits_output(sc)) {
      if constexpr (kMaxOfWarp) Op::rebase_scale(sc, own.m);
      if constexpr (!kCacheExp) tile.rematerialize(args.rows.opaque_zero);
      if constexpr (Unaligned) {  // computed again: the view and masks derived from it would take registers
        p = row_view<Op, Unaligned, true>(args.rows, (active ? row : 0) + args.rows.opaque_zero);
        if (!active) p.bounds.clear();
        e += args.rows.opaque_zero;
      }
      if (Op::ignores(sc)) tile.clear();
      tile.map(args, sc, p, e, kStep, operands);
      Op::template patch<kStep, V>(sc, p, e);
    }
  }
  if constexpr (Op::kFinishesRow && !Cluster)
    if (thread_number_again() == 0) Op::finish_row(args, row);
  Op::finish_launch(args);
}

// Many short rows: persistent groups of TPR lanes, which load their next row while they compute this one.
template <class Op, int TPR, int V>
__device__ __forceinline__ void loop_body(const typename Op::Args& args) {
  using T = typename Op::T;
  static_assert(TPR <= 32);
  constexpr int kRows = kThreads<TPR> / TPR, kStep = TPR * kElements<T>;
  const int lane = threadIdx.x % TPR, e = lane * kElements<T>;
  const int64_t rows = args.rows.m, step = static_cast<int64_t>(gridDim.x) * kRows;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / TPR;
  const auto at = [&](int64_t r) {
    RowView<T> p = row_view<Op, false, true>(args.rows, r < rows ? r : 0);
    if (r >= rows) p.bounds.hi = 0;
    return p;
  };
  Tile<Op, V, false, false, true> next_tile;
  RowView<T> next = at(row);
  auto next_sc = Op::load_scalars(args, row < rows ? row : 0, lane == 0 && row < rows);
  next_tile.load(next, e, kStep);
  const typename Op::template EpilogueOperands<V, kStep, false, false> operands(args, next, e);
  // All lanes of a warp take part in its shuffles. So all groups do as many iterations as the CTA's first.
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * kRows; base < rows; base += step, row += step) {
    Tile<Op, V, false, false, true> tile = next_tile;
    const RowView<T> p = next;
    auto sc = next_sc;
    const bool active = row < rows, leader = active && lane == 0;
    Op::resolve_scalars(args, active ? row : 0, sc, leader);
    next = at(row + step);
    next_sc = Op::load_scalars(args, row + step < rows ? row + step : 0, lane == 0 && row + step < rows);
    next_tile.load(next, e, kStep);
    typename Op::State st;
    reduce_tile<Op, TPR>(args, st, tile, p, e, kStep);
    if (active) Op::finalize(args, row, sc, st, leader);
    if constexpr (Op::kHasOutput) {
      tile.rematerialize(args.rows.opaque_zero);
      tile.map(args, sc, p, e, kStep, operands);
    }
  }
}

// Computes the state of one chunk of a row. If a row is a single chunk and has no output, this completes it.
template <class Op, int Threads, int V, bool Unaligned, bool SameOffset>
__device__ __forceinline__ void partial_body(const typename Op::Args& args) {
  using T = typename Op::T;
  using State = typename Op::State;
  constexpr int kStep = Threads * kElements<T>;
  __shared__ Slot<State> warp_slots[Threads / 32];
  let_next_launch_start();
  const int64_t row = blockIdx.x / args.rows.splits;
  const int chunk = blockIdx.x % args.rows.splits;
  const bool leader = threadIdx.x == 0;
  RowView<T> p = row_view<Op, Unaligned, false>(args.rows, row, chunk);
  if (Op::skips(args, row)) {
    if (args.rows.splits == 1 && !Op::kHasOutput) return finish_skipped<Op>(args, row, leader);
    p.bounds.clear();
  }
  Tile<Op, V, Unaligned, Unaligned && !SameOffset, SameOffset> tile;
  int e = threadIdx.x * kElements<T>;
  // Before what may wait. Not in unaligned kernels: 24576 x 50257 took 1.02 times as long.
  if constexpr (!Unaligned) tile.load(p, e, kStep);
  auto sc = Op::load_scalars(args, row, leader && chunk == 0);
  Op::resolve_part(args, row, sc, leader && chunk == 0);
  State st;
  while (e < p.bounds.hi) {
    if constexpr (Unaligned) tile.load(p, e, kStep);
    Op::template take<kStep>(sc, p.origin, e, tile.a);
    Op::accumulate(args, st, tile, p, e, kStep);
    e += V * kStep;
    if (!Unaligned && e < p.bounds.hi) tile.load(p, e, kStep);
  }
  st.template reduce_lanes<32>();
  const bool complete = args.rows.splits == 1 && !Op::kHasOutput;
  if (!reduce_to_first_warp<Threads / 32>(st, warp_slots, Threads / 32)) {
    if (complete) Op::finish_launch(args);
    return;
  }
  wait_for_previous_launch();  // so that a launch that waits for this one has also waited for the one before
  if (complete) {
    Op::finalize(args, row, sc, st, leader);
    Op::finish_launch(args);
  } else if (leader) {
    static_cast<Slot<State>*>(args.rows.partial)[blockIdx.x].set(st);
    if (chunk == 0) Op::save_scalars(args, row, sc);
  }
}

// Merges the states that partial_body has stored for a row's chunks, and maps one of the chunks.
template <class Op, int V, bool Unaligned>
__device__ __forceinline__ void apply_body(const typename Op::Args& args) {
  using T = typename Op::T;
  using State = typename Op::State;
  constexpr int kStep = kChunkThreads * kElements<T>;
  // Chunks are taken in reverse order, because L2 still holds those that partial_body read last.
  const uint32_t block = gridDim.x - 1 - blockIdx.x;
  const int64_t row = Op::kHasOutput ? block / args.rows.splits : block;
  const int chunk = Op::kHasOutput ? block % args.rows.splits : 0;
  const bool leader = threadIdx.x == 0 && chunk == 0;
  const RowView<T> p = row_view<Op, Unaligned, false>(args.rows, row, chunk);
  int e = threadIdx.x * kElements<T>;
  Tile<Op, V, Unaligned, Unaligned, !Unaligned> tile;
  // These loads are issued before waiting for partial_body.
  if constexpr (Op::kHasOutput) tile.load(p, e, kStep);
  typename Op::template EpilogueOperands<V, kStep, Unaligned, !Unaligned> operands(args, p, e);
  wait_for_previous_launch();
  auto sc = Op::restore_scalars(args, row);
  State st;
  __shared__ Slot<State> warp_slots[kChunkThreads / 32];
  const Slot<State>* slots = static_cast<const Slot<State>*>(args.rows.partial) + row * args.rows.splits;
  for (int i = threadIdx.x; i < args.rows.splits; i += kChunkThreads) st.merge(slots[i].load());
  st.template reduce_lanes<32>();
  reduce_warps<kChunkThreads / 32>(st, warp_slots);
  if constexpr (Op::kFinishesRow) Op::finalize_and_finish(args, row, sc, st, leader);
  else Op::finalize(args, row, sc, st, leader);
  if constexpr (Op::kHasOutput) {
    while (!Op::omits_output(sc)) {
      if (Op::ignores(sc)) tile.clear();
      tile.map(args, sc, p, e, kStep, operands);
      Op::template patch<kStep, V>(sc, p, e);
      e += V * kStep;
      if (e >= p.bounds.hi) break;
      tile.load(p, e, kStep);
      operands.load(p, e);
    }
  }
  Op::finish_launch(args);
}

}  // namespace gander
