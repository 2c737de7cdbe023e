// Cases of the GEMM family: a problem, its inputs by seed and distribution, and how its tensors lie in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/problem.h"
#include "verify/case.h"
#include "verify/gemm/oracle.h"

namespace tessera::verify::gemm {

enum class Distribution : std::uint8_t {
  kNormal,     // preactivations of about unit size
  kOneHot,     // each row of A has a single 1: the product is a selection of B, without any rounding
  kSaturated,  // preactivations in the hundreds: activations at both ends of their range
  kCancel,     // large terms of both signs whose sums are small
  kTiny,       // products near the smallest normal numbers of fp16
};
const char* name_of(Distribution distribution);

// How matrices lie in memory.
enum class Layout : std::uint8_t {
  kCompact,      // rows start at multiples of 16 bytes only if the row's length is such
  kPadded,       // rows are padded to multiples of 16 bytes, and by 16 more
  kFreePadding,  // rows start at multiples of 64 elements; padding of out may be overwritten up to multiples of 16 bytes
  kGaps,         // 8 elements after every row: aligned as compact rows, but what is beside a row is no other row
  kUnaligned,    // 3 elements after every row: most rows start at no multiple of 16 bytes
  kInterleaved,  // a row of every group, then the next row of every group
};

// How rows are divided among ragged groups.
enum class Routing : std::uint8_t {
  kEven,
  kRandom,  // some groups are empty, some have one row, and the last rows have no group
  kHalf,    // one group has half of the rows
};

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  GemmProblem problem;
  Distribution distribution = Distribution::kNormal;
  Layout layout = Layout::kCompact;
  Routing routing = Routing::kEven;
  std::uint64_t seed = 1;
  std::int64_t sample = 0;  // rows that are checked; 0: all
  double floor = 1;         // of the accuracy rule, in epsilons: see verify::judge
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;  // every step of the epilogue as a pass of its own
};

// Matrices of one tensor: one per group, or one.
struct Layers {
  std::int64_t a = 1, b = 1, out = 1;
};
Layers layers_of(const GemmProblem& problem);

// From row to row, and from matrix to matrix, of so many of that size.
struct MatrixStrides {
  std::int64_t row, layer;
};
MatrixStrides strides_of(const Case& c, std::int64_t layers, std::int64_t rows, std::int64_t columns);
std::uint32_t flags_of(const Case& c);  // TESSERA_GEMM_...
// Sets the problem's alignment to what its tensors will have.
void set_alignment(Case& c);
std::string describe(const Case& c);

std::vector<Case> suite(std::string_view name);
const std::vector<std::string>& suite_names();

// [groups + 1]; empty if groups are not ragged.
std::vector<std::int32_t> offsets_of(const Case& c);

// Values from the case's seed, rounded to their types; the same on every platform.
Inputs make_inputs(const Case& c);
// The same without values: Buffers fills them with repeating random ones, which is what time is measured on.
Inputs make_shapes(const Case& c);

std::unique_ptr<verify::Case> gemm_case(const Case& c);

}  // namespace tessera::verify::gemm

namespace tessera::verify {

std::unique_ptr<Case> random_gemm(std::uint64_t number, std::uint64_t kind);

}  // namespace tessera::verify
