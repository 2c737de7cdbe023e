// tessera._native: the C ABI for PyTorch's tensors.
//
// Built against CPython's limited API (one binary for Python 3.10 and up) and without PyTorch's headers: a tensor is
// read through DLPack's C exchange table if PyTorch has one (2.10 and up), else through its Python attributes. So one
// wheel works with every PyTorch. The GIL guards all state here and is released while a kernel runs.
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <utility>

#include "plan.h"
#include "plan_cache.h"
#include "tensor.h"

namespace tessera::python {
namespace {

// Kernels do not write the rows past the last packed sequence; the caller must not see uninitialized memory there.
Fill rows_of(const tessera_attention& args) { return args.cu_seqlens_q != nullptr ? Fill::kZero : Fill::kNone; }

// Every op takes its options as one tuple, in this order.
bool parse_options(PyObject* options, tessera_attention* args) {
  constexpr Py_ssize_t kOptions = 9;
  if (PyTuple_Size(options) != kOptions) {
    PyErr_Format(PyExc_TypeError, "options must be a tuple of %zd", kOptions);
    return false;
  }
  const auto at = [&](Py_ssize_t i) { return PyTuple_GetItem(options, i); };
  args->scale = static_cast<float>(PyFloat_AsDouble(at(0)));
  args->softcap = static_cast<float>(PyFloat_AsDouble(at(1)));
  args->flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(at(2)));
  args->alignment = static_cast<tessera_alignment>(PyLong_AsLong(at(3)));
  bool failed = PyErr_Occurred() != nullptr;
  const auto integer = [&](Py_ssize_t i, const char* name) -> std::int64_t {
    if (failed) return 0;
    const std::int64_t number = PyLong_AsLongLong(at(i));
    if (number == -1 && PyErr_Occurred() != nullptr) {
      failed = true;
      PyErr_Clear();
      fail(std::string(name) + " is " + text_of(at(i)) + "; an integer is accepted");
    }
    return number;
  };
  args->window_left = integer(4, "the left side of window");
  args->window_right = integer(5, "the right side of window");
  args->max_seqlen_q = integer(6, "max_seqlen_q");
  args->max_seqlen_k = integer(7, "max_seqlen_k");
  args->attention_chunk = integer(8, "attention_chunk");
  return PyErr_Occurred() == nullptr;
}

// args: no tensors yet. The last tuple is kept, with its options: Python caches tuples, so the next one is often the same.
bool read_options(PyObject* options, tessera_attention* args) {
  static PyObject* kept = nullptr;
  static tessera_attention parsed = TESSERA_ATTENTION_INIT;
  if (options == kept) {
    *args = parsed;
    return true;
  }
  if (!parse_options(options, args)) return false;
  parsed = *args;
  Py_INCREF(options);
  Py_XDECREF(std::exchange(kept, options));
  return true;
}

// Whether two arguments give the same options. Values of other types than these may change, so they are never the same.
// Runs no Python code.
bool is_same_value(PyObject* a, PyObject* b) {
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyTuple_CheckExact(a)) {
    bool same = PyTuple_Size(a) == PyTuple_Size(b);
    for (Py_ssize_t i = 0; same && i < PyTuple_Size(a); ++i) {
      same = is_same_value(PyTuple_GetItem(a, i), PyTuple_GetItem(b, i));
    }
    return same;
  }
  if (a == Py_None || PyBool_Check(a) || PyUnicode_CheckExact(a)) return a == b;
  return (PyLong_CheckExact(a) || PyFloat_CheckExact(a)) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

// The options of the last calls, by the arguments that they were made of and depend on alone. The GIL guards them.
class KnownOptions {
 public:
  static constexpr Py_ssize_t kGiven = 10;

  // make: called with a tuple of what is given, unless it is known.
  bool read(PyObject* make, PyObject* const* given, tessera_attention* args) {
    for (const Known& known : known_) {
      if (!matches(known, given)) continue;
      *args = known.options;
      return true;
    }
    Known made{Ref(PyTuple_New(kGiven))};
    for (Py_ssize_t i = 0; made.given && i < kGiven; ++i) {
      Py_INCREF(given[i]);
      PyTuple_SetItem(made.given.get(), i, given[i]);
    }
    const Ref options(made.given ? PyObject_CallFunctionObjArgs(make, made.given.get(), nullptr) : nullptr);
    if (!options || !read_options(options.get(), &made.options)) return false;
    *args = made.options;
    if (!matches(made, given)) return true;  // some may change, so they are not kept
    std::swap(known_[next_], made);
    next_ = (next_ + 1) % std::size(known_);
    return true;
  }

