// The tuning table: the fastest Configs that were found, in one SQLite file. Safe across processes.
//
// It is beside the compiled kernels, in a folder under the same rules (jit/cache.h), or at TESSERA_TUNING_TABLE.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"

struct sqlite3;

namespace tessera::engine {

struct TuningEntry {
  // The key.
  std::string gpu;            // "NVIDIA H200, sm_90a"
  int driver = 0;             // 13000: the newest CUDA it supports
  std::string family;         // "attention"
  std::string source;         // hash of the code of all kernels that compete
  std::string problem_class;  // Family::tuning_class(problem)
  // What was found.
  std::string kernel;
  std::string config;  // text_of(Config)
  double microseconds = 0;
  double default_microseconds = 0;
  std::string problem;  // that was measured, for people
  std::string date;     // "2026-11-15", in UTC
  std::string version;  // of Tessera

  bool operator==(const TuningEntry&) const = default;
};

class TuningTable {
 public:
  enum class Access { kRead, kWrite };
  // kRead: TESSERA_UNSUPPORTED if there is none yet. kWrite creates it, and the folder.
  static Result<TuningTable> open(const std::string& file, Access access);

  Result<std::vector<TuningEntry>> entries() const;  // newest first
  Status put(const TuningEntry& entry);              // replaces one with the same key
  Result<int> clear();                               // how many there were

 private:
  struct Close {
    void operator()(sqlite3* db) const;
  };
  explicit TuningTable(sqlite3* db) : db_(db) {}
  std::unique_ptr<sqlite3, Close> db_;
};

// An absolute path; empty if the environment names neither it nor a cache folder.
std::string tuning_table_file();

}  // namespace tessera::engine
