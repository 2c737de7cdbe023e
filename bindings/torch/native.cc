// tessera._native: the C ABI for PyTorch's tensors.
//
// Built against CPython's limited API (one binary for Python 3.10 and up) and against nothing of PyTorch: a tensor is
// read through DLPack's C exchange table where PyTorch has one (2.10 and up), else through its Python attributes. So
// one wheel serves every PyTorch. The interpreter's lock guards all state here and is given up while a kernel runs.
#include <cstring>
#include <exception>
#include <new>
#include <utility>

#include "plan.h"
#include "tensor.h"

namespace tessera::python {
namespace {

// Kernels leave rows past the last packed sequence alone; a caller must not find garbage there.
Fill rows_of(const tessera_attention& args) { return args.cu_seqlens_q != nullptr ? Fill::kZero : Fill::kNone; }

// What every op takes after its tensors, in this order.
constexpr int kOptions = 8;

bool read_options(PyObject* const* values, tessera_attention* args) {
  args->scale = static_cast<float>(PyFloat_AsDouble(values[0]));
  args->softcap = static_cast<float>(PyFloat_AsDouble(values[1]));
  args->flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[2]));
  args->alignment = static_cast<tessera_alignment>(PyLong_AsLong(values[3]));
  args->window_left = PyLong_AsLongLong(values[4]);
  args->window_right = PyLong_AsLongLong(values[5]);
  args->max_seqlen_q = PyLong_AsLongLong(values[6]);
  args->max_seqlen_k = PyLong_AsLongLong(values[7]);
  return PyErr_Occurred() == nullptr;
}

bool expect(const char* function, Py_ssize_t given, Py_ssize_t wanted) {
  if (given == wanted) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, wanted, given);
  return false;
}

struct Inputs {
  View q, k, v, alibi, lengths_q, lengths_k;
  tessera_attention args = TESSERA_ATTENTION_INIT;

  bool read_qkv(PyObject* const* values, Data data) {
    if (!read(values[0], "q", data, &q) || !read(values[1], "k", data, &k) || !read(values[2], "v", data, &v)) {
      return false;
    }
    args.q = &q.tensor;
    args.k = &k.tensor;
    args.v = &v.tensor;
    return true;
  }
  bool read_packing(PyObject* const* values, Data data) {
    return read_optional(values[0], "alibi", data, &alibi, &args.alibi_slopes) &&
           read_optional(values[1], "cu_seqlens_q", data, &lengths_q, &args.cu_seqlens_q) &&
           read_optional(values[2], "cu_seqlens_k", data, &lengths_k, &args.cu_seqlens_k);
  }
  bool read_cache(PyObject* const* values, Data data) {
    return read_optional(values[0], "alibi", data, &alibi, &args.alibi_slopes) &&
           read_optional(values[1], "cache_seqlens", data, &lengths_q, &args.cache_seqlens) &&
           read_optional(values[2], "page_table", data, &lengths_k, &args.page_table);
  }
};

struct Outputs {
  View out_view, lse_view;
  Ref out, lse;

  // out: q's shape with v's head dim; lse: [B, Hq, Sq], packed [Hq, total_q].
  bool make(PyObject* q, Inputs* in, bool with_lse) {
    const tessera_tensor& t = in->q.tensor;
    const tessera_tensor& value = in->v.tensor;
    const int dims = t.ndim;
    if (dims != 3 && dims != 4) {
      fail("q has " + std::to_string(dims) + " dims; 4 are accepted, [B, S, H, D], or 3 with cu_seqlens");
      return false;
    }
    std::int64_t shape[4];
    for (int i = 0; i < dims; ++i) shape[i] = t.shape[i];
    shape[dims - 1] = value.ndim > 0 ? value.shape[value.ndim - 1] : 0;
    out = allocate(q, nullptr, shape, dims, rows_of(in->args), &out_view);
    if (!out) return false;
    in->args.out = &out_view.tensor;
    if (!with_lse) return true;
    const std::int64_t lse_shape[] = {shape[0], shape[dims - 2], shape[dims - 3]};
    const Fill fill = rows_of(in->args) == Fill::kNone ? Fill::kNone : Fill::kMinusInfinity;
    lse = allocate(q, torch.float32, dims == 4 ? lse_shape : lse_shape + 1, dims - 1, fill, &lse_view);
    in->args.lse = &lse_view.tensor;
    return static_cast<bool>(lse);
  }

  PyObject* result(bool with_lse) {
    if (!with_lse) return out.release();
    return PyTuple_Pack(2, out.get(), lse.get());
  }
};

// forward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, <options>, with_lse) -> out or (out, lse)
PyObject* forward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("forward", count, 6 + kOptions + 1)) return nullptr;
  Inputs in;
  Outputs outputs;
  const bool with_lse = PyObject_IsTrue(values[6 + kOptions]) == 1;
  if (!in.read_qkv(values, Data::kNeeded) || !in.read_packing(values + 3, Data::kNeeded) ||
      !read_options(values + 6, &in.args) || !outputs.make(values[0], &in, with_lse) ||
      !run(TESSERA_ATTENTION_FORWARD, in.args, values[0])) {
    return nullptr;
  }
  return outputs.result(with_lse);
}

