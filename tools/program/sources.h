// The origin of the kernels, for every record of a run.
#pragma once

#include "program/console.h"

namespace tessera::tools {

// If kernels come from a folder (TESSERA_KERNEL_SOURCES), prints that and adds it to the record.
void note_sources(Json& json);

}  // namespace tessera::tools
