// What all subcommands share on the terminal: exit codes, colour, tables, progress, JSON files.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

using Json = nlohmann::ordered_json;

enum ExitCode : int {
  kSuccess = 0,
  kCheckFailed = 1,
  kBadUsage = 2,
  kMissing = 3,  // the device or the compiler asked for is not there
};

enum class Style { kBold, kDim, kGood, kBad, kWarn };

// Coloured where stdout is a terminal and NO_COLOR is not set, plain elsewhere.
std::string paint(Style style, std::string_view text);

// "error: ..." on stderr; returns the code, so that a command can `return fail(...)`.
int fail(ExitCode code, std::string_view message);

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

// A bar on stderr where that is a terminal or `always`; a plain line at every tenth of the way elsewhere.
class Progress {
 public:
  Progress(std::string label, std::size_t total, bool always);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(std::string_view doing);  // one more is about to begin
  void finish();                      // takes the bar away, so that results may be printed

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

// Writes where a file was asked for; kSuccess, or kBadUsage with a message where it cannot be written.
int write_json(const std::string& file, const Json& json);

}  // namespace tessera::cli
