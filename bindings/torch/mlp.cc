// MLPs for PyTorch's tensors.
#include <cstring>

#include "plan_cache.h"
#include "tessera/mlp.h"

namespace tessera::python {
namespace {

// The fields of tessera_mlp, in its order.
constexpr const tessera_tensor* tessera_mlp::*kFields[] = {
    &tessera_mlp::x,         &tessera_mlp::up,       &tessera_mlp::down,        &tessera_mlp::out,
    &tessera_mlp::dout,      &tessera_mlp::gate,     &tessera_mlp::up_bias,     &tessera_mlp::gate_bias,
    &tessera_mlp::down_bias, &tessera_mlp::residual, &tessera_mlp::before,      &tessera_mlp::before_gate,
    &tessera_mlp::hidden,    &tessera_mlp::dx,       &tessera_mlp::dup,         &tessera_mlp::ddown,
    &tessera_mlp::dgate,     &tessera_mlp::dbefore,  &tessera_mlp::dbefore_gate};
constexpr int kTensors = sizeof(kFields) / sizeof(kFields[0]);

// Everything that a plan depends on, compared as bytes.
struct Key {
  tessera_device device;
  std::int32_t threads, activation, op;
  std::uint32_t given, aligned, mapped;  // bits of tensors
  tessera_dtype dtype;
  std::int64_t m, k, hidden, n;
};

Key key_of(tessera_mlp_op op, const tessera_mlp& a) {
  Key key;
  std::memset(&key, 0, sizeof key);
  key.device = a.x->device;
  key.threads = a.x->device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.activation = a.activation;
  key.op = op;
  for (int i = 0; i < kTensors; ++i) {
    const tessera_tensor* t = a.*kFields[i];
    if (t == nullptr) continue;
    key.given |= 1u << i;
    if (has_aligned_rows(*t)) key.aligned |= 1u << i;
    if (has_mapped_strides(*t)) key.mapped |= 1u << i;
  }
  key.dtype = a.x->dtype;
  key.m = a.x->shape[0];
  key.k = a.x->shape[1];
  key.hidden = a.up->shape[0];
  key.n = a.down->shape[0];
  return key;
}

SharedPlan plan_for(tessera_mlp_op op, const tessera_mlp& args) {
  static auto* plans = new PlanCache<Key>;
  return plans->find(key_of(op, args), [&](tessera_plan** made) { return tessera_mlp_plan_create(op, &args, made); });
}

}  // namespace

// mlp(tensors, activation, wanted) -> those that `wanted` names, in the struct's order
// tensors: a tuple with those that are read, or None, in the struct's order. wanted: bits of those that are made; a backward
// makes gradients. Rows between the layers start at multiples of 128 bytes or, of fp32, 256.
PyObject* mlp(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr Py_ssize_t kValues = 3;
  if (count != kValues || PyTuple_Size(values[0]) != kTensors) {
    PyErr_Format(PyExc_TypeError, "mlp takes a tuple of %d tensors, an activation and bits", kTensors);
    return nullptr;
  }
  tessera_mlp args = TESSERA_MLP_INIT;
  static const char* const kNames[] = {
      "x",      "up",          "down",   "out", "dout", "gate",  "up_bias", "gate_bias", "down_bias",   "residual",
      "before", "before_gate", "hidden", "dx",  "dup",  "ddown", "dgate",   "dbefore",   "dbefore_gate"};
  View views[kTensors];
  for (int i = 0; i < kTensors; ++i) {
    if (!read_optional(PyTuple_GetItem(values[0], i), kNames[i], Data::kNeeded, &views[i], &(args.*kFields[i]))) {
      return nullptr;
    }
  }
  args.activation = static_cast<tessera_activation>(PyLong_AsLong(values[1]));
  const unsigned long wanted = PyLong_AsUnsignedLong(values[2]);
  args.flags = TESSERA_MLP_HIDDEN_PADDED;  // they are made here
  if (PyErr_Occurred() != nullptr) return nullptr;
  for (const auto field : {&tessera_mlp::x, &tessera_mlp::up, &tessera_mlp::down}) {
    if ((args.*field) != nullptr && (args.*field)->ndim == 2) continue;
    fail("x, up and down have 2 dims each");
    return nullptr;
  }
  const std::int64_t m = args.x->shape[0], k = args.x->shape[1], hidden = args.up->shape[0], n = args.down->shape[0];
  const Ref made(PyTuple_New(__builtin_popcountl(wanted)));
  if (!made) return nullptr;
  Py_ssize_t next = 0;
  for (int i = 0; i < kTensors; ++i) {
    if ((wanted >> i & 1) == 0) continue;
    const auto field = kFields[i];
    const bool of_up = field == &tessera_mlp::dup || field == &tessera_mlp::dgate;
    const bool of_down = field == &tessera_mlp::ddown;
    const bool outside = field == &tessera_mlp::out || field == &tessera_mlp::dx;
    const std::int64_t shape[] = {of_up     ? hidden
                                  : of_down ? n
                                            : m,
                                  of_up || field == &tessera_mlp::dx ? k
                                  : field == &tessera_mlp::out       ? n
                                                                     : hidden};
    const bool padded = !of_up && !of_down && !outside;
    const std::int64_t strides[] = {padded ? (shape[1] + 63) / 64 * 64 : shape[1], 1};
    Ref tensor = allocate_strided(views[0], nullptr, shape, strides, 2, &views[i]);
    if (!tensor) return nullptr;
    args.*field = &views[i].tensor;
    PyTuple_SetItem(made.get(), next++, tensor.release());
  }
  if (args.x->device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  const tessera_mlp_op op = args.dout != nullptr ? TESSERA_MLP_BACKWARD : TESSERA_MLP_FORWARD;
  const SharedPlan plan = plan_for(op, args);
  if (!plan) return nullptr;
  const bool done = run_plan(plan.get(), views[0], [&](void* workspace, std::size_t bytes, void* stream) {
    return tessera_mlp_plan_run(plan.get(), &args, workspace, bytes, stream);
  });
  if (!done) return nullptr;
  Py_INCREF(made.get());
  return made.get();
}

}  // namespace tessera::python
