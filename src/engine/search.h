// The search for the fastest of many candidates; Measure says how one is compiled, checked and timed.
//
// Evolution with an elite: the first generation is what the selector offers and some at random; each later one changes
// one or two fields of the best so far, and takes every fourth at random. A candidate is compiled, then checked, and
// only then timed. The new ones of a generation, the elite and the fallback are timed by turns, so that clock
// drift affects all alike; after a few rounds those far behind are dropped. At the end, elite and fallback are timed
// once more, for longer; the fallback stays the winner unless it is beaten by more than noise.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace tessera::engine {

// Candidates are indices of the space that is searched.
class Measure {
 public:
  virtual ~Measure() = default;
  // For each, why it cannot be used; empty: it can.
  virtual std::vector<std::string> compile(const std::vector<int>& candidates) = 0;
  // Why its results are wrong; empty: they are right.
  virtual std::string check(int candidate) = 0;
  // Seconds of a call: one sample. A failure disqualifies the candidate.
  virtual Result<double> time(int candidate) = 0;
  // Asked between steps; if true, the search ends.
  virtual bool out_of_time() = 0;
};

struct SearchProgress {
  int generation = 0;    // from 1 on
  bool final = false;    // the final rounds
  int tried = 0;         // candidates, this one included
  int disqualified = 0;  // of them
  double best = 0;       // seconds; 0: none was timed yet
  double fallback = 0;   // likewise
};

struct SearchOptions {
  std::uint64_t seed = 1;
  int population = 16;      // new candidates of a generation
  int elite = 4;            // kept from one generation to the next
  int rounds = 6;           // samples of each in a generation
  int trial_rounds = 2;     // after these, the slow are dropped
  double too_slow = 1.15;   // times the best
  int patience = 6;         // generations in a row that find nothing better
  int final_rounds = 15;    // of elite and fallback
  double worth_it = 0.99;   // of the fallback's time: what is faster replaces it
  int most_candidates = 0;  // to try; 0: no limit
  std::function<void(const SearchProgress&)> progress = {};
};

struct Trial {
  enum class State { kTimed, kDropped, kUnusable, kWrong, kFailed };
  int candidate = 0;
  int generation = 0;
  State state = State::kTimed;
  std::string reason;  // of what was disqualified
  double seconds = 0;  // median of its last generation; 0: not timed
  int samples = 0;     // over all generations
};

const char* name_of(Trial::State state);

struct SearchResult {
  int winner = 0;
  double seconds = 0;           // median of the final rounds
  double fallback_seconds = 0;  // likewise
  int generations = 0;
  std::vector<Trial> trials;  // in the order they were tried
};

// genes: a row of numbers for each candidate; candidates are near if few numbers differ. The first `offered` of them
// are tried before all others, and candidate 0 is the fallback. Fails if the fallback itself is disqualified.
Result<SearchResult> search(const std::vector<std::vector<int>>& genes, int offered, Measure& measure,
                            const SearchOptions& options);

}  // namespace tessera::engine
