// Cross-entropy of a linear layer's logits, on whatever device: products of the gemm family, and the step between them
// (cross_entropy.h), over one chunk of rows after another. Of the logits only a chunk's are in memory.
//
//   logits = hidden weight^T    logits → losses, dlogits    dhidden = dlogits weight    dweight += dlogits^T hidden
//
// dweight is summed in the caller's tensor, as a residual of its own product, so the number of chunks is the number of its
// roundings. An fp32 sum would need twice the weight's memory.
#include <algorithm>

#include "base/arithmetic.h"
#include "base/format.h"
#include "gemm/embedded.h"
#include "gemm/gpu.h"
#include "loss/cross_entropy.h"
#include "loss/family.h"

namespace tessera::loss {
namespace {

using engine::Device;

bool has_gradient(const LossProblem& p) { return p.dhidden || p.dweight; }

// Few and equal chunks. Weights are read once for each product of a chunk, which a few hundred rows hide.
std::int64_t rows_of_chunk(const LossProblem& p) {
  constexpr std::int64_t kLeast = 512, kWithoutGradient = 1024, kMostChunks = 8, kTile = 128;
  const std::int64_t most = has_gradient(p) ? kMostChunks : ceil_div(p.rows, kWithoutGradient);
  const std::int64_t chunks = std::clamp<std::int64_t>(p.rows / kLeast, 1, std::max<std::int64_t>(most, 1));
  return std::max<std::int64_t>(std::min(ceil_div(ceil_div(p.rows, chunks), kTile) * kTile, p.rows), 1);
}

enum class Which : std::uint8_t { kLogits, kDhidden, kDweight, kDweightSum };
constexpr const char* kNames[] = {"logits", "dhidden", "dweight", "dweight_sum"};

GemmProblem product_of(const LossProblem& p, Which which, std::int64_t rows) {
  GemmProblem g;
  g.dtype = g.out_dtype = p.dtype;
  g.tensor_maps = p.tensor_maps;
  const bool of_weight = which == Which::kDweight || which == Which::kDweightSum;
  if (which == Which::kLogits) {
    g.m = rows, g.n = p.classes, g.k = p.width;
    g.a_aligned = p.hidden_aligned;
    g.b_aligned = p.weight_aligned;
    g.out_padded = g.n * static_cast<std::int64_t>(size_of(p.dtype)) % 16 != 0;
  } else if (which == Which::kDhidden) {
    g.m = rows, g.n = p.width, g.k = p.classes;
    g.b_transposed = true;
    g.b_aligned = p.weight_aligned;
    g.out_aligned = p.dhidden_aligned;
  } else if (of_weight) {
    g.m = p.classes, g.n = p.width, g.k = rows;
    g.a_transposed = g.b_transposed = true;
    g.b_aligned = p.hidden_aligned;
    g.out_aligned = p.dweight_aligned;
    g.residual = which == Which::kDweightSum;
    if (g.residual) g.epilogue_aligned = p.dweight_aligned;
  }
  return g;
}

struct Product {
  Which which;
  std::int64_t rows;
  gemm::Embedded product;
  std::size_t first_kernel = 0;  // of its steps, among those of the whole recipe
};

struct Plan {
  std::int64_t chunk = 0;  // rows; the last one may have fewer
  std::vector<Product> products;
  std::int64_t stride = 0;  // of the logits
  // Byte offsets in the workspace.
  std::size_t logits = 0, losses = 0, scratch = 0, bytes = 0;
  double microseconds = 0;

