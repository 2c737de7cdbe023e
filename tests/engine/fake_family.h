// A family that is no attention, to test the engine with: sums and sorts of doubles on the CPU, and a sum that has a GPU
// kernel by name only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "base/format.h"
#include "engine/implementation.h"

namespace tessera::engine {

enum class FakeOp : unsigned { kSum, kSort };

struct FakeProblem {
  FakeOp op = FakeOp::kSum;
  std::int64_t count = 0;

  bool operator==(const FakeProblem&) const = default;
};

struct FakeArgs {
  std::vector<double>* values;       // sort: in place
  double* sum = nullptr;             // written by a sum
  std::vector<std::string>* passed;  // names of the steps, as they run
};

struct FakeConfig {
  int unroll = 1;
};
inline void visit_fields(const FakeConfig& c, auto&& visit) { visit("unroll", c.unroll); }

struct FakeTreeConfig {
  int block = 64;
  bool pairwise = true;
};
inline void visit_fields(const FakeTreeConfig& c, auto&& visit) {
  visit("block", c.block);
  visit("pairwise", c.pairwise);
}

struct FakeFamily {
  using Problem = FakeProblem;
  using Args = FakeArgs;
  static constexpr const char* kName = "fake";

  static const std::vector<Implementation<FakeFamily>>& implementations();
  static unsigned op_bit(const Problem& p) { return 1U << static_cast<unsigned>(p.op); }
  static const char* op_name(const Problem& p) { return p.op == FakeOp::kSum ? "fake_sum" : "fake_sort"; }
  static std::string describe(const Problem& p) { return format("{} of {}", op_name(p), p.count); }
  static Fields fields(const Problem& p) { return {{"count", p.count}}; }
  static bool covers(const Problem& planned, const Problem& given) { return planned == given; }
  static std::string difference(const Problem&, const Problem&) { return "count"; }
  static std::string tuning_class(const Problem& p, int) {
    return format("{} {}", op_name(p), p.count < 1000 ? "small" : "large");
  }
  static std::vector<jit::KernelInstance> shared_steps(const Device&);
};

namespace fake {

using Recipe = engine::Recipe<FakeFamily>;

inline constexpr unsigned kSums = 1U << static_cast<unsigned>(FakeOp::kSum);
inline constexpr unsigned kSorts = 1U << static_cast<unsigned>(FakeOp::kSort);

inline std::optional<std::string> needs_the_cpu(const FakeProblem&, const Device& device) {
  if (!device.is_cpu()) return format("runs on the CPU, not on {}", device.name);
  return std::nullopt;
}

// Up to 1000 values, one after the other; two Configs are offered, and two more may be searched.
inline Implementation<FakeFamily> sequential_sum() {
  Implementation<FakeFamily> one{};
  one.name = "sequential_sum";
  one.ops = kSums;
  one.refuses = [](const FakeProblem& p, const Device& device) -> std::optional<std::string> {
    if (auto reason = needs_the_cpu(p, device)) return reason;
    if (p.count > 1000) return format("takes up to 1000 values, not {}", p.count);
    return std::nullopt;
  };
  one.offers = [](const FakeProblem& p, const Device&) {
    std::vector<Offer> offers;
    for (const int unroll : {1, 4}) {
      offers.push_back(
          {main_config(FakeConfig{unroll}), 0, static_cast<double>(p.count) / unroll, format("{} at a time", unroll)});
    }
    return offers;
  };
  one.recipe = [](const FakeProblem& p, const Device&, const Config& named) -> std::optional<Recipe> {
    const auto config = from_main<FakeConfig>(named);
    if (!config || config->unroll < 1 || config->unroll > 8) return std::nullopt;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", std::nullopt}};
    recipe.enqueue = [](const FakeArgs& args, const Launch&) -> Status {
      args.passed->push_back("main");
      *args.sum = std::accumulate(args.values->begin(), args.values->end(), 0.0);
      return {};
    };
    return recipe;
  };
  one.searches = [](const FakeProblem&, const Device&) {
    std::vector<Config> list;
    for (const int unroll : {8, 4, 2, 1}) list.push_back(main_config(FakeConfig{unroll}));
    return list;
  };
  return one;
}

// A recipe of two steps over one workspace: a sum for each block, then the sum of those.
inline Implementation<FakeFamily> tree_sum() {
  Implementation<FakeFamily> one{};
  one.name = "tree_sum";
  one.ops = kSums;
  one.refuses = needs_the_cpu;
  one.offers = [](const FakeProblem& p, const Device&) {
    const FakeTreeConfig config;
    const auto blocks = static_cast<std::size_t>((p.count + config.block - 1) / config.block);
    return std::vector<Offer>{{{{"partial", fields_of(config)}, {"main", fields_of(FakeConfig{2})}},
                               blocks * sizeof(double),
                               20 + static_cast<double>(p.count) / 10,
                               "sums of blocks, then their sum"}};
  };
  one.recipe = [](const FakeProblem& p, const Device&, const Config& named) -> std::optional<Recipe> {
    const auto partial = from_fields<FakeTreeConfig>(fields_of_step(named, "partial"));
    const auto last = from_fields<FakeConfig>(fields_of_step(named, "main"));
    if (named.size() != 2 || !partial || !last || partial->block < 1) return std::nullopt;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"partial", std::nullopt}, {"main", std::nullopt}};
    const auto block = static_cast<std::size_t>(partial->block);
    recipe.workspace = (static_cast<std::size_t>(p.count) + block - 1) / block * sizeof(double);
    recipe.enqueue = [block](const FakeArgs& args, const Launch& launch) -> Status {
      const std::vector<double>& values = *args.values;
      auto* sums = static_cast<double*>(launch.workspace);
      std::size_t blocks = 0;
      args.passed->push_back("partial");
      for (std::size_t begin = 0; begin < values.size(); begin += block, ++blocks) {
        sums[blocks] = 0;
        for (std::size_t i = begin; i < std::min(begin + block, values.size()); ++i) sums[blocks] += values[i];
      }
      args.passed->push_back("main");
      *args.sum = std::accumulate(sums, sums + blocks, 0.0);
      return {};
    };
    return recipe;
  };
  return one;
}

