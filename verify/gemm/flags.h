// GEMM problems by flags of the command line.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gemm/problem.h"
#include "verify/family.h"

namespace tessera::verify::gemm {

// What mlp and moe call them, too.
inline const std::map<std::string, int> kActivationNames{
    {"none", kIdentity}, {"relu", kRelu}, {"silu", kSilu}, {"gelu_tanh", kGeluTanh}, {"gelu_erf", kGeluErf}};

std::vector<Flag> flags();
Result<std::unique_ptr<verify::Case>> described(const FlagValues& values);
Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format);

}  // namespace tessera::verify::gemm