// Reads [B, H, S, D] as [B, S, H, D].
void swap_heads(View* view) {
  tessera_tensor& t = view->tensor;
  if (t.ndim != 4) return;
  for (int i = 0; i < 4; ++i) {
    view->shape[i] = t.shape[i];
    view->strides[i] = t.strides[i];
  }
  std::swap(view->shape[1], view->shape[2]);
  std::swap(view->strides[1], view->strides[2]);
  t.shape = view->shape;
  t.strides = view->strides;
}

// forward_heads_first(q, k, v, <options>) -> out: forward for [B, H, S, D], without a transposed tensor for each input
PyObject* forward_heads_first(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("forward_heads_first", count, 3 + kOptions)) return nullptr;
  Inputs in;
  Outputs outputs;
  if (!in.read_qkv(values, Data::kNeeded) || !read_options(values + 3, &in.args)) return nullptr;
  for (View* view : {&in.q, &in.k, &in.v}) swap_heads(view);
  if (!outputs.make(values[0], &in, false) || !run(TESSERA_ATTENTION_FORWARD, in.args, values[0])) return nullptr;
  return PyObject_CallMethod(outputs.out.get(), "transpose", "ii", 1, 2);
}

// decode(q, k, v, alibi, cache_seqlens, page_table, <options>, with_lse) -> out or (out, lse)
PyObject* decode(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("decode", count, 6 + kOptions + 1)) return nullptr;
  Inputs in;
  Outputs outputs;
  const bool with_lse = PyObject_IsTrue(values[6 + kOptions]) == 1;
  if (!in.read_qkv(values, Data::kNeeded) || !in.read_cache(values + 3, Data::kNeeded) ||
      !read_options(values + 6, &in.args) || !outputs.make(values[0], &in, with_lse) ||
      !run(TESSERA_ATTENTION_DECODE, in.args, values[0])) {
    return nullptr;
  }
  return outputs.result(with_lse);
}

// backward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, <options>, out, lse, dout, dlse) -> (dq, dk, dv)
PyObject* backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("backward", count, 6 + kOptions + 4)) return nullptr;
  Inputs in;
  View out, lse, dout, dlse, dq, dk, dv;
  PyObject* const* saved = values + 6 + kOptions;
  if (!in.read_qkv(values, Data::kNeeded) || !in.read_packing(values + 3, Data::kNeeded) ||
      !read_options(values + 6, &in.args) || !read(saved[0], "out", Data::kNeeded, &out) ||
      !read(saved[1], "lse", Data::kNeeded, &lse) || !read(saved[2], "dout", Data::kNeeded, &dout) ||
      !read_optional(saved[3], "dlse", Data::kNeeded, &dlse, &in.args.dlse)) {
    return nullptr;
  }
  in.args.out = &out.tensor;
  in.args.lse = &lse.tensor;
  in.args.dout = &dout.tensor;
  const Fill fill = rows_of(in.args);
  const Ref dq_tensor = allocate(values[0], nullptr, in.q.tensor.shape, in.q.tensor.ndim, fill, &dq);
  if (!dq_tensor) return nullptr;
  const Ref dk_tensor = allocate(values[1], nullptr, in.k.tensor.shape, in.k.tensor.ndim, fill, &dk);
  if (!dk_tensor) return nullptr;
  const Ref dv_tensor = allocate(values[2], nullptr, in.v.tensor.shape, in.v.tensor.ndim, fill, &dv);
  if (!dv_tensor) return nullptr;
  in.args.dq = &dq.tensor;
  in.args.dk = &dk.tensor;
  in.args.dv = &dv.tensor;
  if (!run(TESSERA_ATTENTION_BACKWARD, in.args, values[0])) return nullptr;
  return PyTuple_Pack(3, dq_tensor.get(), dk_tensor.get(), dv_tensor.get());
}

