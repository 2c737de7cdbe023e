#include "cli/history.h"

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <variant>

#include "jit/hash.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSchema = R"sql(
CREATE TABLE IF NOT EXISTS run(id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, gpu TEXT NOT NULL,
  date TEXT NOT NULL, version TEXT NOT NULL, suite TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS timing(run INTEGER NOT NULL REFERENCES run(id), op TEXT, cell TEXT, entrant TEXT, dtype TEXT,
  status TEXT, detail TEXT, batch INTEGER, seq INTEGER, heads INTEGER, dim INTEGER, causal INTEGER, small INTEGER,
  median REAL, p05 REAL, p95 REAL, graph REAL, host REAL, flops REAL, bytes REAL, unfused_bytes REAL, error REAL,
  part_of_ceiling REAL);
CREATE TABLE IF NOT EXISTS verdict(run INTEGER NOT NULL REFERENCES run(id), name TEXT, outcome TEXT, detail TEXT,
  error REAL);
CREATE INDEX IF NOT EXISTS timing_run ON timing(run);
CREATE INDEX IF NOT EXISTS verdict_run ON verdict(run);
)sql";

using Value = std::variant<std::int64_t, double, std::string>;

// One prepared statement; bound and stepped, finished when it goes.
class Statement {
 public:
  Statement(sqlite3* db, const char* text) : db_(db) { sqlite3_prepare_v2(db, text, -1, &statement_, nullptr); }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  bool run(std::initializer_list<Value> values) {
    bind(values);
    return sqlite3_step(statement_) == SQLITE_DONE;
  }
  void bind(std::initializer_list<Value> values) {
    if (statement_ == nullptr) return;
    sqlite3_reset(statement_);
    int at = 0;
    for (const Value& v : values) {
      ++at;
      if (const auto* i = std::get_if<std::int64_t>(&v)) sqlite3_bind_int64(statement_, at, *i);
      if (const auto* d = std::get_if<double>(&v)) sqlite3_bind_double(statement_, at, *d);
      if (const auto* s = std::get_if<std::string>(&v)) {
        sqlite3_bind_text(statement_, at, s->c_str(), static_cast<int>(s->size()), SQLITE_TRANSIENT);
      }
    }
  }
  bool next() { return statement_ != nullptr && sqlite3_step(statement_) == SQLITE_ROW; }
  std::string text(int column) const {
    const unsigned char* s = sqlite3_column_text(statement_, column);
    return s == nullptr ? "" : reinterpret_cast<const char*>(s);
  }
  std::int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  double real(int column) const { return sqlite3_column_double(statement_, column); }

 private:
  sqlite3* db_;
  sqlite3_stmt* statement_ = nullptr;
};

std::string text_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_string() ? at->get<std::string>() : "";
}
double number_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_number() ? at->get<double>() : 0;
}
std::int64_t integer_at(const Json& object, const char* key) {
  return static_cast<std::int64_t>(number_at(object, key));
}
bool flag_at(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_boolean() && at->get<bool>();
}

Json without(Json object, const char* key) {
  object.erase(key);
  return object;
}

void add_timing(Statement& insert, std::int64_t run, const TimingRow& t) {
  insert.run({run,
              t.op,
              t.cell,
              t.entrant,
              t.dtype,
              t.status,
              t.detail,
              t.batch,
              t.seq,
              t.heads,
              t.dim,
              std::int64_t{t.causal},
              std::int64_t{t.small},
              t.median,
              t.p05,
              t.p95,
              t.graph,
              t.host,
              t.flops,
              t.bytes,
              t.unfused_bytes,
              t.error,
              t.part_of_ceiling});
}

// One row of a peers' file: a cell and all who ran it.
void add_peers_row(Statement& insert, std::int64_t run, const Json& row) {
  TimingRow t;
  t.op = text_at(row, "op");
  t.cell = text_at(row, "cell");
  t.dtype = text_at(row, "dtype");
  t.batch = integer_at(row, "batch");
  t.seq = integer_at(row, "seq");
  t.heads = integer_at(row, "heads");
  t.dim = integer_at(row, "dim");
  t.causal = flag_at(row, "causal");
  t.small = flag_at(row, "small");
  t.flops = number_at(row, "flops");
  t.bytes = number_at(row, "bytes");
  t.unfused_bytes = number_at(row, "unfused_bytes");
  const Json entrants = row.value("entrants", Json::object());
  for (auto at = entrants.begin(); at != entrants.end(); ++at) {
    const Json& e = at.value();
    t.entrant = at.key();
    t.status = text_at(e, "status");
    t.detail = text_at(e, "detail");
    if (const std::string through = text_at(e, "through"); !through.empty()) t.detail = "through the " + through;
    t.median = number_at(e, "median_s");
    t.p05 = number_at(e, "p05_s");
    t.p95 = number_at(e, "p95_s");
    t.graph = number_at(e, "graph_s");
    t.host = number_at(e, "host_s");
    t.error = number_at(e, "error_over_allowed");
    add_timing(insert, run, t);
  }
}

