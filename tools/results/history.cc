#include "results/history.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/format.h"
#include "jit/hash.h"
#include "results/database.h"

namespace tessera::results {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSchemaVersion = 2;  // PRAGMA user_version

constexpr const char* kSchema = R"sql(
CREATE TABLE IF NOT EXISTS run(id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, kind TEXT NOT NULL, gpu TEXT NOT NULL,
  date TEXT NOT NULL, version TEXT NOT NULL, suite TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS verdict(run INTEGER NOT NULL REFERENCES run(id), name TEXT, outcome TEXT, detail TEXT,
  error REAL);
CREATE TABLE timing(run INTEGER NOT NULL REFERENCES run(id), family TEXT, op TEXT, cell TEXT, entrant TEXT, status TEXT,
  detail TEXT, fields TEXT, tags TEXT, median REAL, p05 REAL, p95 REAL, p99 REAL, graph REAL, host REAL, flops REAL,
  bytes REAL, unfused_bytes REAL, error REAL, part_of_ceiling REAL);
CREATE INDEX timing_run ON timing(run);
CREATE INDEX IF NOT EXISTS verdict_run ON verdict(run);
PRAGMA user_version = 2;
)sql";

// Version 1 had a column for each dimension of attention and set no user_version.
constexpr const char* kSetVersion1Aside = R"sql(
DROP INDEX IF EXISTS timing_run;
ALTER TABLE timing RENAME TO timing_1;
)sql";
constexpr const char* kTakeVersion1Over = R"sql(
INSERT INTO timing(run, family, op, cell, entrant, status, detail, fields, tags, median, p05, p95, p99, graph, host,
    flops, bytes, unfused_bytes, error, part_of_ceiling)
  SELECT t.run, 'attention', t.op, t.cell, t.entrant, t.status, t.detail,
    json_object('dtype', t.dtype, 'batch', t.batch, 'seq_k', t.seq, 'heads_q', t.heads, 'dim_qk', t.dim,
      'causal', json(CASE t.causal WHEN 0 THEN 'false' ELSE 'true' END)),
    CASE WHEN r.kind <> 'peers' THEN '[]' WHEN t.op = 'decode' THEN '["decode"]' WHEN t.small THEN '["small"]'
      ELSE '["table"]' END,
    t.median, t.p05, t.p95, 0, t.graph, t.host, t.flops, t.bytes, t.unfused_bytes, t.error, t.part_of_ceiling
  FROM timing_1 t JOIN run r ON r.id = t.run ORDER BY t.rowid;
DROP TABLE timing_1;
)sql";

constexpr const char* kInsertTiming =
    "INSERT INTO timing(run, family, op, cell, entrant, status, detail, fields, tags, median, p05, p95, p99, graph, "
    "host, flops, bytes, unfused_bytes, error, part_of_ceiling) VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)";
constexpr const char* kSelectTimings =
    "SELECT family, op, cell, entrant, status, detail, fields, tags, median, p05, p95, p99, graph, host, flops, bytes, "
    "unfused_bytes, error, part_of_ceiling FROM timing WHERE run=? ORDER BY rowid";

// Creates the tables, or migrates those of an older version. Other processes wait.
Status prepare_schema(sqlite3* db) {
  Transaction transaction(db);
  if (!transaction.begun().ok()) return transaction.begun();
  const std::int64_t found = integer_of(db, "PRAGMA user_version", 0);
  if (found == kSchemaVersion) return {};
  if (found > kSchemaVersion) {
    return {TESSERA_INVALID_ARGUMENT,
            format("it has schema {}, which a newer Tessera wrote; this one reads {}", found, kSchemaVersion)};
  }
  const bool older = integer_of(db, "SELECT 1 FROM sqlite_master WHERE type='table' AND name='timing'", 0) != 0;
  if (older) {
    if (Status s = execute(db, kSetVersion1Aside); !s.ok()) return s;
  }
  if (Status s = execute(db, kSchema); !s.ok()) return s;
  if (older) {
    if (Status s = execute(db, kTakeVersion1Over); !s.ok()) return s;
  }
  return transaction.commit();
}

bool add_timing(Statement& insert, std::int64_t run, const TimingRow& t) {
  return insert.run({run,
                     t.family,
                     t.op,
                     t.cell,
                     t.entrant,
                     t.status,
                     t.detail,
                     t.fields.dump(),
                     Json(t.tags).dump(),
                     t.median,
                     t.p05,
                     t.p95,
                     t.p99,
                     t.graph,
                     t.host,
                     t.flops,
                     t.bytes,
                     t.unfused_bytes,
                     t.error,
                     t.part_of_ceiling});
}

Json without_rows(Json content) {
  content.erase("rows");
  content.erase("cases");
  return content;
}

// What is shown of files whose rows are no timings of one call.
Json as_facts(const std::string& kind, Json content) {
  if (kind == "products") {
    content["products"] = content.value("cases", Json::array());
    for (Json& row : content["products"]) {
      for (Json& entrant : row["entrants"]) entrant.erase("samples_s");
    }
    content.erase("cases");
  } else if (kind == "break_kernels") {
    int caught = 0, missed = 0, races = 0;
    for (const Json& row : content.value("rows", Json::array())) {
      if (row.contains("left") || row.value("caught", Json()).is_null()) continue;  // not run, or not to be noticed
      (row["caught"].get<bool>() ? caught : missed)++;
      races += row.value("race", "").empty() ? 0 : 1;
    }
    content.update({{"caught", caught}, {"missed", missed}, {"races", races}});
  }
  return content;
}

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
  Status status = opened == SQLITE_OK ? Status() : database_error(db);
  if (status.ok()) {
    sqlite3_busy_timeout(db, 10000);
    status = prepare_schema(db);
  }
  if (status.ok()) return history;
  return Status(TESSERA_INVALID_ARGUMENT, format("cannot open the history {}: {}", file, status.message()));
}

