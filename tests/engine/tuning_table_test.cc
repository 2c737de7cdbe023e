// The tuning table, and what a plan is told of it.
#include "engine/tuning_table.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>

#include "engine/tuned.h"
#include "tests/engine/fake_family.h"
#include "tests/jit/helpers.h"

namespace tessera::engine {
namespace {

using jit::ScopedEnvironment;
using jit::TemporaryFolder;

FakeProblem problem() { return {.op = FakeOp::kSum, .count = 500}; }

cuda::DeviceInfo h200(int index) {
  cuda::DeviceInfo info;
  info.index = index;  // find_tuned reads the table once for each
  info.name = "NVIDIA H200";
  info.major = 9;
  info.multiprocessors = 132;
  info.shared_memory_per_block_optin = 227 * 1024;
  info.driver_version = 13000;
  return info;
}

Config some_config() { return main_config(FakeConfig{.unroll = 8}); }

std::optional<Tuned> find_tuned(const cuda::DeviceInfo& device, const FakeProblem& p) {
  return engine::find_tuned<FakeFamily>(device, p);
}

TuningEntry entry_for(const FakeProblem& p) {
  const TuningKey key = tuning_key<FakeFamily>(p, 132);
  TuningEntry e;
  e.gpu = gpu_key(h200(0));
  e.driver = 13000;
  e.family = key.family;
  e.source = key.source;
  e.problem_class = key.problem_class;
  e.kernel = "sequential_sum";
  e.config = text_of(some_config());
  e.microseconds = 800.5;
  e.default_microseconds = 900.25;
  e.problem = "a problem";
  e.date = "2026-01-02";
  e.version = "0.2.0";
  return e;
}

void put(const std::string& file, const TuningEntry& entry) {
  auto table = TuningTable::open(file, TuningTable::Access::kWrite);
  ASSERT_TRUE(table.ok()) << table.status().message();
  const Status s = table->put(entry);
  ASSERT_TRUE(s.ok()) << s.message();
}

TEST(TuningTable, gives_back_what_was_put_and_keeps_one_for_a_key) {
  const TemporaryFolder folder;
  const std::string file = folder.path + "/below/tuning.sqlite";
  EXPECT_FALSE(TuningTable::open(file, TuningTable::Access::kRead).ok()) << "reading makes no file";
  TuningEntry entry = entry_for(problem());
  put(file, entry);
  entry.microseconds = 700;
  put(file, entry);
  TuningEntry other = entry;
  other.driver = 12080;
  put(file, other);
  const auto table = TuningTable::open(file, TuningTable::Access::kRead);
  ASSERT_TRUE(table.ok()) << table.status().message();
  const auto all = table->entries();
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->size(), 2U);
  EXPECT_EQ((*all)[0], other);
  EXPECT_EQ((*all)[1], entry);
  auto writable = TuningTable::open(file, TuningTable::Access::kWrite);
  ASSERT_TRUE(writable.ok());
  EXPECT_EQ(*writable->clear(), 2);
  EXPECT_TRUE(table->entries()->empty());
}

TEST(TuningTable, is_refused_in_a_folder_that_others_can_write_to) {
  const TemporaryFolder folder;
  put(folder.path + "/tuning.sqlite", entry_for(problem()));
  ASSERT_EQ(chmod(folder.path.c_str(), 0777), 0);
  for (const auto access : {TuningTable::Access::kRead, TuningTable::Access::kWrite}) {
    const auto table = TuningTable::open(folder.path + "/tuning.sqlite", access);
    ASSERT_FALSE(table.ok());
    EXPECT_NE(table.status().message().find("0777"), std::string::npos) << table.status().message();
  }
  EXPECT_FALSE(TuningTable::open("tuning.sqlite", TuningTable::Access::kWrite).ok()) << "not absolute";
  EXPECT_FALSE(TuningTable::open("", TuningTable::Access::kWrite).ok());
}

TEST(TuningTable, what_is_no_table_is_an_error_and_no_tuning) {
  const TemporaryFolder folder;
  const std::string file = folder.path + "/tuning.sqlite";
  jit::write_file(file, std::string(5000, 'x'));
  const auto table = TuningTable::open(file, TuningTable::Access::kRead);
  EXPECT_TRUE(!table.ok() || !table->entries().ok());
  EXPECT_FALSE(TuningTable::open(file, TuningTable::Access::kWrite).ok());
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", file.c_str());
  EXPECT_FALSE(find_tuned(h200(100), problem()));
}

TEST(TuningTable, lies_beside_the_compiled_kernels_or_where_it_is_told) {
  const ScopedEnvironment cache("TESSERA_CACHE_DIR", "/somewhere/cache");
  {
    const ScopedEnvironment none("TESSERA_TUNING_TABLE", nullptr);
    EXPECT_EQ(tuning_table_file(), "/somewhere/cache/tuning.sqlite");
  }
  const ScopedEnvironment chosen("TESSERA_TUNING_TABLE", "/else/where.db");
  EXPECT_EQ(tuning_table_file(), "/else/where.db");
}

TEST(Tuned, is_found_for_problems_of_the_class_and_no_others) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  put(tuning_table_file(), entry_for(problem()));
  const auto found = find_tuned(h200(1), problem());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->kernel, "sequential_sum");
  EXPECT_EQ(found->config, some_config());
  EXPECT_EQ(found->microseconds, 800.5);
  EXPECT_EQ(found->default_microseconds, 900.25);
  EXPECT_TRUE(find_tuned(h200(1), {.op = FakeOp::kSum, .count = 999})) << "the same class";
  EXPECT_FALSE(find_tuned(h200(1), {.op = FakeOp::kSum, .count = 1000}));
  EXPECT_FALSE(find_tuned(h200(1), {.op = FakeOp::kSort, .count = 500})) << "other kernels compete";
  TuningKey other = tuning_key<FakeFamily>(problem(), 132);
  EXPECT_TRUE(engine::find_tuned(h200(1), other));
  other.family = "another";
  EXPECT_FALSE(engine::find_tuned(h200(1), other));
}

