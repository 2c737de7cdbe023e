#include "results/database.h"
#include "base/format.h"

namespace tessera::results {

Status database_error(sqlite3* db) {
  return {TESSERA_INTERNAL, format("the history cannot be read or written: {}", sqlite3_errmsg(db))};
}

Status execute(sqlite3* db, const char* text) {
  return sqlite3_exec(db, text, nullptr, nullptr, nullptr) == SQLITE_OK ? Status() : database_error(db);
}

std::int64_t integer_of(sqlite3* db, const char* query, std::int64_t otherwise) {
  Statement statement(db, query);
  return statement.next() ? statement.integer(0) : otherwise;
}

void Statement::bind(std::initializer_list<Value> values) {
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

bool Statement::run(std::initializer_list<Value> values) {
  bind(values);
  return statement_ != nullptr && sqlite3_step(statement_) == SQLITE_DONE;
}

bool Statement::next() { return statement_ != nullptr && sqlite3_step(statement_) == SQLITE_ROW; }

std::string Statement::text(int column) const {
  const unsigned char* s = sqlite3_column_text(statement_, column);
  return s == nullptr ? "" : reinterpret_cast<const char*>(s);
}

Transaction::Transaction(sqlite3* db) : db_(db), begun_(execute(db, "BEGIN IMMEDIATE")), open_(begun_.ok()) {}

Transaction::~Transaction() {
  if (open_) sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
}

Status Transaction::commit() {
  Status status = execute(db_, "COMMIT");
  open_ = !status.ok();
  return status;
}

}  // namespace tessera::results
