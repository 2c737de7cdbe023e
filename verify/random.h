// Counter-based random values: element n of stream s is a hash of (seed, s, n), so values depend neither on the order
// in which they are made nor on the platform's library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::verify {

inline std::uint64_t mixed(std::uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

struct RandomStream {
  std::uint64_t key;
  RandomStream(std::uint64_t seed, std::uint64_t stream) : key(mixed(seed * 0x9e3779b97f4a7c15ULL + stream + 1)) {}

  std::uint64_t bits(std::int64_t n) const {
    return mixed(key + 0x9e3779b97f4a7c15ULL * static_cast<std::uint64_t>(n + 1));
  }
  // Approximately unit normal: four 16-bit uniforms summed. Exact arithmetic, no library function.
  double normal(std::int64_t n) const {
    const std::uint64_t b = bits(n);
    const auto sum = static_cast<double>((b & 0xffff) + ((b >> 16) & 0xffff) + ((b >> 32) & 0xffff) + (b >> 48));
    return (sum / 65536.0 - 2.0) * 1.7320508075688772;
  }
};

// Choices for a random problem: the same for the same seed.
class Draw {
 public:
  explicit Draw(std::uint64_t seed, std::uint64_t stream) : stream_(seed, stream) {}

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(stream_.bits(next_++) % static_cast<std::uint64_t>(n));
  }
  bool one_in(std::int64_t n) { return below(n) == 0; }
  template <std::size_t N, class T>
  T pick(const T (&choices)[N]) {
    return choices[static_cast<std::size_t>(below(N))];
  }

 private:
  RandomStream stream_;
  std::int64_t next_ = 0;
};

// Unit normal values, the same at every call.
inline std::vector<double> some_values(std::size_t count) {
  std::vector<double> values(count);
  const RandomStream stream(1, 0);
  for (std::size_t n = 0; n < count; ++n) values[n] = stream.normal(static_cast<std::int64_t>(n));
  return values;
}

}  // namespace tessera::verify
