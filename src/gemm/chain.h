// A chain of products, and of steps of the family's own between them, as the only kernel of its kind in a family: what it
// tells the engine (engine/implementation.h) follows from the chain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "gemm/embedded.h"

namespace tessera::gemm {

// Link: a family's description of a product or step, with a name. Tensor: its enumeration of tensors.
template <class Link, class Tensor>
struct Chain {
  struct Chosen {
    Link link;
    double microseconds = 0;
    std::optional<Embedded> product = std::nullopt;  // nothing: a step
  };
  // Where in the workspace a tensor is.
  struct Part {
    Tensor tensor;
    std::size_t at;
    std::int64_t row_stride;
  };

  std::vector<Chosen> links;
  std::vector<Part> parts;
  std::size_t scratch = 0;  // where the products' own workspace is: one after another they use the same
  std::size_t bytes = 0;

  // Null if the tensor has no place in the workspace.
  const Part* find(Tensor tensor) const {
    const auto at = std::find_if(parts.begin(), parts.end(), [&](const Part& part) { return part.tensor == tensor; });
    return at == parts.end() ? nullptr : &*at;
  }
  Status add_product(const Link& link, const GemmProblem& problem, const engine::Device& device) {
    auto product = embed(link.name, problem, device);
    if (!product.ok()) return product.status();
    most_scratch_ = std::max(most_scratch_, product->recipe.workspace);
    links.push_back({link, product->microseconds, *std::move(product)});
    return {};
  }
  void end() {
    scratch = bytes;
    bytes += most_scratch_;
  }
  double microseconds() const {
    double sum = 0;
    for (const Chosen& one : links) sum += one.microseconds;
    return sum;
  }
  engine::Config config() const {
    engine::Config config;
    for (const Chosen& one : links) {
      if (one.product) config.insert(config.end(), one.product->config.begin(), one.product->config.end());
    }
    return config;
  }

 private:
  std::size_t most_scratch_ = 0;
};

// Elements of gated pairs, and the sum of two products, as parts of a product instead of steps and products of their own.
struct AtOnce {
  bool first_layer, dhidden, dx;
};

// Of a problem whose tensors are an enumeration T with a gated pair's.
template <class T, class Problem>
AtOnce possible_at_once(const Problem& p, bool backward) {
  const bool gated = p.has(T::kGate);
  return {gated && !backward && p.has(T::kBefore), gated && backward, gated && backward && p.has(T::kDx)};
}

// What a link's product has if it is of that kind (gemm/problem.h).
template <class T>
struct PairTensors {
  T gate_preactivation = T::kNone, saved_gate = T::kNone, out_gate = T::kNone, hidden = T::kNone;
  T a2 = T::kNone, b2 = T::kNone;

  template <class View>
  void give(GemmArgs& product, const View& view) const {
    product.gate_preactivation = view(gate_preactivation);
    product.saved_gate = view(saved_gate);
    product.out_gate = view(out_gate);
    product.hidden = view(hidden);
    product.a2 = view(a2);
    product.b2 = view(b2);
  }
};

// The product that gives the gradient of hidden rows goes on to those of the pair.
template <class T, class Link>
void end_with_gated_gradient(Link& dhidden, bool wants_hidden) {
  dhidden.out = T::kDbefore;
  dhidden.activates = true;
  dhidden.saved = T::kBefore;
  dhidden.pair.saved_gate = T::kBeforeGate;
  dhidden.pair.out_gate = T::kDbeforeGate;
  if (wants_hidden) dhidden.pair.hidden = T::kHidden;
}

// The fastest of the chains that chain_with(at_once) makes of what `possible` allows.
template <class ChainWith>
auto fastest_chain(const AtOnce& possible, const ChainWith& chain_with) {
  auto best = chain_with(AtOnce{});
  for (unsigned choice = 1; choice < 8; ++choice) {
    const AtOnce at_once{(choice & 1) != 0, (choice & 2) != 0, (choice & 4) != 0};
    const bool allowed = (possible.first_layer || !at_once.first_layer) && (possible.dhidden || !at_once.dhidden) &&
                         (possible.dx || !at_once.dx);
    if (!allowed) continue;
    auto chain = chain_with(at_once);
    if (!chain.ok() && chain.status().code() != TESSERA_UNSUPPORTED) return chain;
    if (chain.ok() && (!best.ok() || chain->microseconds() < best->microseconds())) best = std::move(chain);
  }
  return best;
}

// The members of an Implementation. chain_of(problem, device) is the chain or why there is none; instance_of(problem, link) the
// kernel of a step on a GPU; enqueue(chain, device, args, launch) runs it.
template <class Family, auto chain_of>
std::optional<std::string> chain_refuses(const typename Family::Problem& p, const engine::Device& device) {
  const auto chain = chain_of(p, device);
  if (!chain.ok()) return std::string(chain.status().message());
  return std::nullopt;
}

template <class Family, auto chain_of>
std::vector<engine::Offer> chain_offers(const typename Family::Problem& p, const engine::Device& device) {
  const auto chain = chain_of(p, device);
  if (!chain.ok()) return {};
  std::string why;
  for (const auto& one : chain->links) {
    why += format("{}{} {:.3g} us", why.empty() ? "" : ", ", one.link.name, one.microseconds);
  }
  return {{chain->config(), chain->bytes, chain->microseconds(), std::move(why)}};
}

template <class Family, auto chain_of, auto instance_of, auto enqueue>
std::optional<engine::Recipe<Family>> chain_recipe(const typename Family::Problem& p, const engine::Device& device,
                                                   const engine::Config& config) {
  auto chain = chain_of(p, device);
  if (!chain.ok() || chain->config() != config) return std::nullopt;
  engine::Recipe<Family> recipe;
  recipe.problem = p;
  for (const auto& one : chain->links) {
    if (one.product) {
      one.product->add_steps(recipe.steps);
    } else if (device.is_cpu()) {
      recipe.steps.push_back({one.link.name, std::nullopt});
    } else {
      recipe.steps.push_back({one.link.name, instance_of(p, one.link)});
    }
  }
  recipe.workspace = chain->bytes;
  recipe.enqueue = [chain = *std::move(chain), device](const typename Family::Args& args,
                                                       const engine::Launch& launch) {
    return enqueue(chain, device, args, launch);
  };
  return recipe;
}

}  // namespace tessera::gemm
