// Rotary position embedding (kernels/norm/rotary.cuh).
#include "norm/rotary_config.h"

#include <climits>

#include "jit/config_text.h"
#include "norm/family.h"
#include "norm/gpu.h"

namespace tessera::norm {
namespace {

using Config = NormRotaryConfig;

constexpr int kThreads = 128;

// Heads of a thread (docs/kernels/norm_rotary.md). Two loads of 16 bytes are enough for whole heads at known positions.
// Positions have to be loaded before the angles, and slots that are copied have one load per head: more heads were faster.
int heads_of(const NormProblem& p) {
  if (!p.aligned || p.table_dtype != p.dtype) return 4;  // the fewest heads were not timed for these
  if (p.positions || p.rotated < p.columns) return 8;
  return p.interleaved ? 2 : 1;
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("norm_rotary_{}_{}_{}_{}{}", name_of(config.dtype), name_of(config.table_dtype),
                         config.interleaved ? "interleaved" : "half", config.heads, config.aligned ? "" : "_unaligned"),
          .header = "norm/rotary.cuh",
          .entry = "norm_rotary",
          .params = "NormRotaryParams",
          .config = jit::config_text("NormRotaryConfig", config),
          .threads = kThreads,
          .min_blocks = 2,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

Config config_of(const NormProblem& p) {
  return {.dtype = p.dtype,
          .table_dtype = p.table_dtype,
          .interleaved = p.interleaved,
          .aligned = p.aligned,
          .heads = heads_of(p)};
}

// Threads of a head that rotate, and that copy.
struct Slots {
  std::int64_t rotating, copying;
};
Slots slots_of(const NormProblem& p) {
  const Config config = config_of(p);
  return {p.rotated / 2 / norm_rotary_pairs(config), (p.columns - p.rotated) / norm_rotary_vector(config)};
}
std::int64_t threads_of(const NormProblem& p) {
  const Slots slots = slots_of(p);
  return saturating_product(saturating_product(p.batch, p.seq), ceil_div(p.heads, heads_of(p)),
                            slots.rotating + slots.copying);
}

std::optional<std::string> refuses(const NormProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (threads_of(p) > UINT_MAX - kThreads) return "more elements than one grid can cover";
  return std::nullopt;
}

Strides strides_of(const NormView& view) { return {view.batch_stride, view.row_stride, view.head_stride}; }

Status enqueue(const Config& config, const NormArgs& args, const engine::Launch& launch) {
  const NormProblem& p = args.problem;
  const Slots slots = slots_of(p);
  cuda::Work<NormRotaryParams> work = {};
  NormRotaryParams& params = work.params;
  params.x = args.x.data;
  params.out = args.out.data;
  params.x_strides = strides_of(args.x);
  params.out_strides = strides_of(args.out);
  params.cos = args.cos.data;
  params.sin = args.sin.data;
  params.cos_stride = args.cos.row_stride;
  params.sin_stride = args.sin.row_stride;
  params.positions = static_cast<const int*>(args.positions.data);
  params.positions_stride = args.positions.batch_stride;
  params.table_rows = args.table_rows;
  params.tokens = static_cast<unsigned>(p.batch * p.seq);
  params.seq = static_cast<unsigned>(p.seq);
  params.heads = static_cast<int>(p.heads);
  params.rotated = static_cast<int>(p.rotated);
  params.rotating_slots = static_cast<unsigned>(slots.rotating);
  params.slots = static_cast<unsigned>(slots.rotating + slots.copying);
  params.head_groups = static_cast<unsigned>(ceil_div(p.heads, config.heads));
  params.sign = p.inverse ? -1.0f : 1.0f;
  work.grid = {static_cast<unsigned>(ceil_div(threads_of(p), kThreads)), 1, 1};
  return cuda::launch(*launch.kernels[0], work, launch.stream);
}

std::vector<engine::Offer> offers(const NormProblem& p, const Device&) {
  const double bytes =
      2 * static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(size_of(p.dtype));
  return {{engine::main_config(config_of(p)), 0, copy_time(bytes) * (p.aligned ? 1 : 4),
           p.aligned ? "16 bytes at a time" : "element by element, because not all is aligned to 16 bytes"}};
}

std::optional<Recipe> recipe(const NormProblem& p, const Device&, const engine::Config& named) {
  const Config config = config_of(p);
  if (engine::main_config(config) != named) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"main", main_kernel(config)}};
  recipe.enqueue = [config](const NormArgs& args, const engine::Launch& launch) {
    return enqueue(config, args, launch);
  };
  return recipe;
}

std::vector<NormProblem> representatives(const Device&) {
  std::vector<NormProblem> list;
  for (const bool interleaved : {false, true}) {
    NormProblem p;
    p.op = NormOp::kRotary;
    p.dtype = p.table_dtype = DType::kBFloat16;
    p.batch = 1, p.seq = 4096, p.heads = 32, p.columns = p.rotated = 128;
    p.rows = p.seq * p.heads;
    p.interleaved = interleaved;
    if (interleaved) p.table_dtype = DType::kFloat32;
    list.push_back(p);
    p.positions = true;
    list.push_back(p);
  }
  return list;
}

}  // namespace

Implementation rotary() {
  return {"norm_rotary",  NormFamily::bit_of(NormOp::kRotary), {"norm/rotary.cuh"}, refuses, offers, recipe, nullptr,
          representatives};
}

}  // namespace tessera::norm
