#include "jit/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/format.h"

namespace tessera::jit {
namespace {

constexpr std::string_view kMagic = "TESSERA\n";
constexpr std::string_view kSuffix = ".tsr";
constexpr std::string_view kTemporary = ".tmp-";
constexpr std::size_t kChecksumBytes = 16;
constexpr off_t kLargestEntry = off_t{256} << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }

 private:
  int fd_;
};

std::string reason(const char* what, const std::string& where) {
  const int error = errno;
  return format("{} {}: {}", what, where, std::strerror(error));
}

// Creates all missing folders of the path, with mode 0700.
void make_folders(const std::string& path) {
  for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1)) {
    mkdir(path.substr(0, slash).c_str(), 0700);
  }
  mkdir(path.c_str(), 0700);
}

// Opens the folder, so that the folder that is checked is the one that is used.
Result<Descriptor> open_folder(const std::string& path, bool create) {
  if (path.empty()) {
    return Status(TESSERA_UNSUPPORTED, "none of TESSERA_CACHE_DIR, XDG_CACHE_HOME and HOME is set");
  }
  if (path[0] != '/') {
    return Status(TESSERA_UNSUPPORTED, format("cache folder {} is not an absolute path", path));
  }
  if (create) make_folders(path);
  Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.ok()) return Status(TESSERA_UNSUPPORTED, reason("cannot open the cache folder", path));
  struct stat info;
  if (fstat(folder.get(), &info) != 0) return Status(TESSERA_UNSUPPORTED, reason("cannot stat the cache folder", path));
  if (info.st_uid != geteuid()) {
    return Status(TESSERA_UNSUPPORTED, format("cache folder {} is refused: it belongs to user {}, not to user {}", path,
                                              info.st_uid, geteuid()));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return Status(TESSERA_UNSUPPORTED,
                  format("cache folder {} is refused: mode {:04o} lets other users write what would be run; "
                         "chmod 700 it",
                         path, info.st_mode & 07777));
  }
  return folder;
}

class Writer {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& value) {
    number<std::uint64_t>(value.size());
    bytes_ += value;
  }
  void raw(std::string_view value) { bytes_ += value; }
  std::string take() { return std::move(bytes_); }
  std::string_view view() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
  T number() {
    T value{};
    const std::string_view part = raw(sizeof value);
    if (ok_) std::memcpy(&value, part.data(), sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<std::uint64_t>();
    return std::string(raw(size));
  }
  std::string_view raw(std::uint64_t size) {
    if (size > bytes_.size()) ok_ = false;
    if (!ok_) return {};
    const std::string_view part = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return part;
  }
  bool ended() const { return ok_ && bytes_.empty(); }
  bool ok() const { return ok_; }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

std::string serialize(const Key& key, const Image& image) {
  Writer w;
  w.raw(kMagic);
  w.number(kCacheFormat);
  w.number(key.high);
  w.number(key.low);
  w.text(image.kernel);
  w.text(image.target);
  w.text(image.bytes);
  w.text(image.log);
  w.number<std::uint8_t>(image.is_ptx ? 1 : 0);
  const Resources& r = image.resources;
  for (int value : {r.registers, r.stack_bytes, r.spill_store_bytes, r.spill_load_bytes, r.static_smem_bytes}) {
    w.number<std::int32_t>(value);
  }
  w.number<std::uint8_t>(r.wgmma_serialized ? 1 : 0);
  w.number(image.compile_seconds);
  w.raw(checksum_bytes(w.view()));
  return w.take();
}

std::optional<Image> parse(const Key& key, std::string_view bytes) {
  if (bytes.size() < kMagic.size() + kChecksumBytes) return std::nullopt;
  const std::string_view body = bytes.substr(0, bytes.size() - kChecksumBytes);
  if (bytes.substr(body.size()) != checksum_bytes(body)) return std::nullopt;

  Reader r(body);
  if (r.raw(kMagic.size()) != kMagic || r.number<std::uint32_t>() != kCacheFormat) return std::nullopt;
  const auto high = r.number<std::uint64_t>();
  const auto low = r.number<std::uint64_t>();
  if (!(Key{high, low} == key)) return std::nullopt;
  Image image;
  image.kernel = r.text();
  image.target = r.text();
  image.bytes = r.text();
  image.log = r.text();
  image.is_ptx = r.number<std::uint8_t>() != 0;
  Resources& resources = image.resources;
  for (int* value : {&resources.registers, &resources.stack_bytes, &resources.spill_store_bytes,
                     &resources.spill_load_bytes, &resources.static_smem_bytes}) {
    *value = r.number<std::int32_t>();
  }
  resources.wgmma_serialized = r.number<std::uint8_t>() != 0;
  image.compile_seconds = r.number<double>();
  if (!r.ended()) return std::nullopt;
  return image;
}

std::optional<std::string> read_entry(int folder, const std::string& name) {
  const Descriptor file(openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat info;
  if (!file.ok() || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  if (info.st_uid != geteuid() || (info.st_mode & (S_IWGRP | S_IWOTH)) != 0) return std::nullopt;
  if (info.st_size > kLargestEntry) return std::nullopt;
  std::string bytes(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = read(file.get(), bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += static_cast<std::size_t>(got);
  }
  return bytes;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(put));
  }
  return true;
}

// Writes and fsyncs a file under a name that no other writer uses and returns the name. Leaves nothing after a failure.
Result<std::string> write_temporary(int folder, const std::string& directory, std::string_view bytes) {
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::string name = format("{}{}-{}", kTemporary, getpid(), counter.fetch_add(1));
    const Descriptor file(openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    // A killed process with the same ID may have left a file of this name.
    if (!file.ok() && errno == EEXIST) continue;
    if (!file.ok()) return Status(TESSERA_UNSUPPORTED, reason("cannot write to the cache folder", directory));
    if (write_all(file.get(), bytes) && fsync(file.get()) == 0) return name;
    Status failure(TESSERA_UNSUPPORTED, reason("cannot write to the cache folder", directory));
    unlinkat(folder, name.c_str(), 0);
    return failure;
  }
  return Status(TESSERA_UNSUPPORTED, format("no free temporary name in the cache folder {}", directory));
}

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::optional<Key> key_of_file(std::string_view name) {
  if (!ends_with(name, kSuffix) || name.size() != 32 + kSuffix.size()) return std::nullopt;
  const std::string digits(name.substr(0, 32));
  if (digits.find_first_not_of("0123456789abcdef") != std::string::npos) return std::nullopt;
  return Key{std::strtoull(digits.substr(0, 16).c_str(), nullptr, 16),
             std::strtoull(digits.substr(16).c_str(), nullptr, 16)};
}

// The names of our own files in the folder: entries and temporary files.
std::vector<std::string> our_files(int folder) {
  std::vector<std::string> names;
  const int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return names;
  DIR* stream = fdopendir(copy);
  if (stream == nullptr) {
    close(copy);
    return names;
  }
  while (const dirent* item = readdir(stream)) {
    const std::string name = item->d_name;
    if (key_of_file(name) || name.compare(0, kTemporary.size(), kTemporary) == 0) names.push_back(name);
  }
  closedir(stream);
  return names;
}

std::string file_of(const Key& key) { return key.hex() + std::string(kSuffix); }

}  // namespace

std::string checksum_bytes(std::string_view before) {
  const Key hash = hash_of(before);
  Writer w;
  w.number(hash.high);
  w.number(hash.low);
  return w.take();
}

Status check_folder(const std::string& path, bool create) {
  const auto folder = open_folder(path, create);
  return folder.ok() ? Status() : folder.status();
}

DiskCache DiskCache::from_environment() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text != nullptr ? text : "");
  };
  if (const std::string chosen = value("TESSERA_CACHE_DIR"); !chosen.empty()) return DiskCache(chosen);
  if (const std::string xdg = value("XDG_CACHE_HOME"); !xdg.empty()) return DiskCache(xdg + "/tessera");
  if (const std::string home = value("HOME"); !home.empty()) return DiskCache(home + "/.cache/tessera");
  return DiskCache("");
}

