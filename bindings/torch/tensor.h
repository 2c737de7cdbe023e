// PyTorch's tensors as views of the C ABI, through CPython's limited API alone.
#pragma once

#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tessera/attention.h"

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

// The first fields of DLPack's DLPackExchangeAPI, which are stable within one major version of the standard.
struct ExchangeApi {
  std::uint32_t major, minor;
  ExchangeApi* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*export_borrowed)(void* py_object, tessera_tensor* out);
  int (*current_stream)(int device_type, std::int32_t device_index, void** stream);
};

// The members of torch that are used, passed in once by set_up(). All are owned for the life of the process.
struct Torch {
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* float32 = nullptr;
  PyObject* float16 = nullptr;
  PyObject* bfloat16 = nullptr;
  PyObject* int32 = nullptr;
  PyObject* uint8 = nullptr;
  PyObject* get_num_threads = nullptr;
  PyObject* current_stream = nullptr;  // device index -> the stream's handle
  PyObject* is_grad_enabled = nullptr;
  PyObject* is_autocast_enabled = nullptr;
  PyObject* empty_like = nullptr;
  PyObject* interceptors = nullptr;  // tuple of functions that return 0, False or None while nothing intercepts calls
  PyObject* forward_ad = nullptr;    // the module
  const ExchangeApi* exchange = nullptr;
};

extern Torch torch;

// Attribute names that every call looks up, interned.
struct Names {
  PyObject* data_ptr;
  PyObject* shape;
  PyObject* stride;
  PyObject* dtype;
  PyObject* is_cpu;
  PyObject* is_cuda;
  PyObject* is_meta;
  PyObject* is_neg;
  PyObject* resolve_neg;
  PyObject* get_device;
  PyObject* new_empty_strided;
  PyObject* new_zeros;
  PyObject* new_full;
  PyObject* requires_grad;
  PyObject* current_level;
};
extern Names names;

// members: a dict with the members of Torch by name.
bool set_up(PyObject* error_type, PyObject* members, bool dlpack);
bool intern_names();

// str(object).
std::string text_of(PyObject* object);

// Raises tessera.Error.
void fail(const std::string& message, tessera_status status = TESSERA_INVALID_ARGUMENT);

// An argument tensor: its C view, and storage for shape and strides if PyTorch's own cannot be pointed to.
struct View {
  PyObject* object = nullptr;  // borrowed; null: not read yet
  tessera_tensor tensor{};
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
  Ref resolved;  // a copy, whose view this is, of an object that PyTorch is still to negate
};

enum class Data : bool { kNotNeeded, kNeeded };

// Does nothing if the view is one of this object already. What the library writes may not be `resolved`.
bool read(PyObject* object, const char* name, Data data, View* view);
// *slot stays null for None.
bool read_optional(PyObject* object, const char* name, Data data, View* view, const tessera_tensor** slot);
bool truth(PyObject* object, PyObject* name, bool* value);
// False for a meta tensor, and for one that has escaped a torch.func transform. May read the tensor into the view.
bool has_memory(PyObject* tensor, View* view);

// Of PyTorch's tensors: [B, S, H, D] or [B, H, S, D]. The C ABI's views are all [B, S, H, D].
enum class Layout : bool { kRowsFirst, kHeadsFirst };

// Reads [B, H, S, D] as [B, S, H, D].
void swap_heads(View* view);

enum class Fill { kNone, kZero, kMinusInfinity };

// A new tensor on like's device, of like's dtype if dtype is null, row-major in the order of `shape`. With
// Layout::kHeadsFirst, PyTorch sees the second and third of its four dims swapped.
Ref allocate(const View& like, PyObject* dtype, const std::int64_t* shape, int dims, Fill fill, View* view,
             Layout layout = Layout::kRowsFirst);
// The same with these strides, not filled.
Ref allocate_strided(const View& like, PyObject* dtype, const std::int64_t* shape, const std::int64_t* strides,
                     int dims, View* view);

}  // namespace tessera::python
