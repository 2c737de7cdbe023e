#include "mlp/check.h"

#include <array>
#include <optional>

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "base/tensor.h"

namespace tessera::mlp {
namespace {

class Checker {
 public:
  Checker(MlpOp op, const tessera_mlp& in, Look look, CheckedMlp& out)
      : in_(in), look_(look), out_(out), problem_(out.args.problem) {
    problem_.op = op;
  }

  Status run() {
    TESSERA_CHECK(check_presence());
    TESSERA_CHECK(check_options());
    TESSERA_CHECK(check_device());
    TESSERA_CHECK(read_tensors());
    fill_views();
    return {};
  }

 private:
  enum Dim : std::uint8_t { kRows, kColumns, kHidden, kResult, kNoDim };  // M, K, H, N
  enum Use : std::uint8_t { kForwardOnly, kBackwardOnly, kBoth };
  struct Slot {
    MlpTensor tensor;
    const char* name;
    const tessera_tensor* tessera_mlp::*given;
    Use use;
    bool needed;
    bool written;  // by the forward or the backward; what is kept from one to the other is written by the forward
    Dim dims[2];   // the second of a vector is kNoDim
  };
  static const std::array<Slot, kMlpTensors - 1> kSlots;

  bool forward() const { return problem_.op == MlpOp::kForward; }

  Status check_presence() {
    for (const Slot& slot : kSlots) {
      const bool given = in_.*slot.given != nullptr;
      const bool used = slot.use == kBoth || (slot.use == kForwardOnly) == forward();
      if (given && !used) {
        return invalid(format("{} is given; only {} takes it", slot.name, forward() ? "the backward" : "the forward"));
      }
      if (!given && used && slot.needed) return invalid(format("{} is null; {} needs it", slot.name, name()));
      if (given) problem_.given |= bit_of(slot.tensor);
    }
    const bool gated = in_.gate != nullptr;
    if ((in_.gate_bias != nullptr) != (gated && in_.up_bias != nullptr)) {
      return invalid(in_.gate_bias != nullptr
                         ? "gate_bias is given without gate and up_bias; it is accepted with both"
                         : "gate_bias is null, but gate and up_bias are given; both products have a bias or neither");
    }
    const tessera_tensor* second = gated ? in_.before_gate : in_.hidden;
    const char* second_name = gated ? "before_gate" : "hidden";
    if ((gated ? in_.hidden : in_.before_gate) != nullptr) {
      return invalid(gated ? "hidden is given with gate; before and before_gate are accepted"
                           : "before_gate is given without gate; before and hidden are accepted");
    }
    if ((in_.before != nullptr) != (second != nullptr)) {
      return invalid(format("{} is given without {}; both are accepted, or neither",
                            second != nullptr ? second_name : "before", second != nullptr ? "before" : second_name));
    }
    if (!gated && (in_.dgate != nullptr || in_.dbefore_gate != nullptr)) {
      return invalid(format("{} is given without gate", in_.dgate != nullptr ? "dgate" : "dbefore_gate"));
    }
    return {};
  }

  const char* name() const { return name_of(problem_.op); }

  Status check_options() {
    if ((in_.flags & ~static_cast<std::uint32_t>(TESSERA_MLP_HIDDEN_PADDED)) != 0) {
      return invalid(format("flags is {:#x}; TESSERA_MLP_HIDDEN_PADDED is known", in_.flags));
    }
    problem_.hidden_padded = (in_.flags & TESSERA_MLP_HIDDEN_PADDED) != 0;
    switch (in_.activation) {
      case TESSERA_ACTIVATION_NONE:
      case TESSERA_ACTIVATION_RELU:
      case TESSERA_ACTIVATION_SILU:
      case TESSERA_ACTIVATION_GELU_TANH:
      case TESSERA_ACTIVATION_GELU_ERF:
        break;
      default:
        return invalid(
            format("activation is {}; TESSERA_ACTIVATION_NONE, _RELU, _SILU, _GELU_TANH and _GELU_ERF are known",
                   static_cast<int>(in_.activation)));
    }
    problem_.activation = static_cast<int>(in_.activation);
    return {};
  }

