// A compiled kernel and what ptxas reported about it.
#pragma once

#include <string>

namespace tessera::jit {

// All are -1 if the image is PTX, which ptxas has not seen yet.
struct Resources {
  int registers = -1;
  int stack_bytes = -1;
  int spill_store_bytes = -1;
  int spill_load_bytes = -1;
  int static_smem_bytes = -1;
  bool wgmma_serialized = false;

  bool operator==(const Resources&) const = default;
};

struct Image {
  std::string kernel;  // the instance's name
  std::string target;  // "sm_90a", or "compute_75" for PTX
  std::string bytes;   // cubin, or PTX with its terminating zero
  std::string log;     // of the compiler
  bool is_ptx = false;
  Resources resources;
  double compile_seconds = 0;

  bool operator==(const Image&) const = default;
};

}  // namespace tessera::jit
