#pragma once

#include <cstdlib>
#include <string>

namespace tessera::tests {

// Those that the library which is tested was built with; the tests themselves are compiled once for all.
inline std::string sanitizers() {
  const char* const names = std::getenv("TESSERA_SANITIZE");
  return names == nullptr ? "" : names;
}

}  // namespace tessera::tests