std::shared_ptr<const Image> DiskCache::load(const Key& key) const {
  const auto folder = open_folder(directory_, false);
  if (!folder.ok()) return nullptr;
  const auto bytes = read_entry(folder->get(), file_of(key));
  if (!bytes) return nullptr;
  auto image = parse(key, *bytes);
  return image ? std::make_shared<const Image>(std::move(*image)) : nullptr;
}

Status DiskCache::store(const Key& key, const Image& image) const {
  const auto folder = open_folder(directory_, true);
  if (!folder.ok()) return folder.status();
  const auto temporary = write_temporary(folder->get(), directory_, serialize(key, image));
  if (!temporary.ok()) return temporary.status();
  if (renameat(folder->get(), temporary->c_str(), folder->get(), file_of(key).c_str()) != 0) {
    Status failure(TESSERA_UNSUPPORTED, reason("cannot rename an entry in the cache folder", directory_));
    unlinkat(folder->get(), temporary->c_str(), 0);
    return failure;
  }
  return {};
}

CacheState DiskCache::state() const {
  CacheState state{directory_, false, false, ""};
  const auto folder = open_folder(directory_, true);
  if (!folder.ok()) {
    state.reason = folder.status().message();
    return state;
  }
  state.readable = true;
  // Of about the size of an entry.
  const auto probe = write_temporary(folder->get(), directory_, std::string(64 << 10, '\0'));
  if (probe.ok()) {
    state.writable = true;
    unlinkat(folder->get(), probe->c_str(), 0);
  } else {
    state.reason = probe.status().message();
  }
  return state;
}

std::vector<CacheEntry> DiskCache::list() const {
  std::vector<CacheEntry> entries;
  const auto folder = open_folder(directory_, false);
  if (!folder.ok()) return entries;
  for (const std::string& name : our_files(folder->get())) {
    struct stat info;
    if (fstatat(folder->get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;  // removed meanwhile
    CacheEntry entry{name, "", "", static_cast<std::uint64_t>(info.st_size), info.st_mtime, false};
    const auto key = key_of_file(name);
    const auto bytes = key ? read_entry(folder->get(), name) : std::nullopt;
    if (bytes) {
      if (const auto image = parse(*key, *bytes)) {
        entry.kernel = image->kernel;
        entry.target = image->target;
        entry.valid = true;
      }
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

Result<int> DiskCache::clear() const {
  const auto folder = open_folder(directory_, false);
  if (!folder.ok()) return folder.status();
  int removed = 0;
  for (const std::string& name : our_files(folder->get())) {
    if (unlinkat(folder->get(), name.c_str(), 0) == 0) {
      ++removed;
    } else if (errno != ENOENT) {
      return Status(TESSERA_UNSUPPORTED, reason("cannot remove from the cache folder", directory_));
    }
  }
  return removed;
}

}  // namespace tessera::jit
