// GEMM as verify sees it.
#include "gemm/family.h"
#include "verify/family.h"
#include "verify/gemm/cases.h"
#include "verify/gemm/flags.h"

namespace tessera::verify {
namespace {

std::vector<std::unique_ptr<Case>> suite_of(std::string_view name) {
  std::vector<std::unique_ptr<Case>> list;
  for (const gemm::Case& c : gemm::suite(name)) list.push_back(gemm::gemm_case(c));
  return list;
}

std::vector<StepCase> steps() { return {}; }

}  // namespace

const Family& gemm_family() {
  static const Family family = {
      GemmFamily::kName,
      "--m 8192 --n 8192 --k 8192\n"
      "--m 36096 --n 1365 --k 512 --bias --activation silu --arch sm_80,sm_90a\n"
      "--m 1365 --n 512 --k 36096 --ta --tb --out fp32 --arch cuda:0\n"
      "--m 65536 --n 1408 --k 2048 --groups 64 --ragged rows",
      gemm::suite_names,
      suite_of,
      gemm::flags,
      gemm::described,
      gemm::explain,
      engine::gate_instances<GemmFamily>,
      steps,
      random_gemm,
  };
  return family;
}

}  // namespace tessera::verify
