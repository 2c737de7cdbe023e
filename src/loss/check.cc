#include "loss/check.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "base/tensor.h"
#include "mlp/check.h"

namespace tessera::loss {
namespace {

Status check_options(const tessera_loss& in, LossProblem& p) {
  if (in.flags != 0) return invalid(format("flags is {:#x}; 0 is accepted", in.flags));
  if (in.reserved != 0) return invalid(format("reserved is {}; 0 is accepted", in.reserved));
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

Status check_required(LossOp op, std::initializer_list<std::pair<const char*, const tessera_tensor*>> tensors) {
  for (const auto& [name, given] : tensors) {
    if (given == nullptr) return invalid(format("{} is null; {} needs it", name, name_of(op)));
  }
  return {};
}

// target, out and dparams of a likelihood, whose problem has dtype, rows and components. first: the tensor that has given them.
Status check_likelihood(const tessera_loss& in, const char* first, Look look, CheckedLoss& out) {
  LossProblem& p = out.args.problem;
  const bool look_at_data = look == Look::kEverything;
  const auto read = [&](const char* name, const tessera_tensor& given, Element element, Access access, int rank,
                        std::initializer_list<std::int64_t> shape, LossView& view, DType& dtype) -> Status {
    TESSERA_CHECK(check_same_device(name, given.device, first, out.device));
    CheckedTensor t;
    TESSERA_CHECK(check_tensor(given, {name, element, access, rank, rank}, look_at_data, t));
    dtype = dtype_of(t.dtype);
    int dim = 0;
    for (const std::int64_t want : shape) {
      const std::int64_t is = t.shape[static_cast<std::size_t>(dim)];
      if (is != want) return invalid(format("{} has size {} in dim {}; {} is expected", name, is, dim, want));
      ++dim;
    }
    view = {t.data, rank == 3 ? t.strides[0] : std::int64_t{t.shape[0] > 1}, rank == 3 ? t.strides[1] : 0};
    return {};
  };
  DType dtype{};
  TESSERA_CHECK(
      read("target", *in.target, Element::kFloating, Access::kRead, 1, {p.rows}, out.args.target, p.target_dtype));
  if (p.target_dtype != p.dtype && p.target_dtype != DType::kFloat32) {
    return invalid(format("target is {}, but {} is {}; the same or fp32 is accepted", name_of(p.target_dtype), first,
                          name_of(p.dtype)));
  }
  TESSERA_CHECK(read("out", *in.out, Element::kFloat32, Access::kWrite, 1,
                     {p.reduction == Reduction::kNone ? p.rows : 1}, out.args.out, dtype));
  p.gradient = in.dparams != nullptr;
  if (p.gradient) {
    TESSERA_CHECK(read("dparams", *in.dparams, Element::kFloating, Access::kWrite, 3, {p.rows, p.components, 3},
                       out.args.dparams, dtype));
    if (dtype != p.dtype) {
      return invalid(
          format("dparams is {}, but {} is {}; they must be the same", name_of(dtype), first, name_of(p.dtype)));
    }
  }
  if (p.rows == 0 && p.reduction == Reduction::kMean)
    return invalid(format("{} has no rows, which have no mean", first));
  return {};
}

Status check_gmm_nll(const tessera_loss& in, Look look, CheckedLoss& out) {
  LossProblem& p = out.args.problem;
  TESSERA_CHECK(check_absent(p.op, {{"hidden", in.hidden},
                                    {"weight", in.weight},
                                    {"dout", in.dout},
                                    {"dhidden", in.dhidden},
                                    {"dweight", in.dweight},
                                    {"x", in.x},
                                    {"up", in.up},
                                    {"down", in.down}}));
  TESSERA_CHECK(check_required(p.op, {{"params", in.params}, {"target", in.target}, {"out", in.out}}));
  TESSERA_CHECK(check_options(in, p));
  out.device = in.params->device;
  TESSERA_CHECK(check_device("params", out.device));
  CheckedTensor params;
  TESSERA_CHECK(
      check_tensor(*in.params, {"params", Element::kFloating, Access::kRead, 3, 3}, look == Look::kEverything, params));
  if (params.shape[2] != 3) {
    return invalid(format("params has size {} in dim 2; 3 is expected", params.shape[2]));
  }
  p.dtype = dtype_of(params.dtype);
  p.rows = params.shape[0];
  p.components = params.shape[1];
  if (p.components == 0) return invalid("params has 0 components; 1 and more is accepted");
  out.args.params = {params.data, params.strides[0], params.strides[1]};
  return check_likelihood(in, "params", look, out);
}

Status check_mlp_gmm_nll(const tessera_loss& in, Look look, CheckedLoss& out) {
  LossProblem& p = out.args.problem;
  TESSERA_CHECK(check_absent(p.op, {{"params", in.params},
                                    {"hidden", in.hidden},
                                    {"weight", in.weight},
                                    {"dout", in.dout},
                                    {"dhidden", in.dhidden},
                                    {"dweight", in.dweight}}));
  TESSERA_CHECK(
      check_required(p.op, {{"x", in.x}, {"up", in.up}, {"down", in.down}, {"target", in.target}, {"out", in.out}}));
  TESSERA_CHECK(check_options(in, p));
  // The MLP's result is in the workspace or nowhere: what it is to the check has rows of whole 16 bytes.
  alignas(16) static char nowhere[16];
  const auto size_of_dim = [](const tessera_tensor& t) { return t.ndim > 0 && t.shape != nullptr ? t.shape[0] : 0; };
  std::int64_t shape[] = {size_of_dim(*in.x), size_of_dim(*in.down)};
  std::int64_t strides[] = {ceil_div(std::max<std::int64_t>(shape[1], 1), 8) * 8, 1};
  tessera_tensor result = *in.x;
  result.data = nowhere;
  result.ndim = 2;
  result.shape = shape;
  result.strides = strides;
  result.byte_offset = 0;
  tessera_mlp mlp = TESSERA_MLP_INIT;
  mlp.x = in.x;
  mlp.up = in.up;
  mlp.down = in.down;
  mlp.out = &result;
  mlp.activation = in.activation;
  const auto checked = mlp::check(TESSERA_MLP_FORWARD, &mlp, look);
  if (!checked.ok()) return checked.status();
  out.device = checked->device;
  out.args.mlp = checked->args;
  p.mlp = checked->args.problem;
  p.dtype = p.mlp.dtype;
  p.rows = p.mlp.m;
  p.components = p.mlp.n / 3;
  if (p.mlp.n == 0 || p.mlp.n % 3 != 0) {
    return invalid(format("down has {} rows; 3 for each component, at least 3, are accepted", p.mlp.n));
  }
  return check_likelihood(in, "x", look, out);
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
  TESSERA_CHECK(check_absent(
      p.op, {{"params", in.params}, {"dparams", in.dparams}, {"x", in.x}, {"up", in.up}, {"down", in.down}}));
  TESSERA_CHECK(
      check_required(p.op, {{"hidden", in.hidden}, {"weight", in.weight}, {"target", in.target}, {"out", in.out}}));
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
  if (op == TESSERA_LOSS_GMM_NLL) return check_gmm_nll(in, look, out);
  return op == TESSERA_LOSS_MLP_GMM_NLL ? check_mlp_gmm_nll(in, look, out) : check_linear_cross_entropy(in, look, out);
}

Status check_into(tessera_loss_op op, const tessera_loss* args, Look look, CheckedLoss& out) {
  if (op != TESSERA_LOSS_GMM_NLL && op != TESSERA_LOSS_LINEAR_CROSS_ENTROPY && op != TESSERA_LOSS_MLP_GMM_NLL) {
    return invalid(format("op is {}; TESSERA_LOSS_GMM_NLL, _LINEAR_CROSS_ENTROPY and _MLP_GMM_NLL are known",
                          static_cast<int>(op)));
  }
  static_assert(TESSERA_LOSS_LINEAR_CROSS_ENTROPY == static_cast<int>(LossOp::kLinearCrossEntropy) &&
                TESSERA_LOSS_MLP_GMM_NLL == static_cast<int>(LossOp::kMlpGmmNll));
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
