// Each task computes a block of out: it packs panels of A and B as fp32, multiplies them, and applies the epilogue.
#include "gemm/cpu/run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/arithmetic.h"
#include "cpu/thread_pool.h"
#include "gemm/cpu/block_product.h"

namespace tessera::gemm::cpu_backend {
namespace {

constexpr std::int64_t kBlockM = 96;   // a multiple of every BlockOps::rows
constexpr std::int64_t kBlockN = 256;  // and of every BlockOps::columns
constexpr std::int64_t kBlockK = 256;  // packed B: 256 KiB, in L2

constexpr std::size_t kFloats = static_cast<std::size_t>(kBlockM * kBlockK + kBlockK * kBlockN);
constexpr std::size_t kSums = static_cast<std::size_t>(kBlockM * kBlockN);

float load(DType dtype, const void* data, std::int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[at];
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  if ((bits & 0x7c00u) == 0x7c00u) return std::bit_cast<float>(sign | magnitude | 0x7f800000u);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

std::uint16_t bf16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Round to nearest even. Below the smallest normal number, adding 0.5 aligns the value's last kept bit with fp32's.
std::uint16_t fp16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}
void store(DType dtype, void* data, std::int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<std::uint16_t*>(data)[at] = dtype == DType::kBFloat16 ? bf16_of(value) : fp16_of(value);
  }
}

constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f, kSqrtHalf = 0.7071067811865476f;

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float activated(int activation, float x) {
  switch (activation) {
    case kRelu:
      return x < 0 ? 0 : x;
    case kSilu:
      return x * sigmoid(x);
    case kGeluTanh:
      return x * sigmoid(2 * kGeluScale * (x + kGeluCubic * x * x * x));
    case kGeluErf:
      return 0.5f * x * (1 + std::erf(x * kSqrtHalf));
    default:
      return x;
  }
}

float derivative(int activation, float x) {
  switch (activation) {
    case kRelu:
      return x > 0 ? 1.0f : 0.0f;
    case kSilu: {
      const float s = sigmoid(x);
      return s + x * s * (1 - s);
    }
    case kGeluTanh: {
      const float c = std::clamp(x, -10.0f, 10.0f);  // beyond, the slope of the sigmoid is 0 and squares overflow
      const float s = sigmoid(2 * kGeluScale * (c + kGeluCubic * c * c * c));
      return s + c * s * (1 - s) * 2 * kGeluScale * (1 + 3 * kGeluCubic * c * c);
    }
    case kGeluErf:
      return 0.5f * (1 + std::erf(x * kSqrtHalf)) + x * 0.3989422804014327f * std::exp(-0.5f * x * x);
    default:
      return 1;
  }
}

class Task {
 public:
  Task(const BlockOps& ops, const GemmArgs& args, float* scratch)
      : ops_(ops), args_(args), p_(args.problem), packed_(scratch), sums_(scratch + kFloats), gate_(sums_ + kSums) {}

  void run(std::int64_t first_m, std::int64_t first_n) {
    const std::int64_t rows = std::min(kBlockM, p_.m - first_m), columns = std::min(kBlockN, p_.n - first_n);
    multiply(args_.b, first_m, first_n, rows, columns, sums_);
    if (p_.gated) multiply(args_.gate, first_m, first_n, rows, columns, gate_);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) finish(first_m + i, first_n + j, i * kBlockN + j);
    }
  }

 private:
  void multiply(const GemmView& b, std::int64_t first_m, std::int64_t first_n, std::int64_t rows, std::int64_t columns,
                float* sums) const {
    if (p_.k == 0) std::memset(sums, 0, kSums * sizeof(float));
    const auto* a_bytes = static_cast<const std::byte*>(args_.a.data);
    const auto* b_bytes = static_cast<const std::byte*>(b.data);
    const auto size = static_cast<std::int64_t>(size_of(p_.dtype));
    const std::int64_t a_stride = args_.a.row_stride, b_stride = b.row_stride;
    float* packed_b = packed_ + kBlockM * kBlockK;
    for (std::int64_t k = 0; k < p_.k; k += kBlockK) {
      const std::int64_t depth = std::min(kBlockK, p_.k - k);
      const std::int64_t a_at = p_.a_transposed ? k * a_stride + first_m : first_m * a_stride + k;
      const std::int64_t b_at = p_.b_transposed ? k * b_stride + first_n : first_n * b_stride + k;
      ops_.pack(p_.dtype, a_bytes + a_at * size, a_stride, !p_.a_transposed, rows, depth, ops_.rows, packed_);
      ops_.pack(p_.dtype, b_bytes + b_at * size, b_stride, !p_.b_transposed, columns, depth, ops_.columns, packed_b);
      ops_.multiply(packed_, packed_b, sums, kBlockN, ceil_div(rows, ops_.rows), ceil_div(columns, ops_.columns), depth,
                    k > 0);
    }
  }

  void finish(std::int64_t row, std::int64_t column, std::int64_t at) const {
    float x = sums_[at];
    if (p_.bias) x += load(p_.dtype, args_.bias.data, column);
    if (p_.preactivation) {
      store(p_.dtype, args_.preactivation.data, row * args_.preactivation.row_stride + column, x);
    }
    float y = 0;
    if (p_.gradient) {
      y = x * derivative(p_.activation, load(p_.dtype, args_.saved.data, row * args_.saved.row_stride + column));
    } else if (p_.gated) {
      y = x * activated(p_.activation, gate_[at] + (p_.bias ? load(p_.dtype, args_.gate_bias.data, column) : 0.0f));
    } else {
      y = activated(p_.activation, x);
    }
    if (p_.residual) y += load(p_.out_dtype, args_.residual.data, row * args_.residual.row_stride + column);
    store(p_.out_dtype, args_.out.data, row * args_.out.row_stride + column, y);
  }

  const BlockOps& ops_;
  const GemmArgs& args_;
  const GemmProblem& p_;
  float* packed_;
  float* sums_;
  float* gate_;
};

std::size_t floats_per_thread(const GemmProblem& p) { return kFloats + kSums * (p.gated ? 2 : 1); }

}  // namespace

std::size_t workspace_bytes(const GemmProblem& problem, int threads) {
  return static_cast<std::size_t>(std::max(threads, 1)) * floats_per_thread(problem) * sizeof(float);
}

Status run(const GemmArgs& args, int threads, void* workspace) {
  const BlockOps* ops = block_ops();
  if (ops == nullptr) return {TESSERA_UNSUPPORTED, "the CPU backend needs an x86-64 CPU with SSE4.2"};
  const GemmProblem& p = args.problem;
  const std::int64_t across = ceil_div(p.n, kBlockN);
  const std::int64_t tasks = saturating_product(ceil_div(p.m, kBlockM), across);
  tessera::cpu::parallel_for(tasks, std::max(threads, 1), [&](std::int64_t task, int slot) {
    Task(*ops, args, static_cast<float*>(workspace) + static_cast<std::size_t>(slot) * floats_per_thread(p))
        .run(task / across * kBlockM, task % across * kBlockN);
  });
  return {};
}

}  // namespace tessera::gemm::cpu_backend
