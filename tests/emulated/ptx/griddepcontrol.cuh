// Takes the place of kernels/ptx/griddepcontrol.cuh (device.h).
#pragma once

namespace tessera {

inline void pdl_wait_and_launch_dependents() {}

}  // namespace tessera
