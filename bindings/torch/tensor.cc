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

std::string text_of(PyObject* object) {
  const Ref text(PyObject_Str(object));
  const char* utf8 = text ? PyUnicode_AsUTF8AndSize(text.get(), nullptr) : nullptr;
  return utf8 != nullptr ? utf8 : "?";
}

bool read_numbers(PyObject* tuple, std::int64_t* numbers, int count) {
  for (int i = 0; i < count; ++i) {
    numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    if (numbers[i] == -1 && PyErr_Occurred() != nullptr) return false;
  }
  return true;
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

}  // namespace

void fail(const std::string& sentence, tessera_status status) {
  const Ref error(PyObject_CallFunction(error_type, "ss", sentence.c_str(), tessera_status_name(status)));
  if (error) PyErr_SetObject(error_type, error.get());
}

bool truth(PyObject* object, PyObject* name, bool* value) {
  const Ref attribute(PyObject_GetAttr(object, name));
  if (!attribute) return false;
  *value = PyObject_IsTrue(attribute.get()) == 1;
  return true;
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

bool read_optional(PyObject* object, const char* name, Data data, View* view, const tessera_tensor** slot) {
  if (object == Py_None) return true;
  if (!read(object, name, data, view)) return false;
  *slot = &view->tensor;
  return true;
}

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

bool set_up(PyObject* error, PyObject* pieces, bool dlpack) {
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
      {"unplain", &torch.unplain},
  };
  for (const auto& [name, slot] : slots) {
    *slot = PyDict_GetItemString(pieces, name);
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
      {"data_ptr", &names.data_ptr},   {"shape", &names.shape},           {"stride", &names.stride},
      {"dtype", &names.dtype},         {"is_cpu", &names.is_cpu},         {"is_cuda", &names.is_cuda},
      {"is_meta", &names.is_meta},     {"get_device", &names.get_device}, {"new_empty", &names.new_empty},
      {"new_zeros", &names.new_zeros}, {"new_full", &names.new_full},     {"requires_grad", &names.requires_grad},
  };
  for (const auto& [text, slot] : interned) {
    *slot = PyUnicode_InternFromString(text);
    if (*slot == nullptr) return false;
  }
  return true;
}

}  // namespace tessera::python
