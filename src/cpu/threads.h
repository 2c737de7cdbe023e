// The number of threads that the CPU backend uses, process-wide.
#pragma once

namespace tessera::cpu {

// TESSERA_NUM_THREADS, else the number of cores in the affinity mask.
int default_threads();

// 0 restores the default.
void set_threads(int threads);
int threads_in_use();

}  // namespace tessera::cpu
