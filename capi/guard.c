//go:build cgo

/* The fork flag, the last error, option structs, and the begin and end of owning calls. */
#include <ctype.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "_cgo_export.h"

static volatile int forked;

/* Each thread's last error, freed when the thread ends. It is not a _Thread_local array: Go requires the
 * library's thread-local memory to be static, and a library loaded by dlopen gets only a few hundred bytes
 * of static memory. */
static pthread_key_t last_error;
enum { CAPACITY = 2048 };

/* Whether last_error is a key of this library. If the process had none left, it is 0, which is another
 * library's key. */
static int keyed;
static volatile int lost; /* a message could not be stored, because there is no key */

static void in_child(void) { forked = 1; }

__attribute__((constructor)) static void prepare(void) {
  keyed = pthread_key_create(&last_error, free) == 0;
  pthread_atfork(NULL, NULL, in_child);
}

int gander_forked(void) { return forked; }

const char* gander_last_error(void) {
  const char* text = keyed ? pthread_getspecific(last_error) : NULL;
  if (text) return text;
  return lost ? "the message is lost: the process had no thread-local storage key left when it loaded "
                "libgander (pthread_key_create); the status says what kind of error it was; load libgander "
                "before the keys run out"
              : "";
}

/* The thread's buffer of CAPACITY bytes, or NULL if there is no key or no memory. */
static char* error_buffer(void) {
  char* text;
  if (!keyed) {
    lost = 1;
    return NULL;
  }
  text = pthread_getspecific(last_error);
  if (!text) {
    text = calloc(1, CAPACITY);
    if (text && pthread_setspecific(last_error, text)) {
      free(text);
      text = NULL;
    }
  }
  return text;
}

void gander_set_error(const char* message, size_t length) {
  char* text = error_buffer();
  if (!text) return;
  if (length >= CAPACITY) {
    /* Truncate at the start of a UTF-8 character. */
    length = CAPACITY - 1;
    while (length > 0 && ((unsigned char)message[length] & 0xc0) == 0x80) --length;
  }
  memcpy(text, message, length);
  text[length] = '\0';
}

int32_t gander_fail(int32_t status, const char* format, ...) {
  char* text = error_buffer();
  if (text) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, CAPACITY, format, arguments);
    va_end(arguments);
  }
  return status;
}

int32_t gander_fail_fork(const char* function) {
  return gander_fail(GANDER_ERROR_FORK,
                     "%s: called in a child process after fork(), which libgander does not survive; start "
                     "the process by spawn or forkserver, or load libgander only in the child",
                     function);
}

/* Refuses an option struct for a field of its head. */
static int32_t refuse_options(const char* function, const char* field, uint32_t found, const char* expected) {
  char name[64]; /* in capitals */
  size_t length = 0;
  for (; function[length] && length < sizeof name - 1; ++length) {
    name[length] = (char)toupper((unsigned char)function[length]);
  }
  name[length] = '\0';
  return gander_fail(GANDER_ERROR_OPTION,
                     "%s: options.%s is %u, expected %s; begin the struct with %s_OPTIONS_DEFAULTS", function,
                     field, (unsigned)found, expected, name);
}

const void* gander_read_options(const char* function, const gander_head* given, const gander_head* defaults,
                                void* room, int32_t* status) {
  const size_t known = defaults->size;
  if (!given) return defaults;
  if (given->magic != GANDER_OPTIONS_MAGIC) {
    *status = refuse_options(function, "magic", given->magic, "GANDER_OPTIONS_MAGIC");
    return defaults;
  }
  /* No version has more than 4096 bytes. */
  if (given->size < sizeof *given || given->size % 8 != 0 || given->size > 4096) {
    char expected[16];
    snprintf(expected, sizeof expected, "%u", (unsigned)defaults->size);
    *status = refuse_options(function, "size", given->size, expected);
    return defaults;
  }
  if (given->size < known) {
    memcpy(room, defaults, known);
    memcpy(room, given, given->size);
    return room;
  }
  for (size_t i = known; i < given->size; ++i) {
    if (((const char*)given)[i]) {
      *status = gander_fail(GANDER_ERROR_OPTION,
                            "%s: options: byte %zu is set, beyond the %zu that this version knows, expected "
                            "zeros there; leave newer fields zero or load a newer libgander",
                            function, i, known);
      break;
    }
  }
  return given;
}

int32_t gander_begin(const char* function, int32_t status, const gander_head* options,
                     const gander_input* inputs, size_t count, DLManagedTensorVersioned** const* outputs,
                     size_t output_count) {
  const char* wrong = NULL;
  for (size_t i = 0; i < output_count; ++i) {
    if (!outputs[i]) continue;
    /* A slot in the struct would be written before the struct's own tensors are read. */
    if ((uintptr_t)outputs[i] - (uintptr_t)options < options->size) {
      wrong = "a slot of an output is in the option struct, expected a variable of its own";
      continue;
    }
    *outputs[i] = NULL;
    for (size_t j = 0; j < i; ++j) {
      if (outputs[j] == outputs[i]) wrong = "two outputs have the same slot, expected a variable for each";
    }
  }
  if (gander_forked()) return gander_fail_fork(function);
  if (status) return status;
  if (wrong) return gander_fail(GANDER_ERROR_OPTION, "%s: %s", function, wrong);
  for (size_t i = 0; i < count; ++i) {
    const DLManagedTensorVersioned* m = inputs[i].tensor;
    if (m && m->version.major != DLPACK_MAJOR_VERSION) {
      return gander_fail(GANDER_ERROR_VERSION,
                         "%s: %s is a DLPack tensor of version %u.%u, expected %d.x; "
                         "ask its producer for version %d",
                         function, inputs[i].name, (unsigned)m->version.major, (unsigned)m->version.minor,
                         DLPACK_MAJOR_VERSION, DLPACK_MAJOR_VERSION);
    }
  }
  return GANDER_OK;
}

int32_t gander_end(const gander_input* inputs, size_t count, int32_t status) {
  /* A deleter may call the library, and fail. The message that remains is this call's. */
  char* text = status != GANDER_OK && keyed ? pthread_getspecific(last_error) : NULL;
  char message[CAPACITY];
  if (text) strcpy(message, text);
  for (size_t i = 0; i < count; ++i) {
    DLManagedTensorVersioned* m = inputs[i].tensor;
    /* A tensor that is passed as two inputs must be deleted only once. */
    for (size_t j = 0; j < i; ++j) {
      if (inputs[j].tensor == inputs[i].tensor) m = NULL;
    }
    if (m && m->deleter) m->deleter(m);
  }
  if (text) strcpy(text, message);
  return status;
}

void gander_delete_cuda(DLManagedTensorVersioned* m) {
  /* A forked child cannot use CUDA. The memory belongs to the parent. */
  if (!gander_forked()) ganderFreeOutput(m->dl_tensor.device.device_id, (uintptr_t)m->dl_tensor.data);
  free(m);
}

void* gander_call_allocator(const gander_allocator* allocator, size_t bytes) {
  return allocator->allocate(allocator->context, bytes);
}
