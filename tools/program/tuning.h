// What commands share about the tuning table.
#pragma once

#include <set>
#include <string>

#include "verify/family.h"

namespace tessera::tools {

// Current hashes of the kernels that compete for each op: entries with any other hash are stale.
inline std::set<std::string> current_sources() {
  std::set<std::string> ops, sources;
  for (const auto& c : verify::suite("quick")) {
    if (ops.insert(c->op()).second) sources.insert(c->tuning_key(1).source);
  }
  return sources;
}

}  // namespace tessera::tools
