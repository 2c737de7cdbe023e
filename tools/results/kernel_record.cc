#include "results/kernel_record.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/format.h"
#include "jit/sources.h"
#include "results/date.h"
#include "results/json.h"

namespace tessera::results {
namespace {

namespace fs = std::filesystem;

// Held from reading a record until it is written: several runs of verify may share one.
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
  int fd_;  // -1 if the folder cannot be written; writing the record then reports it
};

// An empty record if there is no file or it does not hold a record.
Json read_record(const fs::path& file) {
  std::ifstream in(file);
  Json record = Json::parse(in, nullptr, false);
  if (!record.is_object() || !record.contains("kernels") || !record["kernels"].is_object()) {
    record = Json{{"kernels", Json::object()}};
  }
  return record;
}

// The archs of one entry, each with its GPU and date.
std::string describe(const Json& entry) {
  std::string text;
  const Json archs = entry.is_object() ? entry.value("archs", Json::object()) : Json::object();
  for (auto at = archs.begin(); at != archs.end(); ++at) {
    text += format("{}{} on {}, {}", text.empty() ? "" : "; ", at.key(), text_at(at.value(), "gpu"),
                   text_at(at.value(), "date"));
  }
  return text;
}

}  // namespace

std::vector<KernelState> kernel_states(const std::string& results, const std::vector<std::string>& headers) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& folder : fs::directory_iterator(results, error)) {
    if (fs::exists(folder.path() / "verified.json", error)) files.push_back(folder.path() / "verified.json");
  }
  std::sort(files.begin(), files.end());
  std::vector<Json> records;
  for (const fs::path& file : files) records.push_back(read_record(file));

  std::vector<KernelState> states;
  for (const std::string& header : headers) {
    KernelState state{header, jit::code_hash(header), KernelState::Verified::kNever, {}};
    std::string current, older;
    for (const Json& record : records) {
      if (!record["kernels"].contains(header)) continue;
      const Json& entry = record["kernels"][header];
      std::string& text = text_at(entry, "hash") == state.hash ? current : older;
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
          format("only kernels that the library contains can be recorded as verified, not those in {} "
                 "(TESSERA_KERNEL_SOURCES)",
                 folder)};
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
    if (!entry.is_object() || text_at(entry, "hash") != hash) {
      entry = Json{{"hash", hash}, {"archs", Json::object()}};
    }
    entry["archs"][proof.arch] = Json{{"gpu", proof.gpu}, {"date", today()}, {"by", proof.by}};
  }
  std::ofstream out(file);
  out << record.dump(2) << '\n';
  out.close();
  if (!out) return {TESSERA_INVALID_ARGUMENT, format("cannot write {}", file)};
  return {};
}

}  // namespace tessera::results
