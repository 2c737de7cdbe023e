#include "program/sources.h"

#include "base/format.h"
#include "jit/sources.h"

namespace tessera::tools {

void note_sources(Json& json) {
  const std::string& folder = jit::kernel_sources().folder;
  if (folder.empty()) return;
  print("{}\n", paint(Style::kWarn, format("kernels come from {} (TESSERA_KERNEL_SOURCES)", folder)));
  json["kernel_sources"] = folder;
}

}  // namespace tessera::tools
