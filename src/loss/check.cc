#include "loss/check.h"

#include <array>
#include <optional>

#include "base/arguments.h"
#include "base/format.h"
#include "base/tensor.h"

namespace tessera::loss {
namespace {

struct Slot {
  const char* name;
  const tessera_tensor* tessera_loss::*given;
  bool needed;
  Access access;
  int rank;
  LossView LossArgs::*view;
};
constexpr std::array<Slot, 4> kSlots = {{
    {"params", &tessera_loss::params, true, Access::kRead, 3, &LossArgs::params},
    {"target", &tessera_loss::target, true, Access::kRead, 1, &LossArgs::target},
    {"out", &tessera_loss::out, true, Access::kWrite, 1, &LossArgs::out},
    {"dparams", &tessera_loss::dparams, false, Access::kWrite, 3, &LossArgs::dparams},
}};
enum : std::size_t { kParams, kTarget, kOut, kDparams };

Status check_known(const tessera_loss& in, Look look, CheckedLoss& out) {
  LossProblem& p = out.args.problem;
  for (const Slot& slot : kSlots) {
    if (slot.needed && in.*slot.given == nullptr) {
      return invalid(format("{} is null; {} needs it", slot.name, name_of(p.op)));
    }
  }
  if (in.flags != 0) return invalid(format("flags is {:#x}; 0 is accepted", in.flags));
  switch (in.reduction) {
    case TESSERA_REDUCTION_NONE:
    case TESSERA_REDUCTION_MEAN:
    case TESSERA_REDUCTION_SUM:
      break;
    default:
      return invalid(
          format("reduction is {}; TESSERA_REDUCTION_NONE, _MEAN and _SUM are known", static_cast<int>(in.reduction)));
  }
  static_assert(TESSERA_REDUCTION_MEAN == static_cast<int>(Reduction::kMean) &&
                TESSERA_REDUCTION_SUM == static_cast<int>(Reduction::kSum));
  p.reduction = static_cast<Reduction>(in.reduction);
  p.gradient = in.dparams != nullptr;
  out.device = in.params->device;
  TESSERA_CHECK(check_device("params", out.device));

  std::array<std::optional<CheckedTensor>, kSlots.size()> checked;
  for (std::size_t i = 0; i < kSlots.size(); ++i) {
    const Slot& slot = kSlots[i];
    const tessera_tensor* given = in.*slot.given;
    if (given == nullptr) continue;
    TESSERA_CHECK(check_same_device(slot.name, given->device, "params", out.device));
    const TensorRule rule{slot.name, i == kOut ? Element::kFloat32 : Element::kFloating, slot.access, slot.rank,
                          slot.rank};
    CheckedTensor& t = checked[i].emplace();
    TESSERA_CHECK(check_tensor(*given, rule, look == Look::kEverything, t));
    const DType own = dtype_of(t.dtype), first = dtype_of(checked[kParams]->dtype);
    if (i != kOut && own != first && !(i == kTarget && own == DType::kFloat32)) {
      return invalid(format("{} is {}, but params is {}; {}", slot.name, describe(t.dtype),
                            describe(checked[kParams]->dtype),
                            i == kTarget ? "the same or fp32 is accepted" : "they must be the same"));
    }
    out.args.*slot.view = {t.data, slot.rank == 3 ? t.strides[0] : std::int64_t{t.shape[0] > 1},
                           slot.rank == 3 ? t.strides[1] : 0};
  }

  const CheckedTensor& params = *checked[kParams];
  p.dtype = dtype_of(params.dtype);
  p.target_dtype = dtype_of(checked[kTarget]->dtype);
  p.rows = params.shape[0];
  p.components = params.shape[1];
  const auto match = [&](std::size_t slot, int dim, std::int64_t want) {
    const std::int64_t is = checked[slot]->shape[dim];
    if (is == want) return Status();
    return invalid(format("{} has size {} in dim {}; {} is expected", kSlots[slot].name, is, dim, want));
  };
  TESSERA_CHECK(match(kParams, 2, 3));
  if (p.components == 0) return invalid("params has 0 components; 1 and more is accepted");
  TESSERA_CHECK(match(kTarget, 0, p.rows));
  TESSERA_CHECK(match(kOut, 0, p.reduction == Reduction::kNone ? p.rows : 1));
  if (p.gradient) {
    for (int dim = 0; dim < 3; ++dim) TESSERA_CHECK(match(kDparams, dim, params.shape[dim]));
  }
  if (p.rows == 0 && p.reduction == Reduction::kMean) return invalid("params has no rows, which have no mean");
  return {};
}

Status check_into(tessera_loss_op op, const tessera_loss* args, Look look, CheckedLoss& out) {
  if (op != TESSERA_LOSS_GMM_NLL) {
    return invalid(format("op is {}; TESSERA_LOSS_GMM_NLL is known", static_cast<int>(op)));
  }
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_loss)) return check_known(*args, look, out);
  tessera_loss known = TESSERA_LOSS_INIT;
  TESSERA_CHECK(read_arguments(args, sizeof(tessera_loss), "TESSERA_LOSS_INIT", known));
  return check_known(known, look, out);
}

}  // namespace

Result<CheckedLoss> check(tessera_loss_op op, const tessera_loss* args, Look look) {
  Result<CheckedLoss> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::loss
