// GEMM problems by flags of the command line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "verify/family.h"

namespace tessera::verify::gemm {

std::vector<Flag> flags();
Result<std::unique_ptr<verify::Case>> described(const FlagValues& values);
Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format);

}  // namespace tessera::verify::gemm
