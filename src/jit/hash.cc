#include "jit/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera::jit {

Key hash_of(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

std::string Key::hex() const {
  std::string text(32, '0');
  for (int i = 0; i < 32; ++i) {
    text[static_cast<std::size_t>(i)] = "0123456789abcdef"[(i < 16 ? high : low) >> (60 - i % 16 * 4) & 15];
  }
  return text;
}

}  // namespace tessera::jit
