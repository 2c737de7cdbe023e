#include "engine/search.h"

#include <algorithm>
#include <map>
#include <random>

#include "base/format.h"

namespace tessera::engine {
namespace {

constexpr int kFallback = 0;

double median(std::vector<double> samples) {
  if (samples.empty()) return 0;
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  if (samples.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(samples.begin(), middle)) / 2;
}

int distance(const std::vector<int>& a, const std::vector<int>& b) {
  if (a.size() != b.size()) return static_cast<int>(std::max(a.size(), b.size()));
  int differ = 0;
  for (std::size_t i = 0; i < a.size(); ++i) differ += a[i] != b[i] ? 1 : 0;
  return differ;
}

class Search {
 public:
  Search(const std::vector<std::vector<int>>& genes, int offered, Measure& measure, const SearchOptions& options)
      : genes_(genes),
        offered_(offered),
        measure_(measure),
        options_(options),
        random_(options.seed),
        seen_(genes.size(), false) {}

  Result<SearchResult> run() {
    if (genes_.empty()) return Status(TESSERA_INVALID_ARGUMENT, "there is nothing to search");
    int without_better = 0;
    while (without_better < options_.patience) {
      const std::vector<int> fresh = draw();
      if (fresh.empty() && result_.generations > 0) break;
      const double before = best_;
      const std::vector<int> good = qualified(fresh);
      if (disqualified(kFallback)) return fallback_failed();
      race(good);
      if (disqualified(kFallback)) return fallback_failed();
      without_better = best_ < before * options_.worth_it || before == 0 ? 0 : without_better + 1;
      ++result_.generations;
      if (measure_.out_of_time()) break;
    }
    return finish();
  }

 private:
  Status fallback_failed() const {
    return Status(TESSERA_INTERNAL, format("the selector's own choice is {}: {}", name_of(trial(kFallback).state),
                                           trial(kFallback).reason));
  }

  // Of two numbers the smaller: the front of a list more often than its end.
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(random_() % count); }
  std::size_t front_of(std::size_t count) { return std::min(below(count), below(count)); }

  int at_random(int from_distance, int parent) {
    std::vector<int> fitting;
    for (std::size_t i = 0; i < genes_.size(); ++i) {
      if (seen_[i]) continue;
      if (parent >= 0 && distance(genes_[i], genes_[static_cast<std::size_t>(parent)]) != from_distance) continue;
      fitting.push_back(static_cast<int>(i));
    }
    return fitting.empty() ? -1 : fitting[below(fitting.size())];
  }

  // The new candidates of a generation.
  std::vector<int> draw() {
    std::vector<int> fresh;
    const auto take = [&](int candidate) {
      seen_[static_cast<std::size_t>(candidate)] = true;
      fresh.push_back(candidate);
    };
    if (result_.generations == 0) {
      for (int i = 0; i < std::min<int>(offered_, static_cast<int>(genes_.size())); ++i) take(i);
    }
    const int limit = options_.most_candidates;
    while (static_cast<int>(fresh.size()) < options_.population) {
      if (limit > 0 && static_cast<int>(result_.trials.size() + fresh.size()) >= limit) break;
      int candidate = -1;
      if (!elite_.empty() && fresh.size() % 4 != 3) {
        const int parent = elite_[front_of(elite_.size())];
        const int changes = random_() % 3 == 0 ? 2 : 1;
        candidate = at_random(changes, parent);
        if (candidate < 0) candidate = at_random(3 - changes, parent);
      }
      if (candidate < 0) candidate = at_random(0, -1);
      if (candidate < 0) break;
      take(candidate);
    }
    return fresh;
  }

  Trial& trial(int candidate) { return result_.trials[at_.at(candidate)]; }
  const Trial& trial(int candidate) const { return result_.trials[at_.at(candidate)]; }
  bool disqualified(int candidate) const {
    const auto known = at_.find(candidate);
    if (known == at_.end()) return false;
    const Trial::State state = result_.trials[known->second].state;
    return state != Trial::State::kTimed && state != Trial::State::kDropped;
  }
  void disqualify(int candidate, Trial::State state, const std::string& reason) {
    trial(candidate).state = state;
    trial(candidate).reason = reason;
    ++progress_.disqualified;
  }

  void report() {
    progress_.generation = result_.generations + 1;
    progress_.best = best_;
    if (options_.progress) options_.progress(progress_);
  }

  // Those of the new ones that may be timed.
  std::vector<int> qualified(const std::vector<int>& fresh) {
    std::vector<int> good;
    if (fresh.empty()) return good;
    const std::vector<std::string> reasons = measure_.compile(fresh);
    for (std::size_t i = 0; i < fresh.size(); ++i) {
      // Candidates drawn after time was up have not been tried.
      if (measure_.out_of_time() && fresh[i] != kFallback) break;
      at_[fresh[i]] = result_.trials.size();
      result_.trials.push_back({fresh[i], result_.generations, Trial::State::kTimed, "", 0, 0});
      ++progress_.tried;
      report();
      if (i >= reasons.size() || !reasons[i].empty()) {
        disqualify(fresh[i], Trial::State::kUnusable, i < reasons.size() ? reasons[i] : "it was not compiled");
        continue;
      }
      if (const std::string wrong = measure_.check(fresh[i]); !wrong.empty()) {
        disqualify(fresh[i], Trial::State::kWrong, wrong);
        continue;
      }
      good.push_back(fresh[i]);
    }
    return good;
  }

