//go:build cgo

/* Functions that do not run an op. */
#include "internal.h"
#include "_cgo_export.h"

const char* gander_version(void) { return GANDER_VERSION; }

int32_t gander_abi_version(void) { return GANDER_ABI_VERSION; }

const char* gander_build_info(void) {
  static const char* volatile known;
  if (!known) {
    if (gander_forked()) {
      gander_fail_fork(__func__);
      return "{}";
    }
    known = ganderBuildInfo();
  }
  return known;
}

int32_t gander_warmup(DLDevice device) {
  GANDER_ENTER();
  return ganderWarmup((int32_t)device.device_type, device.device_id);
}

int32_t gander_explain(const char* op, int64_t m, int64_t n, DLDataType dtype, DLDevice device,
                       int32_t algorithm, int32_t batch_invariant, char* text, size_t capacity) {
  GANDER_ENTER();
  return ganderExplain((void*)op, m, n, dtype.code, dtype.bits, dtype.lanes, (int32_t)device.device_type,
                       device.device_id, algorithm, batch_invariant, text, capacity);
}

int32_t gander_explain_device(const char* op, int64_t m, int64_t n, DLDataType dtype, const char* device,
                              int32_t algorithm, int32_t batch_invariant, char* text, size_t capacity) {
  GANDER_ENTER();
  return ganderExplainDevice((void*)op, m, n, dtype.code, dtype.bits, dtype.lanes, (void*)device, algorithm,
                             batch_invariant, text, capacity);
}

int32_t gander_explain_heads(const char* op, int64_t tokens, int64_t heads, int64_t n, DLDataType dtype,
                             DLDevice device, const char* name, char* text, size_t capacity) {
  GANDER_ENTER();
  return ganderExplainHeads((void*)op, tokens, heads, n, dtype.code, dtype.bits, dtype.lanes,
                            (int32_t)device.device_type, device.device_id, (void*)name, text, capacity);
}

int32_t gander_algorithms(const char* op, char* text, size_t capacity) {
  GANDER_ENTER();
  return ganderAlgorithms((void*)op, text, capacity);
}
