#!/bin/sh
# Installs what the build needs of the system: a compiler, Python's headers, and on Linux clang and
# the libraries of the simulated Metal device. Does nothing when all is there.
# Usage: system_packages.sh PYTHON
set -eu
python=$1

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

if [ "$(uname)" = Darwin ]; then
  xcode-select -p >/dev/null 2>&1 || fail "the command-line tools are missing: xcode-select --install"
elif ! have apt-get; then
  say "Not a Debian or Ubuntu system: system packages are yours to install (see README.md)"
else
  if [ "$(id -u)" = 0 ]; then as_root=; else as_root=sudo; fi
  is_listed=false

  install() {
    [ -n "$as_root" ] && ! have sudo && fail "run as root, or install: $*"
    say "Installing system packages: $*"
    $is_listed || $as_root apt-get update -qq
    is_listed=true
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
  }

  have "$python" || install python3
  have g++ || install g++
  missing=
  for package in "libobjc-$(gcc -dumpversion | cut -d. -f1)-dev" libblocksruntime-dev \
      libboost-context-dev ccache; do
    dpkg -s "$package" >/dev/null 2>&1 || missing="$missing $package"
  done
  "$python" -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
  "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
    missing="$missing python3-dev"
  # shellcheck disable=SC2086  # a list of words
  [ -z "$missing" ] || install $missing

  # Any of these will do; the first is the one the tests are run with most.
  versions='19 18 17 20 21'
  found=
  for version in $versions; do have "clang++-$version" && found=$version && break; done
  if [ -z "$found" ]; then
    $is_listed || $as_root apt-get update -qq
    is_listed=true
    for version in $versions; do
      apt-cache show "clang-$version" >/dev/null 2>&1 && found=$version && break
    done
    [ -n "$found" ] || fail "this release has no clang 17 or newer; see https://apt.llvm.org"
    install "clang-$found" "lld-$found"   # lld is optional: kernels link faster with it
  fi
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "Python 3.10 or newer is needed, $("$python" --version) found; make PYTHON=python3.x ..."
