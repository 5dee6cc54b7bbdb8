/* gander.h is valid C99, and needs no other header. Its option structs have no padding, and begin with their
 * size. */
#include "gander.h"

#include "layout_gen.h"

#define FIELD(type, name, at) typedef char type##_##name##_is_at_##at[offsetof(type, name) == (at) ? 1 : -1];
OPTION_FIELDS(FIELD)

int main(void) {
#define STRUCT(type, bytes, initializer) \
  { \
    const type options = initializer; \
    if (sizeof options != (bytes) || options.size != (bytes) || options.magic != GANDER_OPTIONS_MAGIC) \
      return 1; \
  }
  OPTION_STRUCTS(STRUCT)
  return gander_abi_version() == GANDER_ABI_VERSION ? 0 : 1;
}
