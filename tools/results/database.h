// The little of SQLite that the history needs: statements with bound values, and transactions.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <variant>

#include "base/status.h"

namespace tessera::results {

using Value = std::variant<std::int64_t, double, std::string>;

// The message of the last call that failed.
Status database_error(sqlite3* db);

// Runs SQL that takes no values and returns no rows.
Status execute(sqlite3* db, const char* text);

// The first column of the first row; `otherwise` if there is none.
std::int64_t integer_of(sqlite3* db, const char* query, std::int64_t otherwise);

// A prepared statement, finalized when it goes out of scope.
class Statement {
 public:
  Statement(sqlite3* db, const char* text) { sqlite3_prepare_v2(db, text, -1, &statement_, nullptr); }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  void bind(std::initializer_list<Value> values);
  bool run(std::initializer_list<Value> values);  // for a statement that returns no rows
  bool next();                                    // true if there is another row to read

  // Columns in the order in which the SELECT names them.
  std::string text(int column) const;
  std::int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  double real(int column) const { return sqlite3_column_double(statement_, column); }

 private:
  sqlite3_stmt* statement_ = nullptr;
};

// Rolled back unless it is committed.
class Transaction {
 public:
  explicit Transaction(sqlite3* db);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  const Status& begun() const { return begun_; }  // fails if another process holds the file for too long
  Status commit();

 private:
  sqlite3* db_;
  Status begun_;
  bool open_ = false;
};

}  // namespace tessera::results
