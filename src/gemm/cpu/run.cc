// Each task computes a part of out, block by block: it packs panels of A and B, multiplies them, and applies the epilogue.
#include "gemm/cpu/run.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/arithmetic.h"
#include "base/format.h"
#include "base/tensor.h"
#include "cpu/elements.h"
#include "cpu/products.h"
#include "cpu/thread_pool.h"
#include "gemm/cpu/activations.h"

namespace tessera::gemm::cpu_backend {
namespace {

using tessera::cpu::Products;

constexpr std::int64_t kBlockM = 96;   // multiples of kPad, and of the 6 rows that the products have in registers
constexpr std::int64_t kBlockN = 256;  // of every Products::width
constexpr std::int64_t kBlockK = 256;
constexpr std::int64_t kMostBlocks = 4;  // of rows, in a task: they share packed B
constexpr std::int64_t kKept = 1 << 21;  // bytes of packed A, at most, that a task keeps for its next columns

// Lines from a panel to the next. A power of two would put the same line of all panels into one set of the L1 cache.
constexpr std::int64_t kPackedLines = kBlockK + tessera::cpu::kPad;
constexpr std::int64_t kSumLines = kMostBlocks * kBlockM + 1;

constexpr std::int64_t kLhs = kBlockM * kPackedLines, kRhs = kPackedLines * kBlockN, kSums = kSumLines * kBlockN;

// How a product is cut into tasks: as large as leaves every thread several. Of the problem that was planned: fewer rows may need
// more scratch memory.
struct Parts {
  std::int64_t rows, columns;  // of a task, at most
  bool keeps_lhs;              // packed A, for all columns of the task
  std::int64_t lhs_blocks;     // of packed A that a task has at once

  Parts(const Products& ops, const GemmProblem& p, int threads) {
    const std::int64_t tasks = 4 * std::int64_t{std::max(threads, 1)};
    const std::int64_t down = std::max<std::int64_t>(ceil_div(p.m, kBlockM), 1);
    const std::int64_t across = std::max<std::int64_t>(ceil_div(p.n, kBlockN), 1);
    const std::int64_t tall =
        std::clamp<std::int64_t>(saturating_product(down, across) / tasks, 1, std::min(down, kMostBlocks));
    const std::int64_t wide =
        std::clamp<std::int64_t>(saturating_product(ceil_div(down, tall), across) / tasks, 1, across);
    const std::int64_t blocks = saturating_product(tall, std::max<std::int64_t>(ceil_div(p.k, kBlockK), 1));
    keeps_lhs = (wide > 1 || p.gated) && blocks <= kKept / (kLhs * static_cast<std::int64_t>(ops.elem));
    lhs_blocks = keeps_lhs ? blocks : 1;
    rows = kBlockM * tall;
    columns = kBlockN * (keeps_lhs ? ceil_div(across, ceil_div(across, wide)) : 1);
  }

  // Of scratch memory per thread.
  std::int64_t floats(const Products& ops, const GemmProblem& p) const {
    const std::int64_t packed = (lhs_blocks * kLhs + kRhs) * static_cast<std::int64_t>(ops.elem);
    return ceil_div(packed, std::int64_t{sizeof(float)}) + kSums * (p.gated ? 2 : 1);
  }
};

class Task {
 public:
  // scratch: Parts::floats().
  Task(const Products& ops, const GemmArgs& args, const Parts& parts, float* scratch)
      : ops_(ops),
        args_(args),
        p_(args.problem),
        parts_(parts),
        sums_(scratch),
        gate_(sums_ + (p_.gated ? kSums : 0)),
        rhs_(reinterpret_cast<std::byte*>(gate_ + kSums)),
        lhs_(rhs_ + kRhs * elem()) {}

  void run(std::int64_t first_m, std::int64_t first_n) {
    const std::int64_t rows = std::min(parts_.rows, p_.m - first_m), last_n = std::min(first_n + parts_.columns, p_.n);
    bool packs_lhs = true;
    const auto multiply = [&](const GemmView& b, std::int64_t n, std::int64_t columns, float* sums) {
      this->multiply(b, first_m, n, rows, columns, sums, packs_lhs);
      packs_lhs = !parts_.keeps_lhs;
    };
    if (ops_.enter != nullptr) ops_.enter();
    for (std::int64_t n = first_n; n < last_n; n += kBlockN) {
      const std::int64_t columns = std::min(kBlockN, last_n - n);
      multiply(args_.b, n, columns, sums_);
      if (p_.gated) multiply(args_.gate, n, columns, gate_);
      for (std::int64_t i = 0; i < rows; ++i) finish(first_m, i, n, columns);
    }
    if (ops_.leave != nullptr) ops_.leave();
  }

 private:
  std::int64_t elem() const { return static_cast<std::int64_t>(ops_.elem); }

