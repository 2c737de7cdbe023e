// Tensors as the C ABI takes them: typed memory with any strides, gaps filled with NaN, outputs poisoned with NaN. The
// memory may be moved to a device and back.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.h"
#include "verify/host_tensor.h"

namespace tessera::verify {

// Memory that is not cleared before it is filled: pages are first touched by the threads that fill them.
template <class T>
struct Uncleared : std::allocator<T> {
  template <class Made>
  void construct(Made* at) noexcept {
    ::new (static_cast<void*>(at)) Made;
  }
  template <class Made, class... From>
  void construct(Made* at, From&&... from) {
    ::new (static_cast<void*>(at)) Made(std::forward<From>(from)...);
  }
};
using Bytes = std::vector<std::byte, Uncleared<std::byte>>;

// One tensor and the memory it lives in. Not copyable: `tensor` points into the object.
struct Buffer {
  const char* name;  // of the argument
  Bytes storage;     // gaps included
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};  // in elements
  tessera_tensor tensor{};
  bool written = false;       // by the op; gaps of such a tensor must still be poisoned afterwards
  bool free_padding = false;  // what is behind a row, up to a multiple of 16 bytes, may be written, too
  Bytes before;               // written in part: what poison() restores

  explicit Buffer(const char* argument) : name(argument) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool used() const { return tensor.ndim > 0; }
  const tessera_tensor* view() const { return used() ? &tensor : nullptr; }
  DType dtype() const;

  // Makes the memory for `shape` with `strides` and points the tensor at it. Fills it with `values`, rounded; with
  // repeating random ones if there are none; or with NaN if the op writes it. Gaps are NaN. rank: of the last dims, which
  // the tensor has.
  void fill(DType dtype, int rank, const HostTensor& values, bool written_by_op);
  // The same for e4m3; the op reads it.
  void fill_e4m3(int rank, const HostTensor& values);
  // int32 values, [n] or [rows, n / rows].
  void fill(const std::vector<std::int32_t>& values, std::int64_t rows, int rank);
  // The op reads and writes it, in part: it is filled, and is filled again by poison().
  void update_in_place();
  // The tensor has `rank` of the dims, from first_dim on, and points at the host's memory.
  void show(int first_dim, int rank);

  void poison();
  void read(HostTensor& to) const;  // of the same shape
  // Empty, or a message about the first byte between the elements that was written to.
  std::string damage() const;
};

// Those in use.
std::vector<Buffer*> used_of(std::vector<Buffer*> buffers);

tessera_dtype c_dtype(DType dtype);

}  // namespace tessera::verify
