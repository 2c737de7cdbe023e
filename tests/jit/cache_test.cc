#include "jit/cache.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <thread>

#include "tests/jit/helpers.h"

namespace tessera::jit {
namespace {

Image some_image() {
  Image image;
  image.kernel = "kernel";
  image.target = "sm_80";
  image.bytes = std::string("\0cubin\xff", 7) + std::string(5000, 'x');
  image.log = "log";
  image.resources = {40, 0, 0, 0, 6144, false};
  image.compile_seconds = 0.25;
  return image;
}

constexpr Key kKey{0x0123456789abcdefULL, 0xfedcba9876543210ULL};

class CacheTest : public testing::Test {
 protected:
  std::string entry_path() const { return folder.path + "/" + kKey.hex() + ".tsr"; }
  TemporaryFolder folder;
  DiskCache cache{folder.path};
};

TEST_F(CacheTest, what_is_stored_is_loaded) {
  EXPECT_EQ(cache.load(kKey), nullptr);
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  const auto loaded = cache.load(kKey);
  ASSERT_NE(loaded, nullptr);
  EXPECT_EQ(*loaded, some_image());
  EXPECT_EQ(folder.files().size(), 1u);
  struct stat info;
  ASSERT_EQ(stat(entry_path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST_F(CacheTest, a_new_folder_is_made_with_its_parents_for_its_owner_alone) {
  const DiskCache deep(folder.path + "/a/b");
  ASSERT_TRUE(deep.store(kKey, some_image()).ok());
  struct stat info;
  ASSERT_EQ(stat((folder.path + "/a/b").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
}

TEST_F(CacheTest, every_truncation_is_a_miss_and_is_replaced) {
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  const std::string whole = read_file(entry_path());
  for (std::size_t size = 0; size < whole.size(); size += size < 200 ? 1 : 97) {
    write_file(entry_path(), whole.substr(0, size));
    EXPECT_EQ(cache.load(kKey), nullptr) << "cut to " << size << " bytes";
  }
  write_file(entry_path(), whole + "x");
  EXPECT_EQ(cache.load(kKey), nullptr) << "one byte too many";
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  EXPECT_NE(cache.load(kKey), nullptr);
  EXPECT_EQ(folder.files().size(), 1u);
}

TEST_F(CacheTest, every_flipped_bit_is_a_miss) {
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  const std::string whole = read_file(entry_path());
  for (std::size_t byte = 0; byte < whole.size(); byte += byte < 200 || byte + 100 > whole.size() ? 1 : 61) {
    std::string broken = whole;
    broken[byte] = static_cast<char>(broken[byte] ^ (1 << byte % 8));
    write_file(entry_path(), broken);
    EXPECT_EQ(cache.load(kKey), nullptr) << "byte " << byte;
  }
}

TEST_F(CacheTest, another_kernels_entry_under_this_name_is_a_miss) {
  const Key other{1, 2};
  ASSERT_TRUE(cache.store(other, some_image()).ok());
  std::filesystem::rename(folder.path + "/" + other.hex() + ".tsr", entry_path());
  EXPECT_EQ(cache.load(kKey), nullptr);
}

TEST_F(CacheTest, a_foreign_version_is_a_miss_even_with_a_right_checksum) {
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  std::string bytes = read_file(entry_path());
  ASSERT_EQ(bytes[8], static_cast<char>(kCacheFormat));  // after the magic of 8 bytes
  bytes[8] = static_cast<char>(kCacheFormat + 1);
  bytes.resize(bytes.size() - 16);
  bytes += checksum_bytes(bytes);
  write_file(entry_path(), bytes);
  EXPECT_EQ(cache.load(kKey), nullptr);
  bytes[8] = static_cast<char>(kCacheFormat);  // the same change with the right version is a hit
  bytes.resize(bytes.size() - 16);
  bytes += checksum_bytes(bytes);
  write_file(entry_path(), bytes);
  EXPECT_NE(cache.load(kKey), nullptr);
}

TEST_F(CacheTest, a_link_or_a_file_that_others_can_write_is_not_read) {
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  chmod(entry_path().c_str(), 0666);
  EXPECT_EQ(cache.load(kKey), nullptr);
  chmod(entry_path().c_str(), 0600);
  ASSERT_NE(cache.load(kKey), nullptr);
  std::filesystem::rename(entry_path(), folder.path + "/elsewhere");
  ASSERT_EQ(symlink("elsewhere", entry_path().c_str()), 0);
  EXPECT_EQ(cache.load(kKey), nullptr);
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  EXPECT_NE(cache.load(kKey), nullptr);
}

TEST_F(CacheTest, a_folder_that_others_can_write_is_refused_with_a_reason) {
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  for (const mode_t mode : {0720, 0702, 0777, 01777}) {
    chmod(folder.path.c_str(), mode);
    EXPECT_EQ(cache.load(kKey), nullptr);
    EXPECT_FALSE(cache.store(kKey, some_image()).ok());
    const CacheState state = cache.state();
    EXPECT_FALSE(state.readable);
    EXPECT_FALSE(state.writable);
    EXPECT_NE(state.reason.find("refused"), std::string::npos) << state.reason;
  }
  chmod(folder.path.c_str(), 0755);
  EXPECT_TRUE(cache.state().writable) << cache.state().reason;
  EXPECT_NE(cache.load(kKey), nullptr);
}

TEST_F(CacheTest, a_folder_of_another_user_is_refused) {
  DiskCache foreign("/");
  if (geteuid() == 0) {
    ASSERT_EQ(chown(folder.path.c_str(), 65534, 65534), 0);
    foreign = cache;
  }
  EXPECT_FALSE(foreign.state().readable);
  EXPECT_NE(foreign.state().reason.find("belongs to user"), std::string::npos) << foreign.state().reason;
  EXPECT_FALSE(foreign.store(kKey, some_image()).ok());
}

TEST_F(CacheTest, a_place_that_cannot_be_a_folder_says_so) {
  write_file(folder.path + "/file", "");
  for (const std::string& path :
       {folder.path + "/file", folder.path + "/file/below", std::string("relative"), std::string()}) {
    const CacheState state = DiskCache(path).state();
    EXPECT_FALSE(state.readable) << path;
    EXPECT_FALSE(state.writable) << path;
    EXPECT_FALSE(state.reason.empty()) << path;
  }
}

TEST_F(CacheTest, a_write_that_fails_half_way_leaves_nothing) {
  rlimit old;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit small{1000, old.rlim_max};
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const Status stored = cache.store(kKey, some_image());
  const CacheState state = cache.state();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  signal(SIGXFSZ, handler);
  EXPECT_FALSE(stored.ok());
  EXPECT_TRUE(state.readable);
  EXPECT_FALSE(state.writable);
  EXPECT_NE(state.reason.find("cannot write"), std::string::npos) << state.reason;
  EXPECT_TRUE(folder.files().empty());
}

TEST_F(CacheTest, list_and_clear_see_entries_and_what_killed_writers_left_and_nothing_else) {
  ASSERT_TRUE(cache.store(kKey, some_image()).ok());
  ASSERT_TRUE(cache.store(Key{1, 2}, some_image()).ok());
  write_file(folder.path + "/" + Key{1, 2}.hex() + ".tsr", "broken");
  write_file(folder.path + "/.tmp-1-1", "left behind");
  write_file(folder.path + "/mine.txt", "not the cache's");
  const auto entries = cache.list();
  ASSERT_EQ(entries.size(), 3u);
  int valid = 0;
  for (const CacheEntry& entry : entries) {
    if (!entry.valid) continue;
    ++valid;
    EXPECT_EQ(entry.kernel, "kernel");
    EXPECT_EQ(entry.target, "sm_80");
    EXPECT_GT(entry.bytes, 5000u);
  }
  EXPECT_EQ(valid, 1);
  const auto removed = cache.clear();
  ASSERT_TRUE(removed.ok());
  EXPECT_EQ(*removed, 3);
  EXPECT_EQ(folder.files(), std::vector<std::string>{"mine.txt"});
}

TEST(CacheDirectory, follows_the_environment_in_the_documented_order) {
  const ScopedEnvironment home("HOME", "/h");
  const ScopedEnvironment xdg("XDG_CACHE_HOME", nullptr);
  const ScopedEnvironment own("TESSERA_CACHE_DIR", nullptr);
  EXPECT_EQ(DiskCache::from_environment().directory(), "/h/.cache/tessera");
  const ScopedEnvironment with_xdg("XDG_CACHE_HOME", "/x");
  EXPECT_EQ(DiskCache::from_environment().directory(), "/x/tessera");
  const ScopedEnvironment with_own("TESSERA_CACHE_DIR", "/own");
  EXPECT_EQ(DiskCache::from_environment().directory(), "/own");
}

class JitCacheTest : public CacheTest {
 protected:
  void SetUp() override { clear_memory_cache(); }
  void TearDown() override { clear_memory_cache(); }
  ScopedEnvironment directory{"TESSERA_CACHE_DIR", folder.path.c_str()};
  ScopedEnvironment allowed{"TESSERA_NO_COMPILE", nullptr};
};

TEST_F(JitCacheTest, an_image_is_compiled_once_then_found_in_memory_and_on_disk) {
  REQUIRE_NVRTC();
  const auto first = get(some_request());
  ASSERT_TRUE(first.ok()) << first.status().message();
  EXPECT_EQ(first->origin, Origin::kCompiled);
  const auto second = get(some_request());
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->origin, Origin::kMemory);
  clear_memory_cache();
  const auto third = get(some_request());
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(third->origin, Origin::kDisk);
  EXPECT_EQ(*third->image, *first->image);
}

TEST_F(JitCacheTest, a_broken_entry_is_compiled_again_and_replaced) {
  REQUIRE_NVRTC();
  ASSERT_TRUE(get(some_request()).ok());
  const auto key = key_of(some_request());
  ASSERT_TRUE(key.ok());
  const std::string path = folder.path + "/" + key->hex() + ".tsr";
  std::string bytes = read_file(path);
  ASSERT_GT(bytes.size(), 1000u);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
  write_file(path, bytes);
  clear_memory_cache();
  const auto again = get(some_request());
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->origin, Origin::kCompiled);
  clear_memory_cache();
  EXPECT_EQ(get(some_request())->origin, Origin::kDisk);
}

TEST_F(JitCacheTest, threads_that_ask_at_once_share_one_compilation) {
  REQUIRE_NVRTC();
  std::vector<Origin> origins(8);
  std::vector<std::thread> threads;
  for (Origin& origin : origins) {
    threads.emplace_back([&origin] {
      const auto found = get(some_request());
      origin = found.ok() ? found->origin : Origin::kDisk;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::count(origins.begin(), origins.end(), Origin::kCompiled), 1);
  EXPECT_EQ(std::count(origins.begin(), origins.end(), Origin::kMemory), 7);
}

TEST_F(JitCacheTest, sixteen_processes_at_once_leave_one_valid_entry_and_no_temporary_file) {
  REQUIRE_NVRTC();
  std::vector<pid_t> children;
  for (int i = 0; i < 16; ++i) {
    char program[] = "/proc/self/exe";
    char argument[] = "--compile";
    char* arguments[] = {program, argument, nullptr};
    pid_t child = 0;
    ASSERT_EQ(posix_spawn(&child, program, nullptr, nullptr, arguments, environ), 0);
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
  }
  const auto entries = cache.list();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_TRUE(entries[0].valid);
  EXPECT_EQ(folder.files().size(), 1u);
  EXPECT_EQ(get(some_request())->origin, Origin::kDisk);
}

TEST_F(JitCacheTest, forbidding_to_compile_names_the_switch_and_still_uses_the_cache) {
  REQUIRE_NVRTC();
  {
    const ScopedEnvironment forbidden("TESSERA_NO_COMPILE", "1");
    const auto refused = get(some_request());
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), TESSERA_COMPILE_FAILED);
    EXPECT_NE(refused.status().message().find("TESSERA_NO_COMPILE"), std::string::npos);
  }
  ASSERT_TRUE(get(some_request()).ok());
  clear_memory_cache();
  const ScopedEnvironment forbidden("TESSERA_NO_COMPILE", "1");
  const auto found = get(some_request());
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->origin, Origin::kDisk);
}

TEST_F(JitCacheTest, a_read_only_folder_works_without_a_cache_and_says_so) {
  REQUIRE_NVRTC();
  // A folder of our own in which nobody, root included, can create a file.
  const ScopedEnvironment read_only("TESSERA_CACHE_DIR", "/proc/self");
  const auto found = get(some_request());
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->origin, Origin::kCompiled);
  const CacheState state = cache_state();
  EXPECT_FALSE(state.writable);
  EXPECT_NE(state.reason.find("cannot write to the cache folder /proc/self"), std::string::npos) << state.reason;
}

TEST_F(JitCacheTest, a_refused_folder_works_without_a_cache) {
  REQUIRE_NVRTC();
  chmod(folder.path.c_str(), 0770);
  EXPECT_EQ(get(some_request())->origin, Origin::kCompiled);
  clear_memory_cache();
  EXPECT_EQ(get(some_request())->origin, Origin::kCompiled);
  EXPECT_TRUE(folder.files().empty());
}

TEST_F(JitCacheTest, a_full_disk_works_without_a_cache_and_says_so) {
  REQUIRE_NVRTC();
  if (mount("tmpfs", folder.path.c_str(), "tmpfs", 0, "size=4096,mode=0700") != 0) {
    GTEST_SKIP() << "a small file system cannot be mounted here; a_write_that_fails_half_way_leaves_nothing stands in";
  }
  const auto found = get(some_request());
  const CacheState state = cache_state();
  const std::vector<std::string> left = folder.files();
  umount(folder.path.c_str());
  ASSERT_TRUE(found.ok()) << found.status().message();
  EXPECT_EQ(found->origin, Origin::kCompiled);
  EXPECT_TRUE(state.readable);
  EXPECT_FALSE(state.writable);
  EXPECT_NE(state.reason.find("No space left"), std::string::npos) << state.reason;
  EXPECT_TRUE(left.empty());
}

}  // namespace
}  // namespace tessera::jit
