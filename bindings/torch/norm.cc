// Norms and rotary embedding for PyTorch's tensors.
#include "tessera/norm.h"

#include "plan_cache.h"

namespace tessera::python {
namespace {

constexpr int kTensors = 16;

struct Key {
  tessera_device device;
  std::int32_t op, threads;
  std::uint32_t flags, given, aligned;  // given, aligned: a bit for each tensor
  std::int32_t positions_rank;
  tessera_dtype dtypes[2];  // of x and of the tables
  std::int64_t shape[4];    // of x
  std::int64_t tables[2];
};

Key key_of(tessera_norm_op op, const tessera_norm& a) {
  Key key;
  std::memset(&key, 0, sizeof key);
  key.device = a.x->device;
  key.op = op;
  key.threads = a.x->device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.flags = a.flags;
  const tessera_tensor* tensors[kTensors] = {a.x,     a.out,  a.weight, a.bias,     a.residual, a.sum,
                                             a.rstd,  a.mean, a.dout,   a.dsum,     a.dx,       a.dweight,
                                             a.dbias, a.cos,  a.sin,    a.positions};
  for (int i = 0; i < kTensors; ++i) {
    if (tensors[i] == nullptr) continue;
    key.given |= 1u << i;
    if (has_aligned_rows(*tensors[i])) key.aligned |= 1u << i;
  }
  key.dtypes[0] = a.x->dtype;
  for (int i = 0; i < a.x->ndim && i < 4; ++i) key.shape[i] = a.x->shape[i];
  if (a.cos != nullptr) {
    key.dtypes[1] = a.cos->dtype;
    for (int i = 0; i < a.cos->ndim && i < 2; ++i) key.tables[i] = a.cos->shape[i];
  }
  if (a.positions != nullptr) key.positions_rank = a.positions->ndim;
  return key;
}

bool run_norm(tessera_norm_op op, const tessera_norm& args, const View& x) {
  static auto* plans = new PlanCache<Key>;
  if (x.tensor.device.type == TESSERA_CPU && !follow_threads()) return false;
  const SharedPlan plan =
      plans->find(key_of(op, args), [&](tessera_plan** made) { return tessera_norm_plan_create(op, &args, made); });
  return plan && run_plan(plan.get(), x, [&](void* workspace, std::size_t bytes, void* stream) {
           return tessera_norm_plan_run(plan.get(), &args, workspace, bytes, stream);
         });
}

bool expect_dims(const View& x, int dims) {
  if (x.tensor.ndim == dims) return true;
  fail("x has " + std::to_string(x.tensor.ndim) + " dims; " + std::to_string(dims) + " are accepted");
  return false;
}

// None if there is no tensor.
Ref or_none(Ref tensor) {
  if (tensor) return tensor;
  Py_INCREF(Py_None);
  return Ref(Py_None);
}

}  // namespace

// norm_forward(x, weight, bias, residual, eps, flags) -> (out, sum or None, rstd, mean or None)
PyObject* norm_forward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("norm_forward", count, 6)) return nullptr;
  tessera_norm args = TESSERA_NORM_INIT;
  View x, weight, bias, residual, out, sum, rstd, mean;
  if (!read(values[0], "x", Data::kNeeded, &x) ||
      !read_optional(values[1], "weight", Data::kNeeded, &weight, &args.weight) ||
      !read_optional(values[2], "bias", Data::kNeeded, &bias, &args.bias) ||
      !read_optional(values[3], "residual", Data::kNeeded, &residual, &args.residual) || !expect_dims(x, 2)) {
    return nullptr;
  }
  args.x = &x.tensor;
  args.eps = static_cast<float>(PyFloat_AsDouble(values[4]));
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[5]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  const std::int64_t shape[] = {x.tensor.shape[0], x.tensor.shape[1]};
  Ref of_out = allocate(x, nullptr, shape, 2, Fill::kNone, &out), of_sum, of_mean;
  Ref of_rstd = allocate(x, torch.float32, shape, 1, Fill::kNone, &rstd);
  if (!of_out || !of_rstd) return nullptr;
  args.out = &out.tensor;
  args.rstd = &rstd.tensor;
  if (args.residual != nullptr) {
    of_sum = allocate(x, nullptr, shape, 2, Fill::kNone, &sum);
    if (!of_sum) return nullptr;
    args.sum = &sum.tensor;
  }
  if ((args.flags & TESSERA_NORM_CENTERED) != 0) {
    of_mean = allocate(x, torch.float32, shape, 1, Fill::kNone, &mean);
    if (!of_mean) return nullptr;
    args.mean = &mean.tensor;
  }
  if (!run_norm(TESSERA_NORM_FORWARD, args, x)) return nullptr;
  const Ref second = or_none(std::move(of_sum)), fourth = or_none(std::move(of_mean));
  return PyTuple_Pack(4, of_out.get(), second.get(), of_rstd.get(), fourth.get());
}

