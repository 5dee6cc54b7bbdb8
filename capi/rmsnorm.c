//go:build cgo

#include "internal.h"
#include "_cgo_export.h"

int32_t gander_rmsnorm_forward(const DLTensor* x, const DLTensor* weight, const DLTensor* y, const DLTensor* rstd,
                               const gander_rmsnorm_options* options, void* stream) {
  GANDER_ENTER();
  return ganderRMSNormForward((void*)x, (void*)weight, (void*)y, (void*)rstd, (void*)options, stream);
}

int32_t gander_rmsnorm_backward(const DLTensor* x, const DLTensor* weight, const DLTensor* dout, const DLTensor* rstd,
                                const DLTensor* dx, const DLTensor* dw, const gander_rmsnorm_options* options,
                                void* stream) {
  GANDER_ENTER();
  return ganderRMSNormBackward((void*)x, (void*)weight, (void*)dout, (void*)rstd, (void*)dx, (void*)dw, (void*)options,
                               stream);
}

int32_t gander_rmsnorm(DLManagedTensorVersioned* x, DLManagedTensorVersioned* weight, DLDataType out_dtype,
                       const gander_rmsnorm_options* options, void* stream, DLManagedTensorVersioned** y,
                       DLManagedTensorVersioned** rstd) {
  const gander_input inputs[] = {{"x", x}, {"weight", weight}};
  DLManagedTensorVersioned** const outputs[] = {y, rstd};
  int32_t status = gander_begin(__func__, inputs, 2, outputs, 2);
  if (status == GANDER_OK) {
    status = ganderRMSNorm(gander_tensor(x), gander_tensor(weight), out_dtype.code, out_dtype.bits, out_dtype.lanes,
                           (void*)options, stream, y, rstd);
  }
  return gander_end(inputs, 2, status);
}

int32_t gander_rmsnorm_grad(DLManagedTensorVersioned* x, DLManagedTensorVersioned* weight,
                            DLManagedTensorVersioned* dout, DLManagedTensorVersioned* rstd,
                            const gander_rmsnorm_options* options, void* stream, DLManagedTensorVersioned** dx,
                            DLManagedTensorVersioned** dw) {
  const gander_input inputs[] = {{"x", x}, {"weight", weight}, {"dout", dout}, {"rstd", rstd}};
  DLManagedTensorVersioned** const outputs[] = {dx, dw};
  int32_t status = gander_begin(__func__, inputs, 4, outputs, 2);
  if (status == GANDER_OK) {
    status = ganderRMSNormGrad(gander_tensor(x), gander_tensor(weight), gander_tensor(dout), gander_tensor(rstd),
                               (void*)options, stream, dx, dw);
  }
  return gander_end(inputs, 4, status);
}
