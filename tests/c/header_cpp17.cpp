// gander.h is valid C++17, and its functions have C linkage. Option structs are those of C.
#include "gander.h"

#include "layout_gen.h"

static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64 &&
                  sizeof(DLManagedTensorVersioned) == 80,
              "the layout of DLPack 1.x");

#define FIELD(type, name, at) static_assert(offsetof(type, name) == (at), #name);
OPTION_FIELDS(FIELD)
#define STRUCT(type, bytes, initializer) \
  static_assert(sizeof(type) == (bytes) && type(initializer).size == (bytes), #type);
OPTION_STRUCTS(STRUCT)

int main() { return gander_abi_version() == GANDER_ABI_VERSION ? 0 : 1; }
