/* gander.h is C99 and needs nothing before it. */
#include "gander.h"

int main(void) { return gander_abi_version() == GANDER_ABI_VERSION ? 0 : 1; }
