// What all subcommands share on the terminal: exit codes, colour, tables, progress, JSON files.
#pragma once

#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/format.h"
#include "base/status.h"

namespace tessera::tools {

using Json = nlohmann::ordered_json;

enum ExitCode : int {
  kSuccess = 0,
  kCheckFailed = 1,
  kBadUsage = 2,
  kMissing = 3,  // the requested device or compiler is not present
};

// For a status that stopped a command.
ExitCode exit_code_of(const Status& status);

enum class Style { kBold, kDim, kGood, kBad, kWarn };

// Coloured if stdout is a terminal and NO_COLOR is not set; otherwise plain.
std::string paint(Style style, std::string_view text);

void write_text(std::FILE* to, std::string_view text);
template <class... Args>
void print(std::FILE* to, fmt::format_string<Args...> text, Args&&... args) {
  write_text(to, tessera::vformat(text, fmt::make_format_args(args...)));
}
template <class... Args>
void print(fmt::format_string<Args...> text, Args&&... args) {
  write_text(stdout, tessera::vformat(text, fmt::make_format_args(args...)));
}

// "error: ..." on stderr; returns the code, so that a command can `return fail(...)`.
int fail(ExitCode code, std::string_view message);
inline int fail(const Status& status) { return fail(exit_code_of(status), status.message()); }

// Columns as wide as their widest cell. Cells may be painted.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.empty(); }
  void print() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// A bar on stderr if that is a terminal or `always`; otherwise a plain line at every tenth of the way.
class Progress {
 public:
  Progress(std::string label, std::size_t total, bool always);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(std::string_view doing);  // another one is about to start
  void finish();                      // removes the bar, so that results may be printed

 private:
  std::string label_;
  std::size_t total_;
  std::size_t started_ = 0;
  std::size_t last_tenth_ = 0;
  bool bar_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Units for people: "1.25 ms", "3.4 MB".
std::string seconds_text(double seconds);
std::string bytes_text(double bytes);

// Writes if a file was asked for ("-": standard output); kSuccess, or kBadUsage with a message if it cannot be written.
int write_json(const std::string& file, const Json& json);

}  // namespace tessera::tools
