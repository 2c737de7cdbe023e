// What the compile gate compiles stands for all that the kernels' host files offer, and a kernel's hash covers the
// device's code alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "attention/family.h"
#include "engine/select.h"
#include "jit/sources.h"
#include "verify/family.h"

namespace tessera::attention {
namespace {

engine::Device device_of(const std::string& arch) { return *engine::cuda_device(arch); }

std::set<std::string> headers_on(const std::string& arch) {
  std::set<std::string> headers;
  for (const jit::KernelInstance& instance : engine::gate_instances<AttentionFamily>(device_of(arch))) {
    headers.insert(instance.header);
  }
  return headers;
}

// Of every kernel of the family, steps that no implementation names included.
std::set<std::string> entry_headers() {
  std::set<std::string> headers;
  for (const std::string& arch : verify::gate_archs()) headers.merge(headers_on(arch));
  return headers;
}

TEST(Gate, knows_every_arch_and_an_unknown_one_has_no_instances) {
  EXPECT_EQ(verify::gate_archs(), (std::vector<std::string>{"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"}));
  const std::vector<std::string> known = verify::known_archs();
  EXPECT_EQ(known, (std::vector<std::string>{"sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_103",
                                             "sm_120", "sm_121"}));
  for (const std::string& arch : known) {
    EXPECT_TRUE(engine::cuda_device(arch).ok()) << arch;
    EXPECT_FALSE(verify::gate_instances(arch).empty()) << arch;
  }
  for (const char* arch : {"sm_12", "sm_75a", "cpu", ""}) {
    EXPECT_EQ(engine::cuda_device(arch).status().code(), TESSERA_INVALID_ARGUMENT) << arch;
    EXPECT_TRUE(verify::gate_instances(arch).empty()) << arch;
  }
}

TEST(Gate, every_representative_is_served_by_its_kernel_with_configs_that_it_takes_back) {
  std::set<std::string> with_representatives, with_gpu_code;
  for (const std::string& arch : verify::known_archs()) {
    const engine::Device device = device_of(arch);
    for (const Implementation& one : AttentionFamily::implementations()) {
      ASSERT_EQ(one.representatives == nullptr, one.headers.empty()) << one.name;
      if (one.representatives == nullptr) continue;
      with_gpu_code.insert(one.name);
      for (const AttentionProblem& p : one.representatives(device)) {
        const std::string where = format("{} on {}: {}", one.name, arch, AttentionFamily::describe(p));
        with_representatives.insert(one.name);
        EXPECT_NE(one.ops & AttentionFamily::op_bit(p), 0U) << where;
        const auto refusal = one.refuses(p, device);
        ASSERT_FALSE(refusal) << where << ": " << *refusal;
        const std::vector<engine::Offer> offers = one.offers(p, device);
        EXPECT_FALSE(offers.empty()) << where;
        for (const engine::Offer& offer : offers) {
          const auto recipe = one.recipe(p, device, offer.config);
          ASSERT_TRUE(recipe) << where << " " << text_of(offer.config);
          EXPECT_EQ(recipe->workspace, offer.workspace) << where;
          EXPECT_TRUE(recipe->enqueue) << where;
          const auto main = std::find_if(recipe->steps.begin(), recipe->steps.end(),
                                         [](const engine::Step& step) { return step.name == "main"; });
          ASSERT_NE(main, recipe->steps.end()) << where;
          ASSERT_TRUE(main->kernel) << where;
          // A change of any step makes tuning entries stale.
          for (const engine::Step& step : recipe->steps) {
            if (!step.kernel) continue;
            EXPECT_TRUE(std::count(one.headers.begin(), one.headers.end(), step.kernel->header) == 1)
                << where << " " << step.kernel->header;
          }
        }
      }
    }
  }
  EXPECT_EQ(with_representatives, with_gpu_code) << "each has some on some architecture";
  EXPECT_TRUE(with_gpu_code.contains("attention_forward"));
}

// Every .cuh of the family is a kernel that the gate compiles, or part of one; those named after an architecture are
// compiled for that one alone.
TEST(Gate, covers_every_file) {
  for (const std::string& arch : verify::known_archs()) {
    std::set<std::string> expected = entry_headers();
    if (arch != "sm_90a") std::erase_if(expected, [](const auto& name) { return name.find("_sm90") != name.npos; });
    // Newer architectures share the code of e4m3; Hopper has a forward of its own.
    if (arch == "sm_90a") expected.erase("attention/forward_fp8.cuh");
    if (arch != "sm_89" && arch != "sm_90a") {
      std::erase_if(expected, [](const auto& name) { return name.find("_fp8") != name.npos; });
    }
    EXPECT_EQ(headers_on(arch), expected) << arch;
  }
  std::set<std::string> reached;
  for (const std::string& header : entry_headers()) {
    for (const jit::Source* file : jit::reachable(header, {})) reached.insert(file->path);
  }
  for (const jit::Source& source : jit::kernel_sources().files) {
    if (!source.path.starts_with("attention/")) continue;
    EXPECT_TRUE(reached.contains(source.path)) << source.path;
  }
  const std::vector<std::string> named = verify::kernel_headers();
  for (const std::string& header : entry_headers()) {
    EXPECT_TRUE(std::binary_search(named.begin(), named.end(), header)) << header;
  }
}

TEST(Gate, an_instance_comes_once_under_a_name_of_its_own) {
  for (const std::string& arch : verify::known_archs()) {
    std::map<std::string, std::string> names;  // and the Config
    std::set<std::pair<std::string, std::string>> instances;
    for (const jit::KernelInstance& instance : verify::gate_instances(arch)) {
      EXPECT_TRUE(instances.emplace(instance.entry, instance.config).second) << arch << " " << instance.config;
      const auto [at, is_new] = names.emplace(instance.name, instance.config);
      EXPECT_TRUE(is_new) << arch << " " << instance.name << "\n" << at->second << "\n" << instance.config;
    }
  }
}

// What only the host decides with is no part of a kernel's hash: a changed heuristic leaves caches, tuning tables and
// the records of what was verified on a GPU as they are.
TEST(KernelHash, covers_device_code_alone) {
  for (const std::string& header : entry_headers()) {
    const std::vector<const jit::Source*> files = jit::reachable(header, {});
    ASSERT_GE(files.size(), 2U) << header;
    for (const jit::Source* file : files) {
      EXPECT_TRUE(file->path.starts_with("attention/") || file->path.starts_with("tile/") ||
                  file->path.starts_with("ptx/"))
          << header << " includes " << file->path;
      EXPECT_TRUE(file->path.ends_with(".cuh") || file->path.ends_with(".h")) << file->path;
      for (const char* heuristic : {"forward_tile", "forward_sm90_tile", "backward_tile", "backward_sm90_tile",
                                    "backward_wide_sm90_tile", "backward_dq_tile"}) {
        EXPECT_EQ(jit::strip_comments(file->text).find(heuristic), std::string::npos)
            << header << " includes " << file->path << ", which has " << heuristic;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::attention
