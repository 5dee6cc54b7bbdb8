/* Checks that refused calls of owning functions leak nothing: leak_test HEADER  If the leak sanitizer is
 * linked, it checks after each call for memory without references. It covers what the library allocates
 * for C (outputs, messages), but not Go's heap. */
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
        check_and_release(&c, f, wrong, at, status);
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
