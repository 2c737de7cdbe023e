// prefetch: brings a cache line closer before it is loaded.
#pragma once

namespace tessera {

// Starts to bring the line around an address into L2. The address is valid memory.
__forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" : : "l"(address)); }

}  // namespace tessera
