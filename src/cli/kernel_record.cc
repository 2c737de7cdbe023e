#include "cli/kernel_record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <set>

#include "jit/sources.h"
#include "select/kernels.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

// Held from reading a record to writing it: several runs of verify may share one.
class RecordLock {
 public:
  explicit RecordLock(const std::string& file)
      : fd_(open((file + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
    if (fd_ >= 0) flock(fd_, LOCK_EX);
  }
  RecordLock(const RecordLock&) = delete;
  RecordLock& operator=(const RecordLock&) = delete;
  ~RecordLock() {
    if (fd_ >= 0) close(fd_);
  }

 private:
  int fd_;  // -1: a folder that cannot be written, which writing the record will say
};

// An empty record where there is no file; what is no record counts as none.
Json read_record(const fs::path& file) {
  std::ifstream in(file);
  Json record = Json::parse(in, nullptr, false);
  if (!record.is_object() || !record.contains("kernels") || !record["kernels"].is_object()) {
    record = Json{{"kernels", Json::object()}};
  }
  return record;
}

std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : std::string(); }

// The archs of one entry, by GPU and date.
std::string describe(const Json& entry) {
  std::string text;
  const Json archs = entry.value("archs", Json::object());
  for (auto at = archs.begin(); at != archs.end(); ++at) {
    text += fmt::format("{}{} on {}, {}", text.empty() ? "" : "; ", at.key(), text_of(at.value().value("gpu", Json())),
                        text_of(at.value().value("date", Json())));
  }
  return text;
}

}  // namespace

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", &parts);
  return text;
}

std::vector<std::string> kernel_headers() {
  std::set<std::string> headers;
  for (const std::string& arch : select::known_archs()) {
    for (const jit::KernelInstance& instance : select::kernels_for(arch)) headers.insert(instance.header);
  }
  return {headers.begin(), headers.end()};
}

std::vector<KernelState> kernel_states(const std::string& results) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(results, error)) {
    if (fs::exists(folder.path() / "verified.json", error)) files.push_back(folder.path() / "verified.json");
  }
  std::sort(files.begin(), files.end());
  std::vector<Json> records;
  for (const fs::path& file : files) records.push_back(read_record(file));

  std::vector<KernelState> states;
  for (const std::string& header : kernel_headers()) {
    KernelState state{header, jit::code_hash(header), KernelState::Verified::kNever, {}};
    std::string current, older;
    for (const Json& record : records) {
      if (!record["kernels"].contains(header)) continue;
      const Json& entry = record["kernels"][header];
      std::string& text = text_of(entry.value("hash", Json())) == state.hash ? current : older;
      text += (text.empty() ? "" : "; ") + describe(entry);
    }
    if (!current.empty()) {
      state.verified = KernelState::Verified::kYes;
      state.where = current;
    } else if (!older.empty()) {
      state.verified = KernelState::Verified::kChanged;
      state.where = older;
    }
    states.push_back(std::move(state));
  }
  return states;
}

Status may_record() {
  const std::string& folder = jit::kernel_sources().folder;
  if (folder.empty()) return {};
  return {TESSERA_INVALID_ARGUMENT,
          fmt::format("--record is for the kernels that the library holds, not for those in {} "
                      "(TESSERA_KERNEL_SOURCES)",
                      folder)};
}

void note_sources(Json& json) {
  const std::string& folder = jit::kernel_sources().folder;
  if (folder.empty()) return;
  fmt::print("{}\n", paint(Style::kWarn, fmt::format("kernels come from {} (TESSERA_KERNEL_SOURCES)", folder)));
  json["kernel_sources"] = folder;
}

Status record_verified(const std::string& file, const std::vector<std::string>& headers, const Proof& proof) {
  if (Status s = may_record(); !s.ok()) return s;
  std::error_code ignored;
  fs::create_directories(fs::path(file).parent_path(), ignored);
  const RecordLock lock(file);
  Json record = read_record(file);
  for (const std::string& header : headers) {
    Json& entry = record["kernels"][header];
    const std::string hash = jit::code_hash(header);
    if (!entry.is_object() || text_of(entry.value("hash", Json())) != hash) {
      entry = Json{{"hash", hash}, {"archs", Json::object()}};
    }
    entry["archs"][proof.arch] = Json{{"gpu", proof.gpu}, {"date", today()}, {"by", proof.by}};
  }
  std::ofstream out(file);
  out << record.dump(2) << '\n';
  out.close();
  if (!out) return {TESSERA_INVALID_ARGUMENT, fmt::format("cannot write {}", file)};
  return {};
}

}  // namespace tessera::cli
