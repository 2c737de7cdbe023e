// Products of blocks, one table per instruction set: what every family multiplies with on the CPU.
//
// A product is result[m][n] (+)= lhs[m][k] * rhs[k][n]. Its operands are packed into panels whose lines are one vector
// (one cache line with AVX-512), W = width columns of fp32:
//   lhs     [ceil(k / line)][m][line]       line = W for fp32, 32 for bf16
//   rhs     [ceil(n / W)][k][W]             bf16: [ceil(n / W)][k / 2][W][2], pairs of k side by side
//   result  [ceil(n / W)][m][W]             always fp32
// Everything is padded with zeros up to the whole panel: m and k to kPad, n to W. m, n and k are 1 at least.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace tessera::cpu {

constexpr std::int64_t kPad = 32;
constexpr int kMaxWidth = 16;  // W of the widest table

constexpr std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

struct Source {
  const void* data;
  std::int64_t stride;  // elements between rows
  DType dtype;
};

struct Products {
  int width;         // W
  int line;          // of lhs
  std::size_t elem;  // bytes of an operand's element

  // Packs source[rows][cols]. `capacity` is the number of lines in a panel of dst, a multiple of kPad; the rest of the
  // last line and, if the product reads them (bf16), the lines up to a multiple of kPad are zeroed. The transposed
  // lhs of bf16 has round_up(cols, kPad) lines instead: see transposed_stride().
  void (*pack_lhs)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);    // m, k
  void (*pack_lhs_t)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);  // k, m
  void (*pack_rhs)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);    // k, n
  void (*pack_rhs_t)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);  // n, k

  // Strides count elements between panels. rhs is always [panels][k][W].
  void (*multiply)(const void* lhs, std::int64_t lhs_stride, const void* rhs, std::int64_t rhs_stride, float* result,
                   std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k, bool accumulate);
  // The same with an lhs from pack_lhs_t.
  void (*multiply_t)(const void* lhs, std::int64_t lhs_stride, const void* rhs, std::int64_t rhs_stride, float* result,
                     std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k, bool accumulate);

  // Tile registers are configured before a thread's work and released after it; null if there are none.
  void (*enter)();
  void (*leave)();
};

// Elements between panels of an lhs made by pack_lhs_t from source[rows][cols] with this capacity.
inline std::int64_t transposed_stride(const Products& ops, std::int64_t capacity, std::int64_t cols) {
  return ops.elem == sizeof(float) ? capacity * ops.line : round_up(cols, kPad) * ops.line;
}

enum class Isa { kNone, kSse4, kAvx2, kAvx512 };
enum class Bf16Isa { kNone, kAvx512Bf16, kAmx };

Isa detect_isa();
Bf16Isa detect_bf16_isa();
// Tests only: use nothing above these.
void limit_isa(Isa isa, Bf16Isa bf16_isa);
const char* name_of(Isa isa);
const char* name_of(Bf16Isa isa);

// Operands in fp32, whatever the tensors' type is. Null if the build or the CPU does not have it.
const Products* fp32_products(Isa isa);
// Operands in bf16, for bf16 tensors.
const Products* bf16_products(Bf16Isa isa);

// The table that serves a type on this CPU; null if the CPU is too old.
const Products* products_for(DType dtype);

}  // namespace tessera::cpu
