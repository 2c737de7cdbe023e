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

}  // namespace tessera::python
