// The tuning table, and what a plan is told of it.
#include "tune/table.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "cases/cases.h"
#include "select/attention.h"
#include "select/search_space.h"
#include "tests/jit/helpers.h"
#include "tune/tuned.h"

namespace tessera::tune {
namespace {

using jit::ScopedEnvironment;
using jit::TemporaryFolder;

AttentionProblem problem() {
  AttentionProblem p;
  p.dtype = DType::kBFloat16;
  p.batch = 2;
  p.seq_q = p.seq_k = 8192;
  p.heads_q = p.heads_kv = 16;
  p.dim_qk = p.dim_v = 128;
  p.scale = 0.1f;
  p.causal = true;
  return p;
}

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

select::ForwardConfig some_config() {
  auto config = select::forward_sm90_configs(DType::kBFloat16, 128, 128, true, false).front();
  config.consumers = 3;
  config.block_k = 80;
  return config;
}

Entry entry_for(const AttentionProblem& p) {
  Entry e;
  e.gpu = gpu_key(h200(0));
  e.driver = 13000;
  e.source = source_hash();
  e.problem_class = class_of(p, 132);
  e.config = select::instance_of(some_config()).config;
  e.microseconds = 800.5;
  e.default_microseconds = 900.25;
  e.problem = "a problem";
  e.date = "2026-01-02";
  e.version = "0.1.0";
  return e;
}

void put(const std::string& file, const Entry& entry) {
  auto table = Table::open(file, Table::Access::kWrite);
  ASSERT_TRUE(table.ok()) << table.status().message();
  const Status s = table->put(entry);
  ASSERT_TRUE(s.ok()) << s.message();
}

TEST(TuningChecks, take_every_config_of_the_problems_search_space) {
  const select::Device hopper = *select::cuda_device("sm_90a");
  for (const std::int64_t heads_kv : {32, 16, 4, 1}) {
    cases::Case c;
    c.problem = problem();
    c.problem.seq_q = 4;
    c.problem.seq_k = 4096;
    c.problem.heads_q = 32;
    c.problem.heads_kv = heads_kv;
    c.problem.alignment = Alignment::kBottomRight;
    const auto space = select::forward_search_space(c.problem, hopper);
    for (const cases::Case& check : cases::tuning_checks(c)) {
      for (const select::ForwardConfig& config : space) {
        EXPECT_TRUE(select::fits(config, check.problem, hopper))
            << check.name << " " << select::instance_of(config).config << " " << heads_kv;
      }
    }
  }
}

TEST(TuningTable, gives_back_what_was_put_and_keeps_one_for_a_key) {
  const TemporaryFolder folder;
  const std::string file = folder.path + "/below/tuning.sqlite";
  EXPECT_FALSE(Table::open(file, Table::Access::kRead).ok()) << "reading makes no file";
  Entry entry = entry_for(problem());
  put(file, entry);
  entry.microseconds = 700;
  put(file, entry);
  Entry other = entry;
  other.driver = 12080;
  put(file, other);
  const auto table = Table::open(file, Table::Access::kRead);
  ASSERT_TRUE(table.ok()) << table.status().message();
  const auto all = table->entries();
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->size(), 2U);
  EXPECT_EQ((*all)[0], other);
  EXPECT_EQ((*all)[1], entry);
  auto writable = Table::open(file, Table::Access::kWrite);
  ASSERT_TRUE(writable.ok());
  EXPECT_EQ(*writable->clear(), 2);
  EXPECT_TRUE(table->entries()->empty());
}

TEST(TuningTable, is_refused_in_a_folder_that_others_can_write_to) {
  const TemporaryFolder folder;
  put(folder.path + "/tuning.sqlite", entry_for(problem()));
  ASSERT_EQ(chmod(folder.path.c_str(), 0777), 0);
  for (const auto access : {Table::Access::kRead, Table::Access::kWrite}) {
    const auto table = Table::open(folder.path + "/tuning.sqlite", access);
    ASSERT_FALSE(table.ok());
    EXPECT_NE(table.status().message().find("0777"), std::string::npos) << table.status().message();
  }
  EXPECT_FALSE(Table::open("tuning.sqlite", Table::Access::kWrite).ok()) << "not absolute";
  EXPECT_FALSE(Table::open("", Table::Access::kWrite).ok());
}

TEST(TuningTable, what_is_no_table_is_an_error_and_no_tuning) {
  const TemporaryFolder folder;
  const std::string file = folder.path + "/tuning.sqlite";
  jit::write_file(file, std::string(5000, 'x'));
  const auto table = Table::open(file, Table::Access::kRead);
  EXPECT_TRUE(!table.ok() || !table->entries().ok());
  EXPECT_FALSE(Table::open(file, Table::Access::kWrite).ok());
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", file.c_str());
  EXPECT_FALSE(find_tuned(h200(100), problem()));
}

TEST(TuningTable, lies_beside_the_compiled_kernels_or_where_it_is_told) {
  const ScopedEnvironment cache("TESSERA_CACHE_DIR", "/somewhere/cache");
  {
    const ScopedEnvironment none("TESSERA_TUNING_TABLE", nullptr);
    EXPECT_EQ(table_file(), "/somewhere/cache/tuning.sqlite");
  }
  const ScopedEnvironment chosen("TESSERA_TUNING_TABLE", "/else/where.db");
  EXPECT_EQ(table_file(), "/else/where.db");
}

TEST(Tuned, is_found_for_problems_of_the_class_and_no_others) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  put(table_file(), entry_for(problem()));
  const auto found = find_tuned(h200(1), problem());
  ASSERT_TRUE(found);
  EXPECT_EQ(select::instance_of(found->config).config, select::instance_of(some_config()).config);
  EXPECT_EQ(found->microseconds, 800.5);
  EXPECT_EQ(found->default_microseconds, 900.25);
  AttentionProblem near = problem();
  near.seq_q = near.seq_k = 7000;
  near.batch = 3;
  EXPECT_TRUE(find_tuned(h200(1), near));
  const auto changed = [&](const std::function<void(AttentionProblem&)>& change) {
    AttentionProblem p = problem();
    change(p);
    return find_tuned(h200(1), p).has_value();
  };
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.dtype = DType::kFloat16; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.dim_qk = 192; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.dim_v = 64; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.causal = false; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.softcap = 30; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.seq_q = 2048; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.seq_k = 2048; }));
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.window_left = 512; })) << "few of the keys are seen";
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.batch = p.heads_q = 1; })) << "64 tiles, 132 multiprocessors";
  EXPECT_FALSE(changed([](AttentionProblem& p) { p.op = AttentionOp::kBackward; }));
}

