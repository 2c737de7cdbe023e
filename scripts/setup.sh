#!/usr/bin/env bash
# Brings what a build needs: system packages through apt if they are missing, and a venv with NVRTC under the build folder.
# A second run finds everything and does nothing. scripts/setup.sh [BUILD [PACKAGE...]]: more packages, if asked.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}

packages=(
  g++ cmake ninja-build make ccache pkg-config
  libhwy-dev libcli11-dev libfmt-dev nlohmann-json3-dev libxxhash-dev libsqlite3-dev libgtest-dev
  clang-format clang-tidy python3 python3-dev python3-venv
  "${@:2}"
)

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done

if [ ${#missing[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "setup: this machine has no apt-get. Install these (Debian's names) and run again: ${missing[*]}" >&2
    exit 1
  fi
  if [ "$(id -u)" = 0 ]; then
    as_root=()
  elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
    as_root=(sudo)
  else
    echo "setup: these packages are missing, and neither root nor sudo is there to install them:" >&2
    echo "  apt-get install ${missing[*]}" >&2
    exit 1
  fi
  echo "setup: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

venv=$build/venv
stamp=$venv/.requirements
if ! cmp -s requirements.txt "$stamp"; then
  echo "setup: $venv, from requirements.txt"
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
  cp requirements.txt "$stamp"
fi
