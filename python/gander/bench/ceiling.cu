// The limit of memory: kernels that only move bytes, with the operators' shares of reads and writes. A share
// of the limit is relative to the fastest of each. Compiled at run time (limit.py), so no header is needed.
using vectors = long long;

template <int Reads, bool Write, int U>
__device__ __forceinline__ void move(const uint4* a, const uint4* b, uint4* c, vectors n) {
  const vectors base = static_cast<vectors>(blockIdx.x) * blockDim.x * U + threadIdx.x;
  uint4 v[U], w[U];
#pragma unroll
  for (int i = 0; i < U; i++) {
    const vectors j = base + i * blockDim.x;
    v[i] = w[i] = make_uint4(1, 2, 3, 4);
    if (j < n && Reads > 0) v[i] = a[j];
    if (j < n && Reads > 1) w[i] = b[j];
  }
  unsigned all = 0;
#pragma unroll
  for (int i = 0; i < U; i++) {
    const vectors j = base + i * blockDim.x;
    if (Reads > 1) v[i].x ^= w[i].x, v[i].y ^= w[i].y, v[i].z ^= w[i].z, v[i].w ^= w[i].w;
    if (Write && j < n) c[j] = v[i];
    all |= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  // Never true for the data that is used, but the compiler cannot know: the loads stay.
  if (!Write && all == 0x9e3779b9u) c[0] = v[0];
}

#define CEILING(name, reads, write, u)                                                                   \
  extern "C" __global__ void name##_##u(const uint4* a, const uint4* b, uint4* c, vectors n) {           \
    move<reads, write, u>(a, b, c, n);                                                                   \
  }
#define CEILINGS(name, reads, write) \
  CEILING(name, reads, write, 1)     \
  CEILING(name, reads, write, 2)     \
  CEILING(name, reads, write, 4)     \
  CEILING(name, reads, write, 8)

CEILINGS(r, 1, false)
CEILINGS(rw, 1, true)
CEILINGS(rrw, 2, true)
