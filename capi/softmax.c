//go:build cgo

#include "internal.h"
#include "_cgo_export.h"

int32_t gander_softmax_forward(const DLTensor* x, const DLTensor* y, const gander_softmax_options* options,
                               void* stream) {
  GANDER_ENTER();
  return ganderSoftmaxForward((void*)x, (void*)y, (void*)options, stream);
}

int32_t gander_softmax_backward(const DLTensor* dy, const DLTensor* y, const DLTensor* dx,
                                const gander_softmax_options* options, void* stream) {
  GANDER_ENTER();
  return ganderSoftmaxBackward((void*)dy, (void*)y, (void*)dx, (void*)options, stream);
}

int32_t gander_softmax(DLManagedTensorVersioned* x, const gander_softmax_options* options, void* stream,
                       DLManagedTensorVersioned** y) {
  const gander_input inputs[] = {{"x", x}};
  DLManagedTensorVersioned** const outputs[] = {y};
  int32_t status = gander_begin(__func__, inputs, 1, outputs, 1);
  if (status == GANDER_OK) status = ganderSoftmax(gander_tensor(x), (void*)options, stream, y);
  return gander_end(inputs, 1, status);
}

int32_t gander_softmax_grad(DLManagedTensorVersioned* dy, DLManagedTensorVersioned* y,
                            const gander_softmax_options* options, void* stream, DLManagedTensorVersioned** dx) {
  const gander_input inputs[] = {{"dy", dy}, {"y", y}};
  DLManagedTensorVersioned** const outputs[] = {dx};
  int32_t status = gander_begin(__func__, inputs, 2, outputs, 1);
  if (status == GANDER_OK) {
    status = ganderSoftmaxGrad(gander_tensor(dy), gander_tensor(y), (void*)options, stream, dx);
  }
  return gander_end(inputs, 2, status);
}
