// The tuning table: what was found to be the fastest, in one SQLite file. Safe across processes.
//
// It lies beside the compiled kernels, in a folder under the same rules (jit/cache.h), or where TESSERA_TUNING_TABLE
// says.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/status.h"

struct sqlite3;

namespace tessera::tune {

struct Entry {
  // The key.
  std::string gpu;            // "NVIDIA H200, sm_90a"
  int driver = 0;             // 13000: the newest CUDA it supports
  std::string source;         // hash of the kernels' code
  std::string problem_class;  // class_of(problem)
  // What was found.
  std::string config;  // by field name
  double microseconds = 0;
  double default_microseconds = 0;
  std::string problem;  // that was measured, for people
  std::string date;     // "2026-11-15", in UTC
  std::string version;  // of Tessera

  bool operator==(const Entry&) const = default;
};

class Table {
 public:
  enum class Access { kRead, kWrite };
  // kRead: TESSERA_UNSUPPORTED where there is none yet. kWrite makes it, and the folder.
  static Result<Table> open(const std::string& file, Access access);

  Result<std::vector<Entry>> entries() const;  // newest first
  Status put(const Entry& entry);              // in the place of one with the same key
  Result<int> clear();                         // how many there were

 private:
  struct Close {
    void operator()(sqlite3* db) const;
  };
  explicit Table(sqlite3* db) : db_(db) {}
  std::unique_ptr<sqlite3, Close> db_;
};

// An absolute path; empty where neither it nor a cache folder is named by the environment.
std::string table_file();

}  // namespace tessera::tune