TEST(Tuned, a_stale_entry_is_ignored) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  const std::pair<const char*, std::function<void(Entry&)>> stale[] = {
      {"another GPU", [](Entry& e) { e.gpu = "NVIDIA H100, sm_90a"; }},
      {"another driver", [](Entry& e) { e.driver = 12080; }},
      {"other kernels", [](Entry& e) { e.source = std::string(32, '0'); }},
      {"an unknown field", [](Entry& e) { e.config.replace(e.config.find(".stages"), 7, ".phases"); }},
      {"a field too many", [](Entry& e) { e.config.insert(e.config.size() - 1, ", .more = 1"); }},
      {"no Config", [](Entry& e) { e.config = ""; }},
  };
  int device = 10;
  for (const auto& [what, spoil] : stale) {
    Entry entry = entry_for(problem());
    spoil(entry);
    put(table_file(), entry);
    EXPECT_FALSE(find_tuned(h200(device++), problem())) << what;
    auto table = Table::open(table_file(), Table::Access::kWrite);
    ASSERT_TRUE(table.ok() && table->clear().ok());
  }
  put(table_file(), entry_for(problem()));
  EXPECT_TRUE(find_tuned(h200(device), problem())) << "the same entry, unspoilt";
}

TEST(Tuned, one_variable_turns_it_off) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  put(table_file(), entry_for(problem()));
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
  put(table_file(), entry_for(problem()));
  ASSERT_TRUE(find_tuned(h200(40), problem()));
  std::filesystem::remove(folder.path + "/t.sqlite");
  EXPECT_TRUE(find_tuned(h200(40), problem()));
  EXPECT_FALSE(find_tuned(h200(41), problem())) << "another device reads for itself";
}

TEST(Tuned, what_is_forced_goes_before_the_table) {
  const TemporaryFolder folder;
  const ScopedEnvironment at("TESSERA_TUNING_TABLE", (folder.path + "/t.sqlite").c_str());
  force(select::TunedForward{some_config(), 1, 2});
  const auto forced = find_tuned(h200(50), problem());
  force(std::nullopt);
  ASSERT_TRUE(forced);
  EXPECT_EQ(forced->microseconds, 1);
  EXPECT_FALSE(find_tuned(h200(50), problem()));
}

}  // namespace
}  // namespace tessera::tune
