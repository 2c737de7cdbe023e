#include "verify/family.h"

#include <algorithm>
#include <set>

#include "base/arch.h"

// Every family; verify/<name>/ defines <name>_family(). One line adds a family.
#define TESSERA_FAMILIES(each) each(attention) each(gemm) each(mlp) each(moe) each(norm) each(loss)

namespace tessera::verify {

#define TESSERA_DECLARE(name) const Family& name##_family();
TESSERA_FAMILIES(TESSERA_DECLARE)
#undef TESSERA_DECLARE

const std::vector<const Family*>& families() {
#define TESSERA_LIST(name) &name##_family(),
  static const std::vector<const Family*> list = {TESSERA_FAMILIES(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

std::vector<std::string> suite_names() {
  std::vector<std::string> names;
  for (const Family* family : families()) {
    for (const std::string& name : family->suite_names()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  return names;
}

std::vector<std::unique_ptr<Case>> suite(std::string_view name) {
  std::vector<std::unique_ptr<Case>> all;
  for (const Family* family : families()) {
    for (std::unique_ptr<Case>& c : family->suite(name)) all.push_back(std::move(c));
  }
  return all;
}

std::vector<std::string> known_archs() {
  std::vector<std::string> archs = arch_names();
  std::erase(archs, "sm_90");
  return archs;
}

const std::vector<std::string>& gate_archs() {
  static const std::vector<std::string> archs = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"};
  return archs;
}

std::vector<jit::KernelInstance> gate_instances(const std::string& arch) {
  std::vector<jit::KernelInstance> all;
  const auto device = engine::cuda_device(arch);
  if (!device.ok()) return all;
  std::set<std::pair<std::string, std::string>> known;  // families share steps
  for (const Family* family : families()) {
    for (jit::KernelInstance& instance : family->gate(*device)) {
      if (known.emplace(instance.entry, instance.config).second) all.push_back(std::move(instance));
    }
  }
  return all;
}

std::vector<std::string> kernel_headers() {
  std::set<std::string> headers;
  for (const std::string& arch : gate_archs()) {
    for (const jit::KernelInstance& instance : gate_instances(arch)) headers.insert(instance.header);
  }
  return {headers.begin(), headers.end()};
}

}  // namespace tessera::verify
