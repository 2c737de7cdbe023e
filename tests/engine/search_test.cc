// The search, with a measure that needs no GPU.
#include "engine/search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

namespace tessera::engine {
namespace {

// 6 x 8 x 3 x 2 x 3 points; the cost is the sum of each number's distance from the best one, so that every change
// towards it pays.
std::vector<std::vector<int>> grid() {
  std::vector<std::vector<int>> points;
  for (int a = 0; a < 6; ++a) {
    for (int b = 0; b < 8; ++b) {
      for (int c = 0; c < 3; ++c) {
        for (int d = 0; d < 2; ++d) {
          for (int e = 0; e < 3; ++e) points.push_back({a, b, c, d, e});
        }
      }
    }
  }
  return points;
}

class FakeMeasure : public Measure {
 public:
  explicit FakeMeasure(const std::vector<std::vector<int>>& points) : points_(points) {}

  double cost(int candidate) const {
    const std::vector<int> best = {4, 5, 1, 1, 2};
    const std::vector<int>& p = points_[static_cast<std::size_t>(candidate)];
    double sum = 100;
    for (std::size_t i = 0; i < p.size(); ++i) sum += 10 * std::abs(p[i] - best[i]);
    return sum * 1e-6;
  }

  std::vector<std::string> compile(const std::vector<int>& candidates) override {
    std::vector<std::string> reasons;
    for (const int c : candidates) {
      compiled.push_back(c);
      reasons.emplace_back(unusable.count(c) > 0 ? "spills" : "");
    }
    return reasons;
  }
  std::string check(int candidate) override {
    checked.insert(candidate);
    return wrong.count(candidate) > 0 ? "NaN" : "";
  }
  Result<double> time(int candidate) override {
    EXPECT_EQ(checked.count(candidate), 1U) << candidate << " was timed before it was checked";
    EXPECT_EQ(wrong.count(candidate) + unusable.count(candidate), 0U) << candidate;
    if (failing.count(candidate) > 0) return Status(TESSERA_CUDA_FAILED, "it hangs");
    order.push_back(candidate);
    ++samples[candidate];
    // Noise of up to 0.4 %, the same in every run.
    const double noise = 1 + 0.001 * static_cast<double>((samples[candidate] * 7 + candidate * 13) % 5);
    return cost(candidate) * noise * (slow_from > 0 && static_cast<int>(order.size()) > slow_from ? 3 : 1);
  }
  bool out_of_time() override { return limit > 0 && static_cast<int>(order.size()) >= limit; }

