/* gander.h is valid C99, and needs no other header. */
#include "gander.h"

int main(void) { return gander_abi_version() == GANDER_ABI_VERSION ? 0 : 1; }