// explain(op, arch or None, q, k, v, alibi, <two tensors: lengths, or cache lengths and page table>, <options>) -> str
PyObject* explain(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("explain", count, 8 + kOptions)) return nullptr;
  const long op = PyLong_AsLong(values[0]);
  Inputs in;
  const bool read = in.read_qkv(values + 2, Data::kNotNeeded) &&
                    (op == TESSERA_ATTENTION_DECODE ? in.read_cache(values + 5, Data::kNotNeeded)
                                                    : in.read_packing(values + 5, Data::kNotNeeded));
  if (!read || !read_options(values + 8, &in.args)) return nullptr;
  const char* arch = nullptr;
  if (values[1] != Py_None) {
    arch = PyUnicode_AsUTF8AndSize(values[1], nullptr);
    if (arch == nullptr) return nullptr;
  }
  // Outputs and gradients, by shape alone.
  const tessera_tensor& q = in.q.tensor;
  View out = in.q, lse = in.q;
  const int dims = q.ndim;
  if (dims == 3 || dims == 4) {
    const tessera_tensor& v = in.v.tensor;
    std::memcpy(out.shape, q.shape, sizeof(std::int64_t) * static_cast<std::size_t>(dims));
    out.shape[dims - 1] = v.ndim > 0 ? v.shape[v.ndim - 1] : 0;
    out.tensor.shape = out.shape;
    out.tensor.strides = nullptr;
    std::int64_t full[] = {q.shape[0], q.shape[dims - 2], q.shape[dims - 3]};
    std::memcpy(lse.shape, dims == 4 ? full : full + 1, sizeof(std::int64_t) * static_cast<std::size_t>(dims - 1));
    lse.tensor.ndim = dims - 1;
    lse.tensor.dtype = {TESSERA_FLOAT, 32, 1};
    lse.tensor.shape = lse.shape;
    lse.tensor.strides = nullptr;
  }
  tessera_tensor dq = q, dk = in.k.tensor, dv = in.v.tensor;
  dq.strides = dk.strides = dv.strides = nullptr;
  in.args.out = &out.tensor;
  if (op == TESSERA_ATTENTION_BACKWARD) {
    in.args.lse = &lse.tensor;
    in.args.dout = &out.tensor;
    in.args.dq = &dq;
    in.args.dk = &dk;
    in.args.dv = &dv;
  }
  std::string text;
  std::size_t needed = 0;
  const auto kind = static_cast<tessera_attention_op>(op);
  if (!succeeded(tessera_attention_explain(kind, &in.args, arch, nullptr, 0, &needed))) return nullptr;
  text.resize(needed);
  if (!succeeded(tessera_attention_explain(kind, &in.args, arch, text.data(), text.size(), &needed))) return nullptr;
  return PyUnicode_FromString(text.c_str());
}

// mode(q, k, v) -> how a call may go: 0 through PyTorch's dispatcher (something intercepts calls, or a tensor is of
// another class), 1 straight to the kernel, 2 straight, but gradients are wanted; 4 more where autocast is on.
PyObject* mode(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("mode", count, 3)) return nullptr;
  for (int i = 0; i < 3; ++i) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(values[i]));
    if (type != torch.tensor_type && type != torch.parameter_type) return PyLong_FromLong(0);
  }
  const auto yes = [](PyObject* function) {
    const Ref answer(PyObject_CallNoArgs(function));
    return answer ? PyObject_IsTrue(answer.get()) : -1;
  };
  const Py_ssize_t functions = PyTuple_Size(torch.unplain);
  for (Py_ssize_t i = 0; i < functions; ++i) {
    if (yes(PyTuple_GetItem(torch.unplain, i)) != 0) return PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLong(0);
  }
  bool meta = false;
  if (!truth(values[0], names.is_meta, &meta)) return nullptr;
  if (meta) return PyLong_FromLong(0);
  long answer = 1;
  if (yes(torch.is_grad_enabled) != 0) {
    for (int i = 0; i < 3; ++i) {
      bool wanted = false;
      if (!truth(values[i], names.requires_grad, &wanted)) return nullptr;
      if (wanted) answer = 2;
    }
  }
  if (yes(torch.is_autocast_enabled) != 0) answer += 4;
  return PyErr_Occurred() != nullptr ? nullptr : PyLong_FromLong(answer);
}

// setup(Error, pieces: dict, dlpack: bool) -> whether tensors are read through DLPack
PyObject* setup(PyObject*, PyObject* args) {
  PyObject* error = nullptr;
  PyObject* pieces = nullptr;
  int dlpack = 1;
  if (PyArg_ParseTuple(args, "OO!p", &error, &PyDict_Type, &pieces, &dlpack) == 0) return nullptr;
  if (!set_up(error, pieces, dlpack != 0)) return nullptr;
  return PyBool_FromLong(torch.exchange != nullptr);
}

PyObject* version(PyObject*, PyObject*) { return PyUnicode_FromString(tessera_version()); }

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* guarded(PyObject* self, PyObject* const* values, Py_ssize_t count) {
  try {
    return kFunction(self, values, count);
  } catch (const std::bad_alloc&) {
    fail("out of host memory", TESSERA_OUT_OF_MEMORY);
  } catch (const std::exception& error) {
    fail(error.what(), TESSERA_INTERNAL);
  }
  return nullptr;
}

template <PyObject* (*kFunction)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction fast() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&guarded<kFunction>));
}

}  // namespace
}  // namespace tessera::python

PyMODINIT_FUNC PyInit__native() {
  using namespace tessera::python;
  static PyMethodDef methods[] = {
      {"setup", setup, METH_VARARGS, nullptr},
      {"version", version, METH_NOARGS, nullptr},
      {"mode", fast<mode>(), METH_FASTCALL, nullptr},
      {"forward", fast<forward>(), METH_FASTCALL, nullptr},
      {"forward_heads_first", fast<forward_heads_first>(), METH_FASTCALL, nullptr},
      {"backward", fast<backward>(), METH_FASTCALL, nullptr},
      {"decode", fast<decode>(), METH_FASTCALL, nullptr},
      {"explain", fast<explain>(), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  if (!intern_names()) return nullptr;
  return PyModule_Create(&definition);
}
