#include "moe/check.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "base/tensor.h"

namespace tessera::moe {
namespace {

using T = MoeTensor;

enum Use : std::uint8_t { kForwardOnly, kBackwardOnly, kBoth };
struct Slot {
  const tessera_tensor* tessera_moe::*given;
  Use use;
  bool needed;
  bool written;  // in kBoth: by the forward, if it has logits in the case of experts and weights
  Element element;
};
// By MoeTensor.
constexpr std::array<Slot, kMoeGivenTensors> kSlots = {{
    {&tessera_moe::x, kBoth, true, false, Element::kFloating},
    {&tessera_moe::logits, kBoth, false, false, Element::kFloating},
    {&tessera_moe::up, kBoth, true, false, Element::kFloating},
    {&tessera_moe::down, kBoth, true, false, Element::kFloating},
    {&tessera_moe::gate, kBoth, false, false, Element::kFloating},
    {&tessera_moe::out, kForwardOnly, true, true, Element::kFloating},
    {&tessera_moe::dout, kBackwardOnly, true, false, Element::kFloating},
    {&tessera_moe::experts, kBoth, true, true, Element::kInt32},
    {&tessera_moe::weights, kBoth, true, true, Element::kFloat32},
    {&tessera_moe::positions, kBoth, true, true, Element::kInt32},
    {&tessera_moe::offsets, kBoth, true, true, Element::kInt32},
    {&tessera_moe::balance_loss, kForwardOnly, false, true, Element::kFloat32},
    {&tessera_moe::dbalance_loss, kBackwardOnly, false, false, Element::kFloat32},
    {&tessera_moe::before, kBoth, false, true, Element::kFloating},
    {&tessera_moe::before_gate, kBoth, false, true, Element::kFloating},
    {&tessera_moe::x_rows, kBoth, false, true, Element::kFloating},
    {&tessera_moe::dx, kBackwardOnly, false, true, Element::kFloating},
    {&tessera_moe::dlogits, kBackwardOnly, false, true, Element::kFloating},
    {&tessera_moe::dweights, kBackwardOnly, false, true, Element::kFloat32},
    {&tessera_moe::dup, kBackwardOnly, false, true, Element::kFloating},
    {&tessera_moe::ddown, kBackwardOnly, false, true, Element::kFloating},
    {&tessera_moe::dgate, kBackwardOnly, false, true, Element::kFloating},
}};

class Checker {
 public:
  Checker(MoeOp op, const tessera_moe& in, Look look, CheckedMoe& out)
      : in_(in), look_(look), out_(out), problem_(out.args.problem) {
    problem_.op = op;
  }

  Status run() {
    TESSERA_CHECK(check_presence());
    TESSERA_CHECK(check_options());
    TESSERA_CHECK(check_device());
    TESSERA_CHECK(read_tensors());
    TESSERA_CHECK(check_shapes());
    fill_views();
    return {};
  }

 private:
  bool forward() const { return problem_.op == MoeOp::kForward; }
  static const char* name_at(std::size_t i) { return name_of(static_cast<T>(i)); }
  const CheckedTensor& of(T tensor) const { return *checked_[static_cast<std::size_t>(tensor)]; }

  Status check_presence() {
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      const bool given = in_.*slot.given != nullptr;
      const bool used = slot.use == kBoth || (slot.use == kForwardOnly) == forward();
      if (given && !used) {
        return invalid(format("{} is given; only {} takes it", name_at(i), forward() ? "the backward" : "the forward"));
      }
      if (!given && used && slot.needed) {
        return invalid(format("{} is null; {} needs it", name_at(i), name_of(problem_.op)));
      }
      if (given) problem_.given |= bit_of(static_cast<T>(i));
    }
    constexpr struct {
      T tensor, other;
      bool with;
    } kRules[] = {{T::kBalanceLoss, T::kLogits, true}, {T::kDlogits, T::kLogits, true},
                  {T::kDweights, T::kLogits, false},   {T::kDbalanceLoss, T::kDlogits, true},
                  {T::kBeforeGate, T::kGate, true},    {T::kBeforeGate, T::kBefore, true},
                  {T::kDgate, T::kGate, true}};
    for (const auto& [tensor, other, with] : kRules) {
      if (problem_.has(tensor) && problem_.has(other) != with) {
        return invalid(format("{} is given {} {}", name_of(tensor), with ? "without" : "with", name_of(other)));
      }
    }
    if (problem_.has(T::kBefore) && problem_.has(T::kGate) && !problem_.has(T::kBeforeGate)) {
      return invalid("before is given without before_gate; with gate, both are accepted, or neither");
    }
    return {};
  }

