// Losses for PyTorch's tensors.
#include "tessera/loss.h"

#include "plan_cache.h"

namespace tessera::python {
namespace {

struct Key {
  tessera_device device;
  std::int32_t threads, reduction, gradient;
  tessera_dtype dtypes[2];  // of params and target
  std::int64_t rows, components;
};

struct MlpKey {
  Key likelihood;
  std::uint32_t aligned, mapped;  // bits of x, up and down
  std::int32_t activation;
  std::int64_t width, hidden;
};

struct CrossEntropyKey {
  tessera_device device;
  std::int32_t threads, reduction;
  std::uint32_t given, aligned, mapped;  // bits of tensors
  tessera_dtype dtype;
  std::int64_t rows, width, classes;
};

}  // namespace

// gmm_nll(params, target, reduction, with_gradient) -> (out, dparams or None)
PyObject* gmm_nll(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("gmm_nll", count, 4)) return nullptr;
  tessera_loss args = TESSERA_LOSS_INIT;
  View params, target, out, dparams;
  if (!read(values[0], "params", Data::kNeeded, &params) || !read(values[1], "target", Data::kNeeded, &target)) {
    return nullptr;
  }
  args.params = &params.tensor;
  args.target = &target.tensor;
  args.reduction = static_cast<tessera_reduction>(PyLong_AsLong(values[2]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (params.tensor.ndim != 3) {
    fail("params has " + std::to_string(params.tensor.ndim) + " dims; 3 are accepted");
    return nullptr;
  }
  const std::int64_t rows[] = {args.reduction == TESSERA_REDUCTION_NONE ? params.tensor.shape[0] : 1};
  Ref result = allocate(params, torch.float32, rows, 1, Fill::kNone, &out), gradient;
  if (!result) return nullptr;
  args.out = &out.tensor;
  if (PyObject_IsTrue(values[3]) == 1) {
    gradient = allocate(params, nullptr, params.tensor.shape, 3, Fill::kNone, &dparams);
    if (!gradient) return nullptr;
    args.dparams = &dparams.tensor;
  }
  if (params.tensor.device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  Key key;
  std::memset(&key, 0, sizeof key);
  key.device = params.tensor.device;
  key.threads = params.tensor.device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.reduction = args.reduction;
  key.gradient = args.dparams != nullptr;
  key.dtypes[0] = params.tensor.dtype;
  key.dtypes[1] = target.tensor.dtype;
  key.rows = params.tensor.shape[0];
  key.components = params.tensor.shape[1];
  static auto* plans = new PlanCache<Key>;
  const SharedPlan plan = plans->find(
      key, [&](tessera_plan** made) { return tessera_loss_plan_create(TESSERA_LOSS_GMM_NLL, &args, made); });
  const bool done = plan && run_plan(plan.get(), params, [&](void* workspace, std::size_t bytes, void* stream) {
                      return tessera_loss_plan_run(plan.get(), &args, workspace, bytes, stream);
                    });
  if (!done) return nullptr;
  if (!gradient) {
    Py_INCREF(Py_None);
    gradient = Ref(Py_None);
  }
  return PyTuple_Pack(2, result.get(), gradient.get());
}

// mlp_gmm_nll(x, up, down, target, activation, reduction) -> out
PyObject* mlp_gmm_nll(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("mlp_gmm_nll", count, 6)) return nullptr;
  tessera_loss args = TESSERA_LOSS_INIT;
  View x, up, down, target, out;
  if (!read(values[0], "x", Data::kNeeded, &x) || !read(values[1], "up", Data::kNeeded, &up) ||
      !read(values[2], "down", Data::kNeeded, &down) || !read(values[3], "target", Data::kNeeded, &target)) {
    return nullptr;
  }
  args.x = &x.tensor;
  args.up = &up.tensor;
  args.down = &down.tensor;
  args.target = &target.tensor;
  args.activation = static_cast<tessera_activation>(PyLong_AsLong(values[4]));
  args.reduction = static_cast<tessera_reduction>(PyLong_AsLong(values[5]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (const View* matrix : {&x, &up, &down}) {
    if (matrix->tensor.ndim == 2) continue;
    fail("x, up and down have 2 dims each");
    return nullptr;
  }
  const std::int64_t rows = x.tensor.shape[0], components = down.tensor.shape[0] / 3;
  const std::int64_t results[] = {args.reduction == TESSERA_REDUCTION_NONE ? rows : 1};
  Ref result = allocate(x, torch.float32, results, 1, Fill::kNone, &out);
  if (!result) return nullptr;
  args.out = &out.tensor;
  if (x.tensor.device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  MlpKey key;
  std::memset(&key, 0, sizeof key);
  key.likelihood.device = x.tensor.device;
  key.likelihood.threads = x.tensor.device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.likelihood.reduction = args.reduction;
  key.likelihood.dtypes[0] = x.tensor.dtype;
  key.likelihood.dtypes[1] = target.tensor.dtype;
  key.likelihood.rows = rows;
  key.likelihood.components = components;
  const tessera_tensor* tensors[] = {args.x, args.up, args.down};
  for (unsigned i = 0; i < sizeof tensors / sizeof tensors[0]; ++i) {
    if (has_aligned_rows(*tensors[i])) key.aligned |= 1u << i;
    if (has_mapped_strides(*tensors[i])) key.mapped |= 1u << i;
  }
  key.activation = args.activation;
  key.width = x.tensor.shape[1];
  key.hidden = up.tensor.shape[0];
  static auto* plans = new PlanCache<MlpKey>;
  const SharedPlan plan = plans->find(
      key, [&](tessera_plan** made) { return tessera_loss_plan_create(TESSERA_LOSS_MLP_GMM_NLL, &args, made); });
  const bool done = plan && run_plan(plan.get(), x, [&](void* workspace, std::size_t bytes, void* stream) {
                      return tessera_loss_plan_run(plan.get(), &args, workspace, bytes, stream);
                    });
  return done ? result.release() : nullptr;
}

// linear_cross_entropy(hidden, weight, target, dout or None, reduction, needs_hidden, needs_weight)
//   -> (out, dhidden or None, dweight or None)
PyObject* linear_cross_entropy(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("linear_cross_entropy", count, 7)) return nullptr;
  tessera_loss args = TESSERA_LOSS_INIT;
  View hidden, weight, target, dout, out, dhidden, dweight;
  if (!read(values[0], "hidden", Data::kNeeded, &hidden) || !read(values[1], "weight", Data::kNeeded, &weight) ||
      !read(values[2], "target", Data::kNeeded, &target) ||
      !read_optional(values[3], "dout", Data::kNeeded, &dout, &args.dout)) {
    return nullptr;
  }
  args.hidden = &hidden.tensor;
  args.weight = &weight.tensor;
  args.target = &target.tensor;
  args.reduction = static_cast<tessera_reduction>(PyLong_AsLong(values[4]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (hidden.tensor.ndim != 2 || weight.tensor.ndim != 2) {
    fail("hidden and weight have " + std::to_string(hidden.tensor.ndim) + " and " + std::to_string(weight.tensor.ndim) +
         " dims; 2 are accepted");
    return nullptr;
  }
  const std::int64_t rows[] = {args.reduction == TESSERA_REDUCTION_NONE ? hidden.tensor.shape[0] : 1};
  Ref result = allocate(hidden, torch.float32, rows, 1, Fill::kNone, &out), of_hidden, of_weight;
  if (!result) return nullptr;
  args.out = &out.tensor;
  if (PyObject_IsTrue(values[5]) == 1) {
    of_hidden = allocate(hidden, nullptr, hidden.tensor.shape, 2, Fill::kNone, &dhidden);
    if (!of_hidden) return nullptr;
    args.dhidden = &dhidden.tensor;
  }
  if (PyObject_IsTrue(values[6]) == 1) {
    of_weight = allocate(weight, nullptr, weight.tensor.shape, 2, Fill::kNone, &dweight);
    if (!of_weight) return nullptr;
    args.dweight = &dweight.tensor;
  }
  if (hidden.tensor.device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  CrossEntropyKey key;
  std::memset(&key, 0, sizeof key);
  key.device = hidden.tensor.device;
  key.threads = hidden.tensor.device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.reduction = args.reduction;
  const tessera_tensor* tensors[] = {args.hidden, args.weight, args.dhidden, args.dweight, args.dout};
  for (unsigned i = 0; i < sizeof tensors / sizeof tensors[0]; ++i) {
    if (tensors[i] == nullptr) continue;
    key.given |= 1u << i;
    if (has_aligned_rows(*tensors[i])) key.aligned |= 1u << i;
    if (has_mapped_strides(*tensors[i])) key.mapped |= 1u << i;
  }
  key.dtype = hidden.tensor.dtype;
  key.rows = hidden.tensor.shape[0];
  key.width = hidden.tensor.shape[1];
  key.classes = weight.tensor.shape[0];
  static auto* plans = new PlanCache<CrossEntropyKey>;
  const SharedPlan plan = plans->find(key, [&](tessera_plan** made) {
    return tessera_loss_plan_create(TESSERA_LOSS_LINEAR_CROSS_ENTROPY, &args, made);
  });
  const bool done = plan && run_plan(plan.get(), hidden, [&](void* workspace, std::size_t bytes, void* stream) {
                      return tessera_loss_plan_run(plan.get(), &args, workspace, bytes, stream);
                    });
  if (!done) return nullptr;
  const auto or_none = [](const Ref& tensor) { return tensor ? tensor.get() : Py_None; };
  return PyTuple_Pack(3, result.get(), or_none(of_hidden), or_none(of_weight));
}

}  // namespace tessera::python