// One case of `tessera bench`.
void add_bench_row(Statement& insert, std::int64_t run, const Json& row) {
  TimingRow t;
  const std::string op = text_at(row, "op");
  t.op = op == "attention_backward" ? "backward" : op == "attention_decode" ? "decode" : "forward";
  t.cell = text_at(row, "name");
  t.entrant = "tessera";
  t.dtype = text_at(row, "dtype");
  t.batch = integer_at(row, "batch");
  t.seq = integer_at(row, "seq_k");
  t.heads = integer_at(row, "heads_q");
  t.dim = integer_at(row, "dim_qk");
  t.causal = flag_at(row, "causal");
  t.flops = number_at(row, "flops");
  t.bytes = number_at(row, "bytes");
  t.unfused_bytes = number_at(row, "unfused_bytes");
  t.median = number_at(row, "median_s");
  t.p95 = number_at(row, "p95_s");
  t.graph = number_at(row, "graph_s");
  t.host = number_at(row, "host_s");
  t.error = number_at(row, "error_over_allowed");
  t.part_of_ceiling = number_at(row, "part_of_ceiling");
  t.detail = row.contains("wrong") ? text_at(row, "wrong") : text_at(row, "refused");
  t.status = row.contains("wrong") ? "wrong" : row.contains("refused") ? "refused" : "ok";
  add_timing(insert, run, t);
}

constexpr const char* kInsertTiming = "INSERT INTO timing VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)";

}  // namespace

void History::Close::operator()(sqlite3* db) const { sqlite3_close(db); }

Result<History> History::open(const std::string& file) {
  if (file != ":memory:") {
    std::error_code ignored;
    fs::create_directories(fs::path(file).parent_path(), ignored);
  }
  sqlite3* db = nullptr;
  const int opened = sqlite3_open(file.c_str(), &db);
  History history(db);
  char* message = nullptr;
  if (opened == SQLITE_OK) sqlite3_busy_timeout(db, 10000);
  if (opened != SQLITE_OK || sqlite3_exec(db, kSchema, nullptr, nullptr, &message) != SQLITE_OK) {
    const std::string why = message != nullptr ? message : sqlite3_errmsg(db);
    sqlite3_free(message);
    return Status(TESSERA_INVALID_ARGUMENT, fmt::format("cannot open the history {}: {}", file, why));
  }
  return history;
}

Result<bool> History::add_run(const std::string& kind, const std::string& gpu, const std::string& suite,
                              const Json& content, std::int64_t* id) {
  const Json facts = without(without(content, "rows"), "cases");
  const Json environment = facts.value("environment", Json::object());
  const std::string date = facts.contains("date") ? text_at(facts, "date") : text_at(environment, "date");
  const std::string version = facts.contains("version") ? text_at(facts, "version") : text_at(environment, "tessera");
  const std::string key = jit::hash_of(kind + gpu + suite + content.dump()).hex();
  Statement insert(db_.get(), "INSERT OR IGNORE INTO run(key,kind,gpu,date,version,suite,facts) VALUES(?,?,?,?,?,?,?)");
  if (!insert.run({key, kind, gpu, date, version, suite, facts.dump()})) {
    return Status(TESSERA_INTERNAL, fmt::format("the history cannot be written: {}", sqlite3_errmsg(db_.get())));
  }
  *id = sqlite3_last_insert_rowid(db_.get());
  return sqlite3_changes(db_.get()) > 0;
}