  const std::vector<std::vector<int>>& points_;
  std::set<int> unusable, wrong, failing, checked;
  std::vector<int> compiled, order;
  std::map<int, int> samples;
  int limit = 0;
  int slow_from = 0;  // from this sample on the clock is slower for all
};

int index_of(const std::vector<std::vector<int>>& points, const std::vector<int>& point) {
  return static_cast<int>(std::find(points.begin(), points.end(), point) - points.begin());
}

TEST(Search, finds_the_best_of_864_in_a_third_of_them) {
  const auto points = grid();
  for (const std::uint64_t seed : {1, 2, 3, 4, 5}) {
    FakeMeasure measure(points);
    SearchOptions options;
    options.seed = seed;
    const auto found = search(points, 3, measure, options);
    ASSERT_TRUE(found.ok()) << found.status().message();
    EXPECT_EQ(points[static_cast<std::size_t>(found->winner)], (std::vector<int>{4, 5, 1, 1, 2})) << "seed " << seed;
    EXPECT_LE(found->trials.size(), points.size() / 3) << "seed " << seed;
    EXPECT_NEAR(found->seconds, 100e-6, 1e-6);
    EXPECT_NEAR(found->fallback_seconds, measure.cost(0), 2e-6);
  }
}

TEST(Search, is_the_same_for_the_same_seed_and_another_for_another) {
  const auto points = grid();
  std::vector<std::vector<int>> compiled;
  for (const std::uint64_t seed : {7, 7, 8}) {
    FakeMeasure measure(points);
    SearchOptions options;
    options.seed = seed;
    ASSERT_TRUE(search(points, 1, measure, options).ok());
    compiled.push_back(measure.compiled);
  }
  EXPECT_EQ(compiled[0], compiled[1]);
  EXPECT_NE(compiled[0], compiled[2]);
}

TEST(Search, never_times_what_failed_and_says_why) {
  const auto points = grid();
  FakeMeasure measure(points);
  const int best = index_of(points, {4, 5, 1, 1, 2});
  const int second = index_of(points, {4, 5, 1, 1, 1});
  const int third = index_of(points, {4, 5, 1, 0, 2});
  measure.wrong = {best};
  measure.unusable = {second};
  measure.failing = {third};
  for (int i = 5; i < static_cast<int>(points.size()); i += 7) {
    if (i != best && i != third) measure.unusable.insert(i);
  }
  SearchOptions options;
  options.patience = 40;  // so that it comes to all three
  const auto found = search(points, 1, measure, options);
  ASSERT_TRUE(found.ok());
  std::map<int, Trial> trials;
  for (const Trial& t : found->trials) trials[t.candidate] = t;
  ASSERT_EQ(trials.count(best) + trials.count(second) + trials.count(third), 3U);
  EXPECT_EQ(trials[best].state, Trial::State::kWrong);
  EXPECT_EQ(trials[best].reason, "NaN");
  EXPECT_EQ(trials[second].state, Trial::State::kUnusable);
  EXPECT_EQ(trials[third].state, Trial::State::kFailed);
  EXPECT_EQ(trials[third].reason, "it hangs");
  EXPECT_EQ(measure.samples.count(best), 0U);
  EXPECT_EQ(measure.checked.count(second), 0U) << "what cannot be compiled cannot be checked";
  for (const int i : {best, second, third}) EXPECT_NE(found->winner, i);
}

TEST(Search, drops_the_slow_after_the_trial_rounds) {
  const auto points = grid();
  FakeMeasure measure(points);
  SearchOptions options;
  options.patience = 1;
  const auto found = search(points, 1, measure, options);
  ASSERT_TRUE(found.ok());
  int dropped = 0;
  for (const Trial& t : found->trials) {
    if (t.state != Trial::State::kDropped || t.candidate == 0) continue;
    ++dropped;
    // One that was in the elite before may have more behind it.
    if (t.samples == options.trial_rounds) continue;
    EXPECT_EQ((t.samples - options.trial_rounds) % options.rounds, 0) << t.candidate;
  }
  EXPECT_GT(dropped, 5);
  for (const Trial& t : found->trials) {
    if (measure.cost(t.candidate) > 1.3 * found->fallback_seconds && t.candidate != 0) {
      EXPECT_EQ(t.samples, options.trial_rounds) << t.candidate;
    }
  }
}

TEST(Search, keeps_the_elite_and_times_it_again_beside_each_generation) {
  const auto points = grid();
  FakeMeasure measure(points);
  measure.slow_from = 150;  // in the middle of a later generation: an old time is no longer comparable
  const auto found = search(points, 1, measure, {});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(points[static_cast<std::size_t>(found->winner)], (std::vector<int>{4, 5, 1, 1, 2}));
  EXPECT_GT(measure.samples[found->winner], 6 + 15) << "the final rounds, and more than one generation";
  EXPECT_GT(measure.samples[0], 6 * 3) << "the fallback is in every race";
  EXPECT_NEAR(found->fallback_seconds / found->seconds, measure.cost(0) / measure.cost(found->winner), 0.02);
}

TEST(Search, the_fallback_stays_where_nothing_beats_it_by_more_than_noise) {
  std::vector<std::vector<int>> points = {{0}, {1}, {2}, {3}};
  class Flat final : public FakeMeasure {
   public:
    using FakeMeasure::FakeMeasure;
    Result<double> time(int candidate) override { return candidate == 2 ? 0.995e-6 : 1e-6; }
  } measure(points);
  const auto found = search(points, 1, measure, {});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->winner, 0);
  EXPECT_EQ(found->seconds, found->fallback_seconds);
}

TEST(Search, ends_soon_after_time_is_up_and_has_an_answer) {
  const auto points = grid();
  FakeMeasure measure(points);
  measure.limit = 20;  // within the first generation
  const auto found = search(points, 3, measure, {});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->generations, 1);
  EXPECT_LE(measure.order.size(), 16U * 2 + 15 * 5);
  EXPECT_GT(found->fallback_seconds, 0);
  EXPECT_LE(found->seconds, found->fallback_seconds);
}

TEST(Search, time_that_is_up_at_once_still_times_the_fallback) {
  const auto points = grid();
  class Late final : public FakeMeasure {
   public:
    using FakeMeasure::FakeMeasure;
    bool out_of_time() override { return true; }
  } measure(points);
  const auto found = search(points, 3, measure, {});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->winner, 0);
  EXPECT_EQ(found->trials.size(), 1U);
  EXPECT_GT(found->fallback_seconds, 0);
}

TEST(Search, a_fallback_that_is_wrong_is_an_error) {
  const auto points = grid();
  FakeMeasure measure(points);
  measure.wrong = {0};
  const auto found = search(points, 3, measure, {});
  ASSERT_FALSE(found.ok());
  EXPECT_NE(found.status().message().find("NaN"), std::string::npos);
  EXPECT_TRUE(measure.samples.empty()) << "nothing is timed beside a fallback that is wrong";
}

TEST(Search, tries_every_candidate_of_a_small_space_once_and_stops) {
  const std::vector<std::vector<int>> points = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {2, 1, 5}};
  class Small final : public FakeMeasure {
   public:
    using FakeMeasure::FakeMeasure;
    Result<double> time(int candidate) override { return (10 - candidate) * 1e-6; }
  } measure(points);
  const auto found = search(points, 2, measure, {});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->winner, 4);
  EXPECT_EQ(found->trials.size(), 5U);
  EXPECT_EQ(measure.compiled.size(), 5U);
}

}  // namespace
}  // namespace tessera::engine
