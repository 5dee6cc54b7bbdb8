// gander.h is valid C++17, and its functions have C linkage.
#include "gander.h"

static_assert(sizeof(DLTensor) == 48 && sizeof(DLManagedTensor) == 64 &&
                  sizeof(DLManagedTensorVersioned) == 80,
              "the layout of DLPack 1.x");

int main() { return gander_abi_version() == GANDER_ABI_VERSION ? 0 : 1; }
