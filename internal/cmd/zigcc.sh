#!/bin/sh
# The C compiler for wheels: gcc compiles, zig links against an old glibc. Zig cannot compile as well, because
# gorgonia.org/cu adds -I/usr/include, whose headers belong to this machine's glibc.
for argument; do
  case $argument in
    -c | -E | -S | '-###' | --version) exec gcc "$@" ;;
  esac
done
# gorgonia.org/cu names folders of CUDA that a machine need not have. Zig warns of each, gcc does not.
# Go passes -s, and after it -g. gcc ignores -g when it links. With Zig it undoes -s: the library would have
# debug information of gorgonia.org/cu, which names the folder of CUDA's headers, and differ between machines.
for argument; do
  shift
  case $argument in
    -L?*) [ -d "${argument#-L}" ] || continue ;;
    -g) continue ;;
  esac
  set -- "$@" "$argument"
done
exec "$ZIG_PYTHON" -m ziglang cc -target "x86_64-linux-gnu.$GLIBC" "$@"
