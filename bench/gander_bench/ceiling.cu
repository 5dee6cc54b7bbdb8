// The limit of memory: kernels that only move bytes, with the operators' shares of reads and writes. A share
// of the limit is relative to the fastest of each. Compiled at run time (limit.py), so no header is needed.
using vectors = long long;

struct Tensors {
  const uint4* read[3];
  uint4* written[2];
};

template <int Reads, int Writes, int U>
__device__ __forceinline__ void move(const Tensors& tensors, vectors n) {
  const vectors base = static_cast<vectors>(blockIdx.x) * blockDim.x * U + threadIdx.x;
  uint4 v[Reads][U];
#pragma unroll
  for (int i = 0; i < U; i++) {
    const vectors j = base + i * blockDim.x;
#pragma unroll
    for (int r = 0; r < Reads; r++) {
      v[r][i] = make_uint4(1, 2, 3, 4);
      if (j < n) v[r][i] = tensors.read[r][j];
    }
  }
  unsigned all = 0;
#pragma unroll
  for (int i = 0; i < U; i++) {
    const vectors j = base + i * blockDim.x;
    uint4 w = v[0][i];
#pragma unroll
    for (int r = 1; r < Reads; r++) w.x ^= v[r][i].x, w.y ^= v[r][i].y, w.z ^= v[r][i].z, w.w ^= v[r][i].w;
#pragma unroll
    for (int k = 0; k < Writes; k++) {
      if (j < n) tensors.written[k][j] = w;
    }
    all |= w.x ^ w.y ^ w.z ^ w.w;
  }
  // Never true for the data that is used, but the compiler cannot know: the loads stay.
  if (Writes == 0 && all == 0x9e3779b9u) tensors.written[0][0] = v[0][0];
}

#define CEILING(name, reads, writes, u) \
  extern "C" __global__ void name##_##u(const Tensors tensors, vectors n) { \
    move<reads, writes, u>(tensors, n); \
  }
#define CEILINGS(name, reads, writes) \
  CEILING(name, reads, writes, 1) \
  CEILING(name, reads, writes, 2) \
  CEILING(name, reads, writes, 4) \
  CEILING(name, reads, writes, 8)

// An "r" for each tensor read, a "w" for each written.
CEILINGS(r, 1, 0)
CEILINGS(rr, 2, 0)
CEILINGS(rw, 1, 1)
CEILINGS(rrw, 2, 1)
CEILINGS(rrww, 2, 2)
CEILINGS(rrrw, 3, 1)
CEILINGS(rrrww, 3, 2)
