// Matrix products for PyTorch's tensors.
#include <cstring>

#include "plan_cache.h"
#include "tessera/gemm.h"

namespace tessera::python {
namespace {

constexpr int kTensors = 9;  // a, b, out, bias, gate, gate_bias, saved, preactivation, residual

// Everything that a plan depends on, compared as bytes.
struct Key {
  tessera_device device;
  std::int32_t threads, activation;
  std::int32_t op, ranks;         // of a, b and out
  std::uint32_t flags, given;     // bits: tensors that are given
  std::uint32_t aligned, mapped;  // bits: rows at multiples of 16 bytes; strides that TMA takes
  tessera_dtype dtypes[2];        // a, out
  std::int64_t m, n, k, groups;
};

Key key_of(tessera_gemm_op op, const tessera_gemm& a) {
  Key key;
  std::memset(&key, 0, sizeof key);
  key.device = a.a->device;
  key.threads = a.a->device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.activation = a.activation;
  key.flags = a.flags;
  const tessera_tensor* tensors[kTensors] = {a.a,         a.b,     a.out,           a.bias,    a.gate,
                                             a.gate_bias, a.saved, a.preactivation, a.residual};
  for (int i = 0; i < kTensors; ++i) {
    if (tensors[i] == nullptr) continue;
    key.given |= 1u << i;
    if (has_aligned_rows(*tensors[i])) key.aligned |= 1u << i;
    if (has_mapped_strides(*tensors[i])) key.mapped |= 1u << i;
  }
  key.dtypes[0] = a.a->dtype;
  key.dtypes[1] = a.out->dtype;
  key.op = op;
  key.ranks = a.a->ndim | a.b->ndim << 4 | a.out->ndim << 8;
  key.m = a.out->shape[a.out->ndim - 2];
  key.n = a.out->shape[a.out->ndim - 1];
  key.k = a.a->shape[a.a->ndim - ((a.flags & TESSERA_GEMM_A_TRANSPOSED) != 0 ? 2 : 1)];
  key.groups = a.offsets != nullptr ? a.offsets->shape[0] - 1 : a.b->ndim == 3 ? a.b->shape[0] : 0;
  return key;
}

SharedPlan plan_for(tessera_gemm_op op, const tessera_gemm& args) {
  static auto* plans = new PlanCache<Key>;
  return plans->find(key_of(op, args), [&](tessera_plan** made) { return tessera_gemm_plan_create(op, &args, made); });
}

// Of a result: [m, n], or [groups, m, n] unless that is negative.
struct Shape {
  std::int64_t m, n, groups;
  bool interleaved;   // in memory, the groups' first rows come first
  std::int64_t line;  // rows begin at multiples of so many elements
};

Ref allocate(const View& like, PyObject* dtype, const Shape& s, View* view) {
  const std::int64_t row = (s.n + s.line - 1) / s.line * s.line;
  Ref made;
  if (s.groups >= 0) {
    const std::int64_t shape[] = {s.groups, s.m, s.n};
    const std::int64_t strides[] = {s.interleaved ? row : s.m * row, s.interleaved ? s.groups * row : row, 1};
    made = allocate_strided(like, dtype, shape, strides, 3, view);
  } else {
    const std::int64_t shape[] = {s.m, s.n}, strides[] = {row, 1};
    made = allocate_strided(like, dtype, shape, strides, 2, view);
  }
  return made;
}

}  // namespace

// gemm(a, b, bias, gate, gate_bias, saved, residual, offsets, activation, flags, options)
//   -> out, or (out, preactivation)
PyObject* gemm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  // Must agree with python/tessera/_gemm.py.
  constexpr unsigned long kGrouped = 1, kPreactivation = 2, kOutFp32 = 4, kInterleaved = 8, kPadded = 16;
  constexpr Py_ssize_t kValues = 11;
  if (count != kValues) {
    PyErr_Format(PyExc_TypeError, "gemm takes %zd arguments, not %zd", kValues, count);
    return nullptr;
  }
  tessera_gemm args = TESSERA_GEMM_INIT;
  View a, b, bias, gate, gate_bias, saved, residual, offsets, out, preactivation;
  if (!read(values[0], "a", Data::kNeeded, &a) || !read(values[1], "b", Data::kNeeded, &b) ||
      !read_optional(values[2], "bias", Data::kNeeded, &bias, &args.bias) ||
      !read_optional(values[3], "gate", Data::kNeeded, &gate, &args.gate) ||
      !read_optional(values[4], "gate_bias", Data::kNeeded, &gate_bias, &args.gate_bias) ||
      !read_optional(values[5], "saved", Data::kNeeded, &saved, &args.saved) ||
      !read_optional(values[6], "residual", Data::kNeeded, &residual, &args.residual) ||
      !read_optional(values[7], "offsets", Data::kNeeded, &offsets, &args.offsets)) {
    return nullptr;
  }
  args.a = &a.tensor;
  args.b = &b.tensor;
  args.activation = static_cast<tessera_activation>(PyLong_AsLong(values[8]));
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[9]));
  const unsigned long options = PyLong_AsUnsignedLong(values[10]);
  if (PyErr_Occurred() != nullptr) return nullptr;
  const bool grouped = (options & kGrouped) != 0;
  for (const View* view : {&a, &b}) {
    if (view->tensor.ndim == 2 || (grouped && view->tensor.ndim == 3)) continue;
    fail(std::string(view == &a ? "a" : "b") + " has " + std::to_string(view->tensor.ndim) + " dims; " +
         (grouped ? "2 and 3 are accepted" : "2 are accepted"));
    return nullptr;
  }
  const auto dim = [](const View& v, bool transposed) { return v.tensor.shape[v.tensor.ndim - (transposed ? 1 : 2)]; };
  const std::int64_t m = dim(a, (args.flags & TESSERA_GEMM_A_TRANSPOSED) != 0);
  const std::int64_t n = dim(b, (args.flags & TESSERA_GEMM_B_TRANSPOSED) != 0);
  const bool ragged = args.offsets != nullptr, layers = grouped && (!ragged || b.tensor.ndim == 2);
  const std::int64_t groups = !layers                    ? 1
                              : !ragged                  ? b.tensor.shape[0]
                              : offsets.tensor.ndim == 1 ? offsets.tensor.shape[0] - 1
                                                         : 0;
  const std::int64_t bits = (options & kOutFp32) != 0 ? 32 : a.tensor.dtype.bits;
  const std::int64_t line = (options & kPadded) != 0 ? 128 * 8 / bits : 1;
  // It is made here, and the blocks of PyTorch's GPU allocator end at multiples of 16 bytes.
  if ((options & kPadded) != 0) args.flags |= TESSERA_GEMM_OUT_PADDED;
  const Shape shape{m, n, layers ? groups : -1, (options & kInterleaved) != 0, line};
  Ref result = allocate(a, (options & kOutFp32) != 0 ? torch.float32 : nullptr, shape, &out);
  if (!result) return nullptr;
  args.out = &out.tensor;
  Ref before;
  if ((options & kPreactivation) != 0) {
    before = allocate(a, nullptr, shape, &preactivation);
    if (!before) return nullptr;
    args.preactivation = &preactivation.tensor;
  }
  if (args.a->device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  const auto op = grouped ? TESSERA_GEMM_GROUPED : TESSERA_GEMM_DENSE;
  const SharedPlan plan = plan_for(op, args);
  if (!plan) return nullptr;
  const bool done = run_plan(plan.get(), a, [&](void* workspace, std::size_t bytes, void* stream) {
    return tessera_gemm_plan_run(plan.get(), &args, workspace, bytes, stream);
  });
  if (!done) return nullptr;
  return before ? PyTuple_Pack(2, result.get(), before.get()) : result.release();
}

}  // namespace tessera::python
