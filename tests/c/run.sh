#!/bin/sh
# Compiles and runs the C tests: run.sh LIBRARY INCLUDE_DIR...
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(cd "$(dirname "$1")" && pwd)
library=$folder/$(basename "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build SOURCE COMPILER...: compile $program, a test, against the library with all warnings as errors
build() {
  source=$1
  program=$work/$(basename "${source%.*}")
  shift
  echo "== $source"
  "$@" "$here/$source" "$library" -Wl,-rpath,"$folder" -lm -pthread -o "$program"
}

check() {
  build "$@"
  "$program"
}

# The arguments become the includes.
header=
for path in "$@"; do
  [ ! -f "$path/gander.h" ] || header=$path/gander.h
  set -- "$@" "-I$path"
  shift
done
version=$(sed -n 's/^__version__ = \(".*"\)$/\1/p' "$here/../../python/gander/info.py")
set -- "$@" -O1 -Wall -Wextra -Werror -pedantic "-DPYTHON_VERSION=$version"
check header_c99.c "${CC:-cc}" -std=c99 "$@"
check header_cpp17.cpp "${CXX:-c++}" -std=c++17 "$@"
check ../../examples/cpu.c "${CC:-cc}" -std=c99 "$@"
check ../../examples/training_step.c "${CC:-cc}" -std=c99 "$@"
check abi_test.c "${CC:-cc}" -std=c99 "$@"
check registers_test.c "${CC:-cc}" -std=c99 "$@"
check memory_test.c "${CC:-cc}" -std=gnu99 -D_GNU_SOURCE "$@"

build malformed_test.c "${CC:-cc}" -std=c99 "$@"
"$program" "$header"

# Go aborts the process at the first error, so each function is tested in a separate process. The last line
# that a process prints is the result, or the call in which it was aborted.
build stack_test.c "${CC:-cc}" -std=c99 "$@"
functions=$("$program" "$header")
failed=0
for function in $functions; do
  if ! "$program" "$header" "$function" >"$work/log" 2>"$work/dump"; then
    failed=1
    head -n 3 "$work/dump"
  fi
  tail -n 1 "$work/log"
done
[ $failed = 0 ]

# The leak sanitizer needs liblsan and ptrace. It is used if it finds the leaks of leaky.c.
leaks=-fsanitize=leak
cat >"$work/leaky.c" <<'END'
#include <stdlib.h>
void* volatile last;
int main(void) { for (int i = 0; i < 9; ++i) last = malloc(9); }
END
if ! { "${CC:-cc}" $leaks "$work/leaky.c" -o "$work/leaky" && "$work/leaky"; } 2>&1 |
  grep -q 'detected memory leaks'; then
  echo "no leak sanitizer here: leak_test.c only counts calls of deleters"
  leaks=
fi
build leak_test.c "${CC:-cc}" -std=c99 $leaks "$@"
"$program" "$header"

echo "== keys_test.c"
"${CC:-cc}" -std=gnu99 "$@" "$here/keys_test.c" -ldl -pthread -o "$work/keys_test"
for free in 0 1 9; do
  "$work/keys_test" "$library" $free
done

echo "== signal_test.c"
"${CC:-cc}" -std=gnu99 "$@" "$here/signal_test.c" -ldl -o "$work/signal_test"
for when in before onstack; do
  "$work/signal_test" "$library" $when
done

echo "== load_test.c"
"${CC:-cc}" -std=gnu99 -O1 -Wall -Wextra -Werror "$here/load_test.c" -ldl -o "$work/load_test"
# As if other libraries had used up the static thread-local memory that glibc reserves for dlopen.
GLIBC_TUNABLES=glibc.rtld.optional_static_tls=0 "$work/load_test" "$library"
