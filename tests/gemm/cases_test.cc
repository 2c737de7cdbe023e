#include "verify/gemm/cases.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/select.h"
#include "gemm/check.h"
#include "gemm/dense_sm90_config.h"
#include "gemm/family.h"
#include "verify/gemm/buffers.h"

namespace tessera::verify::gemm {
namespace {

TEST(GemmSuites, every_name_is_unique_and_every_suite_has_cases) {
  for (const std::string& name : suite_names()) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) EXPECT_TRUE(seen.insert(c.name).second) << c.name;
    EXPECT_FALSE(seen.empty()) << name;
  }
  EXPECT_TRUE(suite("no such suite").empty());
}

// A case's problem is what the contract's check makes of its tensors if they are on a GPU: explain then answers for it.
TEST(GemmSuites, problems_are_those_of_their_tensors) {
  for (const char* name : {"quick", "full", "hostile"}) {
    for (const Case& c : suite(name)) {
      const Inputs shapes = make_shapes(c);
      Buffers buffers(c, shapes);
      for (Buffer* b : buffers.buffers()) {
        b->tensor.device = {TESSERA_CUDA, 0};
        b->tensor.data = nullptr;
      }
      const auto checked =
          tessera::gemm::check(static_cast<tessera_gemm_op>(c.problem.op), &buffers.args(), Look::kShapes);
      ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
      EXPECT_EQ(GemmFamily::difference(c.problem, checked->args.problem), "") << c.name;
      EXPECT_TRUE(c.problem == checked->args.problem) << c.name;
    }
  }
}

TEST(GemmSuites, flops_and_bytes_of_a_case_done_by_hand) {
  Case c;
  GemmProblem& p = c.problem;
  p.dtype = DType::kBFloat16;
  p.out_dtype = DType::kFloat32;
  p.m = 3, p.n = 5, p.k = 7;
  EXPECT_EQ(c.flops(), 2.0 * 3 * 5 * 7);
  EXPECT_EQ(c.bytes(), 2.0 * (3 * 7 + 5 * 7) + 4.0 * 15);
  p.gated = p.bias = p.residual = true;
  EXPECT_EQ(c.flops(), 4.0 * 3 * 5 * 7);
  EXPECT_EQ(c.bytes(), 2.0 * (3 * 7 + 2 * 5 * 7) + 2.0 * 2 * 5 + 2 * 4.0 * 15);
}

// What the kernel for Hopper does with one tile and not with another is run, and can be broken, on some case.
TEST(GemmSuites, full_has_every_kind_of_tile_on_hopper) {
  const engine::Device device = *engine::cuda_device("sm_90a");
  const auto* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  std::map<std::string, std::string> met;  // and a case that has it
  for (const Case& c : suite("full")) {
    if (c.problem.dtype != DType::kBFloat16 || sm90->refuses(c.problem, device)) continue;
    const engine::Config config = sm90->offers(c.problem, device).front().config;
    const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
    ASSERT_TRUE(main) << c.name;
    const engine::Fields* reduce = engine::fields_of_step(config, "reduce");
    const auto has = [&](bool it_does, const std::string& what) {
      if (it_does) met[what] = c.name;
    };
    has(main->strided != kStridedK,
        std::to_string(main->block_m) + (main->ping_pong ? " rows, ping-pong" : " rows, cooperative"));
    has(main->shares_a, "shared A");
    has(gemm_sm90::shares_b(*main), "shared B");
    has(main->cluster == 1, "one CTA");
    has(main->strided == kStridedM, std::string("strided rows") + (main->edges ? ", edges" : ""));
    has(main->strided == kStridedK, "strided terms, " + std::to_string(main->block_m) + " rows");
    has(!main->tma_store, "stored by threads");
    has(reduce != nullptr && std::get<bool>(reduce->back().value), "transposed product");
    has(engine::fields_of_step(config, "rest") != nullptr, "rest");
  }
  for (const char* what : {"64 rows, ping-pong", "128 rows, ping-pong", "128 rows, cooperative", "shared A", "shared B",
                           "one CTA", "strided rows", "strided rows, edges", "strided terms, 128 rows",
                           "strided terms, 256 rows", "stored by threads", "transposed product", "rest"}) {
    EXPECT_TRUE(met.contains(what)) << what;
  }
}

// The suite has every transposition, activation, layout and epilogue, in both types that GPUs take.
TEST(GemmSuites, full_covers_the_contract) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::set<std::string> met;
    const auto meet = [&](bool here, const std::string& what) {
      if (here) met.insert(what);
    };
    for (const Case& c : suite("full")) {
      const GemmProblem& p = c.problem;
      if (p.dtype != dtype) continue;
      met.insert(std::string("transposed ") + (p.a_transposed ? "t" : "n") + (p.b_transposed ? "t" : "n") +
                 (p.a_aligned ? "" : " a unaligned") + (p.b_aligned ? "" : " b unaligned"));
      meet(p.gated, std::string("gated ") + activation_name(p.activation));
      meet(p.gradient, std::string("gradient ") + activation_name(p.activation));
      meet(p.preactivation, std::string("preactivation ") + activation_name(p.activation));
      meet(p.residual && p.out_dtype == dtype, "residual");
      meet(p.residual && p.out_dtype == DType::kFloat32, "fp32 residual");
      meet(p.m == 0, "M 0");
      meet(p.n == 0, "N 0");
      meet(p.k == 0, "K 0");
    }
    std::vector<std::string> wanted = {"residual", "fp32 residual", "M 0", "N 0", "K 0"};
    for (const char* which : {"nn", "nt", "tn", "tt"}) {
      wanted.push_back(std::string("transposed ") + which);
      wanted.push_back(std::string("transposed ") + which + " a unaligned b unaligned");
    }
    for (const char* f : {"relu", "silu", "gelu_tanh", "gelu_erf"}) {
      for (const char* kind : {"gated ", "gradient ", "preactivation "}) wanted.push_back(std::string(kind) + f);
    }
    for (const std::string& what : wanted) EXPECT_TRUE(met.count(what)) << tessera::name_of(dtype) << " " << what;
  }
}

}  // namespace
}  // namespace tessera::verify::gemm
