#include "tensor.h"

#include <limits>

namespace tessera::python {

Torch torch;
Names names;

namespace {

PyObject* error_type = nullptr;

constexpr std::uint32_t kDlpackMajor = 1;

std::string type_name(PyObject* object) {
  const Ref name(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(object)), "__name__"));
  if (!name) return "?";
  const char* text = PyUnicode_AsUTF8AndSize(name.get(), nullptr);
  return text != nullptr ? text : "?";
}

bool truth_of_call(PyObject* object, PyObject* method, bool* value) {
  const Ref answer(PyObject_CallMethodObjArgs(object, method, nullptr));
  if (!answer) return false;
  *value = PyObject_IsTrue(answer.get()) == 1;
  return true;
}

bool read_numbers(PyObject* tuple, std::int64_t* numbers, int count) {
  for (int i = 0; i < count; ++i) {
    numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (numbers[i] == -1 && PyErr_Occurred() != nullptr) return false;
  }
  return true;
}

// Makes `resolved` of a tensor whose memory holds its negative, as z.conj().imag does. False with an exception.
bool resolve_negation(PyObject* tensor, Ref* resolved) {
  bool negated = false;
  if (!truth_of_call(tensor, names.is_neg, &negated)) return false;
  if (negated) *resolved = Ref(PyObject_CallMethodObjArgs(tensor, names.resolve_neg, nullptr));
  return !negated || *resolved;
}

// Through DLPack; false, without an exception, if it has no table or cannot represent the tensor.
bool read_exchanged(PyObject* tensor, View* view) {
  if (torch.exchange == nullptr) return false;
  const auto exported = [view](PyObject* object) {
    return torch.exchange->export_borrowed(object, &view->tensor) == 0 && view->tensor.ndim <= kMaxDims;
  };
  bool done = exported(tensor);
  // Complex numbers, which alone have such parts, are never of bfloat16.
  if (done && view->tensor.dtype.code == TESSERA_FLOAT) {
    done = resolve_negation(tensor, &view->resolved) && (!view->resolved || exported(view->resolved.get()));
  }
  if (done) {
    view->object = tensor;
  } else {
    PyErr_Clear();
  }
  return done;
}

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
    t.dtype = {TESSERA_UINT, 8, 1};  // a workspace
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
    if (!pointer) {
      PyErr_Clear();
      fail(std::string(name) +
               " has no memory, as a batched gradient (is_grads_batched, vectorize) has none; take one at a time",
           TESSERA_UNSUPPORTED);
      return false;
    }
    t.data = PyLong_AsVoidPtr(pointer.get());
  }
  return PyErr_Occurred() == nullptr;
}

bool is_laid_out(const tessera_tensor& t, const std::int64_t* shape, const std::int64_t* strides, int dims) {
  if (t.ndim != dims || t.strides == nullptr) return false;
  for (int i = 0; i < dims; ++i) {
    if (t.shape[i] != shape[i] || (shape[i] > 1 && t.strides[i] != strides[i])) return false;
  }
  return true;
}

// A tuple of the numbers; with Layout::kHeadsFirst the second and third of four are swapped.
Ref tuple_of(const std::int64_t* numbers, int count, Layout layout) {
  Ref tuple(PyTuple_New(count));
  for (int i = 0; tuple && i < count; ++i) {
    const bool swapped = layout == Layout::kHeadsFirst && (i == 1 || i == 2);
    PyObject* number = PyLong_FromLongLong(numbers[swapped ? 3 - i : i]);
    if (number == nullptr) return {};
    PyTuple_SetItem(tuple.get(), i, number);
  }
  return tuple;
}

Ref allocate_by_size(PyObject* like, PyObject* dtype, const std::int64_t* shape, const std::int64_t* strides, int dims,
                     Fill fill, Layout layout) {
  const Ref size = tuple_of(shape, dims, layout);
  if (!size) return {};
  // new_empty_strided is PyTorch's fastest way to make an empty tensor. Only packed rows need a filled one.
  PyObject* name = names.new_empty_strided;
  Ref second;
  if (fill == Fill::kNone) {
    second = tuple_of(strides, dims, layout);
  } else if (fill == Fill::kZero) {
    name = names.new_zeros;
  } else {
    name = names.new_full;
    second = Ref(PyFloat_FromDouble(-std::numeric_limits<double>::infinity()));
  }
  if (dtype == nullptr) return Ref(PyObject_CallMethodObjArgs(like, name, size.get(), second.get(), nullptr));
  const Ref method(PyObject_GetAttr(like, name));
  const Ref args(second ? PyTuple_Pack(2, size.get(), second.get()) : PyTuple_Pack(1, size.get()));
  const Ref keywords(PyDict_New());
  if (!method || !args || !keywords || PyDict_SetItem(keywords.get(), names.dtype, dtype) != 0) return {};
  return Ref(PyObject_Call(method.get(), args.get(), keywords.get()));
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
  const bool complete = api != nullptr && api->export_borrowed != nullptr && api->current_stream != nullptr;
  return complete ? api : nullptr;
}

}  // namespace