 private:
  struct Known {
    Ref given;  // a tuple
    tessera_attention options = TESSERA_ATTENTION_INIT;
  };

  static bool matches(const Known& known, PyObject* const* given) {
    for (Py_ssize_t i = 0; known.given && i < kGiven; ++i) {
      if (!is_same_value(PyTuple_GetItem(known.given.get(), i), given[i])) return false;
    }
    return static_cast<bool>(known.given);
  }

  Known known_[4];
  std::size_t next_ = 0;
};

// e4m3 is read as uint8, which every PyTorch has.
bool is_byte(const View& view) { return view.tensor.dtype.code == TESSERA_UINT && view.tensor.dtype.bits == 8; }

struct Inputs {
  View q, k, v, alibi, lengths_q, lengths_k;
  Layout layout;  // of the activations
  tessera_attention args = TESSERA_ATTENTION_INIT;

  explicit Inputs(bool heads_first = false) : layout(heads_first ? Layout::kHeadsFirst : Layout::kRowsFirst) {}

  bool read_rows(const char* name, PyObject* value, Data data, View* view) const {
    if (!read(value, name, data, view)) return false;
    if (layout == Layout::kHeadsFirst) swap_heads(view);
    return true;
  }
  bool read_qkv(PyObject* const* values, Data data) {
    if (!read_rows("q", values[0], data, &q) || !read_rows("k", values[1], data, &k) ||
        !read_rows("v", values[2], data, &v)) {
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
    for (View* view : {&k, &v}) {
      if (is_byte(*view)) view->tensor.dtype = {TESSERA_FLOAT8_E4M3FN, 8, 1};
    }
    return read_optional(values[0], "alibi", data, &alibi, &args.alibi_slopes) &&
           read_optional(values[1], "cache_seqlens", data, &lengths_q, &args.cache_seqlens) &&
           read_optional(values[2], "page_table", data, &lengths_k, &args.page_table);
  }
};

// What decode has besides: the rows of the cache, packed queries, and keys that are appended to the cache.
struct Appended {
  static constexpr Py_ssize_t kValues = 11;
  View cache_batch_idx, leftpad_k, lengths_q, k_scale, v_scale, k_new, v_new, rotary_cos, rotary_sin, rotary_seqlens,
      status;

  bool read(PyObject* const* values, Data data, tessera_attention* args) {
    return read_optional(values[0], "cache_batch_idx", data, &cache_batch_idx, &args->cache_batch_idx) &&
           read_optional(values[1], "leftpad_k", data, &leftpad_k, &args->leftpad_k) &&
           read_optional(values[2], "cu_seqlens_q", data, &lengths_q, &args->cu_seqlens_q) &&
           read_optional(values[3], "k_scale", data, &k_scale, &args->k_scale) &&
           read_optional(values[4], "v_scale", data, &v_scale, &args->v_scale) &&
           read_optional(values[5], "k_new", data, &k_new, &args->k_new) &&
           read_optional(values[6], "v_new", data, &v_new, &args->v_new) &&
           read_optional(values[7], "rotary_cos", data, &rotary_cos, &args->rotary_cos) &&
           read_optional(values[8], "rotary_sin", data, &rotary_sin, &args->rotary_sin) &&
           read_optional(values[9], "rotary_seqlens", data, &rotary_seqlens, &args->rotary_seqlens) &&
           read_optional(values[10], "status", data, &status, &args->status);
  }
};

struct Outputs {
  View out_view, lse_view;
  Ref out, lse;

  // out: q's shape with v's head dim, of q's type; lse: [B, Hq, Sq], packed [Hq, total_q].
  bool make(Inputs* in, bool with_lse) {
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
    out = allocate(in->q, nullptr, shape, dims, rows_of(in->args), &out_view, in->layout);
    if (!out) return false;
    in->args.out = &out_view.tensor;
    if (!with_lse) return true;
    const std::int64_t lse_shape[] = {shape[0], shape[dims - 2], shape[dims - 3]};
    const Fill fill = rows_of(in->args) == Fill::kNone ? Fill::kNone : Fill::kMinusInfinity;
    lse = allocate(in->q, torch.float32, dims == 4 ? lse_shape : lse_shape + 1, dims - 1, fill, &lse_view);
    in->args.lse = &lse_view.tensor;
    return static_cast<bool>(lse);
  }

