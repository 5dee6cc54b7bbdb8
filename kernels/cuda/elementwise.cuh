// Where a thread works if nothing is reduced. Any number of threads can share a row: the launch says how
// many.
#pragma once
#include "rows.cuh"

namespace gander {

// A thread's row and place in it. A part of the launch is several rows, or one chunk of a row.
struct ThreadInRow {
  int64_t row;
  int threads;   // that share the row
  int lane;      // the thread's number among them
  bool is_idle;  // no row is left for it

  template <class Args>
  __device__ __forceinline__ ThreadInRow(const Args& args, unsigned part) : threads(args.row_threads) {
    const int tid = threadIdx.x, group = tid * args.inverse_row_threads >> 16;
    lane = tid - group * threads;
    row = static_cast<int64_t>(part / args.rows.splits) * args.rows_per_cta + group;
    is_idle = group >= args.rows_per_cta || row >= args.rows.m;
  }
};

}  // namespace gander
