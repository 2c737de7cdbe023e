#include "jit/gate.h"

#include <set>

#include "base/arch.h"
#include "tests/jit/helpers.h"

namespace tessera::jit {
namespace {

// A kernel of the test's own: `body` sees Params as p.
CompileRequest request_for(const std::string& arch, const std::string& body, int threads, int min_blocks,
                           int dynamic_smem_bytes = 0) {
  const std::string text =
      "#pragma once\nnamespace tessera {\nstruct TestParams { float* data; int n; };\n"
      "struct TestConfig { int value; };\n"
      "template <TestConfig config> __forceinline__ void test_entry(const TestParams& p) {\n" +
      body + "\n}\n}\n";
  KernelInstance instance{.name = "test_kernel",
                          .header = "test/kernel.cuh",
                          .entry = "test_entry",
                          .params = "TestParams",
                          .config = "TestConfig{.value = 1}",
                          .threads = threads,
                          .min_blocks = min_blocks,
                          .dynamic_smem_bytes = dynamic_smem_bytes};
  return {instance, {arch, false}, {{"test/kernel.cuh", text}}, {}};
}

GateRow row_of(const CompileRequest& request) {
  GateOptions options;
  options.use_cache = false;
  auto report = run_gate({request}, options);
  if (report.ok()) return report->rows.at(0);
  GateRow row;
  row.failure = report.status().message();
  return row;
}

constexpr const char* kHarmless = "p.data[threadIdx.x] += config.value;";

TEST(Gate, a_harmless_kernel_passes_on_every_arch) {
  REQUIRE_NVRTC();
  for (const std::string arch : kArchs) {
    const GateRow row = row_of(request_for(arch, kHarmless, 128, 0));
    EXPECT_TRUE(row.passed()) << arch << ": " << row.failure;
    EXPECT_GT(row.resources.registers, 0);
  }
}

TEST(Gate, a_spill_fails) {
  REQUIRE_NVRTC();
  // 64 values live at once in the 32 registers that 2048 threads leave.
  const GateRow row =
      row_of(request_for("sm_80",
                         "float v[64];\n"
                         "for (int i = 0; i < 64; ++i) v[i] = p.data[threadIdx.x + i * 1024];\n"
                         "for (int k = 0; k < p.n; ++k) {\n"
                         "  for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + 7) % 64] + v[(i + 13) % 64];\n"
                         "}\n"
                         "for (int i = 0; i < 64; ++i) p.data[threadIdx.x + i * 1024] = v[i];",
                         1024, 2));
  EXPECT_FALSE(row.passed());
  EXPECT_NE(row.failure.find("spills"), std::string::npos) << row.failure;
  EXPECT_GT(row.resources.spill_store_bytes, 0);
}

TEST(Gate, dynamic_shared_memory_over_the_archs_limit_fails) {
  REQUIRE_NVRTC();
  for (const auto& [arch, limit] : {std::pair{"sm_75", 64},
                                    {"sm_80", 163},
                                    {"sm_86", 99},
                                    {"sm_89", 99},
                                    {"sm_90a", 227},
                                    {"sm_100", 227},
                                    {"sm_120", 99}}) {
    EXPECT_TRUE(row_of(request_for(arch, kHarmless, 128, 0, limit * 1024)).passed()) << arch;
    const GateRow row = row_of(request_for(arch, kHarmless, 128, 0, limit * 1024 + 1));
    EXPECT_FALSE(row.passed()) << arch;
    EXPECT_NE(row.failure.find("shared memory"), std::string::npos) << row.failure;
  }
}

TEST(Gate, static_and_dynamic_shared_memory_count_together) {
  REQUIRE_NVRTC();
  const char* body =
      "__shared__ float s[8192]; s[threadIdx.x] = p.data[threadIdx.x]; __syncthreads(); "
      "p.data[threadIdx.x] = s[p.n];";
  EXPECT_TRUE(row_of(request_for("sm_75", body, 128, 0, 32 * 1024)).passed());
  const GateRow row = row_of(request_for("sm_75", body, 128, 0, 33 * 1024));
  EXPECT_EQ(row.resources.static_smem_bytes, 32 * 1024);
  EXPECT_NE(row.failure.find("shared memory"), std::string::npos) << row.failure;
}

TEST(Gate, static_shared_memory_beyond_what_ptxas_takes_fails) {
  REQUIRE_NVRTC();
  const GateRow row = row_of(request_for("sm_75",
                                         "__shared__ float s[32768]; s[threadIdx.x] = p.data[threadIdx.x]; "
                                         "__syncthreads(); p.data[threadIdx.x] = s[p.n];",
                                         128, 0));
  EXPECT_FALSE(row.passed());
}

TEST(Gate, a_serialised_wgmma_fails) {
  REQUIRE_NVRTC();
  // The accumulator is touched between two products in flight.
  const char* product =
      "asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;\\n\"\n"
      "             : \"+f\"(a[0]), \"+f\"(a[1]), \"+f\"(a[2]), \"+f\"(a[3]) : \"l\"(d), \"l\"(d));\n";
  const std::string fence = "asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");\n";
  const std::string wait =
      "asm volatile(\"wgmma.commit_group.sync.aligned;\" ::: \"memory\");\n"
      "asm volatile(\"wgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n";
  const std::string begin = "float a[4] = {}; unsigned long long d = p.n;\n" + fence;
  const std::string end = wait + "p.data[threadIdx.x] = a[0] + a[1] + a[2] + a[3];";

