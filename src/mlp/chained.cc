// An MLP as products of the gemm family, one after another, on whatever device: the forward has two or three, the backward up
// to eight. What is between the layers and is not the caller's is in the workspace, with rows at multiples of 128 bytes, so
// that TMA loads any hidden width.
#include <array>

#include "gemm/chain.h"
#include "gemm/gpu.h"
#include "mlp/family.h"
#include "mlp/gated.h"

namespace tessera::mlp {
namespace {

using engine::Device;
using T = MlpTensor;

// A product, or, without one, the elements of a gated pair.
struct Link {
  const char* name;
  bool is_product = true;
  T a = T::kNone, b = T::kNone, out = T::kNone;
  bool a_transposed = false, b_transposed = false;
  T bias = T::kNone, gate = T::kNone, gate_bias = T::kNone;
  T saved = T::kNone, preactivation = T::kNone, residual = T::kNone;
  bool activates = false;  // else the activation is the identity
  gemm::PairTensors<T> pair = {};

  // What a product reads or writes between the layers.
  std::array<T, 9> matrices() const {
    return {a,          pair.a2, out, saved, preactivation, pair.gate_preactivation, pair.saved_gate, pair.out_gate,
            pair.hidden};
  }
};

T if_given(const MlpProblem& p, T tensor) { return p.has(tensor) ? tensor : T::kNone; }

// before and hidden, or before and before_gate, or, if nothing of it is kept, hidden alone. stores_pairs: before, before_gate
// and hidden.
void add_first_layer(const MlpProblem& p, bool keeps, bool stores_pairs, std::vector<Link>& links) {
  Link up{.name = "up", .a = T::kX, .b = T::kUp, .bias = if_given(p, T::kUpBias)};
  if (!p.has(T::kGate) || !keeps || stores_pairs) {
    up.out = T::kHidden;
    up.activates = true;
    if (keeps) up.preactivation = T::kBefore;
    if (keeps && p.has(T::kGate)) up.pair.gate_preactivation = T::kBeforeGate;
    up.gate = if_given(p, T::kGate);
    up.gate_bias = if_given(p, T::kGateBias);
    links.push_back(up);
    return;
  }
  up.out = T::kBefore;
  links.push_back(up);
  links.push_back(
      {.name = "gate", .a = T::kX, .b = T::kGate, .out = T::kBeforeGate, .bias = if_given(p, T::kGateBias)});
}

std::vector<Link> links_of(const MlpProblem& p, const gemm::AtOnce& at_once) {
  std::vector<Link> links;
  const bool gated = p.has(T::kGate), kept = p.has(T::kBefore);
  const Link elements{.name = "gated", .is_product = false};
  if (p.op == MlpOp::kForward) {
    add_first_layer(p, kept, at_once.first_layer, links);
    if (gated && kept && !at_once.first_layer) links.push_back(elements);
    links.push_back({.name = "down",
                     .a = T::kHidden,
                     .b = T::kDown,
                     .out = T::kOut,
                     .bias = if_given(p, T::kDownBias),
                     .residual = if_given(p, T::kResidual)});
    return links;
  }
  if (!kept) add_first_layer(p, true, false, links);
  Link dhidden{.name = "dhidden", .a = T::kDout, .b = T::kDown, .b_transposed = true};
  if (at_once.dhidden) {
    gemm::end_with_gated_gradient<T>(dhidden, p.has(T::kDdown));
    links.push_back(dhidden);
  } else if (gated) {
    dhidden.out = T::kDhidden;
    links.push_back(dhidden);
    links.push_back(elements);
  } else {
    dhidden.out = T::kDbefore;
    dhidden.saved = T::kBefore;
    dhidden.activates = true;
    links.push_back(dhidden);
  }
  const auto weight = [&](const char* name, T a, T b, T out) {
    if (p.has(out)) {
      links.push_back({.name = name, .a = a, .b = b, .out = out, .a_transposed = true, .b_transposed = true});
    }
  };
  weight("ddown", T::kDout, T::kHidden, T::kDdown);
  weight("dup", T::kDbefore, T::kX, T::kDup);
  weight("dgate", T::kDbeforeGate, T::kX, T::kDgate);
  if (p.has(T::kDx)) {
    links.push_back({.name = "dx", .a = T::kDbefore, .b = T::kUp, .out = T::kDx, .b_transposed = true});
    if (at_once.dx) {
      links.back().pair.a2 = T::kDbeforeGate;
      links.back().pair.b2 = T::kGate;
    } else if (gated) {
      links.push_back({.name = "dx_of_gate",
                       .a = T::kDbeforeGate,
                       .b = T::kGate,
                       .out = T::kDx,
                       .b_transposed = true,
                       .residual = T::kDx});
    }
  }
  return links;
}

bool is_between_layers(T tensor) {
  return tensor == T::kHidden || tensor == T::kBefore || tensor == T::kBeforeGate || tensor == T::kDhidden ||
         tensor == T::kDbefore || tensor == T::kDbeforeGate;
}

struct Dims {
  std::int64_t rows, columns;
};
Dims dims_of(const MlpProblem& p, T tensor) {
  switch (tensor) {
    case T::kX:
    case T::kDx:
      return {p.m, p.k};
    case T::kUp:
    case T::kGate:
    case T::kDup:
    case T::kDgate:
      return {p.hidden, p.k};
    case T::kDown:
    case T::kDdown:
      return {p.n, p.hidden};
    case T::kOut:
    case T::kDout:
    case T::kResidual:
      return {p.m, p.n};
    default:
      return {p.m, p.hidden};
  }
}

// Whether rows start at multiples of 16 bytes; those in the workspace do.
bool is_aligned(const MlpProblem& p, T tensor) {
  return tensor == T::kNone || !p.has(tensor) || (p.aligned & bit_of(tensor)) != 0;
}

GemmProblem product_of(const MlpProblem& p, const Link& link) {
  GemmProblem g;
  g.dtype = g.out_dtype = p.dtype;
  const Dims a = dims_of(p, link.a), b = dims_of(p, link.b);
  g.m = link.a_transposed ? a.columns : a.rows;
  g.k = link.a_transposed ? a.rows : a.columns;
  g.n = link.b_transposed ? b.columns : b.rows;
  g.a_transposed = link.a_transposed;
  g.b_transposed = link.b_transposed;
  g.activation = link.activates ? p.activation : kIdentity;
  g.bias = link.bias != T::kNone;
  g.gated = link.gate != T::kNone;
  g.gated_gradient = link.pair.saved_gate != T::kNone;
  g.gradient = link.saved != T::kNone && !g.gated_gradient;
  g.preactivation = link.preactivation != T::kNone;
  g.residual = link.residual != T::kNone;
  g.sums_two = link.pair.a2 != T::kNone;
  g.a_aligned = is_aligned(p, link.a) && is_aligned(p, link.pair.a2);
  g.b_aligned = is_aligned(p, link.b) && is_aligned(p, link.gate) && is_aligned(p, link.pair.b2);
  g.out_aligned = is_aligned(p, link.out);
  for (const T t : {link.bias, link.gate_bias, link.saved, link.preactivation, link.residual,
                    link.pair.gate_preactivation, link.pair.saved_gate, link.pair.out_gate, link.pair.hidden}) {
    g.epilogue_aligned &= is_aligned(p, t);
  }
  g.tensor_maps = p.tensor_maps;
  const auto has_padding = [&](T t) {
    return t == T::kNone || (is_between_layers(t) && (p.hidden_padded || !p.has(t)));
  };
  const bool whole_chunks = g.n * static_cast<std::int64_t>(size_of(p.dtype)) % 16 == 0;
  g.out_padded = !whole_chunks;
  for (const T t : {link.out, link.preactivation, link.pair.gate_preactivation, link.pair.out_gate, link.pair.hidden}) {
    g.out_padded &= has_padding(t);
  }
  return g;
}

bool elements_are_aligned(const MlpProblem& p) {
  bool all = true;
  for (const T t : {T::kBefore, T::kBeforeGate, T::kHidden, T::kDbefore, T::kDbeforeGate}) all &= is_aligned(p, t);
  return all;
}

using Chain = gemm::Chain<Link, T>;

Result<Chain> chain_with(const MlpProblem& p, const Device& device, const gemm::AtOnce& at_once) {
  Chain chain;
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  // Whole lines of L2: rows that start within a sector are written and read at 0.8 of the speed.
  constexpr std::int64_t kLine = 128;
  const std::int64_t stride = ceil_div(p.hidden * size, kLine) * kLine / size;
  const auto place = [&](T tensor) {
    if (!is_between_layers(tensor) || p.has(tensor) || chain.find(tensor) != nullptr) return;
    chain.parts.push_back({tensor, chain.bytes, stride});
    chain.bytes += gemm::rounded_part(static_cast<std::size_t>(saturating_product(p.m, stride, size)));
  };
  for (const Link& link : links_of(p, at_once)) {
    if (link.is_product) {
      for (const T t : link.matrices()) place(t);
      if (Status s = chain.add_product(link, product_of(p, link), device); !s.ok()) return s;
      continue;
    }
    for (const T t : {T::kBefore, T::kBeforeGate, T::kHidden}) place(t);
    for (const T t : {T::kDhidden, T::kDbefore, T::kDbeforeGate}) {
      if (p.op == MlpOp::kBackward) place(t);
    }
    chain.links.push_back({link, gated_time(p)});
  }
  chain.end();
  return chain;
}

Result<Chain> chain_of(const MlpProblem& p, const Device& device) {
  const gemm::AtOnce possible = gemm::possible_at_once<T>(p, p.op == MlpOp::kBackward);
  return gemm::fastest_chain(possible, [&](const gemm::AtOnce& at_once) { return chain_with(p, device, at_once); });
}

Status enqueue(const Chain& chain, const Device& device, const MlpArgs& given, const engine::Launch& launch) {
  MlpArgs args = given;
  const MlpProblem& p = args.problem;
  auto* workspace = static_cast<std::byte*>(launch.workspace);
  for (const Chain::Part& part : chain.parts) args[part.tensor] = {workspace + part.at, part.row_stride};
  std::size_t next = 0;
  for (const Chain::Chosen& one : chain.links) {
    const Link& link = one.link;
    if (!link.is_product) {
      if (device.is_cpu()) {
        run_gated(args, device.threads);
        continue;
      }
      const auto work = gated_work(args, gated_config(p, elements_are_aligned(p)));
      if (!work.ok()) return work.status();
      if (Status s = cuda::launch(*launch.kernels[next++], *work, launch.stream); !s.ok()) return s;
      continue;
    }
    const auto view = [&](T tensor) { return tensor == T::kNone ? GemmView() : args[tensor]; };
    GemmArgs product;
    product.a = view(link.a);
    product.b = view(link.b);
    product.gate = view(link.gate);
    product.out = view(link.out);
    product.bias = view(link.bias);
    product.gate_bias = view(link.gate_bias);
    product.saved = view(link.saved);
    product.residual = view(link.residual);
    product.preactivation = view(link.preactivation);
    link.pair.give(product, view);
    if (Status s = one.product->enqueue(product, launch, next, workspace + chain.scratch); !s.ok()) return s;
  }
  return {};
}

jit::KernelInstance step_instance(const MlpProblem& p, const Link&) {
  return instance_of(gated_config(p, elements_are_aligned(p)));
}

}  // namespace

// Its products are instances of gemm's kernels, which the gate compiles for gemm.
Implementation chained() {
  return {"mlp_chained",
          MlpFamily::bit_of(MlpOp::kForward) | MlpFamily::bit_of(MlpOp::kBackward),
          {"gemm/dense.cuh", "gemm/dense_sm90.cuh", "gemm/split_reduce.cuh", "gemm/pad_rows.cuh", "mlp/gated.cuh"},
          gemm::chain_refuses<MlpFamily, chain_of>,
          gemm::chain_offers<MlpFamily, chain_of>,
          gemm::chain_recipe<MlpFamily, chain_of, step_instance, enqueue>,
          nullptr,
          nullptr};
}

}  // namespace tessera::mlp
