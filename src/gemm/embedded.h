// A product as a part of another family's recipe.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
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

// A chain of steps as one offer: what it takes is the sum of its links' microseconds, which it says by their names.
template <class Links>
engine::Offer offer_of(const Links& links, engine::Config config, std::size_t workspace) {
  double microseconds = 0;
  std::string why;
  for (const auto& one : links) {
    microseconds += one.microseconds;
    why += format("{}{} {:.3g} us", why.empty() ? "" : ", ", one.link.name, one.microseconds);
  }
  return {std::move(config), workspace, microseconds, std::move(why)};
}

}  // namespace tessera::gemm
