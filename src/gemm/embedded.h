// A product as a part of another family's recipe.
#pragma once

#include <string>
#include <utility>

#include "engine/embedded.h"
#include "gemm/family.h"

namespace tessera::gemm {

using Embedded = engine::Embedded<GemmFamily>;

inline Result<Embedded> embed(std::string name, const GemmProblem& problem, const engine::Device& device) {
  return engine::embed<GemmFamily>(std::move(name), problem, device);
}

}  // namespace tessera::gemm
