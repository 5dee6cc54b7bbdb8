/* Softmax of libtorch's tensors, which DLPack describes without a copy. TORCH is the folder of libtorch, or
 * what `python -c 'import torch; print(torch.__path__[0])'` prints. After `./build.sh install PREFIX`:
 *
 *   c++ -std=c++20 libtorch.cpp -ITORCH/include -IPREFIX/include -LTORCH/lib -LPREFIX/lib -ltorch_cpu -lc10 \
 *     -lgander -Wl,-rpath,TORCH/lib -Wl,-rpath,PREFIX/lib -o libtorch && ./libtorch
 */
#include <ATen/DLConvertor.h> /* before gander.h: it has DLPack's structs too, and the first one counts */
#include <cstdio>

#include "gander.h"

/* x may be on a GPU. `stream` is then that on which libtorch works: at::cuda::getCurrentCUDAStream(). */
at::Tensor softmax(const at::Tensor& x, void* stream = nullptr) {
  at::Tensor y = at::empty_like(x);
  DLTensor in, out;
  at::toDLPackNonOwning(x, &in);
  at::toDLPackNonOwning(y, &out);
  TORCH_CHECK(!gander_softmax_forward(&in, &out, nullptr, stream), gander_last_error());
  return y;
}

int main() {
  at::Tensor x = at::randn({3, 5});
  double error = (softmax(x) - at::softmax(x, 1)).abs().max().item<double>();
  std::printf("gander %s: largest difference from torch's softmax %.1e\n", gander_version(), error);
  return error < 1e-6 ? 0 : 1;
}
