#include "attention/quantize_fp8.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <vector>

#include "attention/check_data.h"
#include "attention/cpu/e4m3.h"
#include "attention/params.h"
#include "attention/value_transpose.h"
#include "base/arguments.h"
#include "base/format.h"
#include "base/tensor.h"
#include "cuda/device.h"
#include "cuda/kernel.h"
#include "cuda/memory.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

struct Quantise {
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  std::int64_t block = 0;  // rows that share a scale; 0: all
  bool varlen = false;
  bool rotates = false;
  bool values = false;  // out is of x's type
  TensorView x, out;
  float* scale = nullptr;
  bool per_batch = true, per_head = true;  // what has a scale of its own
  RowStrides scale_strides{};
  std::int64_t scales = 0;                   // of all
  const std::int32_t* cu_seqlens = nullptr;  // [B + 1], if varlen
};

TensorView view_of(const CheckedTensor& t) {
  if (t.rank == 3) return {t.data, 0, t.strides[0], t.strides[1]};
  return {t.data, t.strides[0], t.strides[1], t.strides[2]};
}

Status check(const tessera_quantize_fp8& in, Quantise& q, tessera_device& device) {
  for (const auto& [name, tensor] : {std::pair{"x", in.x}, {"out", in.out}, {"scale", in.scale}}) {
    if (tensor == nullptr) return invalid(format("{} is null", name));
  }
  device = in.x->device;
  TESSERA_CHECK(check_device("x", device));
  TESSERA_CHECK(check_same_device("out", in.out->device, "x", device));
  TESSERA_CHECK(check_same_device("scale", in.scale->device, "x", device));
  q.varlen = in.cu_seqlens != nullptr;
  const int rank = q.varlen ? 3 : 4;
  CheckedTensor x, out, scale, cu;
  TESSERA_CHECK(check_tensor(*in.x, {"x", Element::kFloating, Access::kRead, rank, rank}, true, x));
  TESSERA_CHECK(check_tensor(*in.out, {"out", Element::kFloatingOrE4m3, Access::kWrite, rank, rank}, true, out));
  TESSERA_CHECK(check_tensor(*in.scale, {"scale", Element::kFloat32, Access::kWrite, 3, 3}, true, scale));
  q.values = !is_e4m3(out.dtype);
  if (q.values && (out.dtype.code != x.dtype.code || out.dtype.bits != x.dtype.bits)) {
    return invalid(format("out is {}; e4m3 is accepted, or x's type, {}", describe(out.dtype), describe(x.dtype)));
  }
  if (in.reserved != 0) return invalid(format("reserved is {}; 0 is accepted", in.reserved));
  if ((in.flags & ~static_cast<std::uint32_t>(TESSERA_FP8_ROTATE)) != 0) {
    return invalid(format("flags is {:#x}; TESSERA_FP8_ROTATE is accepted", in.flags));
  }
  q.rotates = (in.flags & TESSERA_FP8_ROTATE) != 0;
  if (x.shape != out.shape) {
    const auto dims = [rank](const CheckedTensor& t) {
      return describe({t.shape.data(), static_cast<std::size_t>(rank)});
    };
    return invalid(format("out has shape {}, but x has {}", dims(out), dims(x)));
  }
  q.dtype = dtype_of(x.dtype);
  q.batch = q.varlen ? 0 : x.shape[0];
  q.seq = x.shape[rank - 3];
  q.heads = x.shape[rank - 2];
  q.dim = x.shape[rank - 1];
  if (q.heads < 1 || q.dim < 1) return invalid(format("x has {} heads of {}; at least 1 is accepted", q.heads, q.dim));
  if (q.varlen) {
    TESSERA_CHECK(check_same_device("cu_seqlens", in.cu_seqlens->device, "x", device));
    TESSERA_CHECK(check_tensor(*in.cu_seqlens, {"cu_seqlens", Element::kInt32, Access::kRead, 1, 1}, true, cu));
    q.cu_seqlens = static_cast<const std::int32_t*>(cu.data);
    q.batch = cu.shape[0] - 1;
    if (q.batch < 0) return invalid("cu_seqlens has 0 entries; one more than there are sequences is accepted");
    if (in.max_seqlen < 1 || in.max_seqlen > q.seq) {
      return invalid(
          format("max_seqlen is {}; with cu_seqlens, 1 to {}, the rows of x, is accepted", in.max_seqlen, q.seq));
    }
    if (device.type == TESSERA_CPU) {
      const auto longest =
          longest_sequence({"cu_seqlens", "x", "max_seqlen"}, q.cu_seqlens, q.batch, q.seq, in.max_seqlen);
      if (!longest.ok()) return longest.status();
    }
    q.seq = in.max_seqlen;
  } else if (in.max_seqlen != 0) {
    return invalid(format("max_seqlen is {}; it is for packed sequences, with cu_seqlens", in.max_seqlen));
  }
  if (scale.shape[0] != 1 && scale.shape[0] != q.batch) {
    return invalid(format("scale has batch = {}; 1 or {} is accepted", scale.shape[0], q.batch));
  }
  if (scale.shape[1] != 1 && scale.shape[1] != q.heads) {
    return invalid(format("scale has heads = {}; 1 or {} is accepted", scale.shape[1], q.heads));
  }
  const std::int64_t by_64 = ceil_div(q.seq, std::int64_t{64}), by_128 = ceil_div(q.seq, std::int64_t{128});
  q.block = scale.shape[2] == 1 ? 0 : scale.shape[2] == by_64 ? 64 : scale.shape[2] == by_128 ? 128 : -1;
  if (q.block < 0) {
    return invalid(format("scale has {} blocks; 1, {} of 64 rows or {} of 128 are accepted for {} rows", scale.shape[2],
                          by_64, by_128, q.seq));
  }
  if (q.block > 0 && (scale.shape[0] != q.batch || scale.shape[1] != q.heads)) {
    return invalid(format("scale has shape {}; with blocks, every head of every sequence has its own",
                          describe({scale.shape.data(), 3})));
  }
  q.scales = scale.shape[0] * scale.shape[1] * scale.shape[2];
  const bool compact = (scale.shape[1] <= 1 || scale.strides[1] == scale.shape[2]) &&
                       (scale.shape[0] <= 1 || scale.strides[0] == scale.shape[1] * scale.shape[2]);
  if (!compact) return invalid("scale has gaps between its elements; a contiguous tensor is accepted");
  q.x = view_of(x);
  q.out = view_of(out);
  q.scale = static_cast<float*>(scale.data);
  q.scale_strides = {scale.strides[0], scale.strides[1]};
  q.per_batch = scale.shape[0] > 1;
  q.per_head = scale.shape[1] > 1;
  return {};
}

