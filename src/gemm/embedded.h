// A product as a part of another family's recipe.
#pragma once

#include <string>
#include <vector>

#include "gemm/family.h"

namespace tessera::gemm {

// A product with the recipe that gemm would choose for it. Its steps and Configs have its name: "up", "up_reduce".
struct Embedded {
  std::string name;
  engine::Config config;
  double microseconds = 0;
  Recipe recipe;

  void add_steps(std::vector<engine::Step>& steps) const;
  // next: where its kernels begin among those of the whole recipe, and afterwards where they end.
  Status enqueue(GemmArgs args, const engine::Launch& whole, std::size_t& next, void* workspace) const;
};

Result<Embedded> embed(std::string name, const GemmProblem& problem, const engine::Device& device);

}  // namespace tessera::gemm
