// Places in shared memory that are filled and emptied in turn.
#pragma once

namespace tessera {

// A place among `count`, and the parity of its barriers' phase for the present use (ptx/mbarrier.cuh). Of `step` users
// that take turns with the places, each has its own.
template <int count, int step = 1>
struct Ring {
  static_assert(count % step == 0);

  int index = 0;
  unsigned parity = 0;

  __forceinline__ void advance() {
    const bool wraps = index >= count - step;
    index = wraps ? index - (count - step) : index + step;
    parity ^= wraps ? 1 : 0;
  }
  __forceinline__ int index_before() const { return index < step ? index + (count - step) : index - step; }
};

}  // namespace tessera
