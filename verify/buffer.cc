#include "verify/buffer.h"

#include <algorithm>
#include <cstring>

#include "base/format.h"
#include "verify/parallel.h"
#include "verify/random.h"

namespace tessera::verify {
namespace {

constexpr std::byte kPoison{0xff};  // all ones is a NaN in every floating type here

void store(std::byte* at, DType dtype, double value) {
  if (dtype == DType::kFloat32) {
    const auto x = static_cast<float>(value);
    std::memcpy(at, &x, sizeof x);
  } else {
    const std::uint16_t x = to_bits16(dtype, value);
    std::memcpy(at, &x, sizeof x);
  }
}

double load(const std::byte* at, DType dtype) {
  if (dtype == DType::kFloat32) {
    float x = 0;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  std::uint16_t x = 0;
  std::memcpy(&x, at, sizeof x);
  return from_bits16(dtype, x);
}

// Calls f(index in a compact tensor, byte offset in the storage) for every element, from several threads if the tensor
// is large.
template <class F>
void for_each_element(const Buffer& b, F f) {
  const auto size = static_cast<std::int64_t>(b.tensor.dtype.bits / 8);
  const auto [s0, s1, s2, s3] = b.shape;
  over_range(s0 * s1 * s2 * s3, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end;) {  // a row at a time: divisions take longer than the rest
      std::int64_t z = n % s3;
      const std::int64_t row = n / s3, y = row % s2, x = row / s2 % s1, w = row / s2 / s1;
      const std::int64_t at = w * b.strides[0] + x * b.strides[1] + y * b.strides[2];
      for (; z < s3 && n < end; ++z, ++n) {
        f(static_cast<std::size_t>(n), static_cast<std::size_t>((at + z * b.strides[3]) * size));
      }
    }
  });
}

Bytes some_values_as(DType dtype) {
  const std::vector<double> values = some_values(1048573);
  Bytes block(values.size() * size_of(dtype));
  for (std::size_t n = 0; n < values.size(); ++n) store(block.data() + n * size_of(dtype), dtype, values[n]);
  return block;
}

// Repeats a block whose length is prime, so that rows do not repeat in step. It is made once for each type, because
// rounding takes longer than everything else that a benchmark's inputs need.
void repeat(const Bytes& block, Bytes& storage) {
  over_range(static_cast<std::int64_t>(storage.size()), [&](std::int64_t begin, std::int64_t end) {
    for (auto at = static_cast<std::size_t>(begin); at < static_cast<std::size_t>(end);) {
      const std::size_t from = at % block.size();
      const std::size_t count = std::min(block.size() - from, static_cast<std::size_t>(end) - at);
      std::memcpy(storage.data() + at, block.data() + from, count);
      at += count;
    }
  });
}

void repeat_values(Bytes& storage, DType dtype) {
  static const Bytes fp32 = some_values_as(DType::kFloat32), fp16 = some_values_as(DType::kFloat16),
                     bf16 = some_values_as(DType::kBFloat16);
  repeat(dtype == DType::kFloat32 ? fp32 : dtype == DType::kFloat16 ? fp16 : bf16, storage);
}

void repeat_e4m3(Bytes& storage) {
  constexpr double kSize = 64;  // as if divided by a scale: the largest of many values is near e4m3's largest
  static const Bytes block = [] {
    const std::vector<double> values = some_values(1048573);
    Bytes bytes(values.size());
    for (std::size_t n = 0; n < values.size(); ++n) bytes[n] = std::byte{to_bits_e4m3(values[n] * kSize)};
    return bytes;
  }();
  repeat(block, storage);
}

void fill_with_poison(Bytes& storage) {
  over_range(static_cast<std::int64_t>(storage.size()), [&](std::int64_t begin, std::int64_t end) {
    std::memset(storage.data() + begin, static_cast<int>(kPoison), static_cast<std::size_t>(end - begin));
  });
}

}  // namespace

std::vector<Buffer*> used_of(std::vector<Buffer*> buffers) {
  std::erase_if(buffers, [](const Buffer* b) { return !b->used(); });
  return buffers;
}

