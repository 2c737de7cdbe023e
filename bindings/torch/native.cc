// tessera._native: the C ABI for PyTorch's tensors.
//
// Built against CPython's limited API (one binary for Python 3.10 and up) and against nothing of PyTorch: a tensor is
// read through DLPack's C exchange table where PyTorch has one (2.10 and up), else through its Python attributes. So
// one wheel serves every PyTorch. What is called often is cached at set-up; the interpreter's lock guards all state
// here and is given up while a kernel runs.
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tessera/tessera.h"

namespace {

constexpr int kMaxDims = 5;

// Owns a reference.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The head of DLPack's DLPackExchangeAPI, which its standard keeps from version to version of one major.
struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*export_borrowed)(void* py_object, tessera_tensor* out);
  void* current_stream;
};

constexpr std::uint32_t kDlpackMajor = 1;

// All owned for the life of the process.
struct Torch {
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* float32 = nullptr;
  PyObject* float16 = nullptr;
  PyObject* bfloat16 = nullptr;
  PyObject* int32 = nullptr;
  PyObject* uint8 = nullptr;
  PyObject* get_num_threads = nullptr;
  PyObject* current_stream = nullptr;  // None in a build without CUDA
  PyObject* is_grad_enabled = nullptr;
  PyObject* is_autocast_enabled = nullptr;
  PyObject* unplain = nullptr;  // tuple of functions that answer 0, False or None while nothing intercepts calls
  const ExchangeApi* exchange = nullptr;
};

Torch torch;
PyObject* error_type = nullptr;

// Names looked up at every call, interned.
struct Names {
  PyObject* data_ptr;
  PyObject* shape;
  PyObject* stride;
  PyObject* dtype;
  PyObject* is_cpu;
  PyObject* is_cuda;
  PyObject* is_meta;
  PyObject* get_device;
  PyObject* new_empty;
  PyObject* new_zeros;
  PyObject* new_full;
  PyObject* requires_grad;
};
Names names;

void fail(const std::string& sentence, tessera_status status = TESSERA_INVALID_ARGUMENT) {
  const Ref error(PyObject_CallFunction(error_type, "ss", sentence.c_str(), tessera_status_name(status)));
  if (error) PyErr_SetObject(error_type, error.get());
}