// The same on the CPU: x may also be fp32.
Status run_on_cpu(const Quantise& q) {
  const auto scale_at = [&](std::int64_t b, std::int64_t h, std::int64_t block) -> float& {
    return q.scale[b * q.scale_strides.batch + h * q.scale_strides.head + block];
  };
  std::vector<float> values(static_cast<std::size_t>(q.dim));
  // visit(b, h, scale, row's place in x and in out), with the row in `values`.
  const auto each_row = [&](const auto& visit) {
    for (std::int64_t b = 0; b < q.batch; ++b) {
      const std::int64_t begin = q.varlen ? q.cu_seqlens[b] : 0;
      const std::int64_t length = q.varlen ? q.cu_seqlens[b + 1] - begin : q.seq;
      const std::int64_t batch = q.varlen ? 0 : b;
      for (std::int64_t h = 0; h < q.heads; ++h) {
        for (std::int64_t i = 0; i < length; ++i) {
          cpu::load_fp8_row(q.x.data, q.dtype,
                            batch * q.x.batch_stride + (begin + i) * q.x.seq_stride + h * q.x.head_stride, q.rotates,
                            values);
          visit(scale_at(b, h, q.block > 0 ? i / q.block : 0),
                batch * q.out.batch_stride + (begin + i) * q.out.seq_stride + h * q.out.head_stride);
        }
      }
    }
  };
  std::fill(q.scale, q.scale + q.scales, 0.0f);
  each_row([&](float& largest, std::int64_t) {
    for (const float value : values) largest = std::max(largest, std::abs(value));
  });
  for (std::int64_t n = 0; n < q.scales; ++n) q.scale[n] = std::ldexp(1.0f, cpu::fp8_scale_exponent(q.scale[n]));
  each_row([&](float& scale, std::int64_t at) {
    const float inverse = 1 / scale;
    if (q.values) {
      for (float& value : values) value = cpu::from_e4m3(cpu::to_e4m3(value * inverse)) * scale;
      if (q.rotates) cpu::rotate_fp8_row_back(values);
      for (std::int64_t d = 0; d < q.dim; ++d) {
        cpu::store_element(q.out.data, q.dtype, at + d, values[static_cast<std::size_t>(d)]);
      }
    } else {
      auto* out = static_cast<unsigned char*>(q.out.data) + at;
      for (const float value : values) *out++ = cpu::to_e4m3(value * inverse);
    }
  });
  return {};
}

