// Attention as verify sees it: its cases as verify::Case, and problems by flags.
#pragma once

#include <memory>

#include "verify/attention/cases.h"
#include "verify/family.h"

namespace tessera::verify {

const Family& attention_family();

std::unique_ptr<Case> attention_case(const cases::Case& c);
std::unique_ptr<Case> random_attention(std::uint64_t number, std::uint64_t kind);

}  // namespace tessera::verify
