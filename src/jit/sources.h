// The kernels' sources, embedded in the library by CMake or read from a folder, and what an #include reaches among
// them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/status.h"

namespace tessera::jit {

struct Source {
  std::string path;  // as kernels include it: "attention/split_combine.cuh"
  std::string text;
};

const std::vector<Source>& embedded_sources();

// What kernels are compiled from: the embedded files or, where TESSERA_KERNEL_SOURCES names a folder, every .h and .cuh
// below it, read when the process first asks. Keys and hashes are made of these, so what is compiled from a folder
// shares no cache entry with other code.
struct KernelSources {
  std::vector<Source> files;
  std::string folder;  // empty: embedded
  Status status;       // why the folder cannot be used; then there are no files
};
const KernelSources& kernel_sources();

// `header` and every file it includes, directly or not, sorted by path. A file that is in neither list is left out: the
// compiler will name it. `extra` goes before kernel_sources().
std::vector<const Source*> reachable(std::string_view header, const std::vector<Source>& extra);

// Without comments and with runs of blanks made one, so that a hash of the result changes only when code does.
std::string strip_comments(std::string_view text);

// Hash (hex) of the code of a header and all that it includes, comments stripped: which version of a kernel was
// verified.
std::string code_hash(std::string_view header);

}  // namespace tessera::jit
