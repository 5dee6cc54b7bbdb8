#!/usr/bin/env bash
# Runs gander's tasks by name; ./build.sh help lists them. A task builds what it needs and skips what is up to
# date.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")"

umask g-w,o-w # programs are run from the cache, so only this user may write there

readonly ROOT=$PWD
readonly CACHE=${XDG_CACHE_HOME:-$HOME/.cache}/gander
VENV=$ROOT/.venv                         # Python packages, from requirements.txt
readonly STATE=$ROOT/.build              # this checkout's stamps, logs and temporary files
readonly IMPORTS=$ROOT/python:$ROOT/bench # gander and gander_bench, for PYTHONPATH

# after FILE WORDS: prints the rest of the line that begins with these words. It needs no other program.
after() {
  local line
  while read -r line; do
    [[ $line != "$2"* ]] || printf '%s' "${line#"$2"}"
  done <"$1"
}

# gander's version, and the number in the library's name and SONAME. A folder without sources has neither.
VERSION='' ABI=''
if [[ -f capi/gander.h ]]; then
  VERSION=$(after python/gander/info.py '__version__ = ')
  VERSION=${VERSION//\"/}
  ABI=$(after capi/gander.h '#define GANDER_ABI_VERSION ')
fi
readonly VERSION ABI
readonly LIBRARY=python/gander/lib/libgander.so.$ABI
readonly KERNEL=python/gander/_torch/libgander_torch.so # the kernels' registration with PyTorch
readonly HANDLERS=python/gander/jax/libgander_jax.so    # XLA's calls of the operators
readonly DEFAULT_ARCHS="sm_90 compute_80 compute_90"
readonly WHEEL_ARCHS="sm_80 sm_86 sm_89 sm_90 sm_100 sm_120 compute_80 compute_90"
readonly SOURCES="capi cmd dlpack internal kernels ops python"
readonly GLIBC=2.28                      # the oldest glibc for wheels; and so in their names

# Bytecode lies in .build, also where the environment forbids to write any: without it, each process of the
# tests compiles torch's sources again, which takes longer than what most of them test.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$STATE/bytecode}

# The checks of `test`: two sequences that run in parallel.
readonly GO_LANE="gofmt vet staticcheck portable simd nocgo race generated spills sass exports c
  gomodule install emulated80"
readonly PYTHON_LANE="ruff clangformat types docs pytest hf jax notorch cinstall emulated"

task_help() {
  cat <<'TEXT'
usage: ./build.sh TASK [ARGUMENT...]

  build      compile the kernels and the library into python/gander
  install    install the library, its headers, and files for pkg-config and CMake: `install PREFIX`
  demo       show this machine, check and time each op, and train a small language model with gander
  test       run all checks that need no GPU, with a sample of the cases of tests that have many;
             `test --all` runs all cases, as CI does; `test NAME...` runs only these checks
  test-torch run a sample of tests/python with other releases of torch: `test-torch 2.11.0`, `oldest`;
             python/gander/_torch/fast.py lists the releases that are tested, and `test` runs the newest
  bench      measure host overhead, load time and throughput, next to torch and torch.compile;
             `bench train` trains a Llama with torch, torch.compile, Liger and gander
  notebook   run notebooks/compare_torch_compile.ipynb on this machine, and keep its outputs
  docs       fill in the figures of README.md and docs/, and build the site in .build/site
  gpu-test   run tests/gpu; if the library is already built, needs only Python, torch and pytest, and is
             several times faster with pytest-xdist
  wheel      build a manylinux wheel in dist/, for all architectures or for those of GANDER_ARCHS
  sdist      pack the tracked files in dist/, from which pip builds
  env        print shell commands: eval "$(./build.sh env)" prepares for `go build -tags cuda ./...`
  clean      remove what was built in this checkout; `clean --cache` also removes the toolchain and the
             compiled kernels
  help       print this text

The machine needs Python 3.10 or newer with venv, gcc and g++. The rest comes from package registries.

  GANDER_ARCHS        architectures to compile for (sm_90 compute_80 compute_90): sm_XY is machine code,
                      compute_XY PTX
  GANDER_PYTHON       the Python interpreter for the tasks. That of a virtual environment is used as it is, if
                      it has the packages of requirements.txt; another one makes .venv
  GANDER_TEST         `all`: tests run all their cases, those of go test and pytest too
  GANDER_TRUST_CACHE  if 1, use the cache even if another user owns it or may write to it (containers)
  XDG_CACHE_HOME      where the toolchain and the compiled kernels are kept (~/.cache)
TEXT
}

# ---- Messages ----

say() { printf '%s\n' "$*" >&2; }

die() {
  say "build.sh: $*"
  exit 1
}

# seconds_since START: prints the seconds since START, an EPOCHREALTIME, with one decimal.
seconds_since() {
  local tenths=$(((${EPOCHREALTIME//[.,]/} - ${1//[.,]/}) / 100000))
  printf '%d.%d' $((tenths / 10)) $((tenths % 10))
}

# step TEXT COMMAND...: runs the command and prints TEXT before it, and TEXT with the seconds after it. In the
# main shell it is a background job, or it would go on after that was killed.
step() {
  local text=$1 start=$EPOCHREALTIME
  say "-> $text"
  if ((BASH_SUBSHELL == 0)); then
    background "${@:2}" >&2
    wait "${JOBS[-1]}"
  else
    "${@:2}" >&2
  fi
  say "   $text: $(seconds_since "$start") s"
}

# background COMMAND...: starts the command in its own process group. The EXIT trap kills the group if it
# still runs.
JOBS=()
background() {
  set -m
  "$@" </dev/null &
  JOBS+=($!)
  set +m
}
trap 'for job in "${JOBS[@]}"; do kill -- "-$job" 2>/dev/null || true; done' EXIT

# ---- Digests and stamps ----

# digest WORD...: prints one digest of the words, and of names and content of the files listed on standard
# input.
digest() {
  { printf '%s\n' "$@"; LC_ALL=C sort | xargs -r -d '\n' sha256sum; } | sha256sum | cut -d' ' -f1
}

# current NAME DIGEST: succeeds if stamp NAME contains DIGEST.
current() { [[ -f $STATE/$1 && $(<"$STATE/$1") == "$2" ]]; }

# stamp NAME DIGEST: writes stamp NAME.
stamp() {
  mkdir -p "$STATE"
  printf '%s\n' "$2" >"$STATE/$1"
}

# ---- Python ----

# base_python: prints the interpreter from which virtual environments are made.
base_python() {
  local python=${GANDER_PYTHON:-python3}
  command -v "$python" >/dev/null || die "no $python on PATH: install Python 3.10 or newer"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$("$python" --version) is too old: set GANDER_PYTHON to Python 3.10 or newer"
  printf '%s' "$python"
}

make_venv() { # FOLDER
  local python
  python=$(base_python)
  "$python" -m venv --clear "$1" || die "$python cannot make a virtual environment: install its venv module"
}

# pip_install PYTHON ARGUMENT...: installs packages, each of which must have a hash in the lock file.
pip_install() {
  "$1" -m pip install --quiet --no-input --disable-pip-version-check --no-compile --require-hashes "${@:2}"
}

# given_venv: takes the virtual environment of GANDER_PYTHON in place of .venv, if it names one.
given_venv() {
  local is_venv='import sys; print(sys.prefix if sys.prefix != sys.base_prefix else "")' prefix
  [[ -n ${GANDER_PYTHON:-} ]] || return 0
  prefix=$("$GANDER_PYTHON" -c "$is_venv") || die "GANDER_PYTHON=$GANDER_PYTHON does not run"
  [[ -n $prefix ]] || return 0
  "$prefix/bin/python" -c 'import pip' || die "GANDER_PYTHON=$GANDER_PYTHON has no pip: install it there"
  VENV=$prefix GIVEN=1
  export PYTHONPATH=$IMPORTS${PYTHONPATH:+:$PYTHONPATH}
}

# has_pip: succeeds if .venv, or what stands for it, has pip.
has_pip() { "$VENV/bin/python" -c 'import pip' 2>/dev/null; }

# bare_venv: makes .venv, without packages, if it does not exist. An unfinished one of build.sh is made again.
# Another environment without pip, such as one of uv, is left as it is.
bare_venv() {
  ! has_pip || return 0
  [[ ! -e $VENV ]] || current venv "$VENV" ||
    die "the virtual environment $VENV has no pip, and build.sh has not made it: install pip there" \
      "(uv pip install pip), or move it, or set GANDER_PYTHON to another one"
  stamp venv "$VENV"
  step "a virtual environment in .venv" make_venv "$VENV"
}

# fill_venv: installs the packages, and a path file that makes .venv import gander and gander_bench from this
# checkout.
fill_venv() {
  local site
  pip_install "$VENV/bin/python" -r requirements.txt
  site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$ROOT/python" "$ROOT/bench" >"$site/gander.pth"
}

# packages: fills .venv if its packages are not those of requirements.txt, or its path file has other paths.
packages() {
  local want
  if [[ -n ${GIVEN:-} ]]; then
    want=$(pip_install "$VENV/bin/python" --dry-run --no-deps --no-index -r requirements.txt 2>&1) ||
      die "GANDER_PYTHON=$GANDER_PYTHON lacks packages of requirements.txt:"$'\n'"$want"
    return
  fi
  want=$(ls requirements.txt | digest "$IMPORTS" "$("$VENV/bin/python" --version)")
  [[ -f $VENV/digest && $(<"$VENV/digest") == "$want" ]] && return
  step "torch and the other Python packages into .venv" fill_venv
  printf '%s\n' "$want" >"$VENV/digest"
}

# ---- The cache ----

# usable_paths: refuses paths with characters that Go's tools, nvcc, PATH or PYTHONPATH cannot handle. Spaces
# work.
usable_paths() {
  local path
  for path in "$ROOT" "$CACHE"; do
    case $path in
      *[[:cntrl:]\"\'\`\\\$:\;\&\|\<\>\(\)\{\}\[\]\*\?\#]*)
        die "Go's tools and PATH do not take the path ${path@Q}: rename or move that folder" \
          "(XDG_CACHE_HOME moves the cache), so that it has no quotes, no brackets and none of" \
          "\\ \$ : ; & | < > * ? #"
        ;;
      [!/]*) die "XDG_CACHE_HOME is '${path%/gander}': set it to a path that begins with /" ;;
    esac
  done
}

# trusted_cache: refuses a cache that anyone but this user or root can change, because programs are run from
# it.
trusted_cache() {
  local found
  [[ ${GANDER_TRUST_CACHE:-} != 1 ]] || return 0
  mkdir -p "$CACHE"
  found=$(find -L "$CACHE" -ignore_readdir_race \
    ! -type l \( -perm /022 -o ! -user "$EUID" ! -user 0 \) -print -quit)
  [[ -z $found ]] || die "another user may change $found ($(stat -L -c '%A, owner %U' "$found"))," \
    "and the programs in $CACHE are run. Remove it, or make it yours alone (chown -R, chmod -R go-w)," \
    "or set GANDER_TRUST_CACHE=1 to use the cache as it is."
}

# unpacked LOCK: prints the folder in the cache that holds the packages of a lock file, and fills it first if
# needed. It must run in a subshell, because it sets traps.
unpacked() {
  local folder fresh lock
  folder=$CACHE/$(basename "$1" .txt)-$(sha256sum <"$1" | cut -c1-16)
  if [[ ! -d $folder ]]; then
    mkdir -p "$CACHE"
    exec {lock}>"$CACHE/lock"
    flock --nonblock "$lock" || { say "waiting for another build that fills $CACHE" && flock "$lock"; }
    rm -rf "$CACHE"/.new-* # left by killed processes: a running one would hold the lock
    if [[ ! -d $folder ]]; then
      fresh=$(mktemp -d "$CACHE/.new-XXXXXX")
      trap "rm -rf ${fresh@Q}" EXIT
      trap 'exit 129' HUP # by default SIGHUP ends a subshell without its EXIT trap
      step "$1 into the cache" pip_install "$VENV/bin/python" --no-deps --target "$fresh" -r "$1"
      mv -T "$fresh" "$folder"
    fi
    exec {lock}>&-
  fi
  printf '%s' "$folder"
}

# ---- Compilers ----

has_go() { [[ $(GOTOOLCHAIN=local go version 2>/dev/null) == *" go1.26"[.\ ]* ]]; }

# machine: refuses a machine that lacks what no package registry has.
machine() {
  local tool missing='' python
  [[ $(uname -sm) == "Linux x86_64" ]] || die "gander builds on Linux x86_64, not on $(uname -sm)"
  for tool in gcc g++; do
    command -v $tool >/dev/null || missing+="${missing:+ and no }$tool"
  done
  [[ -z $missing ]] || die "no $missing on PATH: install the C and C++ compilers, for example with" \
    "apt-get install gcc g++ (Debian, Ubuntu) or dnf install gcc gcc-c++ (Fedora, Red Hat)"
  [[ $(gcc -dumpmachine) != *musl* ]] || die "gcc compiles for $(gcc -dumpmachine), expected glibc:" \
    "Go's shared libraries do not start with musl; build on a system with glibc (Debian, Fedora, ...)"
  usable_paths
  trusted_cache
  given_venv
  ! has_pip || return 0
  python=$(base_python)
  "$python" -c 'import ensurepip, venv' 2>/dev/null || die "$python has no venv module: install it, for" \
    "example with apt-get install python3-venv (Debian, Ubuntu), or set GANDER_PYTHON to another Python"
}

# compilers: sets up the environment for Go and cgo with CUDA's headers. Sets NVCC to CUDA's compiler; CUDA's
# other tools are in the same folder.
compilers() {
  local tree
  machine
  bare_venv
  if ! has_go; then
    tree=$(unpacked requirements-go.txt)
    export PATH=$tree/go/bin:$PATH
    unset GOROOT
  fi
  tree=$(unpacked requirements-toolchain.txt)
  NVCC=$tree/nvidia/cu13/bin/nvcc
  # gorgonia.org/cu was written for CUDA 11.8. The driver's ABI is compatible. -w suppresses warnings in that
  # package.
  export GOTOOLCHAIN=local GOEXPERIMENT=simd CGO_ENABLED=1 GOFLAGS=-buildvcs=false
  export CGO_CFLAGS="-O2 '-I$tree/nvidia/cuda_runtime/include' -w" # Go reads the quotes
}

task_env() {
  compilers
  printf 'export %s=%q\n' PATH "$PATH" GOTOOLCHAIN "$GOTOOLCHAIN" GOEXPERIMENT "$GOEXPERIMENT" CGO_ENABLED 1 \
    GOFLAGS -tags=cuda CGO_CFLAGS "$CGO_CFLAGS" PYTHONPATH "$IMPORTS"
}

# ---- The library ----

# kernels ARCHS [OPTION...]: compiles the kernels. kernels/images then holds the images of these architectures
# and no others.
kernels() {
  mkdir -p "$STATE"
  go build -trimpath -o "$STATE/compile" ./internal/cmd/compile # so that copies share Go's cache
  "$STATE/compile" -nvcc "$NVCC" -cache "$CACHE/objects" -archs "$1" -out kernels/images "${@:2}" \
    kernels/cuda/*_gen.cu
}

# commit: prints the commit of the checkout, with -dirty if tracked files have changed. An sdist has it in the
# file COMMIT. The repository of a folder around this one says nothing about it.
commit() {
  local inside id changed
  if inside=$(git rev-parse --show-prefix 2>/dev/null) && [[ -z $inside ]] &&
    id=$(git rev-parse --verify --quiet HEAD); then
    changed=$(git status --porcelain --untracked-files=no)
    printf '%s' "$id${changed:+-dirty}"
  elif [[ -f COMMIT ]]; then
    printf '%s' "$(<COMMIT)"
  else
    printf unknown
  fi
}

nvcc_version() { "$NVCC" --version | sed -n 's/.*, V//p'; }

# library CC PACKAGE [VERSION]: builds libgander.so.ABI from Go. From C builds libgander_torch.so, which
# registers the operators with PyTorch, and libgander_jax.so, through which XLA calls them. Puts what C and
# C++ need beside them. VERSION is that of a wheel.
#
# Every copy of the library, in a wheel or installed, has the same SONAME. By it a loader finds the one that
# the process has: two copies would be two Go runtimes.
library() {
  mkdir -p "$2/lib" "$2/_torch" "$2/jax"
  local linker="'-Wl,--version-script=$ROOT/capi/exports_gen.map' -Wl,-soname,libgander.so.$ABI" facts
  facts="-X main.commit=$(commit) -X main.nvcc=$(nvcc_version) -X main.wheel=${3:-}"
  CC="'$1'" go build -buildmode=c-shared -tags cuda,netgo,osusergo -trimpath \
    -ldflags "-s -w -buildid= -B=none $facts -extldflags \"$linker\"" -o "$2/lib/libgander.so.$ABI" ./capi
  rm -f "$2/lib/libgander.so.h" # the header is capi/gander.h
  development "$2"
  local source
  for source in _torch/c/kernels _torch/c/fast jax/c/handlers; do
    "$1" -std=gnu11 -O2 -fPIC -fexceptions -fvisibility=hidden -Wall -Wextra -Werror -I capi -I dlpack \
      -I python/gander/_native/c -c -o "$STATE/${source##*/}.o" "python/gander/$source.c"
  done
  "$1" -shared -o "$2/_torch/libgander_torch.so" "$STATE/kernels.o" "$STATE/fast.o" -ldl -lpthread
  "$1" -shared -o "$2/jax/libgander_jax.so" "$STATE/handlers.o" -ldl -lpthread
}

# development PREFIX: writes the headers, and the files by which pkg-config and CMake find them and the
# library.
development() {
  local template out
  mkdir -p "$1/include" "$1/lib/pkgconfig" "$1/lib/cmake/gander"
  cp capi/gander.h dlpack/dlpack.h "$1/include"
  for template in capi/gander*.in; do
    out=$(basename "$template" .in)
    case $out in
      *.pc) out=pkgconfig/$out ;;
      *) out=cmake/gander/$out ;;
    esac
    sed -e "s/@VERSION@/$VERSION/g" -e "s/@ABI@/$ABI/g" "$template" >"$1/lib/$out"
  done
}

library_sources() {
  find capi dlpack kernels ops internal/driver internal/policy internal/sizes python/gander/*/c \
    go.mod go.sum -type f ! -name '*_test.go'
}

# compiled: builds the kernels and the library if they are not up to date.
compiled() {
  local archs=${GANDER_ARCHS:-$DEFAULT_ARCHS} want
  step "kernels for $archs" kernels "$archs"
  want=$(library_sources | digest "$(go version)" "$(commit)" "$(nvcc_version)" "$(sha256sum <build.sh)")
  [[ -f $LIBRARY && -f $KERNEL && -f $HANDLERS ]] && current library "$want" && return
  step "the library" library gcc python/gander
  stamp library "$want"
}

# built: builds everything. The packages are installed during compilation: one waits for the network, the
# other uses the cores.
built() {
  compilers
  background packages
  local packages=${JOBS[-1]}
  compiled
  wait "$packages"
}

# install_to PREFIX: copies what `compiled` made for C and C++. The library's file has gander's version in its
# name. Linkers look for libgander.so, programs for its SONAME.
install_to() {
  local from=python/gander
  install -d -m 755 "$1/include" "$1/lib/pkgconfig" "$1/lib/cmake/gander"
  install -m 644 $from/include/* "$1/include"
  sed -e '/^# By its SONAME/d' -e 's/-l:libgander.so.*/-lgander/' $from/lib/pkgconfig/gander.pc |
    install -m 644 /dev/stdin "$1/lib/pkgconfig/gander.pc"
  install -m 644 $from/lib/cmake/gander/* "$1/lib/cmake/gander"
  install -m 755 "$LIBRARY" "$1/lib/libgander.so.$VERSION"
  ln -sf "libgander.so.$VERSION" "$1/lib/libgander.so.$ABI"
  ln -sf "libgander.so.$ABI" "$1/lib/libgander.so"
}

task_install() {
  (($# == 1)) || die "install got $# arguments, expected the folder to install to, for example" \
    "./build.sh install \"\$HOME/.local\""
  [[ $1 == /* ]] || die "install got the folder '$1': give a path that begins with /"
  compilers
  compiled
  install_to "$1"
  say "installed libgander.so.$ABI and its headers in $1; pkg-config finds them with" \
    "PKG_CONFIG_PATH=$1/lib/pkgconfig, CMake with -DCMAKE_PREFIX_PATH=$1"
}

task_build() {
  built
  say "built $LIBRARY ($(du -h $LIBRARY | cut -f1)); .venv/bin/python imports gander"
}

# runnable: sets PYTHON to an interpreter that can import gander and gander_bench. If the library was copied
# here already built, as to a GPU host, it installs nothing and expects torch to be there.
runnable() {
  if [[ -f $LIBRARY && -f $KERNEL && (-n ${GANDER_PYTHON:-} || ! -d $VENV) ]]; then
    PYTHON=${GANDER_PYTHON:-python3}
  else
    built
    PYTHON=$VENV/bin/python
  fi
  export PYTHONPATH=$IMPORTS${PYTHONPATH:+:$PYTHONPATH}
}

task_demo() {
  runnable
  exec "$PYTHON" -m gander_bench demo "$@"
}

# more_packages NAME WHAT: adds to .venv what requirements-NAME.txt has. Another interpreter is left as it is.
more_packages() {
  local want
  [[ $PYTHON == "$VENV/bin/python" && -z ${GIVEN:-} ]] || return 0
  want=$(ls requirements.txt "requirements-$1.txt" | digest "$("$PYTHON" --version)")
  [[ -f $VENV/$1-digest && $(<"$VENV/$1-digest") == "$want" ]] && return
  step "$2 into .venv" pip_install "$PYTHON" -r "requirements-$1.txt"
  printf '%s\n' "$want" >"$VENV/$1-digest"
}

task_bench() {
  runnable
  [[ ${1:-} != train ]] || more_packages train "transformers and Liger"
  exec "$PYTHON" -m gander_bench bench "$@"
}

task_notebook() {
  runnable
  exec "$PYTHON" -c 'from nbclient.cli import main; main()' --inplace --timeout=-1 \
    notebooks/compare_torch_compile.ipynb "$@"
}

task_gpu-test() {
  runnable
  local distribute=()
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then distribute=(-n auto --maxschedchunk 1); fi
  exec "$PYTHON" -m pytest "${distribute[@]}" tests/gpu "$@"
}

# ---- Checks ----

check_gofmt() {
  local files
  files=$(find . -name '*.go' -not -path './.*' -print0 | xargs -0 gofmt -l)
  [[ -z $files ]] || die "not formatted by gofmt:"$'\n'"$files"
}

check_vet() {
  GOEXPERIMENT='' go vet ./...
  go vet -tags cuda ./...
}

check_staticcheck() {
  local tool=(go tool "-modfile=$ROOT/internal/tools/go.mod" staticcheck)
  GOEXPERIMENT='' "${tool[@]}" ./...
  "${tool[@]}" -tags cuda ./...
}

go_test() { go test -v -timeout 30m "$@" | grep -v '^=== '; }

# The planner is a pure function of its arguments. One run of its tests, which take long, is enough, and they
# could find no race.
readonly PLANNER='Plans|TestEvery|TestAlgorithmsAreWhatTheySay'

check_portable() { GOEXPERIMENT='' CGO_CFLAGS='' go_test -skip "$PLANNER" ./...; }

check_simd() { go_test -tags cuda ./...; }

check_nocgo() {
  export CGO_ENABLED=0
  go vet ./dlpack/... ./ops/...
  go_test -skip "$PLANNER" ./dlpack/... ./ops/...
}

# A sample of the cases: what they compute is the other checks' matter.
check_race() { GANDER_TEST='' go_test -race -skip "$PLANNER" -tags cuda ./...; }

# Generated files must be what their generators write. They run in a copy, so that the checkout does not
# change.
check_generated() {
  local copy=$STATE/generated here there
  rm -rf "$copy"
  mkdir -p "$copy"
  git ls-files -z -- $SOURCES tests go.mod go.sum requirements-toolchain.txt |
    tar -c --null -T - | tar -x -C "$copy"
  (cd "$copy" && go generate ./...)
  here=$(git ls-files -z -- "${GENERATED[@]}" | digests)
  there=$(cd "$copy" && find $SOURCES tests \( -name '*_gen.*' -o -path capi/gander.h \) -print0 | digests)
  [[ -n $there ]] || die "no generated file was found"
  diff <(printf '%s' "$here") <(printf '%s' "$there") || die "run go generate ./... and commit what it wrote"
  rm -rf "$copy"
}

# Parts of gander.h are generated too.
readonly GENERATED=(':(glob)**/*_gen.*' capi/gander.h)

# digests: prints a digest and the name of each file of a list.
digests() { LC_ALL=C sort -z | xargs -0 -r sha256sum; }

# internal/cmd/compile reads ptxas' report of every kernel, also of cached ones, and refuses spills and stack
# frames. It prints how many kernels each image has, the bytes of their machine code, and how long they took.
check_spills() { kernels "${GANDER_ARCHS:-$DEFAULT_ARCHS}" -costs; }

check_sass() { go run ./internal/cmd/checksass "${NVCC%/*}" kernels/images; }

check_exports() { exports "$LIBRARY"; }

exports() { go run ./internal/cmd/checklib "$1" capi/gander.h; }

check_c() { sh tests/c/run.sh "$LIBRARY" capi dlpack; }

# Builds the examples with an installed library and with that of a wheel, and loads both in one process.
check_cinstall() {
  local folder=$STATE/cinstall
  rm -rf "$folder"
  mkdir -p "$folder"
  install_to "$folder/installed"
  backend 'backend.pack("python/gander", sys.argv[1], backend.VERSION, backend.PLATFORM)' "$folder"
  "$VENV/bin/python" -m zipfile -e "$folder"/*.whl "$folder/wheel"
  CINSTALL=$folder CUDA=${NVCC%/bin/nvcc} OMP_WAIT_POLICY=passive \
    "$VENV/bin/python" -m pytest tests/c -n 2 --timeout 300
}

# Builds a program of another module with and without CUDA, as docs/go.md says. Its gander has the files that
# git tracks, as Go's module cache has, so it has no compiled kernels. The headers are downloaded once, into
# .build. An empty variable is to Go as if it were not set.
check_gomodule() (
  headers=$STATE/gomodule way="go run $MODULE/cmd/cudaenv" folder=$(mktemp -d)
  trap "rm -rf ${folder@Q}" EXIT
  mkdir "$folder/gander" "$folder/program"
  git ls-files -z | tar -c --null -T - | tar -x -C "$folder/gander"
  cp tests/gomodule/main.go "$folder/program"
  cd "$folder/program"
  export GOCACHE=$(go env GOCACHE) XDG_CACHE_HOME=$headers GANDER_PYTHON=$VENV/bin/python
  export GOFLAGS='' GOEXPERIMENT='' CGO_ENABLED='' CGO_CFLAGS=''
  go mod init example.org/program
  go mod edit -replace "$MODULE=$folder/gander"
  go mod tidy

  go build -o host .
  ./host "$ROOT/kernels/images" host
  ! go build -o cuda -tags cuda . 2>failure || die "the program was built without CUDA's headers"
  grep -F "$way" failure || die "the error does not name $way:"$'\n'"$(<failure)"
  eval "$($way)"
  [[ $CGO_CFLAGS == *"'-I$headers/"* ]] || die "$way has not downloaded the headers: CGO_CFLAGS=$CGO_CFLAGS"
  go build -o cuda -tags cuda .
  ./cuda "$ROOT/kernels/images" cuda
)
readonly MODULE=github.com/gander-go/gander

check_ruff() {
  "$VENV/bin/ruff" check --output-format concise .
  "$VENV/bin/ruff" format --check .
}

# C and CUDA, but not generated and vendored files, nor the macros of Go's assembler.
check_clangformat() {
  git ls-files -z -- '*.c' '*.h' '*.cuh' '*.cpp' \
    ':!*_gen.*' ':!dlpack/dlpack.h' ':!capi/gander.h' ':!kernels/cpu' |
    xargs -0 "$VENV/bin/clang-format" --dry-run --Werror
}

# Type-checks README's first example that needs no package besides torch, and calls of every function. torch's
# own functions have no annotations.
check_types() {
  local folder=$STATE/types
  mkdir -p "$folder"
  awk '/^```python$/ { on = 1; text = ""; next }
    /^```$/ && on { on = 0; if (text !~ /from transformers/) { printf "%s", text; exit } }
    on { text = text $0 "\n" }' README.md >"$folder/readme.py"
  MYPYPATH=python "$VENV/bin/mypy" --strict --untyped-calls-exclude torch --follow-imports silent \
    --cache-dir "$folder/cache" "$folder/readme.py" tests/types/calls.py
  "$VENV/bin/pyright" --pythonpath "$VENV/bin/python" --project tests/types
}

# The figures of the pages are those of the table and of the records, and the site builds.
check_docs() {
  "$VENV/bin/python" internal/site/fill.py --check
  site "$STATE/test/site"
}

# site FOLDER: builds the site of docs/ there. Warnings are errors.
site() {
  local tools
  tools=$(unpacked requirements-docs.txt)
  NO_MKDOCS_2_WARNING=1 PYTHONPATH=$tools:$IMPORTS:$ROOT/internal/site \
    "$VENV/bin/python" -m mkdocs --quiet build --strict --site-dir "$1"
}

# Two workers share two cores, so OpenMP's threads must not spin while they wait.
check_pytest() { OMP_WAIT_POLICY=passive "$VENV/bin/python" -m pytest tests/python -n 2 --timeout 600; }

# gander.hf and gander.rl with the packages that they adapt to; of verl and OpenRLHF with their files alone.
check_hf() {
  local files
  PYTHON=$VENV/bin/python
  more_packages hf "transformers, accelerate, PEFT and TRL"
  files=$(unpacked requirements-rl.txt)
  GANDER_TEST_RL=$files OMP_NUM_THREADS=1 "$PYTHON" -m pytest tests/hf -n 2 --timeout 600
}

# gander.jax with jax, on two devices that are the CPU: the oldest that it takes, which is the last for Python
# 3.11, and the newest, in an environment of its own with Python 3.12 and without torch.
check_jax() {
  local newest=$STATE/jax python
  PYTHON=$VENV/bin/python
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "this is $("$PYTHON" --version), for which there is no jax that gander.jax takes: set GANDER_PYTHON" \
      "to Python 3.11 or newer"
  more_packages jax "jax"
  "$PYTHON" -m pytest tests/jax -n 2 --timeout 600
  if ! python=$(python312); then
    say "--- SKIP: tests/jax with the newest jax: no python3.12 with venv, on PATH or of pyenv" # for tally
    return
  fi
  step "the newest jax into .build/jax" jax_venv "$newest" "$python"
  # A sample: all cases have just run with the other one.
  GANDER_TEST='' "$newest/bin/python" -m pytest tests/jax -n 2 --timeout 600
}

# python312: prints a Python 3.12 that can make virtual environments, or fails. pyenv's python3.12 on PATH
# runs only where it was chosen.
python312() {
  local python
  for python in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
    if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
      printf '%s' "$python"
      return
    fi
  done
  return 1
}

# jax_venv FOLDER PYTHON: makes an environment with jax and pytest.
jax_venv() {
  local want
  want=$(ls requirements-jax.txt | digest "$1" "$("$2" --version)")
  [[ -f $1/digest && $(<"$1/digest") == "$want" ]] && return
  GANDER_PYTHON=$2 make_venv "$1"
  pip_install "$1/bin/python" -r requirements-jax.txt
  printf '%s\n' "$want" >"$1/digest"
}

# Run operators on emulated devices: with clusters and without, and with too little shared memory for some
# kernels, where only those that the planner chooses run.
check_emulated() {
  emulate 900 900
  emulate 900 1200 -k test_policy
}
check_emulated80() {
  emulate 800 800
  emulate 800 860 -k test_policy
}

# emulate ARCH DEVICE [PYTEST OPTIONS]: the libcuda.so.1 lies in a folder that no other check sees.
emulate() {
  local folder=$STATE/emulator-$1
  mkdir -p "$folder"
  "$VENV/bin/python" tests/emulator/build.py "$folder" "${NVCC%/bin/nvcc}/include" "$1" "$CACHE/emulator"
  LD_LIBRARY_PATH=$folder GANDER_TUNE=row PYTHONPATH=python EMULATED_DEVICE=$2 \
    "$VENV/bin/python" -m pytest tests/emulator -n 2 --timeout 600 "${@:3}"
}

# torch_venv FOLDER VERSION: makes an environment with .venv's packages and another torch. There is no lock
# file for that torch and its dependencies.
torch_venv() {
  local lock=$STATE/without-torch.txt want
  awk '/^[^ ]/ { on = !/^(torch|triton|nvidia-.*|cuda-.*)==/ } on' requirements.txt >"$lock"
  want=$(digest "$1" "$2" "$("$VENV/bin/python" --version)" <<<"$lock")
  [[ -f $1/digest && $(<"$1/digest") == "$want" ]] && return
  make_venv "$1"
  pip_install "$1/bin/python" --no-deps -r "$lock"
  "$1/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --no-compile "torch==$2"
  printf '%s\n' "$want" >"$1/digest"
}

task_test-torch() {
  local version folder tested
  read -ra tested < <(sed -n 's/^TESTED = (\(.*\))$/\1/p' python/gander/_torch/fast.py | tr -d '",')
  (($# > 0)) || die "test-torch needs a release of torch, or 'oldest'; ${tested[*]} are tested"
  built
  for version in "${@/#oldest/${tested[0]}}"; do
    folder=$STATE/torch-$version
    step "torch $version into .build/torch-$version" torch_venv "$folder" "$version"
    # Not what no release of torch changes: measurements and how they are shown, and builds. Nor Inductor for
    # each collective, which takes longest: it compiles what lies around them, as in other tests.
    step "tests/python with torch $version" env OMP_WAIT_POLICY=passive PYTHONPATH="$IMPORTS" \
      "$folder/bin/python" -m pytest tests/python -n 2 --timeout 600 -q -k 'not (distributed and inductor)' \
      --ignore-glob='*/test_bench*.py' --ignore-glob='*/test_notebook.py' --ignore-glob='*/test_build.py'
  done
}

# numpy_venv FOLDER: makes an environment with NumPy alone, from the same lock file.
numpy_venv() {
  local lock=$STATE/numpy.txt want
  awk '/^[^ ]/ { on = /^numpy==/ } on' requirements.txt >"$lock"
  want=$(digest "$1" "$("$VENV/bin/python" --version)" <<<"$lock")
  [[ -f $1/digest && $(<"$1/digest") == "$want" ]] && return
  make_venv "$1"
  pip_install "$1/bin/python" -r "$lock"
  printf '%s\n' "$want" >"$1/digest"
}

readonly TRY_NUMPY='
import importlib.util
import pathlib
import gander
import numpy as np

assert importlib.util.find_spec("torch") is None, "this environment is meant to have no torch"
assert (pathlib.Path(gander.get_include()) / "gander.h").is_file()
assert (pathlib.Path(gander.cmake_prefix_path) / "lib/cmake/gander/gander-config.cmake").is_file()
x = np.arange(12, dtype=np.float32).reshape(3, 4)
y = gander.softmax(x)
assert type(y) is np.ndarray, f"NumPy in, {type(y)} out"
np.testing.assert_allclose(y, np.exp(x) / np.exp(x).sum(1, keepdims=True), rtol=1e-6)
for name in "nn", "distributed":
    assert name in dir(gander)
    try:
        getattr(gander, name)
    except ImportError as error:
        assert str(error) == f"gander.{name} needs torch, which is not installed: pip install torch", error
    else:
        raise AssertionError(f"gander.{name} was imported without torch")
try:
    import gander.jax
except ImportError as error:
    assert str(error).startswith("gander.jax needs jax, which is not installed: pip install"), error
else:
    raise AssertionError("gander.jax was imported without jax")
folder = pathlib.Path(gander.__file__).parent
for library in "_torch/libgander_torch.so", "jax/libgander_jax.so":
    assert (folder / library).is_file(), library
'

check_notorch() {
  numpy_venv "$STATE/numpy"
  PYTHONPATH=python "$STATE/numpy/bin/python" -c "$TRY_NUMPY"
  PYTHONPATH=python "$STATE/numpy/bin/python" -m gander check
  PYTHONPATH=python "$STATE/numpy/bin/python" examples/training_step_numpy.py
}

# pip_install_of VENV OPTION...: pip builds and installs gander for sm_90, whose kernels other checks compile
# too. It neither takes a wheel from pip's cache nor leaves one there.
pip_install_of() {
  GANDER_ARCHS=sm_90 elsewhere "$1/bin/python" -m pip install --verbose --no-input --no-cache-dir --no-deps \
    --disable-pip-version-check --force-reinstall "${@:2}"
}

# Installs gander as users do: from a git checkout, which that does not change; as an editable one; and by
# name, from an sdist.
check_install() {
  local folder=$STATE/install tree=$STATE/install/checkout changed
  rm -rf "$folder"
  mkdir -p "$tree"
  git ls-files -z | tar -c --null -T - | tar -x -C "$tree"
  git -C "$tree" init --quiet
  git -C "$tree" add --all
  numpy_venv "$folder/venv"

  pip_install_of "$folder/venv" "$tree" 2>&1 | tee "$folder/pip.log"
  grep -q -e '-> kernels for sm_90' "$folder/pip.log" || die "pip -v does not show the steps of build.sh"
  changed=$(git -C "$tree" ls-files --others --modified --deleted) # with what .gitignore has
  [[ -z $changed ]] || die "pip install changed the checkout:"$'\n'"$changed"
  try_install "$VERSION+sm90" unknown "$folder/venv"
  elsewhere "$folder/venv/bin/python" -m gander check

  pip_install_of "$folder/venv" --editable "$tree"
  try_install "$VERSION" unknown "$tree"

  backend 'backend.build_sdist(sys.argv[1])' "$folder"
  GANDER_PYTHON=$VENV/bin/python pip_install_of "$folder/venv" \
    --no-binary gander-kernels --find-links "$folder" "gander-kernels==$VERSION"
  try_install "$VERSION" "$(commit)" "$folder/venv"
  same_elsewhere "$folder" "$tree"
}

# same_elsewhere FOLDER TREE: makes the sdist, and the libraries that pip has built from it, again in another
# folder. tests/python/test_backend.py has the archive around them.
same_elsewhere() {
  commit >"$2/COMMIT"
  mkdir "$1/again"
  (cd "$2" && backend 'backend.build_sdist(sys.argv[1])' "$1/again")
  cmp "$1/again"/*.tar.gz "$1"/*.tar.gz
  GANDER_ARCHS=sm_90 GANDER_PYTHON=$VENV/bin/python \
    "$BASH" "$2/build.sh" --libraries "$1/again/gander" "$VERSION"
  (cd "$1/again/gander" && find . -type f -exec sha256sum {} +) |
    (cd "$1"/venv/lib/python*/site-packages/gander && sha256sum --check --quiet) ||
    die "the libraries differ from those that the same commit gave in another folder"
}

# try_install VERSION COMMIT FOLDER: tries what is installed. Its version and commit have to be these, and its
# modules have to lie in the folder.
try_install() { elsewhere "$STATE/install/venv/bin/python" -c "$TRY_NUMPY$TRY_VERSION$TRY_INSTALL" "$@"; }

readonly TRY_INSTALL='
import sys

found = installed, gander.info()["commit"], gander.__file__
assert found[:2] == (sys.argv[1], sys.argv[2]) and found[2].startswith(sys.argv[3]), (found, sys.argv)
'

# lane NAME...: runs checks one after the other, each in its own process, and stores their results.
lane() {
  local name start log
  for name in "$@"; do
    start=$EPOCHREALTIME
    log=$STATE/test/$name
    if "$BASH" ./build.sh --check "$name" >"$log.log" 2>&1; then
      tally "$log" >"$log.result"
      say "ok      $name: $(seconds_since "$start") s"
    else
      tally "$log" failed >"$log.result"
      say "FAILED  $name: $(seconds_since "$start") s"
      grep -vE '^ *--- PASS|^ok |^PASS$|no test files' "$log.log" | tail -n 80 | sed 's/^/    /' >&2 || true
    fi
  done
}

# tally LOG [failed]: prints how many tests of a check passed, failed and were skipped. A check without tests
# counts as one test.
tally() {
  local passed failed skipped
  passed=$(count "$1.log" '^--- PASS' ' passed')
  failed=$(count "$1.log" '^--- FAIL' ' failed')
  skipped=$(count "$1.log" '^--- SKIP' ' skipped')
  if [[ $# -gt 1 ]]; then
    ((failed > 0)) || failed=1
  elif ((passed + skipped == 0)); then
    passed=1
  fi
  printf '%d %d %d\n' "$passed" "$failed" "$skipped"
}

# count FILE GO PYTEST: counts the lines that match GO, and adds the number before PYTEST in the last line of
# each run of pytest.
count() {
  awk -v go="$2" -v pytest="[0-9]+$3" '
    $0 ~ go { n++ }
    / in [0-9.]+s/ && match($0, pytest) { n += substr($0, RSTART) }
    END { print n + 0 }' "$1"
}

# summary NAME...: prints the totals. It fails if a check failed or has no result.
summary() {
  local name passed=0 failed=0 skipped=0 p f s
  for name in "$@"; do
    [[ -s $STATE/test/$name.result ]] || die "check $name did not run to its end"
    read -r p f s <"$STATE/test/$name.result"
    ((f == 0)) || say "FAILED  $name; its whole output is in .build/test/$name.log"
    ((p + f > 0)) || die "check $name skipped all $s of its tests; see .build/test/$name.log"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  done
  ((skipped == 0)) || say "$skipped skipped; the logs in .build/test say why"
  say "$passed passed, $failed failed"
  ((failed == 0))
}

# prepare NAME...: makes what these checks need: Go alone, the Python packages, or the library as well.
prepare() {
  local name needs=''
  for name in "$@"; do
    case $name in
      gofmt | generated) ;;
      ruff | clangformat | types) needs=${needs:-packages} ;;
      *) needs=library ;;
    esac
  done
  case $needs in
    library) built ;;
    packages) compilers; packages ;;
    *) compilers ;;
  esac
}

