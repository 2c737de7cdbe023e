// GEMM as verify sees it.
#include "gemm/family.h"
#include "verify/family.h"
#include "verify/gemm/cases.h"
#include "verify/gemm/flags.h"

namespace tessera::verify {

const Family& gemm_family() {
  static const Family family = {
      GemmFamily::kName,
      "--m 8192 --n 8192 --k 8192\n"
      "--m 36096 --n 1365 --k 512 --bias --activation silu --arch sm_80,sm_90a\n"
      "--m 1365 --n 512 --k 36096 --ta --tb --out fp32 --arch cuda:0\n"
      "--m 65536 --n 1408 --k 2048 --groups 64 --ragged rows",
      gemm::suite_names,
      [](std::string_view name) { return as_cases(gemm::suite(name), gemm::gemm_case); },
      gemm::flags,
      gemm::described,
      gemm::explain,
      engine::gate_instances<GemmFamily>,
      random_gemm,
  };
  return family;
}

}  // namespace tessera::verify
