// What was measured, in one SQLite file: runs of verify, bench and the comparison with peers, as their JSON files are
// imported. Safe across processes; the same file imported twice is one run.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/console.h"
#include "ops/status.h"

struct sqlite3;

namespace tessera::cli {

struct RunRow {
  std::int64_t id = 0;
  std::string kind;  // "peers", "bench", "evidence", "verify"
  std::string gpu;   // the results' folder: "h200"
  std::string date;
  std::string version;
  std::string suite;  // verify: "full_native", "hostile", ...
  Json facts;         // all of the file but its rows
};

struct TimingRow {
  std::string op, cell, entrant, dtype, status;  // status: "ok", "wrong", "refused", "failed"
  std::string detail;                            // why it is not ok; of a decode that is, which op ran
  std::int64_t batch = 0, seq = 0, heads = 0, dim = 0;
  bool causal = false, small = false;
  double median = 0, p05 = 0, p95 = 0, graph = 0, host = 0;  // seconds; 0: not measured
  double flops = 0, bytes = 0, unfused_bytes = 0;            // of one call
  double error = 0;                                          // over what is allowed
  double part_of_ceiling = 0;

  bool ok() const { return status == "ok"; }
  double rate() const { return median > 0 ? flops / median : 0; }
  double bandwidth() const { return median > 0 ? bytes / median : 0; }
};

struct VerdictRow {
  std::string name, outcome, detail;
  double error = 0;
};

class History {
 public:
  // ":memory:" for one that is gone with the object.
  static Result<History> open(const std::string& file);
  History(History&& other) noexcept = default;
  History& operator=(History&& other) noexcept = default;

  // Every known file in the subfolders of `results`; how many runs are new.
  Result<int> import_results(const std::string& results);
  Result<int> import_file(const std::string& file, const std::string& gpu);

  std::vector<std::string> gpus() const;
  // Newest first; "" for all.
  std::vector<RunRow> runs(const std::string& kind, const std::string& gpu) const;
  std::vector<TimingRow> timings(std::int64_t run) const;
  std::vector<VerdictRow> verdicts(std::int64_t run) const;

 private:
  struct Close {
    void operator()(sqlite3* db) const;
  };
  explicit History(sqlite3* db) : db_(db) {}
  Result<bool> add_run(const std::string& kind, const std::string& gpu, const std::string& suite, const Json& content,
                       std::int64_t* id);

  std::unique_ptr<sqlite3, Close> db_;
};

}  // namespace tessera::cli