// norm_backward(dout, x, weight, rstd, mean, dsum, flags, with_dweight, with_dbias)
//   -> (dx, dweight or None, dbias or None)
PyObject* norm_backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("norm_backward", count, 9)) return nullptr;
  tessera_norm args = TESSERA_NORM_INIT;
  View dout, x, weight, rstd, mean, dsum, dx, dweight, dbias;
  if (!read(values[0], "dout", Data::kNeeded, &dout) || !read(values[1], "x", Data::kNeeded, &x) ||
      !read_optional(values[2], "weight", Data::kNeeded, &weight, &args.weight) ||
      !read(values[3], "rstd", Data::kNeeded, &rstd) ||
      !read_optional(values[4], "mean", Data::kNeeded, &mean, &args.mean) ||
      !read_optional(values[5], "dsum", Data::kNeeded, &dsum, &args.dsum) || !expect_dims(x, 2)) {
    return nullptr;
  }
  args.x = &x.tensor;
  args.dout = &dout.tensor;
  args.rstd = &rstd.tensor;
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[6]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  const std::int64_t shape[] = {x.tensor.shape[0], x.tensor.shape[1]};
  Ref of_dx = allocate(x, nullptr, shape, 2, Fill::kNone, &dx), of_dweight, of_dbias;
  if (!of_dx) return nullptr;
  args.dx = &dx.tensor;
  if (PyObject_IsTrue(values[7]) == 1) {
    of_dweight = allocate(x, nullptr, shape + 1, 1, Fill::kNone, &dweight);
    if (!of_dweight) return nullptr;
    args.dweight = &dweight.tensor;
  }
  if (PyObject_IsTrue(values[8]) == 1) {
    of_dbias = allocate(x, nullptr, shape + 1, 1, Fill::kNone, &dbias);
    if (!of_dbias) return nullptr;
    args.dbias = &dbias.tensor;
  }
  if (!run_norm(TESSERA_NORM_BACKWARD, args, x)) return nullptr;
  const Ref second = or_none(std::move(of_dweight)), third = or_none(std::move(of_dbias));
  return PyTuple_Pack(3, of_dx.get(), second.get(), third.get());
}

// norm_rotary(x, cos, sin, positions, flags) -> out
PyObject* norm_rotary(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("norm_rotary", count, 5)) return nullptr;
  tessera_norm args = TESSERA_NORM_INIT;
  View x, cos, sin, positions, out;
  if (!read(values[0], "x", Data::kNeeded, &x) || !read(values[1], "cos", Data::kNeeded, &cos) ||
      !read(values[2], "sin", Data::kNeeded, &sin) ||
      !read_optional(values[3], "positions", Data::kNeeded, &positions, &args.positions) || !expect_dims(x, 4)) {
    return nullptr;
  }
  args.x = &x.tensor;
  args.cos = &cos.tensor;
  args.sin = &sin.tensor;
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[4]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  Ref result = allocate(x, nullptr, x.tensor.shape, 4, Fill::kNone, &out);
  if (!result) return nullptr;
  args.out = &out.tensor;
  return run_norm(TESSERA_NORM_ROTARY, args, x) ? result.release() : nullptr;
}

}  // namespace tessera::python
