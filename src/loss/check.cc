#include "loss/check.h"

#include <array>
#include <initializer_list>
#include <optional>
#include <utility>

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

Status check_options(const tessera_loss& in, LossProblem& p) {
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
  return {};
}

// What only another op takes.
Status check_absent(LossOp op, std::initializer_list<std::pair<const char*, const tessera_tensor*>> tensors) {
  for (const auto& [name, given] : tensors) {
    if (given != nullptr) return invalid(format("{} is given; {} does not take it", name, name_of(op)));
  }
  return {};
}

Status check_gmm_nll(const tessera_loss& in, Look look, CheckedLoss& out) {
  LossProblem& p = out.args.problem;
  TESSERA_CHECK(check_absent(p.op, {{"hidden", in.hidden},
                                    {"weight", in.weight},
                                    {"dout", in.dout},
                                    {"dhidden", in.dhidden},
                                    {"dweight", in.dweight}}));
  for (const Slot& slot : kSlots) {
    if (slot.needed && in.*slot.given == nullptr) {
      return invalid(format("{} is null; {} needs it", slot.name, name_of(p.op)));
    }
  }
  TESSERA_CHECK(check_options(in, p));
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

// The tensors of kLinearCrossEntropy. Rows and columns of a matrix: which of the problem's sizes they are.
struct Matrix {
  const char* name;
  const tessera_tensor* tessera_loss::*given;
  bool needed;
  Access access;
  std::int64_t LossProblem::*dims[2];
  LossView LossArgs::*view;
  bool LossProblem::*aligned;
};
constexpr std::array<Matrix, 4> kMatrices = {{
    {"hidden",
     &tessera_loss::hidden,
     true,
     Access::kRead,
     {&LossProblem::rows, &LossProblem::width},
     &LossArgs::hidden,
     &LossProblem::hidden_aligned},
    {"weight",
     &tessera_loss::weight,
     true,
     Access::kRead,
     {&LossProblem::classes, &LossProblem::width},
     &LossArgs::weight,
     &LossProblem::weight_aligned},
    {"dhidden",
     &tessera_loss::dhidden,
     false,
     Access::kWrite,
     {&LossProblem::rows, &LossProblem::width},
     &LossArgs::dhidden,
     &LossProblem::dhidden_aligned},
    {"dweight",
     &tessera_loss::dweight,
     false,
     Access::kWrite,
     {&LossProblem::classes, &LossProblem::width},
     &LossArgs::dweight,
     &LossProblem::dweight_aligned},
}};

bool is_aligned(const CheckedTensor& t) {
  return t.strides[0] * (t.dtype.bits / 8) % 16 == 0 && reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
}
bool allows_tensor_map(const CheckedTensor& t) {
  constexpr std::int64_t kEnd = std::int64_t{1} << 36;  // elements of a row; eight rows are below 2^40 bytes
  return t.shape[0] <= 1 || t.shape[1] == 0 || (t.strides[0] > 0 && t.strides[0] < kEnd);
}

Status check_linear_cross_entropy(const tessera_loss& in, Look look, CheckedLoss& out) {
  LossProblem& p = out.args.problem;
  const auto required = [&](const char* name, const tessera_tensor* given) {
    return given != nullptr ? Status() : invalid(format("{} is null; {} needs it", name, name_of(p.op)));
  };
  TESSERA_CHECK(check_absent(p.op, {{"params", in.params}, {"dparams", in.dparams}}));
  TESSERA_CHECK(required("hidden", in.hidden));
  TESSERA_CHECK(required("weight", in.weight));
  TESSERA_CHECK(required("target", in.target));
  TESSERA_CHECK(required("out", in.out));
  TESSERA_CHECK(check_options(in, p));
  p.dhidden = in.dhidden != nullptr;
  p.dweight = in.dweight != nullptr;
  p.weighted = in.dout != nullptr;
  out.device = in.hidden->device;
  TESSERA_CHECK(check_device("hidden", out.device));

  bool first = true;
  for (const Matrix& matrix : kMatrices) {
    const tessera_tensor* given = in.*matrix.given;
    if (given == nullptr) continue;
    TESSERA_CHECK(check_same_device(matrix.name, given->device, "hidden", out.device));
    CheckedTensor t;
    TESSERA_CHECK(
        check_tensor(*given, {matrix.name, Element::kFloating, matrix.access, 2, 2}, look == Look::kEverything, t));
    if (first) p.dtype = dtype_of(t.dtype);
    if (dtype_of(t.dtype) != p.dtype) {
      return invalid(format("{} is {}, but hidden is {}; they must be the same", matrix.name, describe(t.dtype),
                            name_of(p.dtype)));
    }
    // hidden says rows and width, weight says classes.
    for (int dim = 0; dim < 2; ++dim) {
      std::int64_t& size = p.*matrix.dims[dim];
      if (first || (matrix.given == &tessera_loss::weight && dim == 0)) size = t.shape[dim];
      if (t.shape[dim] != size) {
        return invalid(format("{} has size {} in dim {}; {} is expected", matrix.name, t.shape[dim], dim, size));
      }
    }
    first = false;
    out.args.*matrix.view = {t.data, t.strides[0], 0};
    if (out.device.type != TESSERA_CUDA) continue;
    p.*matrix.aligned = is_aligned(t);
    p.tensor_maps &= allows_tensor_map(t);
  }
  if (p.classes == 0) return invalid("weight has no rows; 1 class and more is accepted");

  const auto vector = [&](const char* name, const tessera_tensor* given, Element element, Access access,
                          std::int64_t size, LossView& view) -> Status {
    TESSERA_CHECK(check_same_device(name, given->device, "hidden", out.device));
    CheckedTensor t;
    TESSERA_CHECK(check_tensor(*given, {name, element, access, 1, 1}, look == Look::kEverything, t));
    if (t.shape[0] != size) {
      return invalid(format("{} has size {} in dim 0; {} is expected", name, t.shape[0], size));
    }
    view = {t.data, std::int64_t{t.shape[0] > 1}, 0};
    return {};
  };
  TESSERA_CHECK(vector("target", in.target, Element::kInt32, Access::kRead, p.rows, out.args.target));
  if (p.weighted) TESSERA_CHECK(vector("dout", in.dout, Element::kFloat32, Access::kRead, p.rows, out.args.dout));
  const std::int64_t results = p.reduction == Reduction::kNone ? p.rows : 1;
  return vector("out", in.out, Element::kFloat32, Access::kWrite, results, out.args.out);
}

Status check_known(tessera_loss_op op, const tessera_loss& in, Look look, CheckedLoss& out) {
  out.args.problem.op = static_cast<LossOp>(op);
  return op == TESSERA_LOSS_GMM_NLL ? check_gmm_nll(in, look, out) : check_linear_cross_entropy(in, look, out);
}

Status check_into(tessera_loss_op op, const tessera_loss* args, Look look, CheckedLoss& out) {
  if (op != TESSERA_LOSS_GMM_NLL && op != TESSERA_LOSS_LINEAR_CROSS_ENTROPY) {
    return invalid(
        format("op is {}; TESSERA_LOSS_GMM_NLL and TESSERA_LOSS_LINEAR_CROSS_ENTROPY are known", static_cast<int>(op)));
  }
  static_assert(TESSERA_LOSS_LINEAR_CROSS_ENTROPY == static_cast<int>(LossOp::kLinearCrossEntropy));
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_loss)) return check_known(op, *args, look, out);
  tessera_loss known = TESSERA_LOSS_INIT;
  TESSERA_CHECK(read_arguments(args, sizeof(tessera_loss), "TESSERA_LOSS_INIT", known));
  return check_known(op, known, look, out);
}

}  // namespace

Result<CheckedLoss> check(tessera_loss_op op, const tessera_loss* args, Look look) {
  Result<CheckedLoss> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::loss
