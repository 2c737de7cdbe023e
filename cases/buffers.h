// A case's tensors as the C ABI takes them: typed memory with the case's strides, gaps filled with NaN, outputs
// poisoned with NaN. The memory may be moved to a device and back.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases/cases.h"
#include "tessera/tessera.h"

namespace tessera::cases {

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
  Bytes storage;  // gaps included
  std::array<std::int64_t, 4> shape{};
  std::array<std::int64_t, 4> strides{};  // in elements
  tessera_tensor tensor{};
  bool written = false;  // by the op; gaps of such a tensor must still be poisoned afterwards

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  bool used() const { return tensor.ndim > 0; }
  const tessera_tensor* view() const { return used() ? &tensor : nullptr; }
};

class Buffers {
 public:
  // backward reads o and lse from `saved`, the oracle's, rounded to their types. Inputs without values (make_shapes)
  // are filled with repeating random ones.
  Buffers(const Case& c, const oracle::Inputs& inputs, const oracle::Outputs* saved);

  tessera_attention_op op() const;
  tessera_attention args() const;
  std::vector<Buffer*> all();  // those in use

  // o and lse as a forward of the same case left them.
  void take_saved(const Buffers& forward);

  void poison();  // fills what the op writes with NaN again

  // What the op wrote, read from host memory. Rows that belong to no sequence are taken from `expected`: nothing is
  // promised about them.
  oracle::Outputs results(const oracle::Outputs& expected) const;
  void excuse_unused_rows(oracle::Outputs& results, const oracle::Outputs& expected) const;

  // Empty, or a sentence about the first byte between the elements of an output that was written to.
  std::string damage() const;

 private:
  void add(Buffer& buffer, const oracle::HostTensor& values, DType dtype, Layout layout, int rank, bool written);
  void add(Buffer& buffer, const std::vector<std::int32_t>& values, std::int64_t rows);

  const Case& case_;
  const oracle::Inputs& inputs_;
  Buffer q_, k_, v_, o_, lse_, d_o_, d_lse_, dq_, dk_, dv_, slopes_, cu_q_, cu_k_, cache_lengths_, page_table_;
};

}  // namespace tessera::cases
