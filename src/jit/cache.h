// Compiled kernels on disk: one file per entry, named by its key.
//
// An entry is trusted only if its magic, format, key, sizes and a checksum over all of it match; anything else is a
// miss, and the entry is replaced. Entries are written to a temporary name in the same folder, fsynced and renamed, so
// a reader sees a whole entry or none, and either of two writers may win. The folder must belong to this user and be
// writable by nobody else, since its contents are executed. If it cannot be used, each process compiles its kernels
// again, and state() says why.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "jit/hash.h"
#include "jit/image.h"

namespace tessera::jit {

constexpr std::uint32_t kCacheFormat = 1;

// The last bytes of an entry: a checksum over all the bytes before them.
std::string checksum_bytes(std::string_view before);

struct CacheState {
  std::string directory;
  bool readable = false;
  bool writable = false;
  std::string reason;  // why it is not readable or not writable; empty if it is both
};

struct CacheEntry {
  std::string file;  // name in the folder
  std::string kernel;
  std::string target;
  std::uint64_t bytes = 0;
  std::int64_t modified = 0;  // seconds since 1970
  bool valid = false;
};

// OK if the folder exists (or was created, if `create`), belongs to this user and is writable by nobody else.
Status check_folder(const std::string& path, bool create);

class DiskCache {
 public:
  explicit DiskCache(std::string directory) : directory_(std::move(directory)) {}

  // TESSERA_CACHE_DIR, else $XDG_CACHE_HOME/tessera, else ~/.cache/tessera, read at each call. Empty: none is set.
  static DiskCache from_environment();

  const std::string& directory() const { return directory_; }

  std::shared_ptr<const Image> load(const Key& key) const;  // null: a miss
  Status store(const Key& key, const Image& image) const;

  // Writes and removes a file, so that a full disk is noticed.
  CacheState state() const;
  std::vector<CacheEntry> list() const;
  // Removes all entries and the temporary files of killed writers; returns the number of files removed.
  Result<int> clear() const;

 private:
  std::string directory_;
};

}  // namespace tessera::jit