  PyObject* result(bool with_lse) {
    if (!with_lse) return out.release();
    return PyTuple_Pack(2, out.get(), lse.get());
  }
};

bool is_true(PyObject* value) { return PyObject_IsTrue(value) == 1; }

// packing: alibi, cu_seqlens_q and cu_seqlens_k. The options are in in->args.
PyObject* run_forward(PyObject* const* qkv, PyObject* const* packing, bool with_lse, Inputs* in) {
  Outputs outputs;
  if (!in->read_qkv(qkv, Data::kNeeded) || !in->read_packing(packing, Data::kNeeded)) return nullptr;
  if (in->q.tensor.dtype.code == TESSERA_FLOAT8_E4M3FN) {
    fail("q is float8_e4m3fn; float16, bfloat16 and float32 are accepted, which precision=\"fp8\" rounds to it");
    return nullptr;
  }
  if (!outputs.make(in, with_lse) || !run(TESSERA_ATTENTION_FORWARD, in->args, in->q)) return nullptr;
  return outputs.result(with_lse);
}

// forward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options, heads_first, with_lse) -> out or (out, lse)
PyObject* forward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("forward", count, 9)) return nullptr;
  Inputs in(is_true(values[7]));
  if (!read_options(values[6], &in.args)) return nullptr;
  return run_forward(values, values + 3, is_true(values[8]), &in);
}

bool as_e4m3(const char* name, View* view) {
  if (!is_byte(*view)) {
    fail(std::string(name) + " has " + std::to_string(view->tensor.dtype.bits) +
         " bits; e4m3, viewed as uint8, is expected");
    return false;
  }
  view->tensor.dtype = {TESSERA_FLOAT8_E4M3FN, 8, 1};
  return true;
}

// quantize_fp8(x, out, scale, cu_seqlens, max_seqlen, flags): writes out, viewed as uint8 if it is e4m3, and scale.
PyObject* quantize_fp8(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("quantize_fp8", count, 6)) return nullptr;
  View x, out, scale, lengths;
  tessera_quantize_fp8 args = TESSERA_QUANTIZE_FP8_INIT;
  args.max_seqlen = PyLong_AsLongLong(values[4]);
  args.flags = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(values[5]));
  if (PyErr_Occurred() != nullptr || !read(values[0], "x", Data::kNeeded, &x) ||
      !read(values[1], "out", Data::kNeeded, &out) || (out.tensor.dtype.bits == 8 && !as_e4m3("out", &out)) ||
      !read(values[2], "scale", Data::kNeeded, &scale) ||
      !read_optional(values[3], "cu_seqlens", Data::kNeeded, &lengths, &args.cu_seqlens)) {
    return nullptr;
  }
  args.x = &x.tensor;
  args.out = &out.tensor;
  args.scale = &scale.tensor;
  void* stream = nullptr;
  if (!current_stream(x.tensor.device, &stream)) return nullptr;
  if (x.tensor.device.type == TESSERA_CPU && !follow_threads()) return nullptr;
  tessera_status status;
  {
    const WithoutGil without;
    status = tessera_attention_quantize_fp8(&args, stream);
  }
  if (!succeeded(status)) return nullptr;
  Py_INCREF(Py_None);
  return Py_None;
}

// decode(q, k, v, alibi, cache_seqlens, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q, k_scale, v_scale, k_new,
//        v_new, rotary_cos, rotary_sin, rotary_seqlens, status, options, with_lse) -> out or (out, lse)
PyObject* decode(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("decode", count, 19)) return nullptr;
  Inputs in;
  Appended appended;
  Outputs outputs;
  const bool with_lse = is_true(values[18]);
  if (!read_options(values[17], &in.args) || !in.read_qkv(values, Data::kNeeded) ||
      !in.read_cache(values + 3, Data::kNeeded) || !appended.read(values + 6, Data::kNeeded, &in.args)) {
    return nullptr;
  }
  if (in.args.k_new != nullptr && (in.k.resolved || in.v.resolved)) {
    fail("k_cache or v_cache is a lazily negated view, to which nothing can be appended; resolve_neg() makes a tensor");
    return nullptr;
  }
  if (!outputs.make(&in, with_lse) || !run(TESSERA_ATTENTION_DECODE, in.args, in.q)) {
    return nullptr;
  }
  return outputs.result(with_lse);
}