tessera_dtype c_dtype(DType dtype) {
  if (dtype == DType::kFloat32) return {TESSERA_FLOAT, 32, 1};
  if (dtype == DType::kFloat16) return {TESSERA_FLOAT, 16, 1};
  return {TESSERA_BFLOAT, 16, 1};
}

DType Buffer::dtype() const {
  if (tensor.dtype.bits == 32) return DType::kFloat32;
  return tensor.dtype.code == TESSERA_BFLOAT ? DType::kBFloat16 : DType::kFloat16;
}

void Buffer::show(int first_dim, int rank) {
  tensor.data = storage.data();
  tensor.device = {TESSERA_CPU, 0};
  tensor.ndim = rank;
  tensor.shape = shape.data() + first_dim;
  tensor.strides = strides.data() + first_dim;
}

void Buffer::fill(DType type, int rank, const HostTensor& values, bool written_by_op) {
  const bool empty = shape[0] * shape[1] * shape[2] * shape[3] == 0;
  const std::size_t elements = empty ? 0 : static_cast<std::size_t>(shape[0] * strides[0] + 64);
  storage.resize(std::max<std::size_t>(elements, 1) * size_of(type));
  tensor.dtype = c_dtype(type);
  show(4 - rank, rank);
  written = written_by_op;
  if (!written && values.empty() && elements > 0) return repeat_values(storage, type);
  fill_with_poison(storage);
  if (written) return;
  for_each_element(*this,
                   [&](std::size_t at, std::size_t byte) { store(storage.data() + byte, type, values.data[at]); });
}

void Buffer::fill_e4m3(int rank, const HostTensor& values) {
  const bool empty = shape[0] * shape[1] * shape[2] * shape[3] == 0;
  const std::size_t elements = empty ? 0 : static_cast<std::size_t>(shape[0] * strides[0] + 64);
  storage.resize(std::max<std::size_t>(elements, 1));
  tensor.dtype = {TESSERA_FLOAT8_E4M3FN, 8, 1};
  show(4 - rank, rank);
  if (values.empty() && elements > 0) return repeat_e4m3(storage);
  fill_with_poison(storage);
  for_each_element(*this,
                   [&](std::size_t at, std::size_t byte) { storage[byte] = std::byte{to_bits_e4m3(values.data[at])}; });
}

void Buffer::fill(const std::vector<std::int32_t>& values, std::int64_t rows, int rank) {
  const auto total = static_cast<std::int64_t>(values.size());
  shape = {1, 1, rows, total / rows};
  strides = {total, total, total / rows, 1};
  storage.resize(values.size() * sizeof(std::int32_t));
  std::memcpy(storage.data(), values.data(), storage.size());
  tensor.dtype = {TESSERA_INT, 32, 1};
  show(4 - rank, rank);
}

void Buffer::update_in_place() {
  written = true;
  before = storage;
}

void Buffer::poison() {
  if (before.empty()) {
    fill_with_poison(storage);
  } else {
    std::memcpy(storage.data(), before.data(), before.size());
  }
}

void Buffer::read(HostTensor& to) const {
  if (tensor.dtype.code == TESSERA_FLOAT8_E4M3FN) {
    return for_each_element(*this, [&](std::size_t at, std::size_t byte) {
      to.data[at] = from_bits_e4m3(static_cast<std::uint8_t>(storage[byte]));
    });
  }
  const DType type = dtype();
  for_each_element(*this, [&](std::size_t at, std::size_t byte) { to.data[at] = load(storage.data() + byte, type); });
}

std::string Buffer::damage() const {
  std::vector<char> element(storage.size(), 0);
  const std::size_t size = tensor.dtype.bits / 8;
  const std::size_t chunk = free_padding ? 16 : size;
  for_each_element(*this, [&](std::size_t, std::size_t byte) {
    const std::size_t from = byte & ~(chunk - 1);  // a power of two, at multiples of which rows start
    for (std::size_t n = 0; n < chunk; ++n) element[from + n] = 1;
  });
  for (std::size_t n = 0; n < element.size(); ++n) {
    if (element[n] == 0 && storage[n] != kPoison) {
      return format("{} was written outside its elements, at byte {}", name, n);
    }
  }
  return {};
}

}  // namespace tessera::verify