  const GateRow good = row_of(request_for("sm_90a", begin + product + product + end, 128, 0));
  EXPECT_TRUE(good.passed()) << good.failure;
  const GateRow bad =
      row_of(request_for("sm_90a", begin + product + "a[0] *= p.data[threadIdx.x];\n" + product + end, 128, 0));
  EXPECT_FALSE(bad.passed());
  EXPECT_NE(bad.failure.find("wgmma"), std::string::npos) << bad.failure;
}

TEST(Gate, the_kernel_that_measures_wgmmas_peak_passes) {
  REQUIRE_NVRTC();
  const GateRow row = row_of({{.name = "wgmma_peak",
                               .header = "bench/wgmma_peak.cuh",
                               .entry = "wgmma_peak",
                               .params = "MmaPeakParams",
                               .config = config_text("MmaPeakConfig", MmaPeakConfig{DType::kBFloat16}),
                               .threads = kWgmmaPeakThreads,
                               .min_blocks = 1,
                               .dynamic_smem_bytes = kWgmmaPeakSharedBytes},
                              {"sm_90a", false},
                              {},
                              {}});
  EXPECT_TRUE(row.passed()) << row.failure;
}

TEST(Gate, a_kernel_that_does_not_compile_is_a_failed_row_and_the_others_go_on) {
  REQUIRE_NVRTC();
  int calls = 0;
  GateOptions options;
  options.use_cache = false;
  options.threads = 2;
  options.progress = [&](const GateRow&, int done, int total) {
    EXPECT_EQ(done, ++calls);
    EXPECT_EQ(total, 3);
  };
  const auto report =
      run_gate({request_for("sm_80", kHarmless, 128, 0), request_for("sm_80", "this is not C++", 128, 0),
                request_for("sm_75", kHarmless, 128, 0)},
               options);
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->failures(), 1);
  EXPECT_FALSE(report->rows[1].passed());
  EXPECT_EQ(report->rows[2].arch, "sm_75");
  EXPECT_EQ(calls, 3);
}

TEST(Gate, an_arch_with_unknown_limits_is_refused) {
  EXPECT_EQ(refusal({40, 0, 0, 0, 0, false}, 0, "sm_80"), "");
  EXPECT_NE(refusal({40, 0, 0, 0, 0, false}, 0, "sm_42").find("sm_42"), std::string::npos);
}

TEST(Gate, a_kernel_of_the_library_passes_on_the_oldest_and_the_newest_arch) {
  REQUIRE_NVRTC();
  GateOptions options;
  options.use_cache = false;
  options.threads = 2;
  const auto report = run_gate({some_request("sm_75"), some_request("sm_90a")}, options);
  ASSERT_TRUE(report.ok()) << report.status().message();
  EXPECT_EQ(report->rows.size(), 2u);
  for (const GateRow& row : report->rows) {
    EXPECT_TRUE(row.passed()) << row.kernel << " " << row.arch << ": " << row.failure;
  }
}

TEST(Gate, pairwise_keeps_every_two_values_that_stand_together_and_few_instances) {
  std::vector<CompileRequest> all;
  for (const char* entry : {"one", "other"}) {
    for (int n = 0; n < 162; ++n) {
      if (n / 27 % 3 == 2 && n % 3 == 2) continue;  // a = 2 never stands beside d = 2
      CompileRequest& request = all.emplace_back();
      request.target.arch = n < 81 ? "sm_80" : "sm_75";
      KernelInstance& k = request.instance;
      k.entry = entry;
      k.config = "C{.a = " + std::to_string(n / 27 % 3) + ", .b = " + std::to_string(n / 9 % 3) +
                 ", .c = " + std::to_string(n / 3 % 3) + ", .d = " + std::to_string(n % 3) + "}";
      k.min_blocks = n == 40 ? 2 : 1;
    }
  }
  const auto pairs_of = [](const std::vector<CompileRequest>& requests) {
    std::set<std::string> pairs;
    for (const CompileRequest& request : requests) {
      const KernelInstance& k = request.instance;
      const std::string values{
          k.config[7], k.config[15], k.config[23], k.config[31], char('0' + k.min_blocks), request.target.arch.back()};
      for (int i = 0; i < 6; ++i) {
        for (int j = i + 1; j < 6; ++j) {
          pairs.insert(k.entry + char('a' + i) + values[i] + char('a' + j) + values[j]);
        }
      }
    }
    return pairs;
  };
  const std::vector<CompileRequest> kept = pairwise(all);
  EXPECT_EQ(pairs_of(kept), pairs_of(all));
  EXPECT_GE(kept.size(), 2 * 9U);
  EXPECT_LE(kept.size(), 2 * 14U);
}

}  // namespace
}  // namespace tessera::jit
