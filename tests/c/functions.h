/* All functions of gander.h that have a stream, with the same signature, and faulty calls of them. */
#ifndef FUNCTIONS_H
#define FUNCTIONS_H

#include <ctype.h>

#include "tensors.h"

/* The types that functions_gen.h uses, which is generated from the table of operators. */
#define TYPES_OF_FUNCTIONS \
  typedef struct { \
    DLManagedTensorVersioned* operands[MOST_OPERANDS]; /* in the order of the parameters; can be NULL */ \
    DLManagedTensorVersioned** outputs[MOST_OUTPUTS];  /* of an owning function */ \
    const void* options; \
    void* stream; \
  } arguments; \
  static inline DLTensor* borrowed(const arguments* a, int i) { \
    return a->operands[i] ? &a->operands[i]->dl_tensor : NULL; \
  } \
  typedef struct { \
    const char* name; \
    int32_t (*call)(const arguments*); \
    /* A letter for each: m (M, N), b a mask of (M, N), n (N), r (M), s (M) or 1, t targets (M), u targets \
     * (N), 1 one element, q heads (M, 1, N), w a table (M, N / 2), i an index, c two of them, g (M, 3), o \
     * bools (M), l int64 (M), P (8, N), G (N, 3), O bools (N), L int64 (N), - NULL. */ \
    const char* operands; \
    const char* places;       /* of operands, then of outputs: p a parameter, o in the option struct */ \
    int outputs;              /* 0 if tensors are borrowed */ \
    const void* wrong_option; /* NULL if no option has invalid values */ \
    const void* set_options;  /* every flag is set, and there is a reduction */ \
    const char* names[MOST_OPERANDS]; \
  } function;
#include "functions_gen.h"
enum { FUNCTIONS = sizeof functions / sizeof *functions };

/* Faults of a call, or of one of its operands. */
typedef enum {
  NOTHING,
  NO_ROWS,
  OPTIONS,
  OPTION,
  SLOT,
  MISSING,
  RANK,
  NO_COLUMNS,
  LENGTH,
  DTYPE,
  DEVICE,
  MIXED,
  LAYOUT,
  ALIGNMENT,
  VERSION,
  FAULTS
} fault;
static const char* const fault_names[FAULTS] = {
    "nothing wrong",      "no rows, at address 16", "options of zeros",
    "value of an option", "NULL for output",        "no operand",
    "rank 0 of operand",  "no columns in operand",  "length of operand",
    "dtype of operand",   "device type of operand", "device of operand",
    "stride of operand",  "alignment of operand",   "DLPack version of operand"};

typedef struct {
  block blocks[MOST_OPERANDS];
  DLManagedTensorVersioned* made[MOST_OUTPUTS];
  arguments a;
} call;

/* Prepares a call with a fault of one operand or output. Returns whether that fault is possible. */
static inline int prepare(call* c, const function* f, fault wrong, int at) {
  static const size_t unset[64];
  int count = (int)strlen(f->operands), places = wrong == SLOT ? f->outputs : wrong < SLOT ? 1 : count;
  if (wrong == OPTION && !f->wrong_option) return 0;
  if (wrong == NO_ROWS && strchr(f->operands, 'u')) return 0; /* m and P are numbers of each row, not rows */
  if (at >= places || (wrong > SLOT && f->operands[at] == '-') || (wrong == VERSION && !f->outputs)) return 0;
  memset(c, 0, sizeof *c);
  for (int i = 0; i < count; ++i) {
    block* b = &c->blocks[i];
    switch (f->operands[i]) {
      case 'm':
      case 'e':
      case 'b': fill(b); break;
      case 'q': fill_heads(b); break;
      case 'w':
      case 'h': fill(b)->shape[1] = N / 2; break;
      case 'n': fill_vector(b, N); break;
      case 'r':
      case 's': fill_vector(b, M); break;
      case 't': fill_targets(b, M); break;
      case 'u': fill_targets(b, N); break;
      case 'i': fill_targets(b, 1); break;
      case 'c': fill_targets(b, 2); break;
      case '1': fill_vector(b, 1); break;
      case 'P': fill(b)->shape[0] = 8; break;
      case 'g':
      case 'G':
        fill(b)->shape[0] = f->operands[i] == 'g' ? M : N;
        b->shape[1] = b->strides[0] = 3;
        break;
      case 'l': fill_targets(b, M)->managed.dl_tensor.dtype.bits = 64; break;
      case 'L': fill_targets(b, N)->managed.dl_tensor.dtype.bits = 64; break;
      case 'o':
      case 'O':
        fill_vector(b, f->operands[i] == 'o' ? M : N);
        b->managed.dl_tensor.dtype = (DLDataType){kDLBool, 8, 1};
        break;
      default: continue;
    }
    c->a.operands[i] = &b->managed;
    if (wrong == NO_ROWS && !strchr("nu1ic", f->operands[i])) { /* valid: the address is not used */
      b->shape[0] = 0;
      b->managed.dl_tensor.data = (void*)16;
    }
  }
  for (int i = 0; i < f->outputs; ++i) {
    c->made[i] = &c->blocks[0].managed; /* must be overwritten */
    c->a.outputs[i] = &c->made[i];
  }
  DLTensor* t = &c->blocks[at].managed.dl_tensor;
  switch (wrong) {
    case NOTHING:
    case NO_ROWS: break;
    case OPTIONS: c->a.options = unset; break;
    case OPTION: c->a.options = f->wrong_option; break;
    case SLOT: c->a.outputs[at] = NULL; break;
    case MISSING: c->a.operands[at] = NULL; break;
    case RANK: t->ndim = 0; break;
    case NO_COLUMNS: t->shape[t->ndim - 1] = 0; break;
    case LENGTH: t->shape[t->ndim - 1] += 1; break;
    case DTYPE: t->dtype.bits = t->dtype.bits == 8 ? 16 : 8; break;
    case DEVICE: t->device.device_type = kDLMetal; break;
    case MIXED: t->device = (DLDevice){kDLCUDA, 1 << 20}; break; /* no machine has so many devices */
    case LAYOUT: t->strides[t->ndim - 1] = 2; break;
    case ALIGNMENT: t->byte_offset = 2; break;
    case VERSION: c->blocks[at].managed.version.major = DLPACK_MAJOR_VERSION + 1; break;
    case FAULTS: break;
  }
  return 1;
}

