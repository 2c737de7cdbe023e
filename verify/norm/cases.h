// Cases of the norm family: a problem, its inputs by seed and distribution, and how its tensors lie in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "norm/problem.h"
#include "tessera/norm.h"
#include "verify/case.h"
#include "verify/norm/oracle.h"

namespace tessera::verify::norm {

enum class Distribution : std::uint8_t {
  kNormal,
  kOffset,    // a mean hundreds of times larger than the spread
  kConstant,  // rows of one value: the variance is 0
  kOutlier,   // one element per row is a thousand times larger
  kTiny,      // squares far below eps
};
const char* name_of(Distribution distribution);

// How rows lie in memory.
enum class Layout : std::uint8_t {
  kCompact,
  kPadded,     // rows are padded to multiples of 16 bytes, and by 16 more
  kUnaligned,  // 3 elements after every row
};

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  NormProblem problem;
  Distribution distribution = Distribution::kNormal;
  Layout layout = Layout::kCompact;
  std::uint64_t seed = 1;
  double floor = 1;  // of the accuracy rule, in epsilons: see verify::judge
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;
};

// From row to row of so many columns.
std::int64_t row_stride(const Case& c, std::int64_t columns);
// Sets the problem's alignment to what its tensors will have, and completes name and floor.
void complete(Case& c);

std::vector<Case> suite(std::string_view name);
const std::vector<std::string>& suite_names();

// Values from the case's seed, rounded to their types; the same on every platform.
Inputs make_inputs(const Case& c);
// The same without values, but with positions and tables.
Inputs make_shapes(const Case& c);

// A case's tensors as the C ABI takes them.
class Buffers final : public Call {
 public:
  // Inputs without values (make_shapes) are filled with repeating random ones.
  Buffers(const Case& c, const Inputs& inputs);

  std::vector<Buffer*> buffers() override;
  tessera_status plan(tessera_plan** plan) override;
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) override;

  const tessera_norm& args() const { return args_; }
  tessera_norm_op op() const { return static_cast<tessera_norm_op>(problem_.op); }
  // What the op wrote, read from host memory.
  Outputs results() const;

 private:
  NormProblem problem_;
  Buffer x_{"x"}, out_{"out"}, weight_{"weight"}, bias_{"bias"}, residual_{"residual"}, sum_{"sum"}, rstd_{"rstd"},
      mean_{"mean"}, dout_{"dout"}, dsum_{"dsum"}, dx_{"dx"}, dweight_{"dweight"}, dbias_{"dbias"}, cos_{"cos"},
      sin_{"sin"}, positions_{"positions"};
  tessera_norm args_ = TESSERA_NORM_INIT;
};

std::unique_ptr<verify::Case> norm_case(const Case& c);

}  // namespace tessera::verify::norm
