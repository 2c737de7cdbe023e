// Thread block clusters (sm_90): CTAs on neighbouring SMs that run at the same time and reach each other's shared memory.
#pragma once

namespace tessera {

__forceinline__ unsigned cluster_cta_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// A barrier of all threads of the cluster; those that have exited count as arrived. The relaxed arrival orders nothing: what
// others depend on needs a fence before. The other one follows this thread's earlier accesses, arrivals at other CTAs'
// mbarriers included.
__forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// One arrival at the mbarrier that has this address in the shared memory of the cluster's CTA `rank`. It orders nothing
// beyond this CTA: that would be a fence of the whole GPU, and a stage that was only read needs none.
__forceinline__ void mbarrier_arrive_at(unsigned mbarrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(mbarrier),
      "r"(rank)
      : "memory");
}

#if __CUDA_ARCH__ >= 900
// All threads of all CTAs of the cluster. Writes to shared memory before it are visible after it.
__forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address, in the cluster, of what CTA `rank` has at this CTA's shared address.
__forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__forceinline__ void store_cluster(unsigned address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__forceinline__ void store_cluster_floats(unsigned address, float v0, float v1) {  // address: a multiple of 8
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v0), "f"(v1) : "memory");
}
#endif

}  // namespace tessera