// backward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options, heads_first, out, lse, dout, dlse) -> (dq, dk, dv)
PyObject* backward(PyObject*, PyObject* const* values, Py_ssize_t count) {
  if (!expect("backward", count, 12)) return nullptr;
  Inputs in(is_true(values[7]));
  View out, lse, dout, dlse, dq, dk, dv;
  if (!read_options(values[6], &in.args) || !in.read_qkv(values, Data::kNeeded) ||
      !in.read_packing(values + 3, Data::kNeeded) || !in.read_rows("out", values[8], Data::kNeeded, &out) ||
      !read(values[9], "lse", Data::kNeeded, &lse) || !in.read_rows("dout", values[10], Data::kNeeded, &dout) ||
      !read_optional(values[11], "dlse", Data::kNeeded, &dlse, &in.args.dlse)) {
    return nullptr;
  }
  in.args.out = &out.tensor;
  in.args.lse = &lse.tensor;
  in.args.dout = &dout.tensor;
  const auto gradient = [&](const View& of, View* view) {
    return allocate(of, nullptr, of.tensor.shape, of.tensor.ndim, rows_of(in.args), view, in.layout);
  };
  const Ref dq_tensor = gradient(in.q, &dq);
  if (!dq_tensor) return nullptr;
  const Ref dk_tensor = gradient(in.k, &dk);
  if (!dk_tensor) return nullptr;
  const Ref dv_tensor = gradient(in.v, &dv);
  if (!dv_tensor) return nullptr;
  in.args.dq = &dq.tensor;
  in.args.dk = &dk.tensor;
  in.args.dv = &dv.tensor;
  if (!run(TESSERA_ATTENTION_BACKWARD, in.args, in.q)) return nullptr;
  return PyTuple_Pack(3, dq_tensor.get(), dk_tensor.get(), dv_tensor.get());
}

// explain(op, arch or None, format, options, q, k, v, alibi, ...) -> str. Then cu_seqlens_q and cu_seqlens_k; for decode,
// what it takes between alibi and its options. format: a tessera_explain_format.
PyObject* explain(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr Py_ssize_t kLeast = 10;
  Inputs in;
  Appended appended;
  if (count < kLeast && !expect("explain", count, kLeast)) return nullptr;
  const auto op = static_cast<tessera_attention_op>(PyLong_AsLong(values[0]));
  const bool decodes = op == TESSERA_ATTENTION_DECODE;
  if (!expect("explain", count, decodes ? kLeast + Appended::kValues : kLeast)) return nullptr;
  const auto format = static_cast<tessera_explain_format>(PyLong_AsLong(values[2]));
  if (PyErr_Occurred() != nullptr || !read_options(values[3], &in.args)) return nullptr;
  if (!in.read_qkv(values + 4, Data::kNotNeeded)) return nullptr;
  const bool read =
      decodes ? in.read_cache(values + 7, Data::kNotNeeded) && appended.read(values + 10, Data::kNotNeeded, &in.args)
              : in.read_packing(values + 7, Data::kNotNeeded);
  if (!read) return nullptr;
  const char* arch = nullptr;
  if (values[1] != Py_None) {
    arch = PyUnicode_AsUTF8AndSize(values[1], nullptr);
    if (arch == nullptr) return nullptr;
  }
  // Only the shapes of outputs and gradients are looked at.
  const tessera_tensor& q = in.q.tensor;
  View out, lse;
  out.tensor = lse.tensor = q;
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
  if (!succeeded(tessera_attention_explain(op, &in.args, arch, format, nullptr, 0, &needed))) return nullptr;
  text.resize(needed);
  if (!succeeded(tessera_attention_explain(op, &in.args, arch, format, text.data(), text.size(), nullptr))) {
    return nullptr;
  }
  return PyUnicode_FromString(text.c_str());
}

// Whether tensors may carry forward-mode tangents: there may be some if PyTorch does not say. As in_dual_level of
// python/tessera/_ops.py, without a call of Python.
bool in_dual_level() {
  const Ref level(PyObject_GetAttr(torch.forward_ad, names.current_level));
  if (!level) PyErr_Clear();
  return !level || PyLong_AsLong(level.get()) >= 0;
}

bool is_tensor_or_none(PyObject* value) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return value == Py_None || type == torch.tensor_type || type == torch.parameter_type;
}

// How to make a call with these tensors, each of which may be None.
constexpr long kDispatched = 0;  // something intercepts calls, or a tensor is of another class or has no memory
constexpr long kPlain = 1;       // straight to the kernel
constexpr long kGradients = 2;   // straight to the kernel, recorded by autograd
constexpr long kAutocast = 4;    // added if it is on
constexpr long kFailed = -1;     // an exception is set