Result<int> History::import_file(const std::string& file, const std::string& gpu) try {
  std::ifstream in(file);
  const Json content = Json::parse(in, nullptr, false);
  const std::string kind = fs::path(file).stem().string();
  if (!content.is_object()) return Status(TESSERA_INVALID_ARGUMENT, fmt::format("{} is no JSON object", file));
  int added = 0;
  sqlite3_exec(db_.get(), "BEGIN", nullptr, nullptr, nullptr);
  const auto end = [&](bool good) { sqlite3_exec(db_.get(), good ? "COMMIT" : "ROLLBACK", nullptr, nullptr, nullptr); };
  std::int64_t id = 0;
  if (kind == "verify") {
    Statement insert(db_.get(), "INSERT INTO verdict VALUES(?,?,?,?,?)");
    for (auto suite = content.begin(); suite != content.end(); ++suite) {
      const Json cases = suite.value().value("cases", Json::object());
      if (!cases.is_object()) continue;  // a record of an older form
      const Result<bool> fresh = add_run(kind, gpu, suite.key(), suite.value(), &id);
      if (!fresh.ok()) {
        end(false);
        return fresh.status();
      }
      if (!*fresh) continue;
      ++added;
      for (auto c = cases.begin(); c != cases.end(); ++c) {
        const bool passed = c.value().is_number();
        insert.run({id, c.key(), std::string(passed ? "passed" : "failed"), passed ? "" : text_at(c.value(), "failed"),
                    passed ? c.value().get<double>() : number_at(c.value(), "error")});
      }
    }
  } else {
    const Result<bool> fresh = add_run(kind, gpu, "", content, &id);
    if (!fresh.ok()) {
      end(false);
      return fresh.status();
    }
    if (*fresh) {
      ++added;
      Statement insert(db_.get(), kInsertTiming);
      for (const Json& row : content.value("rows", Json::array())) add_peers_row(insert, id, row);
      for (const Json& row : content.value("cases", Json::array())) add_bench_row(insert, id, row);
    }
  }
  end(true);
  return added;
} catch (const nlohmann::json::exception& e) {
  sqlite3_exec(db_.get(), "ROLLBACK", nullptr, nullptr, nullptr);
  return Status(TESSERA_INVALID_ARGUMENT, fmt::format("{} is not a result: {}", file, e.what()));
}

Result<int> History::import_results(const std::string& results) {
  std::vector<fs::path> folders;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(results, error)) {
    if (folder.is_directory()) folders.push_back(folder.path());
  }
  if (error) return Status(TESSERA_INVALID_ARGUMENT, fmt::format("cannot read {}: {}", results, error.message()));
  std::sort(folders.begin(), folders.end());
  int added = 0;
  for (const fs::path& folder : folders) {
    for (const char* name : {"peers.json", "bench.json", "evidence.json", "verify.json"}) {
      if (!fs::exists(folder / name)) continue;
      const Result<int> one = import_file((folder / name).string(), folder.filename().string());
      if (!one.ok()) return one.status();
      added += *one;
    }
  }
  return added;
}

std::vector<std::string> History::gpus() const {
  std::vector<std::string> list;
  Statement query(db_.get(), "SELECT DISTINCT gpu FROM run ORDER BY gpu");
  while (query.next()) list.push_back(query.text(0));
  return list;
}

std::vector<RunRow> History::runs(const std::string& kind, const std::string& gpu) const {
  std::vector<RunRow> list;
  Statement query(db_.get(),
                  "SELECT id,kind,gpu,date,version,suite,facts FROM run WHERE (?1='' OR kind=?1) AND (?2='' OR gpu=?2) "
                  "ORDER BY date DESC, id DESC");
  query.bind({kind, gpu});
  while (query.next()) {
    list.push_back({query.integer(0), query.text(1), query.text(2), query.text(3), query.text(4), query.text(5),
                    Json::parse(query.text(6), nullptr, false)});
  }
  return list;
}

std::vector<TimingRow> History::timings(std::int64_t run) const {
  std::vector<TimingRow> list;
  Statement query(db_.get(), "SELECT * FROM timing WHERE run=? ORDER BY rowid");
  query.bind({run});
  while (query.next()) {
    TimingRow t;
    t.op = query.text(1);
    t.cell = query.text(2);
    t.entrant = query.text(3);
    t.dtype = query.text(4);
    t.status = query.text(5);
    t.detail = query.text(6);
    t.batch = query.integer(7);
    t.seq = query.integer(8);
    t.heads = query.integer(9);
    t.dim = query.integer(10);
    t.causal = query.integer(11) != 0;
    t.small = query.integer(12) != 0;
    t.median = query.real(13);
    t.p05 = query.real(14);
    t.p95 = query.real(15);
    t.graph = query.real(16);
    t.host = query.real(17);
    t.flops = query.real(18);
    t.bytes = query.real(19);
    t.unfused_bytes = query.real(20);
    t.error = query.real(21);
    t.part_of_ceiling = query.real(22);
    list.push_back(std::move(t));
  }
  return list;
}

std::vector<VerdictRow> History::verdicts(std::int64_t run) const {
  std::vector<VerdictRow> list;
  Statement query(db_.get(), "SELECT name,outcome,detail,error FROM verdict WHERE run=? ORDER BY rowid");
  query.bind({run});
  while (query.next()) list.push_back({query.text(0), query.text(1), query.text(2), query.real(3)});
  return list;
}

}  // namespace tessera::cli
