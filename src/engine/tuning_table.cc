#include "engine/tuning_table.h"

#include <sqlite3.h>
#include <sys/stat.h>

#include <cstdlib>
#include <initializer_list>

#include "base/format.h"
#include "jit/cache.h"

namespace tessera::engine {
namespace {

constexpr const char* kSchema =
    "CREATE TABLE IF NOT EXISTS tuned_config(gpu TEXT NOT NULL, driver INTEGER NOT NULL, family TEXT NOT NULL, "
    "source TEXT NOT NULL, problem_class TEXT NOT NULL, kernel TEXT NOT NULL, config TEXT NOT NULL, "
    "microseconds REAL NOT NULL, default_microseconds REAL NOT NULL, problem TEXT NOT NULL, date TEXT NOT NULL, "
    "version TEXT NOT NULL, PRIMARY KEY(gpu, driver, family, source, problem_class))";

// A plan should not wait long while a tuner in another process writes.
constexpr int kPatienceMs = 500;

class Statement {
 public:
  Statement(sqlite3* db, const char* text) { prepared_ = sqlite3_prepare_v2(db, text, -1, &statement_, nullptr); }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  void bind(int at, const std::string& text) {
    sqlite3_bind_text(statement_, at, text.c_str(), static_cast<int>(text.size()), SQLITE_TRANSIENT);
  }
  void bind(int at, int number) { sqlite3_bind_int(statement_, at, number); }
  void bind(int at, double number) { sqlite3_bind_double(statement_, at, number); }
  int step() { return prepared_ == SQLITE_OK ? sqlite3_step(statement_) : prepared_; }
  std::string text(int column) const {
    const unsigned char* bytes = sqlite3_column_text(statement_, column);
    return bytes == nullptr ? "" : reinterpret_cast<const char*>(bytes);
  }
  int integer(int column) const { return sqlite3_column_int(statement_, column); }
  double real(int column) const { return sqlite3_column_double(statement_, column); }

 private:
  sqlite3_stmt* statement_ = nullptr;
  int prepared_ = SQLITE_ERROR;
};

Status failure(sqlite3* db, const char* what) {
  return Status(TESSERA_UNSUPPORTED, format("{} the tuning table: {}", what, sqlite3_errmsg(db)));
}

}  // namespace

std::string tuning_table_file() {
  if (const char* chosen = std::getenv("TESSERA_TUNING_TABLE"); chosen != nullptr && *chosen != '\0') return chosen;
  const std::string folder = jit::DiskCache::from_environment().directory();
  return folder.empty() ? "" : folder + "/tuning.sqlite";
}

void TuningTable::Close::operator()(sqlite3* db) const { sqlite3_close(db); }

Result<TuningTable> TuningTable::open(const std::string& file, Access access) {
  if (file.empty()) {
    return Status(TESSERA_UNSUPPORTED,
                  "none of TESSERA_TUNING_TABLE, TESSERA_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
  }
  const std::size_t slash = file.rfind('/');
  const std::string folder = slash == std::string::npos ? file : slash == 0 ? "/" : file.substr(0, slash);
  if (file[0] != '/') return Status(TESSERA_UNSUPPORTED, format("tuning table {} is not an absolute path", file));
  if (Status s = jit::check_folder(folder, access == Access::kWrite); !s.ok()) return s;
  struct stat info;
  if (access == Access::kRead && stat(file.c_str(), &info) != 0) {
    return Status(TESSERA_UNSUPPORTED, format("there is no tuning table {}", file));
  }
  sqlite3* db = nullptr;
  const int flags = access == Access::kRead ? SQLITE_OPEN_READONLY : SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
  const int opened = sqlite3_open_v2(file.c_str(), &db, flags, nullptr);
  TuningTable table(db);
  if (opened != SQLITE_OK) return failure(db, "cannot open");
  sqlite3_busy_timeout(db, kPatienceMs);
  if (access == Access::kWrite && sqlite3_exec(db, kSchema, nullptr, nullptr, nullptr) != SQLITE_OK) {
    return failure(db, "cannot write");
  }
  return table;
}

Result<std::vector<TuningEntry>> TuningTable::entries() const {
  Statement query(db_.get(),
                  "SELECT gpu, driver, family, source, problem_class, kernel, config, microseconds, "
                  "default_microseconds, problem, date, version FROM tuned_config ORDER BY date DESC, rowid DESC");
  std::vector<TuningEntry> list;
  int stepped = query.step();
  for (; stepped == SQLITE_ROW; stepped = query.step()) {
    list.push_back({query.text(0), query.integer(1), query.text(2), query.text(3), query.text(4), query.text(5),
                    query.text(6), query.real(7), query.real(8), query.text(9), query.text(10), query.text(11)});
  }
  if (stepped != SQLITE_DONE) return failure(db_.get(), "cannot read");
  return list;
}

Status TuningTable::put(const TuningEntry& e) {
  Statement insert(db_.get(), "INSERT OR REPLACE INTO tuned_config VALUES(?,?,?,?,?,?,?,?,?,?,?,?)");
  insert.bind(1, e.gpu);
  insert.bind(2, e.driver);
  insert.bind(3, e.family);
  insert.bind(4, e.source);
  insert.bind(5, e.problem_class);
  insert.bind(6, e.kernel);
  insert.bind(7, e.config);
  insert.bind(8, e.microseconds);
  insert.bind(9, e.default_microseconds);
  insert.bind(10, e.problem);
  insert.bind(11, e.date);
  insert.bind(12, e.version);
  return insert.step() == SQLITE_DONE ? Status() : failure(db_.get(), "cannot write");
}

Result<int> TuningTable::clear() {
  Statement all(db_.get(), "DELETE FROM tuned_config");
  if (all.step() != SQLITE_DONE) return failure(db_.get(), "cannot clear");
  return sqlite3_changes(db_.get());
}

}  // namespace tessera::engine
