// A mixture of experts as grouped products of the gemm family with the router's steps around them (steps.h), on whatever
// device. Offsets of experts are made by one step and read by the next: the host does not wait for them. Rows in the order of
// experts, and what is between the layers and is not the caller's, are in the workspace, with rows at multiples of 16 bytes.
#include <algorithm>

#include "base/format.h"
#include "gemm/chain.h"
#include "gemm/gpu.h"
#include "mlp/gated.h"
#include "moe/family.h"
#include "moe/steps.h"

namespace tessera::moe {
namespace {

using engine::Device;
using T = MoeTensor;

// A product; a step of the router; or, without either, the elements of a gated pair, forward (mlp/gated.h).
struct Link {
  const char* name;
  std::optional<Step> step = std::nullopt;
  T a = T::kNone, b = T::kNone, out = T::kNone;
  bool b_transposed = false;
  bool of_weights = false;  // a^T b, a sum over the rows of each expert
  T gate = T::kNone, preactivation = T::kNone, residual = T::kNone;
  bool activates = false;    // else the activation is the identity
  std::vector<T> uses = {};  // of the workspace, beside a and out
  T saved = T::kNone;
  gemm::PairTensors<T> pair = {};

  bool is_product() const { return a != T::kNone; }
};

// stores_pairs: with rows that are kept, one product stores both matrices of gated pairs and multiplies them.
void add_first_layer(const MoeProblem& p, bool keeps, bool stores_pairs, std::vector<Link>& links) {
  const bool gated = p.has(T::kGate);
  Link up{.name = "up", .a = T::kXRows, .b = T::kUp};
  if (!gated || !keeps || stores_pairs) {
    up.out = T::kHidden;
    up.activates = true;
    if (keeps) up.preactivation = T::kBefore;
    if (keeps && gated) up.pair.gate_preactivation = T::kBeforeGate;
    if (gated) up.gate = T::kGate;
    links.push_back(up);
    return;
  }
  up.out = T::kBefore;
  links.push_back(up);
  links.push_back({.name = "gate", .a = T::kXRows, .b = T::kGate, .out = T::kBeforeGate});
}

std::vector<Link> links_of(const MoeProblem& p, const gemm::AtOnce& at_once) {
  std::vector<Link> links;
  const bool gated = p.has(T::kGate), kept = p.has(T::kBefore);
  if (p.op == MoeOp::kForward) {
    std::vector<T> counted = {T::kCounts};
    if (p.has(T::kBalanceLoss)) counted.push_back(T::kShares);
    links.push_back({.name = "route", .step = Step::kRoute, .uses = counted});
    links.push_back({.name = "permute", .step = Step::kPermute, .uses = {T::kXRows}});
    add_first_layer(p, kept, at_once.first_layer, links);
    if (gated && kept && !at_once.first_layer) links.push_back({.name = "gated", .uses = {T::kHidden}});
    links.push_back({.name = "down", .a = T::kHidden, .b = T::kDown, .out = T::kOutRows});
    links.push_back({.name = "combine", .step = Step::kCombine});
    return links;
  }
  const bool of_first = p.has(T::kDup) || p.has(T::kDgate);
  Link permute{.name = "permute", .step = Step::kPermute, .uses = {T::kDoutRows, T::kRowWeights}};
  if (of_first || !kept) permute.uses.push_back(T::kXRows);
  links.push_back(permute);
  if (!kept) {
    // Hidden rows are made by the elements' step.
    links.push_back({.name = "up", .a = T::kXRows, .b = T::kUp, .out = T::kBefore});
    if (gated) links.push_back({.name = "gate", .a = T::kXRows, .b = T::kGate, .out = T::kBeforeGate});
  }
  Link dhidden{.name = "dhidden", .a = T::kDoutRows, .b = T::kDown, .out = T::kDhidden, .b_transposed = true};
  std::vector<T> made = {T::kDbefore, T::kRowDweights};
  if (gated) made.push_back(T::kDbeforeGate);
  if (p.has(T::kDdown)) made.push_back(T::kHidden);
  if (at_once.dhidden) {
    gemm::end_with_gated_gradient<T>(dhidden, p.has(T::kDdown));
    dhidden.uses = made;
    links.push_back(dhidden);
  } else {
    links.push_back(dhidden);
    links.push_back({.name = "elements", .step = Step::kElements, .uses = made});
  }
  if (p.has(T::kDlogits) || p.has(T::kDweights)) {
    links.push_back({.name = "route_backward", .step = Step::kRouteBackward});
  }
  const auto weight = [&](const char* name, T a, T b, T out) {
    if (p.has(out)) links.push_back({.name = name, .a = a, .b = b, .out = out, .of_weights = true});
  };
  weight("ddown", T::kDoutRows, T::kHidden, T::kDdown);
  weight("dup", T::kDbefore, T::kXRows, T::kDup);
  weight("dgate", T::kDbeforeGate, T::kXRows, T::kDgate);
  if (p.has(T::kDx)) {
    links.push_back({.name = "dx", .a = T::kDbefore, .b = T::kUp, .out = T::kDxRows, .b_transposed = true});
    if (at_once.dx) {
      links.back().pair.a2 = T::kDbeforeGate;
      links.back().pair.b2 = T::kGate;
    } else if (gated) {
      links.push_back({.name = "dx_of_gate",
                       .a = T::kDbeforeGate,
                       .b = T::kGate,
                       .out = T::kDxRows,
                       .b_transposed = true,
                       .residual = T::kDxRows});
    }
    links.push_back({.name = "combine", .step = Step::kCombine});
  }
  return links;
}

// Whether rows start at multiples of 16 bytes; those in the workspace do.
bool is_aligned(const MoeProblem& p, T tensor) {
  return tensor == T::kNone || !p.has(tensor) || (p.aligned & bit_of(tensor)) != 0;
}

GemmProblem product_of(const MoeProblem& p, const Link& link) {
  GemmProblem g;
  g.op = GemmOp::kGrouped;
  g.dtype = g.out_dtype = p.dtype;
  const auto a = shape_of(p, link.a).dims, b = shape_of(p, link.b).dims;
  g.grouping = link.of_weights ? kRaggedSums : kRaggedRows;
  g.groups = p.experts;
  g.a_transposed = link.of_weights;
  g.b_transposed = link.of_weights || link.b_transposed;
  g.m = a[g.a_transposed ? 2 : 1];
  g.k = a[g.a_transposed ? 1 : 2];
  g.n = b[g.b_transposed ? 2 : 1];
  g.activation = link.activates ? p.activation : kIdentity;
  g.gated = link.gate != T::kNone;
  g.preactivation = link.preactivation != T::kNone;
  g.gated_gradient = g.weighted = link.pair.saved_gate != T::kNone;
  g.residual = link.residual != T::kNone;
  g.sums_two = link.pair.a2 != T::kNone;
  g.a_aligned = is_aligned(p, link.a) && is_aligned(p, link.pair.a2);
  g.b_aligned = is_aligned(p, link.b) && is_aligned(p, link.gate) && is_aligned(p, link.pair.b2);
  g.out_aligned = is_aligned(p, link.out);
  for (const T t :
       {link.preactivation, link.residual, link.pair.gate_preactivation, link.saved, link.pair.saved_gate}) {
    g.epilogue_aligned &= is_aligned(p, t);
  }
  g.tensor_maps = p.tensor_maps;
  return g;
}

MlpProblem gated_problem(const MoeProblem& p) {
  MlpProblem g;
  g.dtype = p.dtype;
  g.m = p.pairs();
  g.hidden = p.hidden;
  g.activation = p.activation;
  return g;
}
MlpGatedConfig gated_config(const MoeProblem& p) {
  return mlp::gated_config(gated_problem(p), is_aligned(p, T::kBefore) && is_aligned(p, T::kBeforeGate));
}

using Chain = gemm::Chain<Link, T>;

void place(const MoeProblem& p, T tensor, std::int64_t dweight_parts, Chain& chain) {
  if (tensor == T::kNone || p.has(tensor) || chain.find(tensor) != nullptr) return;
  // Results take the place of rows that are no longer needed by then.
  const T earlier = tensor == T::kOutRows ? T::kXRows : tensor == T::kDxRows ? T::kDoutRows : T::kNone;
  if (const Chain::Part* there = chain.find(earlier)) {
    chain.parts.push_back({tensor, there->at, there->row_stride});
    return;
  }
  auto dims = shape_of(p, tensor).dims;
  const bool of_router = tensor >= T::kRowWeights;
  if (tensor == T::kRowDweights) dims[2] = dweight_parts;
  const auto size = of_router ? std::int64_t{4} : static_cast<std::int64_t>(size_of(p.dtype));
  const std::int64_t stride = of_router ? dims[2] : ceil_div(dims[2] * size, 16) * 16 / size;
  chain.parts.push_back({tensor, chain.bytes, stride});
  chain.bytes += gemm::rounded_part(static_cast<std::size_t>(saturating_product(dims[1], stride, size)));
}

Result<Chain> chain_with(const MoeProblem& p, const Device& device, const gemm::AtOnce& at_once) {
  Chain chain;
  const std::int64_t dweight_parts = at_once.dhidden ? dot_parts_of(p.hidden) : 1;
  for (const Link& link : links_of(p, at_once)) {
    for (const T t : {link.a, link.is_product() ? link.out : T::kNone, link.preactivation}) {
      place(p, t, dweight_parts, chain);
    }
    for (const T t : link.uses) place(p, t, dweight_parts, chain);
    if (link.is_product()) {
      if (Status s = chain.add_product(link, product_of(p, link), device); !s.ok()) return s;
    } else {
      chain.links.push_back(
          {link, link.step ? gemm::step_time(bytes_of(*link.step, p)) : mlp::gated_time(gated_problem(p))});
    }
  }
  chain.end();
  return chain;
}

Result<Chain> chain_of(const MoeProblem& p, const Device& device) {
  if (!device.is_cpu() && (p.experts > kMoeMostExperts || p.top_k > kMoeMostTopK)) {
    return Status(TESSERA_UNSUPPORTED, format("takes up to {} experts and a top_k of {} on GPUs, not {} and {}",
                                              kMoeMostExperts, kMoeMostTopK, p.experts, p.top_k));
  }
  const gemm::AtOnce possible = gemm::possible_at_once<T>(p, p.op == MoeOp::kBackward);
  return gemm::fastest_chain(possible, [&](const gemm::AtOnce& at_once) { return chain_with(p, device, at_once); });
}

MlpArgs gated_args(const MoeArgs& args) {
  MlpArgs gated;
  gated.problem = gated_problem(args.problem);
  gated[MlpTensor::kBefore] = args[T::kBefore];
  gated[MlpTensor::kBeforeGate] = args[T::kBeforeGate];
  gated[MlpTensor::kHidden] = args[T::kHidden];
  return gated;
}

Status enqueue_chain(const Chain& chain, const Device& device, const MoeArgs& given, const engine::Launch& launch) {
  MoeArgs args = given;
  auto* workspace = static_cast<std::byte*>(launch.workspace);
  for (const Chain::Part& part : chain.parts) args[part.tensor] = {workspace + part.at, part.row_stride};
  std::size_t next = 0;
  for (const Chain::Chosen& one : chain.links) {
    const Link& link = one.link;
    Status s;
    if (link.is_product()) {
      const auto view = [&](T tensor) { return tensor == T::kNone ? GemmView() : args[tensor]; };
      GemmArgs product;
      product.a = view(link.a);
      product.b = view(link.b);
      product.gate = view(link.gate);
      product.out = view(link.out);
      product.residual = view(link.residual);
      product.preactivation = view(link.preactivation);
      link.pair.give(product, view);
      product.saved = view(link.saved);
      product.row_weights = args.data<float>(T::kRowWeights);
      product.row_dots = args.data<float>(T::kRowDweights);
      product.offsets = args.data<std::int32_t>(T::kOffsets);
      s = one.product->enqueue(product, launch, next, workspace + chain.scratch);
    } else if (device.is_cpu()) {
      if (link.step) {
        run_on_cpu(*link.step, args, device.threads);
      } else {
        mlp::run_gated(gated_args(args), device.threads);
      }
    } else if (link.step) {
      s = enqueue(*link.step, args, *launch.kernels[next++], launch.stream);
    } else {
      const auto work = mlp::gated_work(gated_args(args), gated_config(args.problem));
      s = work.ok() ? cuda::launch(*launch.kernels[next++], *work, launch.stream) : work.status();
    }
    if (!s.ok()) return s;
  }
  return {};
}

jit::KernelInstance step_instance(const MoeProblem& p, const Link& link) {
  return link.step ? instance_of(*link.step, p) : mlp::instance_of(gated_config(p));
}

}  // namespace

// Its products are instances of gemm's kernels, which the gate compiles for gemm.
Implementation chained() {
  return {"moe_chained",
          MoeFamily::bit_of(MoeOp::kForward) | MoeFamily::bit_of(MoeOp::kBackward),
          {"gemm/dense.cuh", "gemm/dense_sm90.cuh", "gemm/split_reduce.cuh", "gemm/pad_rows.cuh", "mlp/gated.cuh",
           "moe/route.cuh", "moe/rows.cuh", "moe/elements.cuh"},
          gemm::chain_refuses<MoeFamily, chain_of>,
          gemm::chain_offers<MoeFamily, chain_of>,
          gemm::chain_recipe<MoeFamily, chain_of, step_instance, enqueue_chain>,
          nullptr,
          nullptr};
}

}  // namespace tessera::moe
