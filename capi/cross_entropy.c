//go:build cgo

#include "internal.h"
#include "_cgo_export.h"

int32_t gander_cross_entropy_forward(const DLTensor* x, const DLTensor* target, const DLTensor* weight,
                                     const DLTensor* loss, const DLTensor* lse, const DLTensor* dx,
                                     const DLTensor* denominator, const gander_cross_entropy_options* options,
                                     void* stream) {
  GANDER_ENTER();
  return ganderCrossEntropyForward((void*)x, (void*)target, (void*)weight, (void*)loss, (void*)lse, (void*)dx,
                                   (void*)denominator, (void*)options, stream);
}

int32_t gander_cross_entropy_backward(const DLTensor* x, const DLTensor* target, const DLTensor* weight,
                                      const DLTensor* dloss, const DLTensor* lse, const DLTensor* denominator,
                                      const DLTensor* dx, const gander_cross_entropy_options* options, void* stream) {
  GANDER_ENTER();
  return ganderCrossEntropyBackward((void*)x, (void*)target, (void*)weight, (void*)dloss, (void*)lse,
                                    (void*)denominator, (void*)dx, (void*)options, stream);
}

int32_t gander_cross_entropy(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                             DLManagedTensorVersioned* weight, const gander_cross_entropy_options* options,
                             void* stream, DLManagedTensorVersioned** loss, DLManagedTensorVersioned** lse,
                             DLManagedTensorVersioned** dx) {
  const gander_input inputs[] = {{"x", x}, {"target", target}, {"weight", weight}};
  DLManagedTensorVersioned** const outputs[] = {loss, lse, dx};
  int32_t status = gander_begin(__func__, inputs, 3, outputs, 3);
  if (status == GANDER_OK) {
    status = ganderCrossEntropy(gander_tensor(x), gander_tensor(target), gander_tensor(weight), (void*)options, stream,
                                loss, lse, dx);
  }
  return gander_end(inputs, 3, status);
}

int32_t gander_cross_entropy_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* target,
                                  DLManagedTensorVersioned* weight, DLManagedTensorVersioned* dloss,
                                  DLManagedTensorVersioned* lse, const gander_cross_entropy_options* options,
                                  void* stream, DLManagedTensorVersioned** dx) {
  const gander_input inputs[] = {{"x", x}, {"target", target}, {"weight", weight}, {"dloss", dloss}, {"lse", lse}};
  DLManagedTensorVersioned** const outputs[] = {dx};
  int32_t status = gander_begin(__func__, inputs, 5, outputs, 1);
  if (status == GANDER_OK) {
    status = ganderCrossEntropyGrad(gander_tensor(x), gander_tensor(target), gander_tensor(weight),
                                    gander_tensor(dloss), gander_tensor(lse), (void*)options, stream, dx);
  }
  return gander_end(inputs, 5, status);
}