  Status check_options() {
    if (in_.reserved != 0) return invalid(format("reserved is {}; 0 is accepted", in_.reserved));
    if ((in_.flags & ~static_cast<std::uint32_t>(TESSERA_MOE_NORMALIZE)) != 0) {
      return invalid(format("flags is {:#x}; 0 and TESSERA_MOE_NORMALIZE are accepted", in_.flags));
    }
    if (in_.scoring != TESSERA_MOE_SOFTMAX && in_.scoring != TESSERA_MOE_SIGMOID) {
      return invalid(format("scoring is {}; TESSERA_MOE_SOFTMAX and TESSERA_MOE_SIGMOID are known",
                            static_cast<int>(in_.scoring)));
    }
    if (in_.activation < TESSERA_ACTIVATION_NONE || in_.activation > TESSERA_ACTIVATION_GELU_ERF) {
      return invalid(
          format("activation is {}; TESSERA_ACTIVATION_NONE, _RELU, _SILU, _GELU_TANH and _GELU_ERF are known",
                 static_cast<int>(in_.activation)));
    }
    static_assert(TESSERA_MOE_SOFTMAX == kMoeSoftmax && TESSERA_MOE_SIGMOID == kMoeSigmoid);
    problem_.activation = static_cast<int>(in_.activation);
    problem_.scoring = in_.logits != nullptr ? static_cast<int>(in_.scoring) : kMoeGiven;
    problem_.normalized = in_.logits != nullptr && (in_.flags & TESSERA_MOE_NORMALIZE) != 0;
    return {};
  }

  Status check_device() {
    out_.device = in_.x->device;
    TESSERA_CHECK(tessera::check_device("x", out_.device));
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const tessera_tensor* given = in_.*kSlots[i].given;
      if (given != nullptr) TESSERA_CHECK(check_same_device(name_at(i), given->device, "x", out_.device));
    }
    return {};
  }

  bool is_written(T tensor, const Slot& slot) const {
    if (slot.use != kBoth || !slot.written) return slot.written;
    const bool of_router = tensor == T::kExperts || tensor == T::kWeights;
    return forward() && !(of_router && in_.logits == nullptr);
  }

