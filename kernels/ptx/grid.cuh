// Grids that follow each other on a stream (sm_90). One that was launched to start early (jit::KernelInstance) may be
// on the GPU while the one before it still works; it must touch no memory of the device before it has waited.
#pragma once

namespace tessera {

// Until the grids before this one have ended, and what they wrote is there for all of this one. At once where it was
// not launched to start early.
__forceinline__ void wait_for_grids_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// From when all blocks have said so, the next grid may come onto SMs that have room. After the wait, so that whoever
// starts early finds all grids but one to have ended.
__forceinline__ void let_next_grid_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace tessera