// 64 registers a thread: half of them for its part of the tile. Blocks of k and v need some more, rotations and residuals
// twice as many.
int ctas_per_sm(const QuantizeFp8Config& config) {
  constexpr int kMost = 16;
  const int threads = config.rotates || config.residuals ? 512 : config.blocks && config.dim_v > 0 ? 896 : 1024;
  return std::clamp(threads / config.threads, 1, kMost);
}

QuantizedTensor quantized_tensor(const QuantizeFp8Config& config, const ToQuantize& t, std::int64_t most_ctas,
                                 std::int64_t& ctas) {
  QuantizedTensor out = {};
  out.x = t.x.data;
  out.out = t.out.data;
  out.scale = t.scale;
  out.found = t.found;
  out.cu_seqlens = t.cu_seqlens;
  out.x_strides = strides_of(t.x);
  out.out_strides = strides_of(t.out);
  out.pitch = t.pitch;
  out.seq = static_cast<int>(t.seq);
  out.heads = static_cast<unsigned>(t.heads);
  out.found_words = t.found_words;
  const std::int64_t tiles = ceil_div(t.seq, std::int64_t{config.rows});
  const std::int64_t groups = saturating_product(t.per_batch ? t.batch : 1, t.per_head ? t.heads : 1);
  const std::int64_t group_tiles = saturating_product(tiles, t.per_batch ? 1 : t.batch, t.per_head ? 1 : t.heads);
  // CTAs of a group have about equally many tiles.
  const std::int64_t rounds = config.blocks ? 1 : std::max<std::int64_t>(1, ceil_div(group_tiles, most_ctas));
  const std::int64_t group_ctas = ceil_div(group_tiles, rounds);
  const auto heads = static_cast<unsigned>(t.heads);
  const auto bounded = [](std::int64_t n) { return static_cast<unsigned>(std::clamp<std::int64_t>(n, 1, INT_MAX)); };
  out.tiles = divisor(bounded(tiles));
  out.group_heads = divisor(t.per_head ? heads : 1);
  out.other_heads = divisor(t.per_head ? 1 : heads);
  out.group_tiles = bounded(group_tiles);
  out.group_ctas = divisor(bounded(group_ctas));
  const std::int64_t more = saturating_product(groups, group_tiles) > INT_MAX ? INT_MAX : groups * group_ctas;
  ctas = std::min<std::int64_t>(INT_MAX, ctas + more);
  out.end = static_cast<unsigned>(ctas);
  return out;
}

// params: but for the tensors.
Status enqueue(const QuantizeFp8Config& config, const cuda::Kernel& kernel, const ToQuantize* tensors, int count,
               const QuantizeFp8Params& params, cuda::CUstream stream) {
  cuda::Work<QuantizeFp8Params> work = {};
  work.params = params;
  const std::int64_t most_ctas = std::int64_t{kernel.multiprocessors} * ctas_per_sm(config);
  std::int64_t ctas = 0;
  for (int i = 0; i < count; ++i) {
    work.params.tensor[i] = quantized_tensor(config, tensors[i], most_ctas, ctas);
  }
  if (ctas >= INT_MAX) return Status(TESSERA_UNSUPPORTED, "quantize_fp8: more rows than one grid can cover");
  if (ctas == 0) return {};
  work.grid = {static_cast<unsigned>(ctas), 1, 1};
  return cuda::launch(kernel, work, stream);
}

// Of `found` for a head of k.
std::int64_t found_words(const AttentionProblem& p) { return 2 + (p.residuals ? p.dim_qk : 0); }