/* Whether a call must be refused. Some operands can be NULL, a scalar, or have any stride. */
static inline int must_fail(const function* f, fault wrong, int at) {
  switch (wrong) {
    case NOTHING:
    case NO_ROWS: return 0;
    case SLOT: return at == 0 && f->places[strlen(f->operands)] == 'p';
    case MISSING: return at == 0;
    case RANK: return !strchr("s1b", f->operands[at]);
    case LENGTH: { /* any number of columns is valid if no other operand has columns */
      size_t others = 0;
      for (const char* p = f->operands; *p; ++p) others += strchr("mhnu", *p) != NULL;
      return f->operands[at] != 'm' || others > 1;
    }
    case ALIGNMENT: return !strchr("oO", f->operands[at]);
    case LAYOUT: return strchr("mehbqwP", f->operands[at]) != NULL;
    default: return 1;
  }
}

/* Whether a call sees an operand or an output: what is in options of zeros, which are refused, it does not.
 */
static inline int is_seen(const function* f, fault wrong, int i) {
  return wrong != OPTIONS || f->places[i] == 'p';
}

/* Checks the results of a call and releases its outputs. */
static inline void check_and_release(const call* c, const function* f, fault wrong, int at, int32_t status) {
  const int count = (int)strlen(f->operands);
  if (wrong <= NO_ROWS) CHECK(status == GANDER_OK);
  if (must_fail(f, wrong, at)) CHECK(status != GANDER_OK && status != GANDER_ERROR_INTERNAL);
  for (int i = 0; i < count; ++i) {
    CHECK(c->blocks[i].deleted == (f->outputs && c->a.operands[i] && is_seen(f, wrong, i)));
  }
  for (int i = 0; i < f->outputs; ++i) {
    if (!c->a.outputs[i] || !is_seen(f, wrong, count + i)) continue;
    CHECK((c->made[i] != NULL) == (status == GANDER_OK));
    if (c->made[i]) c->made[i]->deleter(c->made[i]);
  }
}

/* Calls `with` with the name of each function in the header that has a stream. */
static inline int each_declared(const char* header, void (*with)(const char* name)) {
  static char text[1 << 20];
  FILE* file = fopen(header, "r");
  size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
  int found = 0;
  CHECK(file && length > 0 && feof(file));
  fclose(file);
  for (char *end, *begin = text; (begin = strstr(begin, "/*")) && (end = strstr(begin, "*/"));) {
    memset(begin, ' ', (size_t)(end + 2 - begin));
  }
  for (char* begin = text; (begin = strstr(begin, "\n#"));) { /* directives, whose lines a \ continues */
    for (++begin; *begin && (*begin != '\n' || begin[-1] == '\\'); ++begin) {
      if (*begin != '\\') *begin = ' ';
    }
  }
  for (char* statement = strtok(text, ";"); statement; statement = strtok(NULL, ";")) {
    char *end = strchr(statement, '('), *name = end;
    if (!end || !strstr(end, "stream")) continue;
    while (name > statement && (isalnum((unsigned char)name[-1]) || name[-1] == '_')) --name;
    *end = '\0';
    with(name);
    ++found;
  }
  return found;
}

/* Checks that the header and the table have the same functions. */
static inline void check_is_listed(const char* name) {
  for (int i = 0; i < FUNCTIONS; ++i) {
    if (strcmp(functions[i].name, name) == 0) return;
  }
  fprintf(stderr, "%s has no entry in functions.h\n", name);
  exit(1);
}

static inline void check_functions(const char* header) {
  CHECK(each_declared(header, check_is_listed) == FUNCTIONS);
}

#endif
