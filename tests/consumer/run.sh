#!/usr/bin/env bash
# Installs the library into a fresh prefix and uses it as strangers would: a CMake project with find_package, and a C99
# program that has the header and the .so and nothing else. Then what the library promises of itself as a file.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/prefix" --strip >/dev/null
lib=$(find "$work/prefix" -name 'libtessera.so' -printf '%h\n')

cmake -S tests/consumer/cpp -B "$work/cpp" -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
cmake --build "$work/cpp" >/dev/null
"$work/cpp/consumer" >/dev/null
echo "consumer: find_package(tessera) builds and runs"

cc -std=c99 -Wall -Wextra -Wpedantic -Werror -I "$work/prefix/include" examples/attention.c -L "$lib" -ltessera -lm \
  -Wl,-rpath,"$lib" -o "$work/c_consumer"
"$work/c_consumer" >/dev/null
echo "consumer: the C header alone builds and runs"

size=$(stat -Lc %s "$lib/libtessera.so")
[ "$size" -lt $((5 * 1024 * 1024)) ] || { echo "consumer: libtessera.so has $size bytes; under 5 MB was promised" >&2; exit 1; }
needed=$(readelf -d "$lib/libtessera.so" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | sort | tr '\n' ' ')
case " $needed" in
  *cuda* | *nvrtc* | *hwy* | *fmt* | *sqlite*) echo "consumer: libtessera.so links to $needed" >&2; exit 1 ;;
esac
exported=$(nm -D --defined-only "$lib/libtessera.so" | awk '{print $3}' | sed 's/@.*//' | grep -v '^tessera_' || true)
[ -z "$exported" ] || { echo "consumer: libtessera.so exports more than the C ABI: $exported" >&2; exit 1; }
echo "consumer: libtessera.so, stripped: $size bytes, needs $needed"
