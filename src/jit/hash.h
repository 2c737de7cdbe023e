// XXH3-128, included in one file only: its header is slow to compile.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::jit {

struct Key {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  std::string hex() const;  // 32 digits
  bool operator==(const Key&) const = default;
  bool operator<(const Key& other) const { return high != other.high ? high < other.high : low < other.low; }
};

Key hash_of(std::string_view bytes);

}  // namespace tessera::jit