  const Product& find(Which which, std::int64_t rows) const {
    return *std::find_if(products.begin(), products.end(),
                         [&](const Product& one) { return one.which == which && one.rows == rows; });
  }
};

// Calls visit(first row, rows) for every chunk: one at the least, since dweight is written even if there are no rows.
template <class Visit>
void for_chunks(const LossProblem& p, std::int64_t chunk, const Visit& visit) {
  visit(0, std::min(chunk, p.rows));
  for (std::int64_t first = chunk; first < p.rows; first += chunk) visit(first, std::min(chunk, p.rows - first));
}
std::vector<Which> products_of_chunk(const LossProblem& p, std::int64_t first) {
  std::vector<Which> list = {Which::kLogits};
  if (p.dhidden) list.push_back(Which::kDhidden);
  if (p.dweight) list.push_back(first == 0 ? Which::kDweight : Which::kDweightSum);
  return list;
}

Result<Plan> plan_of(const LossProblem& p, const Device& device) {
  Plan plan;
  plan.chunk = rows_of_chunk(p);
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  constexpr std::int64_t kLine = 128;  // of L2
  plan.stride = ceil_div(p.classes * size, kLine) * kLine / size;
  std::size_t most = 0;
  Status failed;
  for_chunks(p, plan.chunk, [&](std::int64_t first, std::int64_t rows) {
    for (const Which which : products_of_chunk(p, first)) {
      const auto known = std::find_if(plan.products.begin(), plan.products.end(),
                                      [&](const Product& one) { return one.which == which && one.rows == rows; });
      if (known != plan.products.end()) {
        plan.microseconds += known->product.microseconds;
        continue;
      }
      auto product =
          gemm::embed(format("{}{}", rows < plan.chunk ? "last_" : "", kNames[static_cast<std::size_t>(which)]),
                      product_of(p, which, rows), device);
      if (!product.ok()) {
        failed = product.status();
        return;
      }
      most = std::max(most, product->recipe.workspace);
      plan.microseconds += product->microseconds;
      plan.products.push_back({which, rows, *std::move(product)});
    }
    plan.microseconds += cross_entropy_time(p, rows);
  });
  if (!failed.ok()) return failed;
  const auto take = [&](std::size_t bytes) {
    const std::size_t at = plan.bytes;
    plan.bytes += gemm::rounded_part(bytes);
    return at;
  };
  plan.logits = take(static_cast<std::size_t>(saturating_product(std::min(plan.chunk, p.rows), plan.stride, size)));
  plan.losses = take(p.reduction == Reduction::kNone ? 0 : static_cast<std::size_t>(p.rows) * sizeof(float));
  plan.scratch = take(most);
  return plan;
}

engine::Config named(const Plan& plan) {
  engine::Config config = {{"chunks", {{"rows", plan.chunk}}}};
  for (const Product& one : plan.products) {
    config.insert(config.end(), one.product.config.begin(), one.product.config.end());
  }
  return config;
}

// Kernels: those of the products, then the step's, then the sum's.
Status enqueue(const Plan& plan, const Device& device, const LossArgs& args, const engine::Launch& launch) {
  const LossProblem& p = args.problem;
  auto* workspace = static_cast<std::byte*>(launch.workspace);
  const bool reduced = p.reduction != Reduction::kNone;
  auto* losses = reinterpret_cast<float*>(reduced ? workspace + plan.losses : args.out.data);
  const std::size_t kernels = launch.kernels.size();
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  Status failed;
  const auto run = [&](Which which, std::int64_t first, std::int64_t rows) -> Status {
    const Product& one = plan.find(which, rows);
    const auto rows_from = [&](const LossView& view) {
      return GemmView{static_cast<std::byte*>(view.data) + first * view.row_stride * size, view.row_stride};
    };
    const GemmView logits{workspace + plan.logits, plan.stride}, hidden = rows_from(args.hidden);
    const GemmView weight{args.weight.data, args.weight.row_stride};
    const GemmView dweight{args.dweight.data, args.dweight.row_stride};
    GemmArgs g;
    if (which == Which::kLogits) {
      g.a = hidden, g.b = weight, g.out = logits;
    } else if (which == Which::kDhidden) {
      g.a = logits, g.b = weight, g.out = rows_from(args.dhidden);
    } else {
      g.a = logits, g.b = hidden, g.out = dweight;
      if (which == Which::kDweightSum) g.residual = dweight;
    }
    std::size_t next = one.first_kernel;
    return one.product.enqueue(g, launch, next, workspace + plan.scratch);
  };
  for_chunks(p, plan.chunk, [&](std::int64_t first, std::int64_t rows) {
    for (const Which which : products_of_chunk(p, first)) {
      if (failed.ok()) failed = run(which, first, rows);
      if (which != Which::kLogits || !failed.ok() || rows == 0) continue;
      const LogitRows logits{workspace + plan.logits, plan.stride, first, rows};
      if (device.is_cpu()) {
        cpu_backend::cross_entropy(args, logits, losses, device.threads);
        continue;
      }
      const auto work = cross_entropy_work(args, logits, losses);
      failed =
          work.ok() ? cuda::launch(*launch.kernels[kernels - (reduced ? 2 : 1)], *work, launch.stream) : work.status();
    }
  });
  if (!failed.ok() || !reduced) return failed;
  if (!device.is_cpu())
    return cuda::launch(*launch.kernels[kernels - 1], reduce_rows_work(args, losses), launch.stream);
  cpu_backend::reduce_rows(args, losses);
  return {};
}

std::optional<std::string> refuses(const LossProblem& p, const Device& device) {
  const auto plan = plan_of(p, device);
  if (!plan.ok()) return std::string(plan.status().message());
  return std::nullopt;
}

std::vector<engine::Offer> offers(const LossProblem& p, const Device& device) {
  const auto plan = plan_of(p, device);
  if (!plan.ok()) return {};
  return {{named(*plan), plan->bytes, plan->microseconds,
           format("chunks of {} rows: {:.3g} MiB of logits at a time", plan->chunk,
                  static_cast<double>(plan->losses - plan->logits) / 1048576)}};
}

std::optional<Recipe> recipe(const LossProblem& p, const Device& device, const engine::Config& config) {
  auto plan = plan_of(p, device);
  if (!plan.ok() || named(*plan) != config) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  std::size_t kernels = 0;
  for (Product& one : plan->products) {
    one.first_kernel = kernels;
    one.product.add_steps(recipe.steps);
    kernels = static_cast<std::size_t>(std::count_if(recipe.steps.begin(), recipe.steps.end(),
                                                     [](const engine::Step& step) { return step.kernel.has_value(); }));
  }
  std::optional<jit::KernelInstance> rows, reduce;
  if (!device.is_cpu()) {
    rows = instance_of(cross_entropy_config(p, device));
    reduce = reduce_rows_instance();
  }
  recipe.steps.push_back({"cross_entropy", rows});
  if (p.reduction != Reduction::kNone) recipe.steps.push_back({"reduce", reduce});
  recipe.workspace = plan->bytes;
  recipe.enqueue = [plan = *std::move(plan), device](const LossArgs& args, const engine::Launch& launch) {
    return enqueue(plan, device, args, launch);
  };
  return recipe;
}

// Its products are instances of gemm's kernels, which the gate compiles for gemm; but only here one is a sum into its own
// result with both operands transposed.
std::vector<LossProblem> representatives(const Device& device) {
  if (device.compute != 90 || !device.specific) return {};
  LossProblem p;
  p.op = LossOp::kLinearCrossEntropy;
  p.dtype = DType::kBFloat16;
  p.rows = 8192;
  p.width = 4096;
  p.classes = 131072;
  p.dhidden = p.dweight = true;
  return {p};
}

}  // namespace

Implementation linear_cross_entropy() {
  return {"loss_linear_cross_entropy",
          LossFamily::bit_of(LossOp::kLinearCrossEntropy),
          {"gemm/dense.cuh", "gemm/dense_sm90.cuh", "gemm/split_reduce.cuh", "gemm/pad_rows.cuh",
           "loss/cross_entropy.cuh", "loss/reduce_rows.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::loss
