// Attention problems by flags of the command line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "verify/family.h"

namespace tessera::verify {

std::vector<Flag> attention_flags();
Result<std::unique_ptr<Case>> described_attention(const FlagValues& values);
Result<std::string> explain_attention(const FlagValues& values, tessera_device device, const char* arch,
                                      tessera_explain_format format);

}  // namespace tessera::verify
