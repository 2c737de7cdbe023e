// Cases of mixtures of experts, their inputs, and the oracle: a router in scalar fp64, and the MLP family's oracle for each
// expert, written to be read.
//
// A kernel passes if its errors against the oracle are at most twice those of the plain computation in the same precision,
// plus a floor. Experts, positions and offsets must be right to the bit. Nothing here shares code with the kernels.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "moe/problem.h"
#include "tessera/moe.h"
#include "verify/case.h"
#include "verify/host_tensor.h"

namespace tessera::verify::moe {

enum class Layout : std::uint8_t {
  kCompact,
  kPaddedHidden,  // rows between the layers start at multiples of 16 bytes
  kUnaligned,     // 3 elements after every row of a matrix
};

enum class Routing : std::uint8_t {
  kNormal,     // unit normal logits
  kTies,       // logits of 0 and 1 only
  kOneExpert,  // one expert has the largest logit of every token
  kEmpty,      // every second expert has no token
  kHostile,    // logits in the thousands, of both signs, or such that every sigmoid underflows
  kMasked,     // half of the logits are -inf
  kSkipped,    // the caller's experts, some of which there are not
};

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  MoeProblem problem;
  Layout layout = Layout::kPaddedHidden;
  Routing routing = Routing::kNormal;
  double scale = 1;  // of x
  std::uint64_t seed = 1;
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;
};

bool is_integer(MoeTensor tensor);
bool is_written(const MoeProblem& problem, MoeTensor tensor);
DType dtype_of(const MoeProblem& problem, MoeTensor tensor);
std::array<std::int64_t, 4> strides_of(const Case& c, MoeTensor tensor);
// Sets the problem's alignment to what its tensors will have, and its name.
void complete(Case& c);

std::vector<Case> suite(std::string_view name);
const std::vector<std::string>& suite_names();

// By MoeTensor, [1, groups, rows, columns]; empty if not given. Integers are whole numbers.
using Tensors = std::array<HostTensor, kMoeGivenTensors>;

// Values from the case's seed, rounded to their type; what a backward is given of the forward is made by the oracle. If not
// all of them are wanted, only those of the router, which decide how long it takes.
enum class Values : std::uint8_t { kAll, kRouter };
Tensors make_inputs(const Case& c, Values values);

// What the op writes, in fp64, and the plain same-precision computation of it.
Tensors exact(const MoeProblem& problem, const Tensors& inputs, int threads);
Tensors plain(const MoeProblem& problem, const Tensors& inputs, int threads);
// The router alone, forward.
Tensors routed(const MoeProblem& problem, const Tensors& inputs);

// A case's tensors as the C ABI takes them.
class Buffers final : public Call {
 public:
  // Inputs without values are filled with repeating random ones.
  Buffers(const Case& c, const Tensors& inputs);

  std::vector<Buffer*> buffers() override;
  tessera_status plan(tessera_plan** plan) override;
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) override;

  const tessera_moe& args() const { return args_; }
  tessera_moe_op op() const { return static_cast<tessera_moe_op>(problem_.op); }
  HostTensor result(MoeTensor tensor) const;

 private:
  MoeProblem problem_;
  std::vector<std::unique_ptr<Buffer>> buffers_;  // by MoeTensor
  tessera_moe args_ = TESSERA_MOE_INIT;
};

// The field of an argument struct.
const tessera_tensor*& field_of(tessera_moe& args, MoeTensor tensor);
void set_options(const MoeProblem& problem, tessera_moe& args);

std::unique_ptr<verify::Case> moe_case(const Case& c);
std::unique_ptr<verify::Case> random_moe(std::uint64_t number, std::uint64_t kind);

}  // namespace tessera::verify::moe