Status run_on_gpu(const Quantise& q, int device, cuda::CUstream stream) {
  constexpr std::int64_t kLargestDim = 256;
  const auto info = cuda::device(device);
  if (!info.ok()) return info.status();
  if (info->major * 10 + info->minor < 89) {
    return Status(TESSERA_UNSUPPORTED, format("e4m3 needs sm_89 or newer; {} is {}", info->name, cuda::arch_of(*info)));
  }
  if (q.dtype == DType::kFloat32) return Status(TESSERA_UNSUPPORTED, "x is fp32; a GPU takes fp16 and bf16");
  if (q.seq >= kUnbounded) return Status(TESSERA_UNSUPPORTED, "sequences are shorter than 2^30");
  if (q.dim % 16 != 0 || q.dim > kLargestDim) {
    return Status(TESSERA_UNSUPPORTED, format("x has head dim {}; a GPU takes multiples of 16 up to 256", q.dim));
  }
  constexpr std::int64_t kAny = 2;
  if (!allows_vectors(q.x, kAny, kAny, kAny, 2, 8) || !allows_vectors(q.out, kAny, kAny, kAny, q.values ? 2 : 1, 8)) {
    return Status(TESSERA_UNSUPPORTED, "x and out need rows at multiples of 16 and 8 bytes on a GPU");
  }
  if (q.batch == 0 || q.seq == 0) {  // nothing has the scale 1
    return cuda::fill(device, q.scale, std::bit_cast<unsigned>(1.0f), q.scales * std::int64_t{sizeof(float)}, stream);
  }
  QuantizeFp8Config config = quantize_config(q.dtype, q.dim, 0, q.block);
  config.rotates = q.rotates;
  config.values = q.values;
  const auto kernel = cuda::load_kernel(device, instance_of(config));
  if (!kernel.ok()) return kernel.status();
  ToQuantize tensor = {.x = q.x,
                       .out = q.out,
                       .scale = q.scale,
                       .found = nullptr,
                       .cu_seqlens = q.cu_seqlens,
                       .pitch = 0,
                       .batch = q.batch,
                       .seq = q.seq,
                       .heads = q.heads,
                       .per_batch = q.per_batch,
                       .per_head = q.per_head};
  if (q.block > 0) return enqueue(config, **kernel, &tensor, 1, {}, stream);
  const std::size_t bytes = static_cast<std::size_t>(q.scales) * tensor.found_words * sizeof(unsigned);
  auto found = cuda::StreamBuffer::make(device, bytes, stream);
  if (!found.ok()) return found.status();
  tensor.found = static_cast<unsigned*>(found->data());
  if (Status s = cuda::zero(device, tensor.found, bytes, stream); !s.ok()) return s;
  if (Status s = enqueue(config, **kernel, &tensor, 1, {}, stream); !s.ok()) return s;
  return found->release();
}

}  // namespace

QuantizeFp8Config quantize_config(DType dtype, std::int64_t dim, std::int64_t dim_v, std::int64_t rows) {
  constexpr std::int64_t kRows = 128;
  const std::int64_t tile = rows > 0 ? rows : kRows;
  return {.dtype = dtype,
          .dim = static_cast<int>(dim),
          .dim_v = static_cast<int>(dim_v),
          .rows = static_cast<int>(tile),
          .threads = static_cast<int>(std::max(dim, dim_v) * tile / 64 + 31) / 32 * 32,  // two items each
          .blocks = rows > 0,
          .transposes = false,
          .rotates = false,
          .residuals = false,
          .values = false};
}

jit::KernelInstance instance_of(const QuantizeFp8Config& config) {
  return {.name = format("quantize_fp8_{}_d{}{}{}{}{}{}{}", name_of(config.dtype), config.dim,
                         config.dim_v > 0 ? format("x{}", config.dim_v) : "", config.transposes ? "_transposes" : "",
                         config.blocks ? format("_{}", config.rows) : "", config.rotates ? "_rotates" : "",
                         config.residuals ? "_residuals" : "", config.values ? "_values" : ""),
          .header = "attention/quantize_fp8.cuh",
          .entry = "quantize_fp8",
          .params = "QuantizeFp8Params",
          .config = jit::config_text("QuantizeFp8Config", config),
          .threads = config.threads,
          .min_blocks = ctas_per_sm(config),
          .dynamic_smem_bytes = quantize_fp8_shared_bytes(config),
          .pdl = true};
}