TEST(Tuned, a_stale_entry_is_ignored) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  const std::pair<const char*, std::function<void(TuningEntry&)>> stale[] = {
      {"another GPU", [](TuningEntry& e) { e.gpu = "NVIDIA H100, sm_90a"; }},
      {"another driver", [](TuningEntry& e) { e.driver = 12080; }},
      {"other kernels", [](TuningEntry& e) { e.source = std::string(32, '0'); }},
      {"another family", [](TuningEntry& e) { e.family = "attention"; }},
      {"a Config that is no JSON", [](TuningEntry& e) { e.config.pop_back(); }},
      {"no Config", [](TuningEntry& e) { e.config = ""; }},
  };
  int device = 10;
  for (const auto& [what, spoil] : stale) {
    TuningEntry entry = entry_for(problem());
    spoil(entry);
    put(tuning_table_file(), entry);
    EXPECT_FALSE(find_tuned(h200(device++), problem())) << what;
    auto table = TuningTable::open(tuning_table_file(), TuningTable::Access::kWrite);
    ASSERT_TRUE(table.ok() && table->clear().ok());
  }
  put(tuning_table_file(), entry_for(problem()));
  EXPECT_TRUE(find_tuned(h200(device), problem())) << "the same entry, unspoilt";
}

TEST(Tuned, one_variable_turns_it_off) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  put(tuning_table_file(), entry_for(problem()));
  {
    const ScopedEnvironment off("TESSERA_NO_TUNING", "1");
    EXPECT_FALSE(find_tuned(h200(30), problem()));
  }
  const ScopedEnvironment on("TESSERA_NO_TUNING", "0");
  EXPECT_TRUE(find_tuned(h200(31), problem()));
}

TEST(Tuned, the_table_is_read_once_a_process) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  put(tuning_table_file(), entry_for(problem()));
  ASSERT_TRUE(find_tuned(h200(40), problem()));
  std::filesystem::remove(folder.path + "/t.sqlite");
  EXPECT_TRUE(find_tuned(h200(40), problem()));
  EXPECT_FALSE(find_tuned(h200(41), problem())) << "another device reads for itself";
}

TEST(Tuned, what_is_forced_goes_before_the_table) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  force(Tuned{"sequential_sum", some_config(), 1, 2});
  const auto forced = find_tuned(h200(50), problem());
  force(std::nullopt);
  ASSERT_TRUE(forced);
  EXPECT_EQ(forced->microseconds, 1);
  EXPECT_FALSE(find_tuned(h200(50), problem()));
}

}  // namespace
}  // namespace tessera::engine
