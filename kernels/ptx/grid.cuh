// Grids that follow each other on a stream. From sm_90 on, one that was launched to start early (jit::KernelInstance)
// may be on the GPU while the one before it still works; it must touch no memory of the device before it has waited.
#pragma once

namespace tessera {

// Waits until the grids before this one have ended and what they wrote is there for all of this one, and then lets the
// next grid come onto SMs that have room, as soon as all blocks of this one have come here: whoever starts early finds
// all grids but the one before it to have ended. One thread of a block does, if the others touch nothing before it has.
__forceinline__ void follow_grids_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tessera