  struct Contestant {
    int candidate;
    std::vector<double> samples;
  };

  // One sample of each, starting with another one every time; candidates that fail are removed.
  void round(std::vector<Contestant>& field, int number) {
    std::rotate(field.begin(), field.begin() + (number > 0 && !field.empty() ? 1 : 0), field.end());
    for (Contestant& c : field) {
      const Result<double> seconds = measure_.time(c.candidate);
      if (!seconds.ok()) {
        disqualify(c.candidate, Trial::State::kFailed, seconds.status().message());
        continue;
      }
      c.samples.push_back(*seconds);
      ++trial(c.candidate).samples;
    }
    std::erase_if(field, [&](const Contestant& c) { return disqualified(c.candidate); });
  }

  void drop_the_slow(std::vector<Contestant>& field) {
    double best = 0;
    for (const Contestant& c : field) {
      const double now = median(c.samples);
      best = best == 0 ? now : std::min(best, now);
    }
    std::erase_if(field, [&](const Contestant& c) {
      if (c.candidate == kFallback || median(c.samples) <= best * options_.too_slow) return false;
      trial(c.candidate).state = Trial::State::kDropped;
      trial(c.candidate).seconds = median(c.samples);
      return true;
    });
  }

  // Elite, fallback and the new ones against each other; the best are the new elite.
  void race(const std::vector<int>& fresh) {
    std::vector<Contestant> field = contestants(fresh);
    for (int n = 0; n < options_.rounds; ++n) {
      if (n > 0 && measure_.out_of_time()) break;
      round(field, n);
      report();
      if (n + 1 == options_.trial_rounds) drop_the_slow(field);
    }
    settle(field);
  }

  std::vector<Contestant> contestants(const std::vector<int>& fresh) const {
    std::vector<int> all = elite_;
    all.insert(all.end(), fresh.begin(), fresh.end());
    if (at_.count(kFallback) > 0) all.push_back(kFallback);
    std::vector<Contestant> field;
    for (const int candidate : all) {
      const bool twice =
          std::any_of(field.begin(), field.end(), [&](const Contestant& c) { return c.candidate == candidate; });
      if (!twice && !disqualified(candidate)) field.push_back({candidate, {}});
    }
    return field;
  }

  void settle(std::vector<Contestant>& field) {
    for (const Contestant& c : field) {
      trial(c.candidate).seconds = median(c.samples);
      trial(c.candidate).state = Trial::State::kTimed;
    }
    std::stable_sort(field.begin(), field.end(),
                     [](const Contestant& a, const Contestant& b) { return median(a.samples) < median(b.samples); });
    elite_.clear();
    for (const Contestant& c : field) {
      if (static_cast<int>(elite_.size()) < options_.elite) elite_.push_back(c.candidate);
      if (c.candidate == kFallback) progress_.fallback = trial(kFallback).seconds;
    }
    if (!field.empty()) best_ = trial(field.front().candidate).seconds;
  }

  Result<SearchResult> finish() {
    std::vector<Contestant> field = contestants({});
    progress_.final = true;
    report();
    for (int n = 0; n < options_.final_rounds; ++n) round(field, n);
    if (disqualified(kFallback)) return fallback_failed();
    settle(field);
    result_.fallback_seconds = trial(kFallback).seconds;
    result_.winner = elite_.front();
    if (trial(result_.winner).seconds > result_.fallback_seconds * options_.worth_it) result_.winner = kFallback;
    result_.seconds = trial(result_.winner).seconds;
    return std::move(result_);
  }

  const std::vector<std::vector<int>>& genes_;
  const int offered_;
  Measure& measure_;
  const SearchOptions& options_;
  std::mt19937_64 random_;
  std::vector<bool> seen_;
  std::map<int, std::size_t> at_;  // a candidate's index in the trials
  std::vector<int> elite_;         // best first
  double best_ = 0;
  SearchProgress progress_;
  SearchResult result_;
};

}  // namespace

const char* name_of(Trial::State state) {
  switch (state) {
    case Trial::State::kTimed:
      return "timed";
    case Trial::State::kDropped:
      return "dropped";
    case Trial::State::kUnusable:
      return "unusable";
    case Trial::State::kWrong:
      return "wrong";
    case Trial::State::kFailed:
      return "failed";
  }
  return "unknown";
}

Result<SearchResult> search(const std::vector<std::vector<int>>& genes, int offered, Measure& measure,
                            const SearchOptions& options) {
  return Search(genes, offered, measure, options).run();
}

}  // namespace tessera::engine
