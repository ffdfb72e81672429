#!/usr/bin/env bash
# Compiles the native module for 64-bit Arm in FOLDER, beside an Arm Python that runs it under qemu-aarch64.
#   build.sh FOLDER PYTHON
# PYTHON has pip, which fetches nanobind's sources. The Arm packages are unpacked below FOLDER: nothing of the system changes, and no
# root is needed. Needs aarch64-linux-gnu-g++, apt-get and dpkg.
set -euo pipefail
folder=$(realpath -m "$1") python=$2
source=$(realpath "$(dirname "$0")/../..")
mkdir -p "$folder"/{state/lists/partial,cache/archives/partial,packages,root,objects}
touch "$folder/state/status"
options=(-q -o APT::Architecture=arm64 -o "APT::Architectures::=arm64" -o Dir::State="$folder/state" -o Dir::State::status="$folder/state/status"
  -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=)

# An Arm Python with its headers, and the libraries that both load; torch's Python code loads libffi, bz2 and lzma.
if [ ! -e "$folder/root/usr/lib/aarch64-linux-gnu/libffi.so.8" ]; then
  apt-get "${options[@]}" update
  version=$(apt-cache "${options[@]}" show python3 | sed -n 's/^Version: \([0-9]*\.[0-9]*\).*/\1/p' | head -n 1)
  (cd "$folder/packages" && apt-get "${options[@]}" download "python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib" \
    "libpython$version-dev" libc6 libc6-dev linux-libc-dev libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5)
  for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$folder/root"; done
  ln -sf "usr/bin/python$version" "$folder/root/python"
fi
interpreter=$(basename "$(readlink "$folder/root/python")")

# nanobind of the version range that the wheel is built with.
[ -d "$folder/nanobind" ] ||
  "$python" -m pip install -q --no-deps --target "$folder" "$("$python" -c 'import pathlib, re
print(re.search(r"nanobind[^\x22]*", pathlib.Path("'"$source"'/pyproject.toml").read_text())[0])')"

# The options are those of CMakeLists.txt.
compile() {
  aarch64-linux-gnu-g++ -std=c++17 -O3 -Wall -Wextra -Werror -ffp-contract=off -fPIC -fvisibility=hidden -fno-strict-aliasing -DNDEBUG \
    -I "$source/csrc" -isystem "$folder/nanobind/include" -isystem "$folder/nanobind/ext/robin_map/include" \
    -isystem "$folder/root/usr/include/$interpreter" -isystem "$folder/root/usr/include" -c "$1" -o "$folder/objects/$(basename "$1").$2.o"
}
export -f compile
export source folder interpreter
rm -f "$folder"/objects/*.o
{ find "$source/csrc/cpu" -name '*.cpp'; echo "$folder/nanobind/src/nb_combined.cpp"; } | cat -n |
  xargs -P "$(nproc)" -L 1 bash -c 'compile "$1" "$0"'
aarch64-linux-gnu-g++ -shared -o "$folder/_native.so" "$folder"/objects/*.o -lpthread -lrt