Rounding rounding_of(const AttentionProblem& p, bool transposes_v, int rows) {
  constexpr std::size_t kAlignment = 256;
  const AttentionProblem e4m3 = as_e4m3(p);
  const std::int64_t rows_q = p.varlen ? p.total_q : p.batch * p.seq_q;
  const std::int64_t rows_k = p.varlen ? p.total_k : p.batch * p.seq_k;
  const std::int64_t heads_k = p.batch * p.heads_kv, heads_q = p.batch * p.heads_q;
  Rounding parts{.transposes_v = transposes_v, .rows = rows};
  const auto take = [&parts](std::int64_t bytes) {
    const std::size_t at = parts.bytes;
    parts.bytes += (static_cast<std::size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  if (rows > 0) {
    parts.scales = take(2 * heads_k * ceil_div(p.seq_k, std::int64_t{rows}) * std::int64_t{sizeof(float)});
  } else {
    parts.found = take((heads_k * found_words(p) + (heads_q + heads_k) * 2) * std::int64_t{sizeof(unsigned)});
    parts.scales = take((2 * heads_k + heads_q) * std::int64_t{sizeof(float)});
    parts.q = take(rows_q * p.heads_q * e4m3.dim_qk);
  }
  parts.k = take(rows_k * p.heads_kv * e4m3.dim_qk);
  parts.v = take(transposes_v ? static_cast<std::int64_t>(transposed_bytes(p)) : rows_k * p.heads_kv * p.dim_v);
  return parts;
}

QuantizeFp8Config rounding_config(const AttentionProblem& p, bool transposes_v, int rows) {
  QuantizeFp8Config config = quantize_config(p.dtype, p.dim_qk, p.dim_v, rows);
  config.transposes = transposes_v;
  config.rotates = p.rotates;
  config.residuals = p.residuals;
  return config;
}

AttentionProblem as_e4m3(const AttentionProblem& problem) {
  AttentionProblem p = problem;
  p.fp8 = true;
  if (p.residuals) p.dim_qk += kResidualColumns;
  p.rounds_to_fp8 = p.rotates = p.residuals = false;
  return p;
}

Result<AttentionArgs> enqueue_rounding(const AttentionArgs& args, const Rounding& rounding, const cuda::Kernel& kernel,
                                       char* workspace, unsigned* tile_counter, cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const QuantizeFp8Config config = rounding_config(p, rounding.transposes_v, rounding.rows);
  AttentionArgs out = args;
  out.problem = as_e4m3(p);
  const auto compact = [&](std::size_t at, std::int64_t seq, std::int64_t heads, std::int64_t dim) {
    return TensorView{workspace + at, p.varlen ? 0 : seq * heads * dim, heads * dim, dim};
  };
  const bool rounds_q = rounding.rows == 0;
  if (rounds_q) out.q = compact(rounding.q, p.seq_q, p.heads_q, out.problem.dim_qk);
  out.k = compact(rounding.k, p.seq_k, p.heads_kv, out.problem.dim_qk);
  out.v = compact(rounding.v, p.seq_k, p.heads_kv, p.dim_v);
  ToQuantize tensors[3] = {};
  auto* scale = reinterpret_cast<float*>(workspace + rounding.scales);
  auto* found = reinterpret_cast<unsigned*>(workspace + rounding.found);
  const std::int64_t blocks = rounds_q ? 1 : ceil_div(p.seq_k, std::int64_t{rounding.rows});
  const auto set = [&](ToQuantize& t, const TensorView& x, const TensorView& to, bool of_q, unsigned words,
                       ScaleView& view) {
    t.x = x;
    t.out = to;
    t.scale = scale;
    t.found = found;
    t.found_words = words;
    t.cu_seqlens = of_q ? args.cu_seqlens_q : args.cu_seqlens_k;
    t.batch = p.batch;
    t.seq = of_q ? p.seq_q : p.seq_k;
    t.heads = of_q ? p.heads_q : p.heads_kv;
    view = {scale, t.heads * blocks, blocks};
    scale += p.batch * t.heads * blocks;
    found += p.batch * t.heads * words;
  };
  set(tensors[0], args.k, out.k, false, static_cast<unsigned>(found_words(p)), out.k_scale);
  if (rounds_q) set(tensors[1], args.q, out.q, true, 2, out.q_scale);
  set(tensors[2], args.v, out.v, false, 2, out.v_scale);
  tensors[2].pitch = transposed_pitch(p);
  QuantizeFp8Params params = {};
  params.tile_counter = tile_counter;
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  const Status s = enqueue(config, kernel, tensors, 3, params, stream);
  if (!s.ok()) return s;
  return out;
}

Status quantize_fp8(const tessera_quantize_fp8* args, void* stream) {
  if (args == nullptr) return invalid("args is null");
  tessera_quantize_fp8 known = TESSERA_QUANTIZE_FP8_INIT;
  TESSERA_CHECK(read_arguments(args, offsetof(tessera_quantize_fp8, max_seqlen), "TESSERA_QUANTIZE_FP8_INIT", known));
  Quantise q;
  tessera_device device{};
  TESSERA_CHECK(check(known, q, device));
  if (device.type == TESSERA_CPU) return run_on_cpu(q);
  return run_on_gpu(q, device.index, static_cast<cuda::CUstream>(stream));
}

}  // namespace tessera::attention
