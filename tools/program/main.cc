#include "program/commands.h"

int main(int argc, char** argv) {
  using namespace tessera::tools;
  return run_commands(argc, argv,
                      {add_doctor, add_verify, add_fuzz, add_bench, add_explain, add_compile, add_cache, add_kernels,
                       add_report, add_tune, add_cases});
}
