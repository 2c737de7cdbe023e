// Mixtures of experts for PyTorch's tensors.
#include "tessera/moe.h"

#include <cstring>

#include "plan_cache.h"

namespace tessera::python {
namespace {

// The fields of tessera_moe, in its order.
constexpr struct Field {
  const tessera_tensor* tessera_moe::*tensor;
  const char* name;
} kFields[] = {
    {&tessera_moe::x, "x"},
    {&tessera_moe::logits, "logits"},
    {&tessera_moe::up, "up"},
    {&tessera_moe::down, "down"},
    {&tessera_moe::gate, "gate"},
    {&tessera_moe::out, "out"},
    {&tessera_moe::dout, "dout"},
    {&tessera_moe::experts, "experts"},
    {&tessera_moe::weights, "weights"},
    {&tessera_moe::positions, "positions"},
    {&tessera_moe::offsets, "offsets"},
    {&tessera_moe::balance_loss, "balance_loss"},
    {&tessera_moe::dbalance_loss, "dbalance_loss"},
    {&tessera_moe::before, "before"},
    {&tessera_moe::before_gate, "before_gate"},
    {&tessera_moe::x_rows, "x_rows"},
    {&tessera_moe::dx, "dx"},
    {&tessera_moe::dlogits, "dlogits"},
    {&tessera_moe::dweights, "dweights"},
    {&tessera_moe::dup, "dup"},
    {&tessera_moe::ddown, "ddown"},
    {&tessera_moe::dgate, "dgate"},
};
constexpr int kTensors = sizeof(kFields) / sizeof(kFields[0]);

// Everything that a plan depends on, compared as bytes.
struct Key {
  tessera_device device;
  std::int32_t threads, activation, scoring, op;
  std::uint32_t flags, given, aligned, mapped;  // the latter: bits of tensors
  tessera_dtype dtype, logits_dtype;
  std::int64_t m, k, hidden, experts, top_k;
};

Key key_of(tessera_moe_op op, const tessera_moe& a) {
  Key key;
  std::memset(&key, 0, sizeof key);
  key.device = a.x->device;
  key.threads = a.x->device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.activation = a.activation;
  key.scoring = a.scoring;
  key.op = op;
  key.flags = a.flags;
  for (int i = 0; i < kTensors; ++i) {
    const tessera_tensor* t = a.*kFields[i].tensor;
    if (t == nullptr) continue;
    key.given |= 1u << i;
    if (has_aligned_rows(*t)) key.aligned |= 1u << i;
    if (has_mapped_strides(*t)) key.mapped |= 1u << i;
  }
  key.dtype = a.x->dtype;
  if (a.logits != nullptr) key.logits_dtype = a.logits->dtype;
  key.m = a.x->shape[0];
  key.k = a.x->shape[1];
  key.experts = a.up->shape[0];
  key.hidden = a.up->shape[1];
  key.top_k = a.experts->shape[1];
  return key;
}

SharedPlan plan_for(tessera_moe_op op, const tessera_moe& args) {
  static auto* plans = new PlanCache<Key>;
  return plans->find(key_of(op, args), [&](tessera_plan** made) { return tessera_moe_plan_create(op, &args, made); });
}

// What the op makes, on x's device.
struct Made {
  int dims;
  std::int64_t shape[3], strides[3];
  PyObject* dtype;  // null: that of x
};
Made made_of(const tessera_moe& a, std::int64_t top_k, const tessera_tensor* tessera_moe::*field) {
  const std::int64_t m = a.x->shape[0], k = a.x->shape[1], experts = a.up->shape[0], hidden = a.up->shape[1];
  const auto compact = [](int dims, std::int64_t first, std::int64_t second, std::int64_t third, PyObject* dtype) {
    return Made{dims, {first, second, third}, {second * third, third, 1}, dtype};
  };
  const auto matrix = [](std::int64_t rows, std::int64_t columns, std::int64_t stride, PyObject* dtype) {
    return Made{2, {rows, columns, 0}, {stride, 1, 0}, dtype};
  };
  if (field == &tessera_moe::experts || field == &tessera_moe::positions) return matrix(m, top_k, top_k, torch.int32);
  if (field == &tessera_moe::weights || field == &tessera_moe::dweights) return matrix(m, top_k, top_k, torch.float32);
  if (field == &tessera_moe::offsets) return {1, {experts + 1, 0, 0}, {1, 0, 0}, torch.int32};
  if (field == &tessera_moe::balance_loss) return {1, {1, 0, 0}, {1, 0, 0}, torch.float32};
  if (field == &tessera_moe::before || field == &tessera_moe::before_gate) {
    return matrix(m * top_k, hidden, (hidden + 7) / 8 * 8, nullptr);  // rows at multiples of 16 bytes
  }
  if (field == &tessera_moe::x_rows) return matrix(m * top_k, k, (k + 7) / 8 * 8, nullptr);
  if (field == &tessera_moe::dlogits) {
    return matrix(m, experts, experts, a.logits != nullptr && a.logits->dtype.bits == 32 ? torch.float32 : nullptr);
  }
  if (field == &tessera_moe::dup || field == &tessera_moe::dgate) return compact(3, experts, hidden, k, nullptr);
  if (field == &tessera_moe::ddown) return compact(3, experts, k, hidden, nullptr);
  return matrix(m, k, k, nullptr);
}

}  // namespace

// moe(tensors, wanted, top_k, activation, scoring, flags) -> those that `wanted` names, in the struct's order
// tensors: a tuple with those that are read, or None, in the struct's order. wanted: bits of those that are made.
PyObject* moe(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr Py_ssize_t kValues = 6;
  if (!expect("moe", count, kValues)) return nullptr;
  if (PyTuple_Size(values[0]) != kTensors) {
    PyErr_Format(PyExc_TypeError, "moe takes a tuple of %d tensors", kTensors);
    return nullptr;
  }
  tessera_moe args = TESSERA_MOE_INIT;
  View views[kTensors];
  for (int i = 0; i < kTensors; ++i) {
    const Field& field = kFields[i];
    if (!read_optional(PyTuple_GetItem(values[0], i), field.name, Data::kNeeded, &views[i], &(args.*field.tensor))) {
      return nullptr;
    }
  }
  const unsigned long wanted = PyLong_AsUnsignedLong(values[1]);
  const long long top_k = PyLong_AsLongLong(values[2]);
  args.activation = static_cast<tessera_activation>(PyLong_AsLong(values[3]));
  args.scoring = static_cast<tessera_moe_scoring>(PyLong_AsLong(values[4]));
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[5]));
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (args.x == nullptr || args.x->ndim != 2 || args.up == nullptr || args.up->ndim != 3) {
    fail("x must have 2 dims, [M, K], and up 3, [E, H, K]");
    return nullptr;
  }
  if (args.experts != nullptr && args.experts->ndim != 2) {
    fail("experts must have 2 dims, [M, top_k]");
    return nullptr;
  }
  if (top_k < 1 || top_k > args.up->shape[0]) {
    fail("top_k is " + std::to_string(top_k) + "; 1 to the number of experts is accepted, which is " +
         std::to_string(args.up->shape[0]));
    return nullptr;
  }
  const Ref made(PyTuple_New(__builtin_popcountl(wanted)));
  if (!made) return nullptr;
  Py_ssize_t next = 0;
  for (int i = 0; i < kTensors; ++i) {
    if ((wanted >> i & 1) == 0) continue;
    const Made m = made_of(args, top_k, kFields[i].tensor);
    Ref tensor = allocate_strided(views[0], m.dtype, m.shape, m.strides, m.dims, &views[i]);
    if (!tensor) return nullptr;
    args.*kFields[i].tensor = &views[i].tensor;
    PyTuple_SetItem(made.get(), next++, tensor.release());
  }
  if (args.experts == nullptr) {
    fail("experts is missing");
    return nullptr;
  }
  if (args.x->device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  const tessera_moe_op op = args.dout != nullptr ? TESSERA_MOE_BACKWARD : TESSERA_MOE_FORWARD;
  const SharedPlan plan = plan_for(op, args);
  if (!plan) return nullptr;
  const bool done = run_plan(plan.get(), views[0], [&](void* workspace, std::size_t bytes, void* stream) {
    return tessera_moe_plan_run(plan.get(), &args, workspace, bytes, stream);
  });
  if (!done) return nullptr;
  Py_INCREF(made.get());
  return made.get();
}

}  // namespace tessera::python
