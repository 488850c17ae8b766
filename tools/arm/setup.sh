#!/bin/bash
# Runs the kernels of packed weights on an emulated 64-bit ARM: setup.sh FOLDER cortex-a76|neoverse-v1 TILES
# FOLDER is set up once (a minute, .7 GB): Debian's qemu, its Python 3.11 for arm64, and wheels for aarch64.
# TILES: what `python tools/arm/check.py TILES` wrote on this machine, whose bits are compared.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); source=$(dirname "$(dirname "$here")"); arm=$1; processor=$2; tiles=$3
mkdir -p "$arm" && arm=$(cd "$arm" && pwd)
if [ ! -e "$arm/ready" ]; then
  mkdir -p "$arm"/{apt/state/lists/partial,apt/cache/archives/partial,root/proc,site,wheels}
  : > "$arm/apt/status"
  options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$arm/apt/state" -o APT::Sandbox::User=root
    -o Dir::State::status="$arm/apt/status" -o Dir::Cache="$arm/apt/cache" -o APT::Install-Recommends=0)
  apt-get update -qq
  (cd "$arm" && apt-get -o APT::Sandbox::User=root download -qq qemu-user-static)
  apt-get "${options[@]}" update -qq
  apt-get "${options[@]}" install -qq -y --download-only python3.11 libstdc++6
  for package in "$arm"/apt/cache/archives/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x -C "$arm/root"; done
  dpkg-deb --fsys-tarfile "$arm"/qemu-user-static_*.deb | tar -x -C "$arm" ./usr/bin/qemu-aarch64-static
  platforms=()
  for tag in manylinux2014 manylinux_2_17 manylinux_2_27 manylinux_2_28; do platforms+=(--platform "${tag}_aarch64"); done
  pinned=$(grep -E '^(numba|msgspec|safetensors|numpy)==' "$source/constraints.txt" | grep -v '< "3.11"' | cut -d';' -f1)
  # shellcheck disable=SC2086
  pip download -q --no-deps "${platforms[@]}" --python-version 3.11 --only-binary=:all: -d "$arm/wheels" $pinned llvmlite==0.50.0
  for wheel in "$arm"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$arm/site"; done
  touch "$arm/ready"
fi
# LLVM reads the processor from /proc/cpuinfo, which qemu 7.2 does not emulate; with -L, qemu looks in root/ first
features="fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
part=0xd0b
if [ "$processor" = neoverse-v1 ]; then part=0xd40; features="$features i8mm bf16"; fi
printf 'processor\t: 0\nFeatures\t: %s\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: %s\nCPU revision\t: 1\n\n' \
  "$features" $part > "$arm/root/proc/cpuinfo"
export PYTHONPATH="$arm/site" PYTHONDONTWRITEBYTECODE=1 NUMBA_CACHE_DIR="$arm/cache-$processor"
exec "$arm/usr/bin/qemu-aarch64-static" -L "$arm/root" -cpu max "$arm/root/usr/bin/python3.11" "$here/check.py" "$tiles"
