#include "attention/quantize_fp8.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>

#include "attention/check_data.h"
#include "attention/cpu/e4m3.h"
#include "attention/params.h"
#include "base/arguments.h"
#include "base/format.h"
#include "base/tensor.h"
#include "cuda/device.h"
#include "cuda/kernel.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

struct Quantise {
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  std::int64_t block = 0;  // rows that share a scale; 0: all
  bool varlen = false;
  TensorView x, out;
  float* scale = nullptr;
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
  if (!is_e4m3(out.dtype)) return invalid(format("out is {}; e4m3 is accepted", describe(out.dtype)));
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
  return {};
}

// The same on the CPU: x may also be fp32.
Status run_on_cpu(const Quantise& q) {
  const std::int64_t blocks = q.block > 0 ? ceil_div(q.seq, q.block) : 1;
  const auto scale_at = [&](std::int64_t b, std::int64_t h, std::int64_t block) -> float& {
    return q.scale[b * q.scale_strides.batch + h * q.scale_strides.head + block];
  };
  const auto rows_of = [&](std::int64_t b, std::int64_t block, const auto& visit) {
    const std::int64_t begin = q.varlen ? q.cu_seqlens[b] : 0;
    const std::int64_t length = q.varlen ? q.cu_seqlens[b + 1] - begin : q.seq;
    const std::int64_t first = block * q.block, last = q.block > 0 ? std::min(length, first + q.block) : length;
    for (std::int64_t i = first; i < last; ++i) visit(q.varlen ? 0 : b, begin + i);
  };
  const auto value = [&](std::int64_t b, std::int64_t row, std::int64_t h, std::int64_t d) {
    const std::int64_t at = b * q.x.batch_stride + row * q.x.seq_stride + h * q.x.head_stride + d;
    return cpu::load_element(q.x.data, q.dtype, at);
  };
  std::fill(q.scale, q.scale + q.scales, 0.0f);
  const auto each = [&](const auto& visit) {
    for (std::int64_t b = 0; b < q.batch; ++b) {
      for (std::int64_t h = 0; h < q.heads; ++h) {
        for (std::int64_t block = 0; block < blocks; ++block) visit(b, h, block);
      }
    }
  };
  each([&](std::int64_t b, std::int64_t h, std::int64_t block) {
    float& largest = scale_at(b, h, block);
    rows_of(b, block, [&](std::int64_t batch, std::int64_t row) {
      for (std::int64_t d = 0; d < q.dim; ++d) largest = std::max(largest, std::abs(value(batch, row, h, d)));
    });
  });
  for (std::int64_t n = 0; n < q.scales; ++n) q.scale[n] = std::ldexp(1.0f, cpu::fp8_scale_exponent(q.scale[n]));
  each([&](std::int64_t b, std::int64_t h, std::int64_t block) {
    const float inverse = 1 / scale_at(b, h, block);
    rows_of(b, block, [&](std::int64_t batch, std::int64_t row) {
      auto* out = static_cast<unsigned char*>(q.out.data) + batch * q.out.batch_stride + row * q.out.seq_stride +
                  h * q.out.head_stride;
      for (std::int64_t d = 0; d < q.dim; ++d) out[d] = cpu::to_e4m3(value(batch, row, h, d) * inverse);
    });
  });
  return {};
}

Status run_on_gpu(const Quantise& q, int device, cuda::CUstream stream) {
  constexpr std::int64_t kLargestDim = 256;
  constexpr bool kOffered = false;  // its results on a GPU have not been compared with the CPU's
  if (!kOffered) return Status(TESSERA_UNSUPPORTED, "quantize_fp8 runs on the CPU only");
  const auto info = cuda::device(device);
  if (!info.ok()) return info.status();
  if (info->major != 9) {
    return Status(TESSERA_UNSUPPORTED,
                  format("e4m3 needs sm_90a, as its forward does; {} is {}", info->name, cuda::arch_of(*info)));
  }
  if (q.dtype == DType::kFloat32) return Status(TESSERA_UNSUPPORTED, "x is fp32; a GPU takes fp16 and bf16");
  if (q.dim % 16 != 0 || q.dim > kLargestDim) {
    return Status(TESSERA_UNSUPPORTED, format("x has head dim {}; a GPU takes multiples of 16 up to 256", q.dim));
  }
  constexpr std::int64_t kAny = 2;
  if (!allows_vectors(q.x, kAny, kAny, kAny, 2, 8) || !allows_vectors(q.out, kAny, kAny, kAny, 1, 8)) {
    return Status(TESSERA_UNSUPPORTED, "x and out need rows at multiples of 16 and 8 bytes on a GPU");
  }
  const int rows = q.block > 0 ? static_cast<int>(q.block) : 128;
  const std::int64_t tiles = ceil_div(q.seq, std::int64_t{rows});
  const std::int64_t ctas = saturating_product(tiles, q.heads, q.batch);
  if (ctas > INT_MAX) return Status(TESSERA_UNSUPPORTED, "quantize_fp8: more rows than one grid can cover");
  QuantizeFp8Params params = {};
  params.x = q.x.data;
  params.out = q.out.data;
  params.scale = q.scale;
  params.cu_seqlens = q.cu_seqlens;
  params.x_strides = strides_of(q.x);
  params.out_strides = strides_of(q.out);
  params.scale_strides = q.scale_strides;
  params.seq = static_cast<int>(q.seq);
  params.heads = static_cast<unsigned>(q.heads);
  params.tiles = static_cast<unsigned>(tiles);
  const cuda::Work<QuantizeFp8Params> work{params, {static_cast<unsigned>(ctas), 1, 1}};
  const auto launch = [&](bool finds_amax, bool of_whole) -> Status {
    const auto kernel = cuda::load_kernel(
        device, instance_of(quantize_config(q.dtype, static_cast<int>(q.dim), rows, finds_amax, of_whole)));
    if (!kernel.ok()) return kernel.status();
    return cuda::launch(**kernel, work, stream);
  };
  if (q.block > 0) return launch(false, false);
  if (Status s = cuda::zero(device, q.scale, q.scales * 4, stream); !s.ok()) return s;
  if (Status s = launch(true, false); !s.ok()) return s;
  return launch(false, true);
}

}  // namespace

QuantizeFp8Config quantize_config(DType dtype, int dim, int rows, bool finds_amax, bool of_whole) {
  // Eight loads of 16 bytes per thread hold a tile in registers and keep enough bytes in flight.
  constexpr int kElements = 64;
  const int threads = std::clamp((rows * dim / kElements + 31) / 32 * 32, 64, 512);
  return {.dtype = dtype, .dim = dim, .rows = rows, .threads = threads, .finds_amax = finds_amax, .of_whole = of_whole};
}

jit::KernelInstance instance_of(const QuantizeFp8Config& config) {
  return {.name = format("quantize_fp8_{}_d{}_{}{}{}", name_of(config.dtype), config.dim, config.rows,
                         config.finds_amax ? "_amax" : "", config.of_whole ? "_whole" : ""),
          .header = "attention/quantize_fp8_sm90.cuh",
          .entry = "quantize_fp8",
          .params = "QuantizeFp8Params",
          .config = jit::config_text("QuantizeFp8Config", config),
          .threads = config.threads,
          .min_blocks = std::max(1, 512 / config.threads),
          .pdl = true};
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
