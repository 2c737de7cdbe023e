// While it lives, the CPU backend uses nothing above these instruction sets.
#pragma once

#include "cpu/products.h"

namespace tessera::cpu {

class IsaLimit {
 public:
  IsaLimit(Isa isa, Bf16Isa bf16) { limit_isa(isa, bf16); }
  ~IsaLimit() { limit_isa(Isa::kAvx512, Bf16Isa::kAmx); }
  IsaLimit(const IsaLimit&) = delete;
  IsaLimit& operator=(const IsaLimit&) = delete;
};

}  // namespace tessera::cpu