  Status check_device() {
    out_.device = in_.x->device;
    TESSERA_CHECK(tessera::check_device("x", out_.device));
    for (const Slot& slot : kSlots) {
      const tessera_tensor* given = in_.*slot.given;
      if (given != nullptr) TESSERA_CHECK(check_same_device(slot.name, given->device, "x", out_.device));
    }
    return {};
  }

  std::int64_t& size_of_dim(Dim dim) {
    return dim == kRows ? problem_.m : dim == kColumns ? problem_.k : dim == kHidden ? problem_.hidden : problem_.n;
  }

  Status read_tensors() {
    const char* givers[4] = {};  // which tensor said how long a dim is
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      const tessera_tensor* given = in_.*slot.given;
      if (given == nullptr) continue;
      const int rank = slot.dims[1] == kNoDim ? 1 : 2;
      const bool kept = slot.use == kBoth && slot.written;
      const bool written = slot.written && (!kept || forward());
      const TensorRule rule{slot.name, Element::kFloating, written ? Access::kWrite : Access::kRead, rank, rank};
      CheckedTensor& t = checked_[i].emplace();
      TESSERA_CHECK(check_tensor(*given, rule, look_ == Look::kEverything, t));
      if (dtype_of(t.dtype) != dtype_of(checked_[0]->dtype)) {
        return invalid(format("{} is {}, but x is {}; they must be the same", slot.name, describe(t.dtype),
                              describe(checked_[0]->dtype)));
      }
      for (int dim = 0; dim < rank; ++dim) {
        const Dim which = slot.dims[dim];
        const char*& giver = givers[which];
        if (giver == nullptr) {
          giver = slot.name;
          size_of_dim(which) = t.shape[dim];
        } else if (t.shape[dim] != size_of_dim(which)) {
          return invalid(format("{} has size = {} in dim {}, but {} gives {}", slot.name, t.shape[dim], dim, giver,
                                size_of_dim(which)));
        }
      }
    }
    problem_.dtype = dtype_of(checked_[0]->dtype);
    return problem_.hidden_padded ? check_padding() : Status();
  }

  // Rows that are written and their padding must not overlap, and chunks of 16 bytes must be aligned.
  Status check_padding() {
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      const bool written = slot.use == kBoth ? forward() : slot.written;
      if (!checked_[i] || !written || slot.dims[0] != kRows || slot.dims[1] != kHidden) continue;
      const CheckedTensor& t = *checked_[i];
      const std::int64_t bytes = t.dtype.bits / 8, row = ceil_div(saturating_product(t.shape[1], bytes), 16) * 16;
      const bool apart = t.shape[0] <= 1 || t.shape[1] == 0 || t.strides[0] * bytes >= row;
      if (is_aligned(t) && apart) continue;
      return invalid(
          format("{} has rows that do not start at multiples of 16 bytes; TESSERA_MLP_HIDDEN_PADDED needs them to, "
                 "with room for {} bytes each",
                 slot.name, row));
    }
    return {};
  }

  // Strides that do not matter are 0 by now.
  static bool is_aligned(const CheckedTensor& t) {
    const std::int64_t bytes = t.dtype.bits / 8;
    const bool rows = t.rank < 2 || t.strides[0] * bytes % 16 == 0;
    return rows && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  }
  static bool allows_tensor_map(const CheckedTensor& t) {
    constexpr std::int64_t kEnd = std::int64_t{1} << 36;  // elements of a row; eight rows are below 2^40 bytes
    return t.rank < 2 || t.shape[0] <= 1 || t.shape[1] == 0 || (t.strides[0] > 0 && t.strides[0] < kEnd);
  }

  void fill_views() {
    const bool on_gpu = out_.device.type == TESSERA_CUDA;
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const CheckedTensor& t = *checked_[i];
      out_.args[kSlots[i].tensor] = {t.data, t.rank < 2 ? 0 : t.strides[0]};
      if (!on_gpu) continue;
      if (!is_aligned(t)) problem_.aligned &= ~bit_of(kSlots[i].tensor);
      problem_.tensor_maps &= allows_tensor_map(t);
    }
  }

  const tessera_mlp& in_;
  const Look look_;
  CheckedMlp& out_;
  MlpProblem& problem_;
  std::array<std::optional<CheckedTensor>, kMlpTensors - 1> checked_;
};

