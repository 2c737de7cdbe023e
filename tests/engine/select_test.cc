// Selection, explanations, search spaces, the gate's list and plans, of a family that the engine has never heard of.
#include "engine/select.h"

#include <gtest/gtest.h>

#include <set>

#include "engine/json.h"
#include "engine/plan.h"
#include "tests/engine/fake_family.h"

namespace tessera::engine {
namespace {

constexpr tessera_device kCpu{TESSERA_CPU, 0};

FakeProblem sum_of(std::int64_t count) { return {FakeOp::kSum, count}; }
FakeProblem sort_of(std::int64_t count) { return {FakeOp::kSort, count}; }

std::vector<std::string> kernels_of(const Selection<FakeFamily>& selection) {
  std::vector<std::string> names;
  for (const auto& c : selection.candidates) names.emplace_back(c.implementation->name);
  return names;
}

TEST(Select, candidates_come_in_the_order_of_their_predicted_time) {
  using Names = std::vector<std::string>;
  // 1000 and 250 us against 120; 50 and 12.5 against 25.
  EXPECT_EQ(kernels_of(select<FakeFamily>(sum_of(1000), cpu_device(1))),
            (Names{"tree_sum", "sequential_sum", "sequential_sum"}));
  const auto few = select<FakeFamily>(sum_of(50), cpu_device(1));
  EXPECT_EQ(kernels_of(few), (Names{"sequential_sum", "tree_sum", "sequential_sum"}));
  EXPECT_EQ(few.candidates[0].offer.config, main_config(FakeConfig{4}));
  EXPECT_EQ(few.candidates[2].offer.config, main_config(FakeConfig{1}));
  EXPECT_TRUE(std::is_sorted(few.candidates.begin(), few.candidates.end(),
                             [](const auto& a, const auto& b) { return a.offer.microseconds < b.offer.microseconds; }));
}

TEST(Select, a_kernel_that_cannot_serve_says_why) {
  const auto selection = select<FakeFamily>(sum_of(1001), cpu_device(1));
  ASSERT_EQ(selection.refusals.size(), 2U);
  EXPECT_EQ(selection.refusals[0].kernel, "sequential_sum");
  EXPECT_EQ(selection.refusals[0].reason, "takes up to 1000 values, not 1001");
  EXPECT_EQ(selection.refusals[1].kernel, "gpu_sum");
  EXPECT_EQ(kernels_of(selection), (std::vector<std::string>{"tree_sum"}));
}

TEST(Select, kernels_of_other_ops_are_neither_candidates_nor_refusals) {
  const auto sort = select<FakeFamily>(sort_of(10), cpu_device(1));
  EXPECT_EQ(kernels_of(sort), (std::vector<std::string>{"heap_sort"}));
  EXPECT_TRUE(sort.refusals.empty());
  const auto sum = select<FakeFamily>(sum_of(10), cpu_device(1));
  for (const Refusal& r : sum.refusals) EXPECT_NE(r.kernel, "heap_sort");
}

TEST(Select, what_was_tuned_comes_first_however_slow_and_is_not_doubled) {
  const Device cpu = cpu_device(1);
  const Tuned unoffered{"sequential_sum", main_config(FakeConfig{8}), 1e6, 2e6};
  const auto selection = select<FakeFamily>(sum_of(50), cpu, &unoffered);
  ASSERT_EQ(selection.candidates.size(), 4U);
  EXPECT_TRUE(selection.candidates[0].tuned);
  EXPECT_EQ(selection.candidates[0].offer.config, unoffered.config);
  EXPECT_EQ(selection.candidates[0].offer.microseconds, 1e6);
  EXPECT_EQ(selection.candidates[0].offer.why, "tuned on this GPU, default 2000000.0 us");
  for (std::size_t i = 1; i < 4; ++i) EXPECT_FALSE(selection.candidates[i].tuned);

  const Tuned offered{"sequential_sum", main_config(FakeConfig{1}), 3, 4};
  EXPECT_EQ(select<FakeFamily>(sum_of(50), cpu, &offered).candidates.size(), 3U);

  const Tuned tree{"tree_sum", {{"partial", fields_of(FakeTreeConfig{10})}, {"main", fields_of(FakeConfig{1})}}, 3, 4};
  const auto of_two_steps = select<FakeFamily>(sum_of(50), cpu, &tree).candidates.front();
  EXPECT_TRUE(of_two_steps.tuned);
  EXPECT_EQ(of_two_steps.offer.workspace, 5 * sizeof(double)) << "the recipe's, not the offer's";
}

TEST(Select, what_was_tuned_is_ignored_if_it_does_not_fit) {
  const auto is_taken = [](const FakeProblem& p, const Device& device, const Tuned& tuned) {
    const auto selection = select<FakeFamily>(p, device, &tuned);
    const auto plain = select<FakeFamily>(p, device);
    const bool taken = !selection.candidates.empty() && selection.candidates.front().tuned;
    if (!taken) {
      EXPECT_EQ(kernels_of(selection), kernels_of(plain));
    }
    return taken;
  };
  const Config config = main_config(FakeConfig{8});
  EXPECT_TRUE(is_taken(sum_of(50), cpu_device(1), {"sequential_sum", config, 1, 2}));
  EXPECT_FALSE(is_taken(sum_of(2000), cpu_device(1), {"sequential_sum", config, 1, 2})) << "its kernel refuses";
  EXPECT_FALSE(is_taken(sort_of(50), cpu_device(1), {"sequential_sum", config, 1, 2})) << "of another op";
  EXPECT_FALSE(is_taken(sum_of(50), *cuda_device("sm_80"), {"sequential_sum", config, 1, 2})) << "another device";
  EXPECT_FALSE(is_taken(sum_of(50), cpu_device(1), {"tree_sum", config, 1, 2})) << "a Config of another kernel";
  EXPECT_FALSE(is_taken(sum_of(50), cpu_device(1), {"no_such_kernel", config, 1, 2}));
  EXPECT_FALSE(is_taken(sum_of(50), cpu_device(1), {"sequential_sum", main_config(FakeConfig{9}), 1, 2}));
  EXPECT_FALSE(is_taken(sum_of(50), cpu_device(1), {"sequential_sum", {}, 1, 2}));
}

Explanation explained(const FakeProblem& p, const Device& device, const Tuned* tuned = nullptr) {
  return explain<FakeFamily>(p, device, select<FakeFamily>(p, device, tuned));
}

TEST(Explain, is_data_that_text_is_made_from) {
  const Explanation e = explained(sum_of(50), cpu_device(2));
  EXPECT_EQ(e.family, "fake");
  EXPECT_EQ(e.op, "fake_sum");
  EXPECT_EQ(e.device, "cpu, 2 threads");
  ASSERT_EQ(e.options.size(), 3U);
  EXPECT_EQ(e.options[1].kernel, "tree_sum");
  EXPECT_EQ(e.options[1].workspace, sizeof(double));
  EXPECT_EQ(e.options[1].microseconds, 25);
  EXPECT_FALSE(e.options[1].tuned);
  ASSERT_EQ(e.refusals.size(), 1U);
  EXPECT_EQ(text_of(e), R"(fake_sum of 50
on cpu, 2 threads
chosen  sequential_sum: 4 at a time; predicted 12.5 us, workspace 0 B
        {"main": {"unroll": 4}}
offered tree_sum: sums of blocks, then their sum; predicted 25 us, workspace 8 B
        {"partial": {"block": 64, "pairwise": true}, "main": {"unroll": 2}}
offered sequential_sum: 1 at a time; predicted 50 us, workspace 0 B
        {"main": {"unroll": 1}}
refused gpu_sum: runs on GPUs
)");
}

TEST(Explain, json_has_what_was_chosen_offered_and_refused) {
  const Json json = Json::parse(json_text_of(explained(sum_of(50), cpu_device(1))));
  EXPECT_EQ(json["family"], "fake");
  EXPECT_EQ(json["op"], "fake_sum");
  EXPECT_EQ(json["problem"], "fake_sum of 50");
  EXPECT_EQ(json["fields"], (Json{{"count", 50}}));
  EXPECT_EQ(json["device"], "cpu, 1 thread");
  EXPECT_EQ(json["chosen"]["kernel"], "sequential_sum");
  EXPECT_EQ(json["chosen"]["config"]["main"]["unroll"], 4);
  EXPECT_EQ(json["chosen"]["workspace"], 0);
  EXPECT_EQ(json["chosen"]["predicted_us"], 12.5);
  EXPECT_EQ(json["chosen"]["why"], "4 at a time");
  EXPECT_EQ(json["chosen"]["tuned"], false);
  ASSERT_EQ(json["offered"].size(), 2U);
  EXPECT_EQ(json["offered"][0]["kernel"], "tree_sum");
  EXPECT_EQ(json["offered"][0]["config"],
            (Json{{"partial", {{"block", 64}, {"pairwise", true}}}, {"main", {{"unroll", 2}}}}));
  EXPECT_EQ(json["offered"][0]["workspace"], 8);
  EXPECT_EQ(json["offered"][0]["predicted_us"], 25);
  EXPECT_EQ(json["offered"][1]["predicted_us"], 50);
  EXPECT_EQ(json["refused"], (Json::array({{{"kernel", "gpu_sum"}, {"reason", "runs on GPUs"}}})));
}

TEST(Explain, a_tuned_time_is_called_measured) {
  const Tuned tuned{"sequential_sum", main_config(FakeConfig{8}), 7, 9};
  const Explanation e = explained(sum_of(50), cpu_device(1), &tuned);
  const Json json = Json::parse(json_text_of(e));
  EXPECT_EQ(json["chosen"]["tuned"], true);
  EXPECT_EQ(json["chosen"]["measured_us"], 7);
  EXPECT_FALSE(json["chosen"].contains("predicted_us"));
  EXPECT_EQ(json["offered"].size(), 3U);
  EXPECT_NE(text_of(e).find("measured 7 us"), std::string::npos) << text_of(e);
}

TEST(Explain, says_that_nothing_serves_and_why) {
  const Explanation e = explained(sort_of(50), *cuda_device("sm_80"));
  const Json json = Json::parse(json_text_of(e));
  EXPECT_TRUE(json["chosen"].is_null());
  EXPECT_TRUE(json["offered"].empty());
  EXPECT_EQ(json["refused"][0]["kernel"], "heap_sort");
  EXPECT_EQ(json["refused"][0]["reason"], "runs on the CPU, not on sm_80");
  EXPECT_EQ(text_of(e),
            "fake_sort of 50\non sm_80\nno kernel of this version serves it\n"
            "refused heap_sort: runs on the CPU, not on sm_80\n");
}

TEST(SearchSpace, has_what_is_offered_first_and_every_config_once) {
  const SearchSpace space = search_space<FakeFamily>(sum_of(50), cpu_device(1));
  EXPECT_EQ(space.offered, 3);
  ASSERT_EQ(space.choices.size(), 5U);
  EXPECT_EQ(space.choices[0].config, main_config(FakeConfig{4})) << "the selector's own choice";
  EXPECT_EQ(space.choices[1].kernel, "tree_sum");
  EXPECT_EQ(space.choices[2].config, main_config(FakeConfig{1}));
  EXPECT_EQ(space.choices[3].config, main_config(FakeConfig{8}));
  EXPECT_EQ(space.choices[4].config, main_config(FakeConfig{2}));
}

TEST(SearchSpace, has_nothing_of_a_kernel_that_refuses) {
  const SearchSpace many = search_space<FakeFamily>(sum_of(5000), cpu_device(1));
  ASSERT_EQ(many.choices.size(), 1U);
  EXPECT_EQ(many.choices[0].kernel, "tree_sum");
  EXPECT_TRUE(search_space<FakeFamily>(sort_of(10), *cuda_device("sm_80")).choices.empty());
}

TEST(SearchSpace, genes_differ_as_the_kernel_and_the_fields_do) {
  const Choice one{"sequential_sum",
                   {{"main", {{"unroll", std::int64_t{4}}, {"flag", true}, {"text", std::string("x")}}}}};
  const std::vector<int> genes = genes_of(one);
  ASSERT_EQ(genes.size(), 4U);
  EXPECT_EQ(genes_of(one), genes);
  const auto differ = [&](const Choice& other) {
    const std::vector<int> others = genes_of(other);
    int count = 0;
    for (std::size_t i = 0; i < genes.size(); ++i) count += genes[i] != others[i] ? 1 : 0;
    return count;
  };
  Choice other = one;
  other.kernel = "tree_sum";
  EXPECT_EQ(differ(other), 1);
  other = one;
  other.config[0].fields[0].value = std::int64_t{5};
  EXPECT_EQ(differ(other), 1);
  other.config[0].fields[1].value = false;
  other.config[0].fields[2].value = std::string("y");
  EXPECT_EQ(differ(other), 3);
}

TEST(GateInstances, are_those_of_every_representative_problem_and_shared_step_once) {
  std::vector<std::string> names;
  for (const jit::KernelInstance& instance : gate_instances<FakeFamily>(*cuda_device("sm_80"))) {
    names.push_back(instance.name);
  }
  // Three problems compile to two instances; their second step is one of the two shared ones.
  EXPECT_EQ(names,
            (std::vector<std::string>{"fake/finish.cuh_1", "fake/finish.cuh_2", "fake/sum.cuh_1", "fake/sum.cuh_4"}));
}

TEST(Plan, runs_the_steps_of_the_chosen_recipe_over_one_workspace) {
  const auto plan = make_plan<FakeFamily>(kCpu, sum_of(1000), Explained::kYes);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_STREQ((*plan)->family, FakeFamily::kName);
  EXPECT_EQ((*plan)->explanation.options.front().kernel, "tree_sum");
  EXPECT_EQ(std::string((*plan)->text()), text_of((*plan)->explanation));
  EXPECT_EQ(Json::parse((*plan)->json())["chosen"]["kernel"], "tree_sum");
  EXPECT_TRUE((*plan)->kernels.empty());
  ASSERT_GE((*plan)->workspace, 16 * sizeof(double));
  std::vector<double> values(1000, 0.5), workspace((*plan)->workspace / sizeof(double) + 1);
  double sum = 0;
  std::vector<std::string> passed;
  const Status s = run(**plan, {&values, &sum, &passed}, workspace.data(), (*plan)->workspace, nullptr);
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(sum, 500);
  EXPECT_EQ(passed, (std::vector<std::string>{"partial", "main"}));
}

TEST(Plan, refuses_a_workspace_that_is_too_small_before_anything_runs) {
  const auto plan = make_plan<FakeFamily>(kCpu, sum_of(1000), Explained::kNo);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  std::vector<double> values(1000), workspace(1000);
  double sum = -1;
  std::vector<std::string> passed;
  EXPECT_EQ(run(**plan, {&values, &sum, &passed}, workspace.data(), (*plan)->workspace - 1, nullptr).code(),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(run(**plan, {&values, &sum, &passed}, nullptr, (*plan)->workspace, nullptr).code(),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_TRUE(passed.empty());
  EXPECT_EQ(sum, -1);
}

}  // namespace
}  // namespace tessera::engine
