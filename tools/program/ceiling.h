// Ceilings, measured on this machine in the same run as the figures that are compared with them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::tools {

struct Unit {
  std::string name;  // "fp32 FMA, avx512"
  double flops = 0;  // per second, all threads together
};

struct Ceilings {
  int threads = 1;
  std::vector<Unit> units;    // fp32 FMA first
  double copy_bandwidth = 0;  // bytes per second, read plus written, of a copy of 256 MiB

  void keep_best_of(const Ceilings& other);  // measured again: interference can only lower a figure
  const Unit& fp32() const { return units.front(); }
  const Unit& best_for_16_bit() const;  // the fastest of all
};

// Takes about a second.
Ceilings measure_ceilings(int threads);

// Bytes per second of reading a buffer of this size repeatedly: the ceiling of decode, which reads its KV cache once
// per call. Measured at the case's own size, since a small KV cache stays in the processor's caches.
double measure_read_bandwidth(int threads, std::size_t bytes);

}  // namespace tessera::tools
