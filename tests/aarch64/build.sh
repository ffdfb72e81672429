#!/usr/bin/env bash
# Builds gradwire's wheel for 64-bit Arm and installs it, as pip does on an Arm machine.
#   build.sh FOLDER PYTHON
# FOLDER/env is an environment whose Python is an Arm one under qemu-aarch64; FOLDER/dist gets the sdist and the wheel. PYTHON has pip,
# which fetches what builds. ARM_DEBIAN=trixie takes the Python of that release of Debian, and so its wheel; else it is this machine's.
# The Arm packages are unpacked below FOLDER: nothing of the system changes, and no root is needed.
# Needs aarch64-linux-gnu-g++, qemu-aarch64, cmake, apt-get and dpkg.
set -euo pipefail
folder=$(realpath -m "$1") python=$2
source=$(realpath "$(dirname "$0")/../..")
root=$folder/root arm=$folder/env/bin/python
mkdir -p "$folder"/{state/lists/partial,cache/archives/partial,sources,root,env/bin}

# An Arm Python with its headers, and all that these require.
if [ ! -e "$root/usr/bin/python3" ]; then
  touch "$folder/state/status"
  # shellcheck source=/dev/null
  here=$(. /etc/os-release && echo "$VERSION_CODENAME")
  for each in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [ ! -f "$each" ] || sed "s/\b$here\b/${ARM_DEBIAN:-$here}/g" "$each" >"$folder/sources/${each##*/}"
  done
  apt() {
    apt-get -qq -o APT::Architecture=arm64 -o "APT::Architectures::=arm64" -o Dir::State="$folder/state" -o Dir::Cache="$folder/cache" \
      -o Dir::State::status="$folder/state/status" -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$folder/sources" \
      -o APT::Sandbox::User= -o Debug::NoLocking=1 "$@"
  }
  apt update
  apt install --yes --download-only --no-install-recommends python3 libpython3-dev libstdc++6
  for package in "$folder"/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
  [ -e "$root/lib" ] || ln -s usr/lib "$root/lib"
fi
interpreter=$(basename "$(readlink "$root/usr/bin/python3")")

# Its processes start others by the path of this script, so that these are emulated, too. The processor is that of arm_torch.py: pointer
# authentication, which qemu's own has and Debian 13 uses, makes Python twenty-five times slower.
cat >"$arm" <<END_OF_SCRIPT
#!/bin/sh
exec qemu-aarch64 -cpu neoverse-n1 -L '$root' -0 "\$0" '$root/usr/bin/$interpreter' "\$@"
END_OF_SCRIPT
chmod +x "$arm"
printf 'home = %s\ninclude-system-site-packages = false\n' "$root/usr/bin" >"$folder/env/pyvenv.cfg"

# pip, and what pyproject.toml builds with: all of it is pure Python.
site=$folder/env/lib/$interpreter/site-packages
if [ ! -e "$site/pip" ]; then
  mapfile -t requires < <("$python" -c 'import sys, tomllib; print(*tomllib.load(open(sys.argv[1], "rb"))["build-system"]["requires"], sep="\n")' \
    "$source/pyproject.toml")
  "$python" -m pip install -q --target "$site" --platform any --python-version "${interpreter#python}" --only-binary :all: pip "${requires[@]}"
fi

# The sdist, of the version that PYTHON has installed, as ranks of two versions refuse each other. From it, in the emulator but for the
# compiler, the wheel. pyconfig.h lies beside the folder of the other headers.
rm -rf "$folder/dist" "$site"/gradwire*
SETUPTOOLS_SCM_PRETEND_VERSION=$("$python" -c 'from importlib.metadata import version; print(version("gradwire"))')
export SETUPTOOLS_SCM_PRETEND_VERSION
(cd "$source" && PYTHONPATH=$site "$python" -c 'import scikit_build_core.build as build, sys; build.build_sdist(sys.argv[1])' "$folder/dist")
pip() { "$arm" -m pip "$@" -q --no-cache-dir --disable-pip-version-check; }
CXX=aarch64-linux-gnu-g++ CXXFLAGS="-Werror -idirafter $root/usr/include" \
  pip wheel --no-deps --no-build-isolation --wheel-dir "$folder/dist" "$folder"/dist/*.tar.gz
pip install --only-binary :all: "$folder"/dist/*.whl