// has_memory(i): whether the i-th tensor has. Those that have escaped a torch.func transform have none.
template <class HasMemory>
long mode_of(PyObject* const* values, Py_ssize_t count, HasMemory&& has_memory) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_tensor_or_none(values[i])) return kDispatched;
  }
  const auto yes = [](PyObject* function) {
    const Ref answer(PyObject_CallNoArgs(function));
    return answer ? PyObject_IsTrue(answer.get()) : -1;
  };
  const Py_ssize_t functions = PyTuple_Size(torch.interceptors);
  for (Py_ssize_t i = 0; i < functions; ++i) {
    if (yes(PyTuple_GetItem(torch.interceptors, i)) != 0) return PyErr_Occurred() != nullptr ? kFailed : kDispatched;
  }
  if (in_dual_level()) return kDispatched;
  bool gradients = false;
  if (yes(torch.is_grad_enabled) != 0) {
    for (Py_ssize_t i = 0; i < count && !gradients; ++i) {
      if (values[i] != Py_None && !truth(values[i], names.requires_grad, &gradients)) return kFailed;
    }
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (values[i] != Py_None && !has_memory(i)) return kDispatched;
  }
  const int autocast = yes(torch.is_autocast_enabled);
  if (PyErr_Occurred() != nullptr) return kFailed;
  return (gradients ? kGradients : kPlain) + (autocast != 0 ? kAutocast : 0);
}

// mode(tensors or None, ...) -> kDispatched, kPlain or kGradients, plus kAutocast
PyObject* mode(PyObject*, PyObject* const* values, Py_ssize_t count) {
  const long mode = mode_of(values, count, [&](Py_ssize_t i) {
    View view;
    return has_memory(values[i], &view);
  });
  return mode == kFailed ? nullptr : PyLong_FromLong(mode);
}

// forward_if_plain(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, heads_first, with_lse, make_options, ...)
//   -> what forward returns if mode(q, k, v) is kPlain, else that mode
// The options are those of make_options(the tuple of the last arguments).
PyObject* forward_if_plain(PyObject*, PyObject* const* values, Py_ssize_t count) {
  constexpr Py_ssize_t kFixed = 9;
  if (!expect("forward_if_plain", count, kFixed + KnownOptions::kGiven)) return nullptr;
  static auto* known = new KnownOptions;
  Inputs in(is_true(values[6]));
  View* const views[] = {&in.q, &in.k, &in.v};
  const long mode = mode_of(values, 3, [&](Py_ssize_t i) { return has_memory(values[i], views[i]); });
  if (mode == kFailed) return nullptr;
  if (mode != kPlain) return PyLong_FromLong(mode);
  if (!known->read(values[8], values + kFixed, &in.args)) return nullptr;
  return run_forward(values, values + 3, is_true(values[7]), &in);
}

// setup(Error, members: dict, dlpack: bool, loop: address of a tessera_parallel_loop or 0) -> whether tensors are read
// through DLPack
PyObject* setup(PyObject*, PyObject* args) {
  PyObject* error = nullptr;
  PyObject* members = nullptr;
  int dlpack = 1;
  unsigned long long loop = 0;
  if (PyArg_ParseTuple(args, "OO!pK", &error, &PyDict_Type, &members, &dlpack, &loop) == 0) return nullptr;
  if (!set_up(error, members, dlpack != 0)) return nullptr;
  if (!succeeded(tessera_set_parallel_loop(reinterpret_cast<tessera_parallel_loop>(loop)))) return nullptr;
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
      {"forward_if_plain", fast<forward_if_plain>(), METH_FASTCALL, nullptr},
      {"quantize_fp8", fast<quantize_fp8>(), METH_FASTCALL, nullptr},
      {"backward", fast<backward>(), METH_FASTCALL, nullptr},
      {"decode", fast<decode>(), METH_FASTCALL, nullptr},
      {"explain", fast<explain>(), METH_FASTCALL, nullptr},
      {"gemm", fast<gemm>(), METH_FASTCALL, nullptr},
      {"norm_forward", fast<norm_forward>(), METH_FASTCALL, nullptr},
      {"norm_backward", fast<norm_backward>(), METH_FASTCALL, nullptr},
      {"norm_rotary", fast<norm_rotary>(), METH_FASTCALL, nullptr},
      {"gmm_nll", fast<gmm_nll>(), METH_FASTCALL, nullptr},
      {"mlp_gmm_nll", fast<mlp_gmm_nll>(), METH_FASTCALL, nullptr},
      {"linear_cross_entropy", fast<linear_cross_entropy>(), METH_FASTCALL, nullptr},
      {"mlp", fast<mlp>(), METH_FASTCALL, nullptr},
      {"moe", fast<moe>(), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  if (!intern_names()) return nullptr;
  return PyModule_Create(&definition);
}
