/* Trains a classifier with gander's cross-entropy as a function of libtorch's autograd. DLPack describes its
 * tensors without a copy. TORCH is the folder of libtorch, or what
 * `python -c 'import torch; print(torch.__path__[0])'` prints. After `./build.sh install PREFIX`:
 *
 *   c++ -std=c++20 libtorch.cpp -ITORCH/include -IPREFIX/include -LTORCH/lib -LPREFIX/lib -ltorch_cpu -lc10 \
 *     -lgander -Wl,-rpath,TORCH/lib -Wl,-rpath,PREFIX/lib -o libtorch && ./libtorch
 */
#include <ATen/DLConvertor.h> /* before gander.h: it has DLPack's structs too, and the first one counts */
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstdio>

#include "gander.h"

/* For tensors on a GPU it is the stream on which libtorch works: at::cuda::getCurrentCUDAStream(). */
void* const stream = nullptr;

DLTensor view(const at::Tensor& t) {
  DLTensor made;
  at::toDLPackNonOwning(t, &made);
  return made;
}

/* The mean loss of rows. Forward also makes the gradient of the logits, for an upstream gradient of 1. */
struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& target) {
    at::Tensor loss = at::empty({}, at::kFloat), dlogits = at::empty_like(logits);
    DLTensor x = view(logits), t = view(target), mean = view(loss), dx = view(dlogits);
    gander_cross_entropy_forward_options options = GANDER_CROSS_ENTROPY_FORWARD_OPTIONS_DEFAULTS;
    options.reduction = GANDER_REDUCTION_MEAN;
    options.one_pass = 1;
    options.dx = &dx;
    TORCH_CHECK(!gander_cross_entropy_forward(&x, &t, &mean, &options, stream), gander_last_error());
    context->save_for_backward({dlogits});
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list upstream) {
    return {context->get_saved_variables()[0] * upstream[0], at::Tensor()};
  }
};

int main() {
  const int M = 64, K = 8, N = 10, STEPS = 30; /* rows, features, classes */
  at::manual_seed(0);
  /* The class of a row is the largest of random linear functions of it, so that it can be learned. */
  at::Tensor features = at::randn({M, K}), target = features.matmul(at::randn({K, N})).argmax(1);
  at::Tensor weights = at::zeros({K, N}).requires_grad_();

  std::printf("gander %s\n", gander_version());
  double first = 0, loss = 0;
  for (int step = 0; step < STEPS; ++step) {
    at::Tensor mean = CrossEntropy::apply(features.matmul(weights), target);
    mean.backward();
    {
      at::NoGradGuard frozen;
      weights -= 2 * weights.grad();
      weights.mutable_grad().reset();
    }
    loss = mean.item<double>();
    if (step == 0) first = loss;
    if (step % 10 == 0 || step == STEPS - 1) std::printf("step %2d: loss %.4f\n", step, loss);
  }
  /* All weights are 0 in the first step, so all classes are equally probable. */
  if (!(std::fabs(first - std::log(N)) < 1e-5) || !(loss < first / 3)) {
    std::printf("wrong: the first loss is %.6f, expected %.6f, and a third of it at the end\n", first,
                std::log(N));
    return 1;
  }
  return 0;
}
