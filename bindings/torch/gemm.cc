// Matrix products for PyTorch's tensors.
#include <cstring>
#include <memory>
#include <string_view>
#include <unordered_map>

#include "plan.h"
#include "tensor.h"
#include "tessera/gemm.h"

namespace tessera::python {
namespace {

constexpr int kTensors = 9;  // a, b, out, bias, gate, gate_bias, saved, preactivation, residual

// Everything that a plan depends on, compared as bytes.
struct Key {
  tessera_device device;
  std::int32_t threads, activation;
  std::uint32_t flags, given;     // bits: tensors that are given
  std::uint32_t aligned, mapped;  // bits: rows at multiples of 16 bytes; strides that TMA takes
  tessera_dtype dtypes[2];        // a, out
  std::int64_t m, n, k;
};

// Must agree with src/gemm/check.cc.
bool aligned(const tessera_tensor& t) {
  const std::uint64_t bytes = t.dtype.bits / 8;
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  if (t.ndim == 2 && t.shape[0] > 1) {
    all |= static_cast<std::uint64_t>(t.strides != nullptr ? t.strides[0] : t.shape[1]) * bytes;
  }
  return all % 16 == 0;
}
bool mapped(const tessera_tensor& t) {
  return t.ndim < 2 || t.strides == nullptr || t.shape[0] <= 1 ||
         (t.strides[0] > 0 && t.strides[0] < std::int64_t{1} << 36);
}

Key key_of(const tessera_gemm& a) {
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
    if (aligned(*tensors[i])) key.aligned |= 1u << i;
    if (mapped(*tensors[i])) key.mapped |= 1u << i;
  }
  key.dtypes[0] = a.a->dtype;
  key.dtypes[1] = a.out->dtype;
  key.m = a.out->shape[0];
  key.n = a.out->shape[1];
  key.k = a.a->shape[(a.flags & TESSERA_GEMM_A_TRANSPOSED) != 0 ? 0 : 1];
  return key;
}

struct KeyHash {
  std::size_t operator()(const Key& key) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), sizeof key});
  }
};
struct KeyEqual {
  bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
};
struct PlanDeleter {
  void operator()(tessera_plan* plan) const { tessera_plan_destroy(plan); }
};
using Plan = std::shared_ptr<const tessera_plan>;
constexpr std::size_t kMostPlans = 4096;

std::unordered_map<Key, Plan, KeyHash, KeyEqual>& plans() {
  static auto* all = new std::unordered_map<Key, Plan, KeyHash, KeyEqual>;
  return *all;
}

Plan plan_for(const tessera_gemm& args) {
  const Key key = key_of(args);
  const auto known = plans().find(key);
  if (known != plans().end()) return known->second;
  tessera_plan* made = nullptr;
  PyThreadState* state = PyEval_SaveThread();
  const tessera_status status = tessera_gemm_plan_create(TESSERA_GEMM_DENSE, &args, &made);
  PyEval_RestoreThread(state);
  if (!succeeded(status)) return nullptr;
  Plan plan(made, PlanDeleter{});
  if (plans().size() >= kMostPlans) plans().clear();
  plans().emplace(key, plan);
  return plan;
}

}  // namespace

// gemm(a, b, bias, gate, gate_bias, saved, residual, activation, flags, with_preactivation, out_fp32)
//   -> out, or (out, preactivation)
PyObject* gemm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr Py_ssize_t kValues = 11;
  if (count != kValues) {
    PyErr_Format(PyExc_TypeError, "gemm takes %zd arguments, not %zd", kValues, count);
    return nullptr;
  }
  tessera_gemm args = TESSERA_GEMM_INIT;
  View a, b, bias, gate, gate_bias, saved, residual, out, preactivation;
  if (!read(values[0], "a", Data::kNeeded, &a) || !read(values[1], "b", Data::kNeeded, &b) ||
      !read_optional(values[2], "bias", Data::kNeeded, &bias, &args.bias) ||
      !read_optional(values[3], "gate", Data::kNeeded, &gate, &args.gate) ||
      !read_optional(values[4], "gate_bias", Data::kNeeded, &gate_bias, &args.gate_bias) ||
      !read_optional(values[5], "saved", Data::kNeeded, &saved, &args.saved) ||
      !read_optional(values[6], "residual", Data::kNeeded, &residual, &args.residual)) {
    return nullptr;
  }
  args.a = &a.tensor;
  args.b = &b.tensor;
  args.activation = static_cast<tessera_activation>(PyLong_AsLong(values[7]));
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[8]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  const bool with_preactivation = PyObject_IsTrue(values[9]) == 1;
  const bool out_fp32 = PyObject_IsTrue(values[10]) == 1;
  for (const View* view : {&a, &b}) {
    if (view->tensor.ndim == 2) continue;
    fail(std::string(view == &a ? "a" : "b") + " has " + std::to_string(view->tensor.ndim) + " dims; 2 are accepted");
    return nullptr;
  }
  const std::int64_t shape[] = {a.tensor.shape[(args.flags & TESSERA_GEMM_A_TRANSPOSED) != 0 ? 1 : 0],
                                b.tensor.shape[(args.flags & TESSERA_GEMM_B_TRANSPOSED) != 0 ? 1 : 0]};
  Ref result = allocate(a, out_fp32 ? torch.float32 : nullptr, shape, 2, Fill::kNone, &out);
  if (!result) return nullptr;
  args.out = &out.tensor;
  Ref before;
  if (with_preactivation) {
    before = allocate(a, nullptr, shape, 2, Fill::kNone, &preactivation);
    if (!before) return nullptr;
    args.preactivation = &preactivation.tensor;
  }
  if (args.a->device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  const Plan plan = plan_for(args);
  if (!plan) return nullptr;
  const bool done = run_plan(plan.get(), a, [&](void* workspace, std::size_t bytes, void* stream) {
    return tessera_gemm_plan_run(plan.get(), &args, workspace, bytes, stream);
  });
  if (!done) return nullptr;
  return with_preactivation ? PyTuple_Pack(2, result.get(), before.get()) : result.release();
}

}  // namespace tessera::python