std::string type_name(PyObject* object) {
  const Ref name(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  if (!name) return "?";
  const char* text = PyUnicode_AsUTF8AndSize(name.get(), nullptr);
  return text != nullptr ? text : "?";
}

std::string text_of(PyObject* object) {
  const Ref text(PyObject_Str(object));
  const char* utf8 = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  return utf8 != nullptr ? utf8 : "?";
}

// A tensor of the call: its C view, and room for shape and strides where PyTorch lends none.
struct View {
  tessera_tensor tensor{};
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
};

bool read_numbers(PyObject* tuple, std::int64_t* numbers, int count) {
  for (int i = 0; i < count; ++i) {
    numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (numbers[i] == -1 && PyErr_Occurred() != nullptr) return false;
  }
  return true;
}

bool truth(PyObject* object, PyObject* name, bool* value) {
  const Ref attribute(PyObject_GetAttr(object, name));
  if (!attribute) return false;
  *value = PyObject_IsTrue(attribute.get()) == 1;
  return true;
}

enum class Data : bool { kNotNeeded, kNeeded };

bool read_attributes(PyObject* object, const char* name, Data data, View* view) {
  tessera_tensor& t = view->tensor;
  const Ref dtype(PyObject_GetAttr(object, names.dtype));
  const Ref shape(PyObject_GetAttr(object, names.shape));
  const Ref strides(PyObject_CallMethodObjArgs(object, names.stride, nullptr));
  if (!dtype || !shape || !strides) return false;
  if (dtype.get() == torch.float32) {
    t.dtype = {TESSERA_FLOAT, 32, 1};
  } else if (dtype.get() == torch.float16) {
    t.dtype = {TESSERA_FLOAT, 16, 1};
  } else if (dtype.get() == torch.bfloat16) {
    t.dtype = {TESSERA_BFLOAT, 16, 1};
  } else if (dtype.get() == torch.int32) {
    t.dtype = {TESSERA_INT, 32, 1};
  } else if (dtype.get() == torch.uint8) {
    t.dtype = {TESSERA_UINT, 8, 1};  // scratch
  } else {
    fail(std::string(name) + " is " + text_of(dtype.get()) +
         "; float16, bfloat16 and float32 are accepted, int32 for lengths and tables");
    return false;
  }
  const Py_ssize_t dims = PyTuple_Size(shape.get());
  if (dims > kMaxDims) {
    fail(std::string(name) + " has " + std::to_string(dims) + " dims; at most 4 are accepted");
    return false;
  }
  t.ndim = static_cast<std::int32_t>(dims);
  t.shape = view->shape;
  t.strides = view->strides;
  if (!read_numbers(shape.get(), view->shape, t.ndim) || !read_numbers(strides.get(), view->strides, t.ndim)) {
    return false;
  }
  bool cpu = false, cuda = false;
  if (!truth(object, names.is_cpu, &cpu) || !truth(object, names.is_cuda, &cuda)) return false;
  t.device = {TESSERA_CPU, 0};
  if (cuda) {
    const Ref index(PyObject_CallMethodObjArgs(object, names.get_device, nullptr));
    if (!index) return false;
    t.device = {TESSERA_CUDA, static_cast<std::int32_t>(PyLong_AsLong(index.get()))};
  } else if (!cpu && data == Data::kNeeded) {
    const Ref device(PyObject_GetAttrString(object, "device"));
    fail(std::string(name) + " is on " + (device ? text_of(device.get()) : "?") + "; cpu and cuda are accepted");
    return false;
  }
  if (data == Data::kNeeded) {
    const Ref pointer(PyObject_CallMethodObjArgs(object, names.data_ptr, nullptr));
    if (!pointer) return false;
    t.data = PyLong_AsVoidPtr(pointer.get());
  }
  return PyErr_Occurred() == nullptr;
}

bool read(PyObject* object, const char* name, Data data, View* view) {
  const int is_tensor = PyObject_IsInstance(object, torch.tensor_type);
  if (is_tensor < 0) return false;
  if (is_tensor == 0) {
    fail(std::string(name) + " is a " + type_name(object) + "; a torch.Tensor is expected");
    return false;
  }
  if (data == Data::kNeeded && torch.exchange != nullptr) {
    if (torch.exchange->export_borrowed(object, &view->tensor) == 0) return true;
    PyErr_Clear();  // what DLPack cannot carry gets its sentence below
  }
  return read_attributes(object, name, data, view);
}

// Reads an optional tensor; *slot stays null for None.
bool read_optional(PyObject* object, const char* name, Data data, View* view, const tessera_tensor** slot) {
  if (object == Py_None) return true;
  if (!read(object, name, data, view)) return false;
  *slot = &view->tensor;
  return true;
}

std::int64_t dim(const tessera_tensor& t, int i) { return i < t.ndim ? t.shape[i] : 0; }

enum class Fill { kNone, kZero, kMinusInfinity };

// A new tensor beside `like`, row-major.
Ref allocate(PyObject* like, PyObject* dtype, const std::int64_t* shape, int dims, Fill fill, View* view) {
  const Ref size(PyTuple_New(dims));
  if (!size) return {};
  for (int i = 0; i < dims; ++i) {
    PyObject* number = PyLong_FromLongLong(shape[i]);
    if (number == nullptr) return {};
    PyTuple_SetItem(size.get(), i, number);
  }
  PyObject* name = fill == Fill::kNone ? names.new_empty : fill == Fill::kZero ? names.new_zeros : names.new_full;
  Ref made;
  if (dtype == nullptr) {
    made = Ref(PyObject_CallMethodObjArgs(like, name, size.get(), nullptr));
  } else {
    const Ref method(PyObject_GetAttr(like, name));
    const Ref value(fill == Fill::kMinusInfinity ? PyFloat_FromDouble(-std::numeric_limits<double>::infinity())
                                                 : nullptr);
    const Ref args(value ? PyTuple_Pack(2, size.get(), value.get()) : PyTuple_Pack(1, size.get()));
    const Ref keywords(PyDict_New());
    if (!method || !args || !keywords || PyDict_SetItem(keywords.get(), names.dtype, dtype) != 0) return {};
    made = Ref(PyObject_Call(method.get(), args.get(), keywords.get()));
  }
  if (!made || !read(made.get(), "output", Data::kNeeded, view)) return {};
  return made;
}

// Kernels leave rows past the last packed sequence alone; a caller must not find garbage there.
Fill rows_of(const tessera_attention& args) { return args.cu_seqlens_q != nullptr ? Fill::kZero : Fill::kNone; }

// ---- Plans ----
// A plan holds what a problem's first call worked out (the check, the choice, the compiled kernel, the workspace), so
// that later calls only run. Its key is whatever a plan depends on, as bytes.

struct Key {
  std::int32_t op, threads;
  tessera_device device;
  tessera_dtype dtype;
  std::uint32_t given;    // which optional tensors, and which tensors' rows all start at multiples of 16 bytes
  std::int32_t ndims[4];  // q, k, v, slopes
  std::int64_t shapes[3][4];
  std::int64_t batch, pages;  // of cu_seqlens or the page table
  float scale, softcap;
  std::uint32_t flags;
  std::int32_t alignment;
  std::int64_t window_left, window_right, max_q, max_k;
};

static_assert(std::has_unique_object_representations_v<tessera_device>);

bool aligned(const tessera_tensor* t) {
  constexpr std::uint64_t kVector = 16;
  const std::uint64_t bytes = t->dtype.bits / 8;
  std::uint64_t all = reinterpret_cast<std::uintptr_t>(t->data) + t->byte_offset;
  for (int i = 0; i + 1 < t->ndim && t->strides != nullptr; ++i)
    all |= static_cast<std::uint64_t>(t->strides[i]) * bytes;
  return all % kVector == 0;
}

Key key_of(tessera_attention_op op, const tessera_attention& a) {
  Key key;
  std::memset(&key, 0, sizeof key);
  key.op = op;
  key.threads = a.q->device.type == TESSERA_CPU ? tessera_num_threads() : 0;
  key.device = a.q->device;
  key.dtype = a.q->dtype;
  std::uint32_t bit = 1;
  for (const tessera_tensor* t : {a.lse, a.dlse, a.alibi_slopes, a.cu_seqlens_q, a.cache_seqlens, a.page_table}) {
    if (t != nullptr) key.given |= bit;
    bit <<= 1;
  }
  for (const tessera_tensor* t : {a.q, a.k, a.v, a.out, a.dout, a.dq, a.dk, a.dv}) {
    if (t != nullptr && aligned(t)) key.given |= bit;
    bit <<= 1;
  }
  const tessera_tensor* inputs[] = {a.q, a.k, a.v};
  for (int i = 0; i < 3; ++i) {
    key.ndims[i] = inputs[i]->ndim;
    for (int d = 0; d < 4; ++d) key.shapes[i][d] = dim(*inputs[i], d);
  }
  if (a.alibi_slopes != nullptr) key.ndims[3] = a.alibi_slopes->ndim;
  if (a.cu_seqlens_q != nullptr) key.batch = dim(*a.cu_seqlens_q, 0);
  if (a.page_table != nullptr) key.batch = dim(*a.page_table, 0), key.pages = dim(*a.page_table, 1);
  key.scale = a.scale;
  key.softcap = a.softcap;
  key.flags = a.flags;
  key.alignment = a.alignment;
  key.window_left = a.window_left;
  key.window_right = a.window_right;
  key.max_q = a.max_seqlen_q;
  key.max_k = a.max_seqlen_k;
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

struct WithoutLock {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutLock() { PyEval_RestoreThread(state); }
};

bool succeeded(tessera_status status) {
  if (status == TESSERA_OK) return true;
  fail(tessera_last_error(), status);
  return false;
}

// The CPU backend takes as many threads as PyTorch does: launchers and data loaders set that.
bool follow_threads() {
  static long set = 0;
  const Ref number(PyObject_CallNoArgs(torch.get_num_threads));
  if (!number) return false;
  const long threads = PyLong_AsLong(number.get());
  if (threads == set) return true;
  if (!succeeded(tessera_set_num_threads(static_cast<std::int32_t>(threads)))) return false;
  set = threads;
  return true;
}

// Lengths in host memory are the problem's own, so a plan made for one call's need not cover the next one's.
bool lengths_matter(const tessera_attention& a) { return a.cu_seqlens_q != nullptr && a.q->device.type == TESSERA_CPU; }

Plan plan_for(tessera_attention_op op, const tessera_attention& args) {
  const bool keep = !lengths_matter(args);
  const Key key = key_of(op, args);
  if (keep) {
    const auto known = plans().find(key);
    if (known != plans().end()) return known->second;
  }
  tessera_plan* made = nullptr;
  tessera_status status;
  {
    const WithoutLock without;
    status = tessera_plan_create(op, &args, &made);
  }
  if (!succeeded(status)) return nullptr;
  Plan plan(made, PlanDeleter{});
  if (keep) {
    if (plans().size() >= kMostPlans) plans().clear();
    plans().emplace(key, plan);
  }
  return plan;
}

// Scratch up to this size is kept by the calling thread: it spares the CPU's small calls an allocation.
constexpr std::size_t kSmall = 1 << 18;

void* small_scratch() {
  thread_local const std::unique_ptr<unsigned char[]> kept(new unsigned char[kSmall]);
  return kept.get();
}

bool run(tessera_attention_op op, const tessera_attention& args, PyObject* q) {
  const bool cpu = args.q->device.type == TESSERA_CPU;
  if (cpu && !follow_threads()) return false;
  const Plan plan = plan_for(op, args);
  if (!plan) return false;

  const std::size_t bytes = tessera_plan_workspace(plan.get());
  void* workspace = nullptr;
  Ref scratch;
  View scratch_view;
  if (bytes > 0 && cpu && bytes <= kSmall) {
    workspace = small_scratch();
  } else if (bytes > 0) {
    const auto size = static_cast<std::int64_t>(bytes);
    scratch = allocate(q, torch.uint8, &size, 1, Fill::kNone, &scratch_view);
    if (!scratch) return false;
    workspace = scratch_view.tensor.data;
  }
  void* stream = nullptr;
  if (!cpu) {
    const Ref index(PyLong_FromLong(args.q->device.index));
    const Ref handle(index ? PyObject_CallFunctionObjArgs(torch.current_stream, index.get(), nullptr) : nullptr);
    if (!handle) return false;
    stream = PyLong_AsVoidPtr(handle.get());
  }
  tessera_status status;
  {
    const WithoutLock without;
    status = tessera_plan_run(plan.get(), &args, workspace, bytes, stream);
  }
  return succeeded(status);
}

// ---- Arguments ----

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

const ExchangeApi* exchange_of(PyObject* tensor_type) {
  const Ref capsule(PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
  if (!capsule) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  PyErr_Clear();
  while (api != nullptr && api->major != kDlpackMajor) api = api->previous;
  return api != nullptr && api->export_borrowed != nullptr ? api : nullptr;
}

// setup(Error, pieces: dict, dlpack: bool) hands over the parts of torch that are used, once.
PyObject* setup(PyObject*, PyObject* args) {
  PyObject* pieces = nullptr;
  int dlpack = 1;
  if (PyArg_ParseTuple(args, "OO!p", &error_type, &PyDict_Type, &pieces, &dlpack) == 0) return nullptr;
  Py_INCREF(error_type);
  const struct {
    const char* name;
    PyObject** slot;
  } slots[] = {
      {"Tensor", &torch.tensor_type},
      {"Parameter", &torch.parameter_type},
      {"float32", &torch.float32},
      {"float16", &torch.float16},
      {"bfloat16", &torch.bfloat16},
      {"int32", &torch.int32},
      {"uint8", &torch.uint8},
      {"get_num_threads", &torch.get_num_threads},
      {"current_stream", &torch.current_stream},
      {"is_grad_enabled", &torch.is_grad_enabled},
      {"is_autocast_enabled", &torch.is_autocast_enabled},
      {"unplain", &torch.unplain},
  };
  for (const auto& [name, slot] : slots) {
    *slot = PyDict_GetItemString(pieces, name);
    if (*slot == nullptr) return PyErr_Format(PyExc_KeyError, "setup needs %s", name);
    Py_INCREF(*slot);
  }
  torch.exchange = dlpack != 0 ? exchange_of(torch.tensor_type) : nullptr;
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

PyMODINIT_FUNC PyInit__native() {
  static PyMethodDef methods[] = {
      {"setup", setup, METH_VARARGS, nullptr},
      {"version", version, METH_NOARGS, nullptr},
      {"mode", fast<mode>(), METH_FASTCALL, nullptr},
      {"forward", fast<forward>(), METH_FASTCALL, nullptr},
      {"backward", fast<backward>(), METH_FASTCALL, nullptr},
      {"decode", fast<decode>(), METH_FASTCALL, nullptr},
      {"explain", fast<explain>(), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  const struct {
    const char* text;
    PyObject** slot;
  } interned[] = {
      {"data_ptr", &names.data_ptr},   {"shape", &names.shape},           {"stride", &names.stride},
      {"dtype", &names.dtype},         {"is_cpu", &names.is_cpu},         {"is_cuda", &names.is_cuda},
      {"is_meta", &names.is_meta},     {"get_device", &names.get_device}, {"new_empty", &names.new_empty},
      {"new_zeros", &names.new_zeros}, {"new_full", &names.new_full},     {"requires_grad", &names.requires_grad},
  };
  for (const auto& [text, slot] : interned) {
    *slot = PyUnicode_InternFromString(text);
    if (*slot == nullptr) return nullptr;
  }
  return PyModule_Create(&definition);
}