  // sums: result form [kBlockN / W][kSumLines][W].
  void multiply(const GemmView& b, std::int64_t first_m, std::int64_t first_n, std::int64_t rows, std::int64_t columns,
                float* sums, bool packs_lhs) const {
    if (p_.k == 0) std::memset(sums, 0, kSums * sizeof(float));
    const int panels = static_cast<int>(ceil_div(columns, ops_.width));
    const auto product = p_.a_transposed ? ops_.multiply_t : ops_.multiply;
    std::byte* lhs = lhs_;
    for (std::int64_t k = 0; k < p_.k; k += kBlockK) {
      const std::int64_t depth = std::min(kBlockK, p_.k - k);
      if (p_.b_transposed) {
        ops_.pack_rhs(block_of(b, k, first_n), depth, columns, kPackedLines, rhs_);
      } else {
        ops_.pack_rhs_t(block_of(b, first_n, k), columns, depth, kPackedLines, rhs_);
      }
      for (std::int64_t i = 0; i < rows; i += kBlockM) {
        const std::int64_t here = std::min(kBlockM, rows - i), row = first_m + i;
        if (packs_lhs) pack_lhs(row, here, k, depth, lhs);
        const std::int64_t stride =
            p_.a_transposed ? tessera::cpu::transposed_stride(ops_, kPackedLines, here) : kBlockM * ops_.line;
        product(lhs, stride, rhs_, kPackedLines * ops_.width, sums + i * ops_.width, kSumLines * ops_.width, here,
                panels, depth, k > 0);
        if (parts_.keeps_lhs) lhs += kLhs * elem();
      }
    }
  }

  void pack_lhs(std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t depth, std::byte* to) const {
    if (p_.a_transposed) return ops_.pack_lhs_t(block_of(args_.a, k, row), depth, rows, kPackedLines, to);
    ops_.pack_lhs(block_of(args_.a, row, k), rows, depth, kBlockM, to);
  }

  tessera::cpu::Source block_of(const GemmView& view, std::int64_t row, std::int64_t column) const {
    const auto size = static_cast<std::int64_t>(size_of(p_.dtype));
    return {static_cast<const std::byte*>(view.data) + (row * view.row_stride + column) * size, view.row_stride,
            p_.dtype};
  }

  void row_of(const float* sums, std::int64_t row, std::int64_t columns, float* x) const {
    const auto copy = [&](auto width) {
      for (std::int64_t j = 0; j < columns; j += width) {
        std::memcpy(x + j, sums + j * kSumLines + row * width, sizeof(float) * width);
      }
    };
    if (ops_.width == 16) return copy(std::integral_constant<std::int64_t, 16>());
    if (ops_.width == 8) return copy(std::integral_constant<std::int64_t, 8>());
    copy(std::integral_constant<std::int64_t, 4>());
  }

  // The i-th row of the sums, from first_n on.
  TESSERA_CLONED void finish(std::int64_t first_m, std::int64_t i, std::int64_t first_n, std::int64_t columns) const {
    using namespace tessera::cpu;
    const std::int64_t row = first_m + i;
    float x[kBlockN], other[kBlockN];
    const auto add = [&](DType dtype, const void* data, std::int64_t at, float* to) {
      load_row(dtype, data, at, columns, other);
      for (std::int64_t j = 0; j < columns; ++j) to[j] += other[j];
    };
    row_of(sums_, i, columns, x);
    if (p_.bias) add(p_.dtype, args_.bias.data, first_n, x);
    if (p_.preactivation) {
      store_row(p_.dtype, args_.preactivation.data, row * args_.preactivation.row_stride + first_n, columns, x);
    }
    if (p_.gradient) {
      load_row(p_.dtype, args_.saved.data, row * args_.saved.row_stride + first_n, columns, other);
      derivative(p_.activation, other, columns, other);
      for (std::int64_t j = 0; j < columns; ++j) x[j] *= other[j];
    } else if (p_.gated) {
      float gate[kBlockN];
      row_of(gate_, i, columns, gate);
      if (p_.bias) add(p_.dtype, args_.gate_bias.data, first_n, gate);
      activated(p_.activation, gate, columns, gate);
      for (std::int64_t j = 0; j < columns; ++j) x[j] *= gate[j];
    } else if (p_.activation != kIdentity) {
      activated(p_.activation, x, columns, x);
    }
    if (p_.residual) add(p_.out_dtype, args_.residual.data, row * args_.residual.row_stride + first_n, x);
    store_row(p_.out_dtype, args_.out.data, row * args_.out.row_stride + first_n, columns, x);
  }

