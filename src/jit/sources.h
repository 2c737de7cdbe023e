// The sources of the kernels, embedded in the library by CMake or read from a folder, and what a header includes among
// them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tessera::jit {

struct Source {
  std::string path;  // as kernels include it: "attention/decode_combine.cuh"
  std::string text;
};

const std::vector<Source>& embedded_sources();

// What kernels are compiled from: the embedded files or, if TESSERA_KERNEL_SOURCES names a folder, every .h and .cuh
// below it, read when it is first needed. Keys and hashes are computed from these files, so code that differs shares no
// cache entry. The .h files of a folder must be those that the library was built with: the host compiles them too.
struct KernelSources {
  std::vector<Source> files;
  std::string folder;  // empty: embedded
  Status status;       // why the folder cannot be used; then `files` is empty
};
const KernelSources& kernel_sources();

// `header` and every file that it includes, directly or not, sorted by path. `extra` is searched before
// kernel_sources(); a file that is in neither is left out, and the compiler will name it.
std::vector<const Source*> reachable(std::string_view header, const std::vector<Source>& extra);

// Removes comments and collapses runs of blanks, so that a hash of the result changes only if the code does.
std::string strip_comments(std::string_view text);

// The hash (hex) of a header and all that it includes, without comments: it identifies the version of a kernel that was
// verified.
std::string code_hash(std::string_view header);

}  // namespace tessera::jit
