/* Tensors that break DLPack's own rules, in every place of every function, alone and in pairs:
 * malformed_test HEADER  No function may look at such a tensor before it has checked it. Each must refuse the
 * call, name the operand, and write nothing. */
#include "functions.h"

typedef struct {
  const char* what;
  void (*spoil)(block* b);
} malformation;

static void without_shape(block* b, int32_t ndim) {
  b->managed.dl_tensor.ndim = ndim;
  b->managed.dl_tensor.shape = NULL;
}
static void shape_1(block* b) { without_shape(b, 1); }
static void shape_2(block* b) { without_shape(b, 2); }
static void shape_3(block* b) { without_shape(b, 3); }
static void shape_64(block* b) { without_shape(b, 64); }
static void shape_and_strides(block* b) {
  without_shape(b, 2);
  b->managed.dl_tensor.strides = NULL;
}
static void data(block* b) { b->managed.dl_tensor.data = NULL; }
static void data_of_rows(block* b) { /* of a weight of shape (M, N), which is that of heads */
  b->managed.dl_tensor.ndim = 2;
  b->shape[0] = M, b->shape[1] = N;
  b->strides[0] = N, b->strides[1] = 1;
  b->managed.dl_tensor.data = NULL;
}
static void first_negative(block* b) { b->shape[0] = -1; }
static void last_negative(block* b) { b->shape[b->managed.dl_tensor.ndim - 1] = INT64_MIN; }
static void both_negative(block* b) {
  b->managed.dl_tensor.ndim = 2;
  b->shape[0] = b->shape[1] = -2;
}
static void empty_and_negative(block* b) {
  b->managed.dl_tensor.ndim = 2;
  b->shape[0] = 0, b->shape[1] = -1;
}
static void rank_negative(block* b) { b->managed.dl_tensor.ndim = -1; }
static void rank_least(block* b) { b->managed.dl_tensor.ndim = INT32_MIN; }
static void rank_large(block* b) { b->managed.dl_tensor.ndim = 65; }
static void rank_most(block* b) { b->managed.dl_tensor.ndim = INT32_MAX; }
static void size_most(block* b) { b->shape[0] = INT64_MAX; }
static void sizes_most(block* b) {
  b->managed.dl_tensor.ndim = 2;
  b->shape[0] = b->shape[1] = INT64_MAX;
  b->managed.dl_tensor.strides = NULL;
}
static void stride_most(block* b) {
  b->shape[0] = 2;
  b->strides[0] = INT64_MAX;
}
static void stride_least(block* b) {
  b->shape[0] = 2;
  b->strides[0] = INT64_MIN;
}
static void offset_most(block* b) { b->managed.dl_tensor.byte_offset = UINT64_MAX; }
static void no_bits(block* b) { b->managed.dl_tensor.dtype.bits = 0; }
static void no_lanes(block* b) { b->managed.dl_tensor.dtype.lanes = 0; }
static void most_lanes(block* b) { b->managed.dl_tensor.dtype.lanes = UINT16_MAX; }
static void unknown_code(block* b) { b->managed.dl_tensor.dtype.code = 255; }
static void unknown_device(block* b) { b->managed.dl_tensor.device.device_type = (DLDeviceType)0; }

static const malformation malformations[] = {
    {"shape NULL, ndim 1", shape_1},
    {"shape NULL, ndim 2", shape_2},
    {"shape NULL, ndim 3", shape_3},
    {"shape NULL, ndim 64", shape_64},
    {"shape and strides NULL", shape_and_strides},
    {"data NULL", data},
    {"data NULL, shape (M, N)", data_of_rows},
    {"a negative first size", first_negative},
    {"a negative last size", last_negative},
    {"two negative sizes", both_negative},
    {"a negative size after 0", empty_and_negative},
    {"ndim -1", rank_negative},
    {"ndim INT32_MIN", rank_least},
    {"ndim 65", rank_large},
    {"ndim INT32_MAX", rank_most},
    {"a size of INT64_MAX", size_most},
    {"two sizes of INT64_MAX", sizes_most},
    {"a stride of INT64_MAX", stride_most},
    {"a stride of INT64_MIN", stride_least},
    {"byte_offset UINT64_MAX", offset_most},
    {"a dtype of no bits", no_bits},
    {"a dtype of no lanes", no_lanes},
    {"a dtype of 65535 lanes", most_lanes},
    {"a dtype of no known code", unknown_code},
    {"a device of no known type", unknown_device},
};
enum { MALFORMATIONS = sizeof malformations / sizeof *malformations };

/* Calls f with operand i, and j unless it is i, malformed. */
static void call_malformed(const function* f, const void* options, int i, const malformation* a, int j,
                           const malformation* b) {
  static float before[MOST_OPERANDS][8 * N];
  call c;
  CHECK(prepare(&c, f, NOTHING, 0));
  c.a.options = options;
  for (const int* at = (const int[]){i, j, -1}; *at >= 0; ++at) {
    if (!c.a.operands[*at]) c.a.operands[*at] = &fill_vector(&c.blocks[*at], 1)->managed; /* optional */
  }
  for (int k = 0; k < MOST_OPERANDS; ++k) memcpy(before[k], c.blocks[k].data, sizeof before[k]);
  a->spoil(&c.blocks[i]);
  if (i != j) b->spoil(&c.blocks[j]);
  const int32_t status = f->call(&c.a);
  char of_i[64], of_j[64];
  snprintf(of_i, sizeof of_i, ": %s ", f->names[i]);
  snprintf(of_j, sizeof of_j, ": %s ", f->names[j]);
  /* With options there may be more to refuse: a mean has one loss. */
  const int named = options || strstr(gander_last_error(), of_i) || strstr(gander_last_error(), of_j);
  if (status == GANDER_OK || status == GANDER_ERROR_INTERNAL || !named) {
    fprintf(stderr, "%s: %s has %s, %s has %s: status %d\n  %s\n", f->name, f->names[i], a->what, f->names[j],
            b->what, (int)status, gander_last_error());
    exit(1);
  }
  for (int k = 0; k < MOST_OPERANDS; ++k) {
    CHECK(memcmp(before[k], c.blocks[k].data, sizeof before[k]) == 0);
    CHECK(c.blocks[k].deleted == (f->outputs && c.a.operands[k]));
  }
  for (int k = 0; k < f->outputs; ++k) CHECK(c.made[k] == NULL);
}

int main(int argc, char** argv) {
  CHECK(argc == 2);
  check_functions(argv[1]);
  for (const function* f = functions; f < functions + FUNCTIONS; ++f) {
    const void* const options[] = {NULL, f->set_options};
    const int count = (int)strlen(f->operands);
    int calls = 0;
    for (int o = 0; o < 2; ++o)
      for (int i = 0; i < count; ++i)
        for (int j = i; j < count; ++j)
          for (int a = 0; a < MALFORMATIONS; ++a)
            for (int b = 0; b < (i == j ? 1 : MALFORMATIONS); ++b, ++calls)
              call_malformed(f, options[o], i, &malformations[a], j, &malformations[b]);
    printf("ok  %s: %d calls\n", f->name, calls);
    fflush(stdout);
  }
  return 0;
}