std::string text_of(PyObject* object) {
  const Ref text(PyObject_Str(object));
  const char* utf8 = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  return utf8 != nullptr ? utf8 : "?";
}

void fail(const std::string& message, tessera_status status) {
  const Ref error(PyObject_CallFunction(error_type, "ss", message.c_str(), tessera_status_name(status)));
  if (error) PyErr_SetObject(error_type, error.get());
}

bool truth(PyObject* object, PyObject* name, bool* value) {
  const Ref attribute(PyObject_GetAttr(object, name));
  if (!attribute) return false;
  *value = PyObject_IsTrue(attribute.get()) == 1;
  return true;
}

bool read(PyObject* object, const char* name, Data data, View* view) {
  if (view->object == object) return true;
  const int is_tensor = PyObject_IsInstance(object, torch.tensor_type);
  if (is_tensor < 0) return false;
  if (is_tensor == 0) {
    fail(std::string(name) + " is a " + type_name(object) + "; a torch.Tensor is expected");
    return false;
  }
  if (data == Data::kNeeded && read_exchanged(object, view)) return true;
  if (data == Data::kNeeded && !resolve_negation(object, &view->resolved)) return false;
  view->object = object;
  if (view->resolved) object = view->resolved.get();
  return read_attributes(object, name, data, view);  // has the error message for what DLPack cannot represent
}

bool has_memory(PyObject* tensor, View* view) {
  if (read_exchanged(tensor, view)) return true;
  bool meta = true;
  const Ref address(PyObject_CallMethodObjArgs(tensor, names.data_ptr, nullptr));
  const bool has = address && truth(tensor, names.is_meta, &meta) && !meta;
  PyErr_Clear();
  return has;
}

bool read_optional(PyObject* object, const char* name, Data data, View* view, const tessera_tensor** slot) {
  if (object == Py_None) return true;
  if (!read(object, name, data, view)) return false;
  *slot = &view->tensor;
  return true;
}

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

Ref allocate(const View& like, PyObject* dtype, const std::int64_t* shape, int dims, Fill fill, View* view,
             Layout layout) {
  std::int64_t strides[kMaxDims];
  std::uint64_t elements = 1;  // may wrap: the library has not checked the shape yet
  for (int i = dims - 1; i >= 0; --i) {
    strides[i] = static_cast<std::int64_t>(elements);
    elements *= shape[i] > 0 ? static_cast<std::uint64_t>(shape[i]) : 1;
  }
  Ref made;
  if (fill == Fill::kNone && dtype == nullptr && is_laid_out(like.tensor, shape, strides, dims)) {
    made = Ref(PyObject_CallFunctionObjArgs(torch.empty_like, like.object, nullptr));
  } else {
    made = allocate_by_size(like.object, dtype, shape, strides, dims, fill, layout);
  }
  if (!made || !read(made.get(), "output", Data::kNeeded, view)) return {};
  if (layout == Layout::kHeadsFirst) swap_heads(view);
  return made;
}

Ref allocate_strided(const View& like, PyObject* dtype, const std::int64_t* shape, const std::int64_t* strides,
                     int dims, View* view) {
  Ref made = allocate_by_size(like.object, dtype, shape, strides, dims, Fill::kNone, Layout::kRowsFirst);
  if (!made || !read(made.get(), "output", Data::kNeeded, view)) return {};
  return made;
}

bool set_up(PyObject* error, PyObject* members, bool dlpack) {
  Py_INCREF(error);
  error_type = error;
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
      {"empty_like", &torch.empty_like},
      {"interceptors", &torch.interceptors},
      {"forward_ad", &torch.forward_ad},
  };
  for (const auto& [name, slot] : slots) {
    *slot = PyDict_GetItemString(members, name);
    if (*slot == nullptr) {
      PyErr_Format(PyExc_KeyError, "setup needs %s", name);
      return false;
    }
    Py_INCREF(*slot);
  }
  torch.exchange = dlpack ? exchange_of(torch.tensor_type) : nullptr;
  return true;
}

bool intern_names() {
  const struct {
    const char* text;
    PyObject** slot;
  } interned[] = {
      {"data_ptr", &names.data_ptr},
      {"shape", &names.shape},
      {"stride", &names.stride},
      {"dtype", &names.dtype},
      {"is_cpu", &names.is_cpu},
      {"is_cuda", &names.is_cuda},
      {"is_meta", &names.is_meta},
      {"is_neg", &names.is_neg},
      {"resolve_neg", &names.resolve_neg},
      {"get_device", &names.get_device},
      {"new_empty_strided", &names.new_empty_strided},
      {"new_zeros", &names.new_zeros},
      {"new_full", &names.new_full},
      {"requires_grad", &names.requires_grad},
      {"_current_level", &names.current_level},
  };
  for (const auto& [text, slot] : interned) {
    *slot = PyUnicode_InternFromString(text);
    if (*slot == nullptr) return false;
  }
  return true;
}

}  // namespace tessera::python
