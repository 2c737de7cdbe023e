// Takes the place of kernels/ptx/griddepcontrol.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

inline void pdl_wait_and_launch_dependents() { emulated::wait_for_preceding_grid(); }

}  // namespace tessera
