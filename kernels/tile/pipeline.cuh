// The state of one side of a pipeline: which stage comes next, and the parity of its mbarriers.
#pragma once

namespace tessera {

// A stage of `count`, and the phase parity of its mbarriers for the current use (ptx/mbarrier.cuh). If `step` users
// take the stages in turn, each has a state of its own that advances by `step`.
template <int count, int step = 1>
struct PipelineState {
  static_assert(count % step == 0);

  int index = 0;
  unsigned parity = 0;

  __forceinline__ void advance() {
    const bool wraps = index >= count - step;
    index = wraps ? index - (count - step) : index + step;
    parity ^= wraps ? 1 : 0;
  }
  __forceinline__ int previous_index() const { return index < step ? index + (count - step) : index - step; }
};

}  // namespace tessera
