// Bulk copies between the shared memories of a cluster (sm_90).
#pragma once

namespace tessera {

// One thread issues the copy. destination and mbarrier: addresses in the cluster, of the same CTA, at which the bytes
// complete. Writes to `source` must have been made visible to the async proxy.
__forceinline__ void bulk_copy_to_cluster(unsigned destination, unsigned source, unsigned bytes, unsigned mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "r"(source), "r"(bytes), "r"(mbarrier)
      : "memory");
}

}  // namespace tessera