  const Products& ops_;
  const GemmArgs& args_;
  const GemmProblem& p_;
  const Parts& parts_;
  float* sums_;
  float* gate_;
  std::byte* rhs_;  // packed
  std::byte* lhs_;  // one block of it or, if it is kept, [K / kBlockK][rows / kBlockM] blocks
};

// Rows, or terms, of a group.
GroupRange range_of(const GemmArgs& args, std::int64_t group) {
  const GemmProblem& p = args.problem;
  if (args.offsets == nullptr) return {0, 0};
  const std::int64_t rows = p.grouping == kRaggedRows ? p.m : p.k, most = std::numeric_limits<int>::max();  // offset
  return group_range(args.offsets, static_cast<int>(group), static_cast<int>(std::min(rows, most)));
}

// The product of one group, as an ungrouped one.
GemmArgs group_of(const GemmArgs& args, std::int64_t group) {
  GemmArgs one = args;
  GemmProblem& p = one.problem;
  const auto move = [&](GemmView& view, DType dtype, std::int64_t rows) {
    if (view.data == nullptr) return;
    const std::int64_t elements = group * view.group_stride + rows * view.row_stride;
    view.data = static_cast<std::byte*>(view.data) + elements * static_cast<std::int64_t>(size_of(dtype));
  };
  const GroupRange range = range_of(args, group);
  const std::int64_t of_out = p.grouping == kRaggedRows ? range.begin : 0;
  const std::int64_t of_terms = p.grouping == kRaggedSums ? range.begin : 0;
  if (p.grouping == kRaggedRows) p.m = range.end - range.begin;
  if (p.grouping == kRaggedSums) p.k = range.end - range.begin;
  move(one.a, p.dtype, of_out + of_terms);
  move(one.b, p.dtype, of_terms);
  move(one.gate, p.dtype, of_terms);
  move(one.bias, p.dtype, 0);
  move(one.gate_bias, p.dtype, 0);
  move(one.saved, p.dtype, of_out);
  move(one.preactivation, p.dtype, of_out);
  move(one.residual, p.out_dtype, of_out);
  move(one.out, p.out_dtype, of_out);
  return one;
}

std::int64_t row_blocks(const GemmArgs& args, std::int64_t group, std::int64_t rows) {
  const GemmProblem& p = args.problem;
  if (p.grouping != kRaggedRows) return ceil_div(p.m, rows);
  const GroupRange range = range_of(args, group);
  return ceil_div(range.end - range.begin, rows);
}

Status check_offsets(const GemmArgs& args) {
  const GemmProblem& p = args.problem;
  if (args.offsets == nullptr) return {};
  const std::int64_t most = p.grouping == kRaggedRows ? p.m : p.k;
  if (args.offsets[0] != 0) return invalid(format("offsets[0] is {}; 0 is accepted", args.offsets[0]));
  for (std::int64_t g = 0; g < p.groups; ++g) {
    const std::int32_t begin = args.offsets[g], end = args.offsets[g + 1];
    if (end < begin || end > most) {
      return invalid(format("offsets[{}] is {}; {} to {} is accepted", g + 1, end, begin, most));
    }
  }
  return {};
}

Status run_grouped(const Products& ops, const GemmArgs& args, const Parts& parts, int threads, float* scratch) {
  const GemmProblem& p = args.problem;
  if (Status s = check_offsets(args); !s.ok()) return s;
  const std::int64_t across = ceil_div(p.n, parts.columns);
  std::int64_t blocks = 0;
  for (std::int64_t g = 0; g < p.groups; ++g) blocks += row_blocks(args, g, parts.rows);
  tessera::cpu::parallel_for(saturating_product(blocks, across), threads, [&](std::int64_t task, int slot) {
    std::int64_t group = 0, block = task / across;
    for (; block >= row_blocks(args, group, parts.rows); ++group) block -= row_blocks(args, group, parts.rows);
    const GemmArgs one = group_of(args, group);
    Task(ops, one, parts, scratch + slot * parts.floats(ops, p)).run(block * parts.rows, task % across * parts.columns);
  });
  return {};
}

}  // namespace

std::size_t workspace_bytes(const GemmProblem& problem, int threads) {
  const Products* ops = tessera::cpu::products_for(problem.dtype);
  if (ops == nullptr) return 0;  // run() says why
  const std::int64_t floats = Parts(*ops, problem, threads).floats(*ops, problem);
  return static_cast<std::size_t>(std::max(threads, 1) * floats) * sizeof(float);
}

Status run(const GemmArgs& args, int threads, void* workspace) {
  const Products* ops = tessera::cpu::products_for(args.problem.dtype);
  if (ops == nullptr) return {TESSERA_UNSUPPORTED, "the CPU backend needs an x86-64 CPU with SSE4.2"};
  const GemmProblem& p = args.problem;
  threads = std::max(threads, 1);
  const Parts parts(*ops, p, threads);
  auto* const scratch = static_cast<float*>(workspace);
  if (p.op == GemmOp::kGrouped) return run_grouped(*ops, args, parts, threads, scratch);
  const std::int64_t across = ceil_div(p.n, parts.columns);
  const std::int64_t tasks = saturating_product(ceil_div(p.m, parts.rows), across);
  tessera::cpu::parallel_for(tasks, threads, [&](std::int64_t task, int slot) {
    Task(*ops, args, parts, scratch + slot * parts.floats(*ops, p))
        .run(task / across * parts.rows, task % across * parts.columns);
  });
  return {};
}

}  // namespace tessera::gemm::cpu_backend
