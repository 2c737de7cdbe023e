// Programmatic dependent launch (PDL, sm_90 and newer): a grid launched with the attribute (jit::KernelInstance) may
// start while the preceding grid on its stream is still running. It must not access global memory before it has waited.
#pragma once

namespace tessera {

// Waits until the preceding grids have completed and their writes are visible to this whole grid, then allows the next
// grid to start as soon as every CTA of this one has come here. In this order, only the immediately preceding grid may
// still be running when a grid starts. One thread of a CTA is enough if the other threads access no global memory
// before it has returned.
__forceinline__ void pdl_wait_and_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace tessera
