#include "program/console.h"
#include "base/format.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>

namespace tessera::tools {
namespace {

bool coloured() {
  static const bool yes = isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr;
  return yes;
}

// Characters a terminal shows: colour sequences and the later bytes of UTF-8 have no width.
std::size_t shown_width(std::string_view text) {
  std::size_t width = 0;
  for (std::size_t n = 0; n < text.size(); ++n) {
    if (text[n] == '\033') {
      while (n < text.size() && text[n] != 'm') ++n;
    } else if ((static_cast<unsigned char>(text[n]) & 0xc0) != 0x80) {
      ++width;
    }
  }
  return width;
}

std::size_t terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 100;
}

}  // namespace

std::string paint(Style style, std::string_view text) {
  if (!coloured()) return std::string(text);
  const char* code = "";
  switch (style) {
    case Style::kBold:
      code = "1";
      break;
    case Style::kDim:
      code = "2";
      break;
    case Style::kGood:
      code = "32";
      break;
    case Style::kBad:
      code = "1;31";
      break;
    case Style::kWarn:
      code = "33";
      break;
  }
  return format("\033[{}m{}\033[0m", code, text);
}

void write_text(std::FILE* to, std::string_view text) { std::fwrite(text.data(), 1, text.size(), to); }

int fail(ExitCode code, std::string_view message) {
  std::fflush(stdout);
  print(stderr, "error: {}\n", message);
  return code;
}

void Table::print() const {
  std::vector<std::size_t> width(columns_.size());
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    width[c] = shown_width(columns_[c].title);
    for (const auto& row : rows_) width[c] = std::max(width[c], c < row.size() ? shown_width(row[c]) : 0);
  }
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string cell = cell_of(c);
      const std::string gap(width[c] - shown_width(cell), ' ');
      text += "  ";
      text += columns_[c].align == Align::kLeft ? cell + gap : gap + cell;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    tools::print("{}\n", text);
  };
  line([&](std::size_t c) { return paint(Style::kDim, columns_[c].title); });
  for (const auto& row : rows_) line([&](std::size_t c) { return c < row.size() ? row[c] : std::string(); });
}

Progress::Progress(std::string label, std::size_t total, bool always)
    : label_(std::move(label)), total_(total), bar_(always || isatty(STDERR_FILENO) != 0) {}

void Progress::step(std::string_view doing) {
  const std::size_t done = started_++;
  if (total_ == 0) return;
  if (!bar_) {
    const std::size_t tenth = done * 10 / total_;
    if (tenth == last_tenth_) return;
    last_tenth_ = tenth;
    print(stderr, "{}: {} of {}\n", label_, done, total_);
    return;
  }
  constexpr std::size_t kWidth = 24;
  const std::size_t full = done * kWidth / total_;
  const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  std::string left;
  if (done > 0 && spent > 2) left = format(", {:.0f} s left", spent / double(done) * double(total_ - done));
  std::string text = format("{} [{}{}] {}/{}{}  {}", label_, std::string(full, '='), std::string(kWidth - full, ' '),
                            done, total_, left, doing);
  if (text.size() >= terminal_width()) text.resize(terminal_width() - 1);
  print(stderr, "\r\033[K{}", text);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::finish() {
  if (drawn_) print(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return format("{:.2f} ms", seconds * 1e3);
  return format("{:.2f} s", seconds);
}

std::string bytes_text(double bytes) {
  if (bytes < 1e3) return format("{:.0f} B", bytes);
  if (bytes < 1e6) return format("{:.1f} kB", bytes / 1e3);
  if (bytes < 1e9) return format("{:.1f} MB", bytes / 1e6);
  return format("{:.2f} GB", bytes / 1e9);
}

ExitCode exit_code_of(const Status& status) {
  switch (status.code()) {
    case TESSERA_OK:
      return kSuccess;
    case TESSERA_INVALID_ARGUMENT:
      return kBadUsage;
    case TESSERA_NO_DEVICE:
    case TESSERA_COMPILE_FAILED:
      return kMissing;
    default:
      return kCheckFailed;
  }
}

int write_json(const std::string& file, const Json& json) {
  if (file.empty()) return kSuccess;
  // Names come from outside (a CPU's, a path's): invalid UTF-8 is replaced instead of raising an exception.
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n';
  if (file == "-") {
    print("{}", text);
    return kSuccess;
  }
  std::ofstream out(file);
  out << text;
  out.close();
  if (!out) return fail(kBadUsage, format("cannot write {}", file));
  return kSuccess;
}

}  // namespace tessera::tools