  Status read_tensors() {
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      const tessera_tensor* given = in_.*slot.given;
      if (given == nullptr) continue;
      const T tensor = static_cast<T>(i);
      const int rank = shape_of(problem_, tensor).rank;
      const TensorRule rule{name_at(i), slot.element, is_written(tensor, slot) ? Access::kWrite : Access::kRead, rank,
                            rank};
      CheckedTensor& t = checked_[i].emplace();
      TESSERA_CHECK(check_tensor(*given, rule, look_ == Look::kEverything, t));
      if (slot.element != Element::kFloating) continue;
      const DType own = dtype_of(t.dtype), of_x = dtype_of(of(T::kX).dtype);
      if (tensor == T::kLogits) {
        if (own != of_x && own != DType::kFloat32) {
          return invalid(format("logits is {}, but x is {}; the same or fp32 is accepted", describe(t.dtype),
                                describe(of(T::kX).dtype)));
        }
        problem_.logits_dtype = own;
        continue;
      }
      const T like = tensor == T::kDlogits ? T::kLogits : T::kX;
      if (own != dtype_of(of(like).dtype)) {
        return invalid(format("{} is {}, but {} is {}; they must be the same", name_at(i), describe(t.dtype),
                              name_of(like), describe(of(like).dtype)));
      }
    }
    problem_.dtype = dtype_of(of(T::kX).dtype);
    return {};
  }

  Status check_shapes() {
    problem_.m = of(T::kX).shape[0];
    problem_.k = of(T::kX).shape[1];
    problem_.experts = of(T::kUp).shape[0];
    problem_.hidden = of(T::kUp).shape[1];
    problem_.top_k = of(T::kExperts).shape[1];
    if (problem_.top_k < 1 || problem_.top_k > problem_.experts) {
      return invalid(format("experts has {} columns, but up has {} experts; 1 to as many are accepted", problem_.top_k,
                            problem_.experts));
    }
    if (saturating_product(problem_.m, problem_.top_k) > INT32_MAX) {
      return invalid(
          format("x has {} rows with {} experts each; fewer than 2^31 pairs are accepted", problem_.m, problem_.top_k));
    }
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const CheckedTensor& t = *checked_[i];
      const MoeShape want = shape_of(problem_, static_cast<T>(i));
      const auto rank = static_cast<std::size_t>(t.rank);
      const std::span<const std::int64_t> is(t.shape.data(), rank), wanted(want.dims.data() + 3 - rank, rank);
      if (!std::equal(is.begin(), is.end(), wanted.begin())) {
        return invalid(format("{} is {}; {} is accepted, since x is {}, up is {} and experts is {}", name_at(i),
                              describe(is), describe(wanted), shape_text(T::kX), shape_text(T::kUp),
                              shape_text(T::kExperts)));
      }
      const T tensor = static_cast<T>(i);
      const bool of_pairs =
          tensor == T::kExperts || tensor == T::kWeights || tensor == T::kPositions || tensor == T::kDweights;
      if (of_pairs && t.shape[0] > 1 && t.strides[0] != t.shape[1]) {
        return invalid(format("{} has a stride of {} from row to row; {} is accepted: it is compact", name_at(i),
                              t.strides[0], t.shape[1]));
      }
    }
    return {};
  }
  std::string shape_text(T tensor) const {
    return describe(std::span<const std::int64_t>(of(tensor).shape.data(), static_cast<std::size_t>(of(tensor).rank)));
  }

  // Strides that do not matter are 0 by now.
  static bool is_aligned(const CheckedTensor& t) {
    const std::int64_t bytes = t.dtype.bits / 8;
    bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    for (int dim = 0; dim + 1 < t.rank; ++dim) aligned &= t.strides[dim] * bytes % 16 == 0;
    return aligned;
  }
  static bool allows_tensor_map(const CheckedTensor& t) {
    constexpr std::int64_t kEnd = std::int64_t{1} << 36;  // elements of a row; eight rows are below 2^40 bytes
    bool allows = true;
    for (int dim = 0; dim + 1 < t.rank; ++dim) {
      allows &= t.shape[dim] <= 1 || t.shape[t.rank - 1] == 0 || (t.strides[dim] > 0 && t.strides[dim] < kEnd);
    }
    return allows;
  }

  void fill_views() {
    const bool on_gpu = out_.device.type == TESSERA_CUDA;
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const CheckedTensor& t = *checked_[i];
      const T tensor = static_cast<T>(i);
      out_.args[tensor] = {t.data, t.rank < 2 ? 0 : t.strides[t.rank - 2], t.rank < 3 ? 0 : t.strides[0]};
      // The router's tensors are accessed element by element.
      const bool of_router = kSlots[i].element != Element::kFloating || tensor == T::kLogits || tensor == T::kDlogits;
      if (!on_gpu || of_router) continue;
      if (!is_aligned(t)) problem_.aligned &= ~bit_of(tensor);
      problem_.tensor_maps &= allows_tensor_map(t);
    }
  }

  const tessera_moe& in_;
  const Look look_;
  CheckedMoe& out_;
  MoeProblem& problem_;
  std::array<std::optional<CheckedTensor>, kMoeGivenTensors> checked_;
};

Status check_into(tessera_moe_op op, const tessera_moe* args, Look look, CheckedMoe& out) {
  if (op != TESSERA_MOE_FORWARD && op != TESSERA_MOE_BACKWARD) {
    return invalid(format("op is {}; TESSERA_MOE_FORWARD and TESSERA_MOE_BACKWARD are known", static_cast<int>(op)));
  }
  static_assert(TESSERA_MOE_FORWARD == static_cast<int>(MoeOp::kForward) &&
                TESSERA_MOE_BACKWARD == static_cast<int>(MoeOp::kBackward));
  const auto known_op = static_cast<MoeOp>(op);
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_moe)) return Checker(known_op, *args, look, out).run();
  tessera_moe known = TESSERA_MOE_INIT;
  TESSERA_CHECK(read_arguments(args, sizeof(tessera_moe), "TESSERA_MOE_INIT", known));
  return Checker(known_op, known, look, out).run();
}

}  // namespace

Result<CheckedMoe> check(tessera_moe_op op, const tessera_moe* args, Look look) {
  Result<CheckedMoe> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::moe
