/* Every refusal of every owning function leaves nothing behind: leak_test HEADER
 *
 * The leak sanitizer, where it is linked, looks after each call for memory that nothing points to. It sees
 * what the library allocates for C (outputs, messages). Go's own memory is not malloc's. */
#include "functions.h"

int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

int main(int argc, char** argv) {
  CHECK(argc == 2);
  setvbuf(stdout, NULL, _IOLBF, 0);
  check_functions(argv[1]);
  for (const function* f = functions; f < functions + FUNCTIONS; ++f) {
    int refusals = 0;
    for (int wrong = 0; f->outputs && wrong < FAULTS; ++wrong) {
      for (int at = 0; at < MOST_OPERANDS; ++at) {
        call c;
        if (!prepare(&c, f, wrong, at)) continue;
        int32_t status = f->call(&c.a);
        settle(&c, f, wrong, at, status);
        refusals += status != GANDER_OK;
        if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check()) {
          fprintf(stderr, "%s leaks: %s %d, status %d\n", f->name, fault_names[wrong], at, (int)status);
          _Exit(1);
        }
      }
    }
    if (f->outputs) printf("ok  %s: %d refusals\n", f->name, refusals);
  }
  return 0;
}