constexpr std::array<Checker::Slot, kMlpTensors - 1> Checker::kSlots = {{
    {MlpTensor::kX, "x", &tessera_mlp::x, kBoth, true, false, {kRows, kColumns}},
    {MlpTensor::kUp, "up", &tessera_mlp::up, kBoth, true, false, {kHidden, kColumns}},
    {MlpTensor::kDown, "down", &tessera_mlp::down, kBoth, true, false, {kResult, kHidden}},
    {MlpTensor::kOut, "out", &tessera_mlp::out, kForwardOnly, true, true, {kRows, kResult}},
    {MlpTensor::kDout, "dout", &tessera_mlp::dout, kBackwardOnly, true, false, {kRows, kResult}},
    {MlpTensor::kGate, "gate", &tessera_mlp::gate, kBoth, false, false, {kHidden, kColumns}},
    {MlpTensor::kUpBias, "up_bias", &tessera_mlp::up_bias, kBoth, false, false, {kHidden, kNoDim}},
    {MlpTensor::kGateBias, "gate_bias", &tessera_mlp::gate_bias, kBoth, false, false, {kHidden, kNoDim}},
    {MlpTensor::kDownBias, "down_bias", &tessera_mlp::down_bias, kForwardOnly, false, false, {kResult, kNoDim}},
    {MlpTensor::kResidual, "residual", &tessera_mlp::residual, kForwardOnly, false, false, {kRows, kResult}},
    {MlpTensor::kBefore, "before", &tessera_mlp::before, kBoth, false, true, {kRows, kHidden}},
    {MlpTensor::kBeforeGate, "before_gate", &tessera_mlp::before_gate, kBoth, false, true, {kRows, kHidden}},
    {MlpTensor::kHidden, "hidden", &tessera_mlp::hidden, kBoth, false, true, {kRows, kHidden}},
    {MlpTensor::kDx, "dx", &tessera_mlp::dx, kBackwardOnly, false, true, {kRows, kColumns}},
    {MlpTensor::kDup, "dup", &tessera_mlp::dup, kBackwardOnly, false, true, {kHidden, kColumns}},
    {MlpTensor::kDdown, "ddown", &tessera_mlp::ddown, kBackwardOnly, false, true, {kResult, kHidden}},
    {MlpTensor::kDgate, "dgate", &tessera_mlp::dgate, kBackwardOnly, false, true, {kHidden, kColumns}},
    {MlpTensor::kDbefore, "dbefore", &tessera_mlp::dbefore, kBackwardOnly, false, true, {kRows, kHidden}},
    {MlpTensor::kDbeforeGate, "dbefore_gate", &tessera_mlp::dbefore_gate, kBackwardOnly, false, true, {kRows, kHidden}},
}};

Status check_into(tessera_mlp_op op, const tessera_mlp* args, Look look, CheckedMlp& out) {
  if (op != TESSERA_MLP_FORWARD && op != TESSERA_MLP_BACKWARD) {
    return invalid(format("op is {}; TESSERA_MLP_FORWARD and TESSERA_MLP_BACKWARD are known", static_cast<int>(op)));
  }
  static_assert(TESSERA_MLP_FORWARD == static_cast<int>(MlpOp::kForward) &&
                TESSERA_MLP_BACKWARD == static_cast<int>(MlpOp::kBackward));
  const auto known_op = static_cast<MlpOp>(op);
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_mlp)) return Checker(known_op, *args, look, out).run();
  tessera_mlp known = TESSERA_MLP_INIT;
  TESSERA_CHECK(read_arguments(args, sizeof(tessera_mlp), "TESSERA_MLP_INIT", known));
  return Checker(known_op, known, look, out).run();
}

}  // namespace

Result<CheckedMlp> check(tessera_mlp_op op, const tessera_mlp* args, Look look) {
  Result<CheckedMlp> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::mlp