inline jit::KernelInstance instance(const char* header, int unroll) {
  jit::KernelInstance one;
  one.name = format("{}_{}", header, unroll);
  one.header = header;
  one.config = format("FakeConfig{{.unroll = {}}}", unroll);
  return one;
}

// Its second step is one that other recipes share. Problems of one class compile to the same instance.
inline Implementation<FakeFamily> gpu_sum() {
  Implementation<FakeFamily> one{};
  one.name = "gpu_sum";
  one.ops = kSums;
  one.headers = {"fake/sum.cuh", "fake/finish.cuh"};
  one.refuses = [](const FakeProblem&, const Device& device) -> std::optional<std::string> {
    if (device.is_cpu()) return "runs on GPUs";
    return std::nullopt;
  };
  one.offers = [](const FakeProblem& p, const Device&) {
    return std::vector<Offer>{{main_config(FakeConfig{p.count < 1000 ? 1 : 4}), 256, 5, "one grid"}};
  };
  one.recipe = [](const FakeProblem& p, const Device&, const Config& named) -> std::optional<Recipe> {
    const auto config = from_main<FakeConfig>(named);
    if (!config) return std::nullopt;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", instance("fake/sum.cuh", config->unroll)}, {"finish", instance("fake/finish.cuh", 1)}};
    recipe.workspace = 256;
    return recipe;
  };
  one.representatives = [](const Device&) {
    return std::vector<FakeProblem>{{FakeOp::kSum, 10}, {FakeOp::kSum, 20}, {FakeOp::kSum, 5000}};
  };
  return one;
}

inline Implementation<FakeFamily> heap_sort() {
  Implementation<FakeFamily> one{};
  one.name = "heap_sort";
  one.ops = kSorts;
  one.headers = {"bench/mma_peak.cuh"};  // some real file: the key of a tuning entry has its hash
  one.refuses = needs_the_cpu;
  one.offers = [](const FakeProblem& p, const Device&) {
    return std::vector<Offer>{{main_config(FakeConfig{1}), 0, static_cast<double>(p.count), "the one sort"}};
  };
  one.recipe = [](const FakeProblem& p, const Device&, const Config&) -> std::optional<Recipe> {
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", std::nullopt}};
    recipe.enqueue = [](const FakeArgs& args, const Launch&) -> Status {
      args.passed->push_back("main");
      std::sort(args.values->begin(), args.values->end());
      return {};
    };
    return recipe;
  };
  return one;
}

}  // namespace fake

inline const std::vector<Implementation<FakeFamily>>& FakeFamily::implementations() {
  static const std::vector<Implementation<FakeFamily>> list = {fake::sequential_sum(), fake::tree_sum(),
                                                               fake::gpu_sum(), fake::heap_sort()};
  return list;
}

inline std::vector<jit::KernelInstance> FakeFamily::shared_steps(const Device&) {
  return {fake::instance("fake/finish.cuh", 1), fake::instance("fake/finish.cuh", 2)};
}

}  // namespace tessera::engine