task_test() {
  local go=$GO_LANE python=$PYTHON_LANE start=$EPOCHREALTIME
  if [[ ${1:-} == --all ]]; then
    export GANDER_TEST=all
    shift
  fi
  if (($# > 0)); then go="$*" python=''; fi
  prepare $go $python
  rm -rf "$STATE/test"
  mkdir -p "$STATE/test"
  background lane $go
  background lane $python
  wait
  say "everything took $(seconds_since "$start") s"
  summary $go $python
}

# ---- Wheel and clean ----

# backend CODE ARGUMENT...: runs Python code with internal/backend.py, which packs the wheels.
backend() {
  PYTHONPATH=internal${PYTHONPATH:+:$PYTHONPATH} "$VENV/bin/python" -c "import sys, backend; $1" "${@:2}"
}

# Links the library against an old glibc, with kernels for all architectures, and tries the wheel in an empty
# environment, with a wheel of gander_bench that is built for this. A wheel for other architectures says so in
# its version.
task_wheel() {
  local tools stage=$STATE/wheel archs=${GANDER_ARCHS:-$WHEEL_ARCHS} version
  compilers
  tools=$(unpacked requirements-wheel.txt)
  export ZIG_PYTHON=$VENV/bin/python ZIG_GLOBAL_CACHE_DIR=$CACHE/zig GLIBC
  export PYTHONPATH=$tools${PYTHONPATH:+:$PYTHONPATH}
  step "kernels for $archs" kernels "$archs"
  rm -rf "$stage" dist
  mkdir -p "$stage/bench" dist
  cp -R bench/pyproject.toml bench/gander_bench "$stage/bench"
  version=$(backend 'print(backend.version_for(sys.argv[1:]))' ${GANDER_ARCHS:-})
  step "the library for glibc $GLIBC" library "$ROOT/internal/cmd/zigcc.sh" "$stage" "$version"
  exports "$stage/lib/libgander.so.$ABI"
  step "the wheel" pack "$stage" "$version"
  step "the wheel of gander_bench" pip_wheel "$stage/bench" "$stage"
  step "the wheels in an empty environment" try_wheels "$stage/venv" dist/*.whl "$stage"/*.whl
  say "$(ls dist/*.whl) ($(du -h dist/*.whl | cut -f1))"
}

task_sdist() {
  local tools
  compilers
  tools=$(unpacked requirements-wheel.txt)
  mkdir -p dist
  say "dist/$(PYTHONPATH=$tools backend 'print(backend.build_sdist("dist"))')"
}

# pip_wheel FOLDER OUT: builds the wheel of the package in a folder, with the tools on PYTHONPATH.
pip_wheel() {
  "$VENV/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$2" "$1"
}

# pack FOLDER VERSION: packs the wheel, and checks that its libraries need no newer glibc than its name says.
pack() {
  local report minor
  backend 'backend.pack(*sys.argv[1:])' "$1" dist "$2" "manylinux_${GLIBC/./_}_x86_64"
  report=$("$VENV/bin/python" -m auditwheel show dist/*.whl 2>&1 | tr '\n' ' ')
  minor=$(sed -n 's/.*following platform tag: "manylinux_2_\([0-9]*\)_x86_64".*/\1/p' <<<"$report")
  [[ -n $minor ]] && ((minor <= ${GLIBC#2.})) || die "the wheel does not run on glibc $GLIBC: $report"
}

readonly TRY_BENCH='
from importlib.resources import files
import gander_bench.results

assert (files("gander_bench") / "ceiling.cu").is_file(), "the wheel of gander_bench has no ceiling.cu"
'

readonly TRY_VERSION='
import importlib.metadata
import gander

installed = importlib.metadata.version("gander-kernels")
assert gander.__version__ == gander.info()["version"] == installed, (gander.info(), installed)
'

# try_wheels VENV WHEEL...: installs the wheels in an environment with NumPy alone, and tries them from
# another folder.
try_wheels() {
  numpy_venv "$1"
  "$1/bin/python" -m pip install --quiet --no-input --no-deps --no-index "${@:2}"
  elsewhere "$1/bin/python" -c "$TRY_NUMPY$TRY_VERSION$TRY_BENCH"
  elsewhere "$1/bin/python" -m gander check
}

# elsewhere COMMAND...: runs the command in another folder, and without variables that lead to the checkout.
elsewhere() { (cd / && env --unset PYTHONPATH --unset PYTHONPYCACHEPREFIX "$@"); }

task_docs() {
  built
  step "the figures of the pages" "$VENV/bin/python" internal/site/fill.py
  step "the site" site "$STATE/site"
  say ".build/site/index.html"
}

task_clean() {
  rm -rf "$ROOT/.venv" "$STATE" dist bench/{build,*.egg-info} demo.png
  rm -rf python/gander/{include,lib}
  rm -f python/gander/*/*.so kernels/images/{*.fatbin,SHA256SUMS}
  [[ ${1:-} != --cache ]] || rm -rf "$CACHE"
}

readonly TASK=${1:-help}
case $TASK in
  build | install | demo | test | test-torch | bench | notebook | docs | gpu-test | wheel | sdist | env | \
    clean | help)
    "task_$TASK" "${@:2}"
    ;;
  --check)
    compilers
    "check_$2"
    ;;
  # For internal/backend.py.
  --machine) PYTHONDONTWRITEBYTECODE=1 machine ;; # it runs in checkouts, and leaves nothing there
  --commit) commit ;;
  --numbers) printf '%s %s' "$VERSION" "$ABI" ;;
  --compile) # what `build` does, without packages
    compilers
    compiled
    ;;
  --libraries) # FOLDER VERSION: the libraries of a wheel for this machine
    compilers
    step "kernels for $GANDER_ARCHS" kernels "$GANDER_ARCHS"
    step "the library" library gcc "$2" "$3"
    ;;
  *)
    task_help >&2
    die "there is no task $TASK"
    ;;
esac
