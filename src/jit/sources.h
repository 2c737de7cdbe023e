// The kernels' sources, embedded in the library by CMake, and what an #include reaches among them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::jit {

struct Source {
  std::string path;  // as kernels include it: "attention/split_combine.cuh"
  std::string text;
};

const std::vector<Source>& embedded_sources();

// `header` and every file it includes, directly or not, sorted by path. A file that is in neither list is left out: the
// compiler will name it. `extra` goes before the embedded ones.
std::vector<const Source*> reachable(std::string_view header, const std::vector<Source>& extra);

// Without comments and with runs of blanks made one, so that a hash of the result changes only when code does.
std::string strip_comments(std::string_view text);

// Hash (hex) of the code of a header and all that it includes, comments stripped: which version of a kernel was
// verified.
std::string code_hash(std::string_view header);

}  // namespace tessera::jit
