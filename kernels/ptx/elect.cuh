// Which thread this is, asked for anew each time: for code that has no register to keep the answer in.
#pragma once

namespace tessera {

// True for one lane of a converged warp, always the same one (sm_90).
__forceinline__ bool elect_one() {
  int is_elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(is_elected));
  return is_elected != 0;
}

// threadIdx.x. The compiler would keep it in a register.
__forceinline__ int read_thread() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

}  // namespace tessera