Result<std::int64_t> History::add_run(const std::string& kind, const std::string& gpu, const std::string& suite,
                                      const Json& content) {
  const Json facts = without_rows(content);
  const Json environment = facts.value("environment", Json::object());
  const std::string date = facts.contains("date") ? text_at(facts, "date") : text_at(environment, "date");
  const std::string version = facts.contains("version") ? text_at(facts, "version") : text_at(environment, "tessera");
  const std::string key = jit::hash_of(kind + gpu + suite + content.dump()).hex();
  Statement insert(db_.get(), "INSERT OR IGNORE INTO run(key,kind,gpu,date,version,suite,facts) VALUES(?,?,?,?,?,?,?)");
  if (!insert.run({key, kind, gpu, date, version, suite, facts.dump()})) return database_error(db_.get());
  return sqlite3_changes(db_.get()) > 0 ? sqlite3_last_insert_rowid(db_.get()) : std::int64_t{0};
}

// verify.json: {suite: {"date": ..., "cases": {name: error | {"failed": why, "error": ...}}}}
Result<int> History::add_verdicts(const std::string& gpu, const Json& suites) {
  int added = 0;
  Statement insert(db_.get(), "INSERT INTO verdict(run,name,outcome,detail,error) VALUES(?,?,?,?,?)");
  for (auto suite = suites.begin(); suite != suites.end(); ++suite) {
    const Json cases = suite.value().value("cases", Json::object());
    if (!cases.is_object()) continue;  // the record of a version that listed cases without errors
    const Result<std::int64_t> run = add_run("verify", gpu, suite.key(), suite.value());
    if (!run.ok()) return run.status();
    if (*run == 0) continue;
    ++added;
    for (auto c = cases.begin(); c != cases.end(); ++c) {
      const bool passed = c.value().is_number();
      const double error = passed ? c.value().get<double>() : number_at(c.value(), "error");
      if (!insert.run({*run, c.key(), std::string(passed ? "passed" : "failed"),
                       passed ? std::string() : text_at(c.value(), "failed"), error})) {
        return database_error(db_.get());
      }
    }
  }
  return added;
}

// peers.json and peers_unfused.json have "rows"; bench.json, training.json and evidence.json have "cases"; the others are
// facts alone.
Result<int> History::add_timings(const std::string& kind, const std::string& gpu, const Json& content) {
  const Result<std::int64_t> run = add_run(kind, gpu, "", content);
  if (!run.ok()) return run.status();
  if (*run == 0) return 0;
  Statement insert(db_.get(), kInsertTiming);
  bool good = true;
  for (const Json& row : content.value("rows", Json::array())) {
    for (const TimingRow& t : timings_of_peers_row(row)) good = add_timing(insert, *run, t) && good;
  }
  for (const Json& row : content.value("cases", Json::array())) {
    good = add_timing(insert, *run, timing_of_bench_case(row)) && good;
  }
  if (!good) return database_error(db_.get());
  return 1;
}

Result<int> History::import_file(const std::string& file, const std::string& gpu) try {
  std::ifstream in(file);
  const Json content = Json::parse(in, nullptr, false);
  if (!content.is_object()) return Status(TESSERA_INVALID_ARGUMENT, format("{} is not a JSON object", file));
  const std::string kind = fs::path(file).stem().string();
  Transaction transaction(db_.get());
  if (!transaction.begun().ok()) return transaction.begun();
  const bool is_timed = kind != "products" && kind != "break_kernels";
  const Result<int> added = kind == "verify" ? add_verdicts(gpu, content)
                            : is_timed       ? add_timings(kind, gpu, content)
                                             : add_timings(kind, gpu, without_rows(as_facts(kind, content)));
  if (!added.ok()) return added;
  if (Status s = transaction.commit(); !s.ok()) return s;
  return added;
} catch (const nlohmann::json::exception& e) {
  return Status(TESSERA_INVALID_ARGUMENT, format("{} is not a result file: {}", file, e.what()));
}

Result<int> History::import_results(const std::string& results) {
  std::vector<fs::path> folders;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(results, error)) {
    if (folder.is_directory()) folders.push_back(folder.path());
  }
  if (error) return Status(TESSERA_INVALID_ARGUMENT, format("cannot read {}: {}", results, error.message()));
  std::sort(folders.begin(), folders.end());
  int added = 0;
  for (const fs::path& folder : folders) {
    for (const char* name : {"peers.json", "peers_unfused.json", "bench.json", "training.json", "evidence.json",
                             "products.json", "break_kernels.json", "fuzz.json", "dram_bytes.json", "verify.json"}) {
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
  Statement query(db_.get(), kSelectTimings);
  query.bind({run});
  while (query.next()) {
    int column = 0;
    const auto text = [&] { return query.text(column++); };
    const auto real = [&] { return query.real(column++); };
    TimingRow t;
    for (std::string* s : {&t.family, &t.op, &t.cell, &t.entrant, &t.status, &t.detail}) *s = text();
    t.fields = Json::parse(text(), nullptr, false);
    if (!t.fields.is_object()) t.fields = Json::object();
    for (const Json& tag : Json::parse(text(), nullptr, false)) {
      if (tag.is_string()) t.tags.push_back(tag.get<std::string>());
    }
    for (double* d : {&t.median, &t.p05, &t.p95, &t.p99, &t.graph, &t.host, &t.flops, &t.bytes, &t.unfused_bytes,
                      &t.error, &t.part_of_ceiling}) {
      *d = real();
    }
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

}  // namespace tessera::results
