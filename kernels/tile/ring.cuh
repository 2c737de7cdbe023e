// Places in shared memory that are filled and emptied in turn.
#pragma once

namespace tessera {

// A place among `count`, and the parity of its barriers' phase for the present use (ptx/mbarrier.cuh).
template <int count>
struct Ring {
  int index = 0;
  unsigned parity = 0;

  __forceinline__ void advance() {
    if (++index == count) {
      index = 0;
      parity ^= 1;
    }
  }
  __forceinline__ int index_before() const { return index == 0 ? count - 1 : index - 1; }
};

}  // namespace tessera
