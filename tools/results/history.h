// What was measured, in one SQLite file: the runs of verify, bench and the comparison with peers, imported from their
// JSON files. Several processes may use one file; importing the same JSON twice adds one run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "results/json.h"
#include "results/timing.h"

struct sqlite3;

namespace tessera::results {

struct RunRow {
  std::int64_t id = 0;
  std::string kind;  // "peers", "bench", "evidence", "verify"
  std::string gpu;   // the name of the results' folder: "h200"
  std::string date;
  std::string version;
  std::string suite;  // verify: "full_native", "hostile", ...
  Json facts;         // everything in the file but its rows
};

struct VerdictRow {
  std::string name, outcome, detail;
  double error = 0;
};

class History {
 public:
  // A file of an older schema is migrated: its runs are kept. ":memory:" opens one that lives as long as the object.
  static Result<History> open(const std::string& file);
  History(History&& other) noexcept = default;
  History& operator=(History&& other) noexcept = default;

  // Imports every known file in the subfolders of `results`; returns how many runs are new.
  Result<int> import_results(const std::string& results);
  Result<int> import_file(const std::string& file, const std::string& gpu);

  std::vector<std::string> gpus() const;
  // Newest first; an empty kind or gpu selects all.
  std::vector<RunRow> runs(const std::string& kind, const std::string& gpu) const;
  std::vector<TimingRow> timings(std::int64_t run) const;
  std::vector<VerdictRow> verdicts(std::int64_t run) const;

 private:
  struct Close {
    void operator()(sqlite3* db) const;
  };
  explicit History(sqlite3* db) : db_(db) {}

  // The new run's id, or 0 if the history already has it.
  Result<std::int64_t> add_run(const std::string& kind, const std::string& gpu, const std::string& suite,
                               const Json& content);
  Result<int> add_verdicts(const std::string& gpu, const Json& suites);
  Result<int> add_timings(const std::string& kind, const std::string& gpu, const Json& content);

  std::unique_ptr<sqlite3, Close> db_;
};

}  // namespace tessera::results
