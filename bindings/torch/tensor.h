// PyTorch's tensors as the C ABI's views, by CPython's limited API alone.
#pragma once

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tessera/tessera.h"

namespace tessera::python {

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

// The parts of torch that are used, handed over once by set_up(). All owned for the life of the process.
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
  PyObject* empty_like = nullptr;
  PyObject* unplain = nullptr;  // tuple of functions that answer 0, False or None while nothing intercepts calls
  const ExchangeApi* exchange = nullptr;
};

extern Torch torch;

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
  PyObject* new_empty_strided;
  PyObject* new_zeros;
  PyObject* new_full;
  PyObject* requires_grad;
};
extern Names names;

// Hands over tessera.Error and a dict with the members of Torch by name.
bool set_up(PyObject* error_type, PyObject* pieces, bool dlpack);
bool intern_names();

// Raises tessera.Error.
void fail(const std::string& sentence, tessera_status status = TESSERA_INVALID_ARGUMENT);

// A tensor of the call: its C view, and room for shape and strides where PyTorch lends none or other ones are meant.
struct View {
  PyObject* object = nullptr;  // borrowed
  tessera_tensor tensor{};
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
};

enum class Data : bool { kNotNeeded, kNeeded };

bool read(PyObject* object, const char* name, Data data, View* view);
// *slot stays null for None.
bool read_optional(PyObject* object, const char* name, Data data, View* view, const tessera_tensor** slot);
bool truth(PyObject* object, PyObject* name, bool* value);
// A tensor on meta has none, nor has one that a transform of torch.func left behind.
bool has_memory(PyObject* tensor);

// Of PyTorch's tensors; the C ABI's views are all [B, S, H, D].
enum class Layout : bool { kRowsFirst, kHeadsFirst };

// Reads [B, H, S, D] as [B, S, H, D].
void swap_heads(View* view);

enum class Fill { kNone, kZero, kMinusInfinity };

// A new tensor beside `like`, of like's dtype where that is null, row-major as `shape` orders it; with
// Layout::kHeadsFirst PyTorch sees the second and third of its four dims swapped.
Ref allocate(const View& like, PyObject* dtype, const std::int64_t* shape, int dims, Fill fill, View* view,
             Layout layout = Layout::kRowsFirst);

}  // namespace tessera::python
