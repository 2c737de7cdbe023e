// The built program, run as a user runs it.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "cases/cases.h"

namespace {

using Json = nlohmann::json;

struct Answer {
  int code = -1;
  std::string text;  // stdout and stderr
};

class Cli : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = (std::filesystem::temp_directory_path() / "tessera-cli-XXXXXX").string();
    ASSERT_NE(mkdtemp(path.data()), nullptr);
    folder_ = path;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // `environment` goes before the program: NAME=value ...
  Answer run(const std::string& arguments, const std::string& environment = "") const {
    return run_program(TESSERA_PROGRAM, arguments, environment);
  }
  Answer run_program(const std::string& program, const std::string& arguments,
                     const std::string& environment = "") const {
    const std::string command =
        "TESSERA_CACHE_DIR=" + file("cache") + " " + environment + " " + program + " " + arguments + " 2>&1";
    Answer answer;
    FILE* pipe = popen(command.c_str(), "r");
    if (pipe == nullptr) return answer;
    char buffer[4096];
    for (std::size_t n = 0; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) answer.text.append(buffer, n);
    const int status = pclose(pipe);
    if (WIFEXITED(status)) answer.code = WEXITSTATUS(status);
    return answer;
  }

  std::string file(const std::string& name) const { return folder_ + "/" + name; }

  Json json(const std::string& name) const {
    std::ifstream in(file(name));
    return Json::parse(in, nullptr, false);
  }

  std::string folder_;
};

bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_F(Cli, every_command_has_help_with_examples) {
  const Answer all = run("--help");
  EXPECT_EQ(all.code, 0);
  for (const char* command :
       {"doctor", "verify", "bench", "explain", "compile", "cache", "kernels", "report", "tune", "tune attention"}) {
    EXPECT_TRUE(holds(all.text, std::string(command).substr(0, 4)));
    const Answer help = run(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_TRUE(holds(help.text, "Examples:")) << command;
    EXPECT_TRUE(holds(help.text, "--json")) << command;
  }
  EXPECT_EQ(run("--version").text, "tessera 0.1.0\n");
}

TEST_F(Cli, bad_usage_exits_with_2_and_names_what_is_wrong) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "subcommand"},
      {"frobnicate", "frobnicate"},
      {"verify --suite nonsense", "nonsense"},
      {"verify --device gpu", "gpu"},
      {"verify --device cuda:x", "cuda:x"},
      {"verify --filter no_such_case", "no_such_case"},
      {"verify --arch-code sm_12", "sm_12"},
      {"verify --arch-code sm_75", "--device cuda"},
      {"bench --device cpu --arch-code sm_80", "--device cuda"},
      {"verify --repeat 0", "--repeat"},
      {"verify --suite full --record x.json", "--record"},
      {"kernels --record x.json", "--kernel"},
      {"kernels --record x.json --by hand --kernel no_such.cuh", "no_such.cuh"},
      {"bench --min-time -1", "--min-time"},
      {"bench --filter no_such_case", "no_such_case"},
      {"explain --op sideways", "sideways"},
      {"explain --sq ten", "ten"},
      {"explain --arch sm_12", "sm_12"},
      {"explain --sq 5 --sk 7 --causal", "alignment"},
      {"explain --hq 8 --hkv 3", "8"},
      {"compile --arch sm_12", "sm_12"},
      {"cache", "subcommand"},
      {"tune", "tune attention"},
      {"tune attention --cases no_such_case", "no_such_case"},
      {"tune attention --cases fwd --dim 64", "--cases"},
      {"tune attention --heads 8 --heads-kv 3", "--heads-kv"},
      {"tune attention --budget 0", "--budget"},
      {"tune attention --dry-run --arch sm_12", "sm_12"},
      {"tune attention --list", "--list"},
      {"tune --list --clear", "--clear"},
      {"doctor --nonsense", "--nonsense"},
      {"doctor --json /nonexistent/folder/file", "/nonexistent/folder/file"},
  };
  for (const auto& [arguments, part] : wrong) {
    const Answer answer = run(arguments);
    EXPECT_EQ(answer.code, 2) << arguments << "\n" << answer.text;
    EXPECT_TRUE(holds(answer.text, "error: ")) << arguments << "\n" << answer.text;
    EXPECT_TRUE(holds(answer.text, part)) << arguments << "\n" << answer.text;
  }
}

TEST_F(Cli, a_device_or_a_compiler_that_is_not_there_exits_with_3) {
  const Answer device = run("verify --device cuda:9999");
  EXPECT_EQ(device.code, 3) << device.text;
  for (const char* command : {"tune attention --device cuda:9999 --dim 64", "explain --arch cuda:9999"}) {
    const Answer answer = run(command);
    EXPECT_EQ(answer.code, 3) << answer.text;
    EXPECT_TRUE(holds(answer.text, "error: ")) << answer.text;
  }
  EXPECT_FALSE(std::filesystem::exists(file("cache/tuning.sqlite")));
  const Answer compiler = run("compile", "TESSERA_NVRTC=" + file("nothing.so"));
  EXPECT_EQ(compiler.code, 3) << compiler.text;
  EXPECT_TRUE(holds(compiler.text, "nothing.so"));
}

TEST_F(Cli, tune_says_without_a_gpu_what_it_would_search) {
  const Answer answer = run("tune attention --dim 80 --dry-run --arch sm_90a --json " + file("space.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json found = json("space.json")["problems"];
  ASSERT_EQ(found.size(), 1U);
  EXPECT_GT(found[0]["configs"].size(), 500U);
  EXPECT_TRUE(holds(answer.text, std::to_string(found[0]["configs"].size()))) << answer.text;
  const Answer older =
      run("tune attention --cases fwd/bf16/b8_sq2048 --dry-run --arch sm_80 --json " + file("80.json"));
  EXPECT_EQ(older.code, 0) << older.text;
  EXPECT_EQ(json("80.json")["problems"].size(), 8U) << "four head dims, causal and not";
  EXPECT_LE(json("80.json")["problems"][0]["configs"].size(), 3U) << "the portable kernel's alone";
}

// On a driver that computes on the host and says that less shared memory is faster.
constexpr const char* kFakeGpu = "LD_LIBRARY_PATH=" TESSERA_FAKE_DRIVER "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}";
constexpr const char* kSmallProblem = "tune attention --dim 16 --seq 500 --heads 2 --batch 1 --budget 60 --json ";

TEST_F(Cli, tune_keeps_the_winner_and_plans_take_it) {
  const Answer tuned = run(kSmallProblem + file("tune.json"), kFakeGpu);
  ASSERT_EQ(tuned.code, 0) << tuned.text;
  EXPECT_TRUE(holds(tuned.text, "gain")) << tuned.text;
  const Json problem = json("tune.json")["problems"][0];
  EXPECT_NEAR(problem["default"]["us"].get<double>(), 110, 0.01) << "128 x 96";
  EXPECT_NEAR(problem["winner"]["us"].get<double>(), 106, 0.01) << "64 x 64";
  EXPECT_EQ(problem["trials"].size(), 3U);
  const Answer list = run("tune --list --json " + file("list.json"));
  EXPECT_EQ(list.code, 0) << list.text;
  const Json entries = json("list.json")["entries"];
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0]["config"], problem["winner"]["config"]);
  EXPECT_EQ(entries[0]["gpu"], "Fake GPU, sm_80");
  EXPECT_FALSE(entries[0]["stale"].get<bool>());

  const std::string explain = "explain --sq 520 --hq 2 --d 16 --arch cuda:0";
  const std::string chosen = "chosen  attention_forward " + problem["winner"]["config"].get<std::string>();
  const Answer after = run(explain, kFakeGpu);
  EXPECT_EQ(after.code, 0) << after.text;
  EXPECT_TRUE(holds(after.text, chosen)) << after.text;
  EXPECT_TRUE(holds(after.text, "tuned on this GPU: 106.0 us, default 110.0 us")) << after.text;
  EXPECT_TRUE(holds(run("doctor").text, "tuning.sqlite, 1 entry, 1 of these kernels"));
  const std::string off = std::string(kFakeGpu) + " TESSERA_NO_TUNING=1";
  EXPECT_FALSE(holds(run(explain, off).text, "tuned")) << "turned off";
  EXPECT_FALSE(holds(run(explain + " --causal", kFakeGpu).text, "tuned")) << "another class";
  EXPECT_TRUE(holds(run("tune --clear").text, "removed 1 entry"));
  EXPECT_FALSE(holds(run(explain, kFakeGpu).text, "tuned")) << "cleared";
}

TEST_F(Cli, tune_disqualifies_what_computes_wrong_or_takes_the_gpu_with_it) {
  for (const char* bad : {"wrong", "fault"}) {
    const Answer answer =
        run(kSmallProblem + file("tune.json"), std::string(kFakeGpu) + " FAKE_CUDA_BAD_SMEM=6144 FAKE_CUDA_BAD=" + bad);
    EXPECT_EQ(answer.code, 0) << answer.text;
    const Json problem = json("tune.json")["problems"][0];
    EXPECT_EQ(problem["winner"]["config"], problem["default"]["config"]) << bad;
    int disqualified = 0;
    for (const Json& trial : problem["trials"]) {
      if (trial["state"] != "wrong") continue;
      ++disqualified;
      EXPECT_FALSE(trial.contains("us")) << "timed all the same";
      EXPECT_TRUE(holds(answer.text, trial["reason"].get<std::string>())) << answer.text;
    }
    EXPECT_EQ(disqualified, 2) << answer.text;
    EXPECT_EQ(holds(answer.text, "lost 2 times"), std::string(bad) == "fault") << answer.text;
  }
  const Answer hopeless =
      run(kSmallProblem + file("tune.json"), std::string(kFakeGpu) + " FAKE_CUDA_BAD_SMEM=10240 FAKE_CUDA_BAD=wrong");
  EXPECT_EQ(hopeless.code, 1) << "the default itself is wrong\n" << hopeless.text;
  EXPECT_TRUE(holds(hopeless.text, "the selector's own choice is wrong")) << hopeless.text;
}

TEST_F(Cli, doctor_says_what_is_here_and_what_will_be_used) {
  const Answer answer = run("doctor --json " + file("doctor.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "forward, backward and decode run on the CPU"));
  EXPECT_FALSE(holds(answer.text, "\033")) << "colour where stdout is no terminal";
  const Json found = json("doctor.json");
  ASSERT_TRUE(found.is_object());
  EXPECT_EQ(found["version"], "0.1.0");
  EXPECT_GE(found["cpu"]["threads"].get<int>(), 1);
  EXPECT_FALSE(found["cpu"]["isa"].get<std::string>().empty());
  EXPECT_EQ(found["cache"]["directory"], file("cache"));
}

TEST_F(Cli, doctor_says_why_a_cache_is_not_used) {
  std::filesystem::create_directory(file("cache"));
  ASSERT_EQ(chmod(file("cache").c_str(), 0777), 0);  // anyone could plant a kernel there
  const Answer answer = run("doctor --json " + file("doctor.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json found = json("doctor.json");
  EXPECT_FALSE(found["cache"]["readable"].get<bool>());
  EXPECT_FALSE(found["cache"]["reason"].get<std::string>().empty());
  EXPECT_TRUE(holds(answer.text, "not used")) << answer.text;
}

TEST_F(Cli, quick_suite_passes_on_the_cpu) {
  const Answer answer = run("verify --suite quick --json " + file("verify.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json report = json("verify.json");
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report["failed"], 0);
  EXPECT_EQ(report["refused"], 0);
  EXPECT_EQ(report["passed"], tessera::cases::suite("quick").size());
  EXPECT_EQ(report["cases"].size(), tessera::cases::suite("quick").size());
  EXPECT_GT(report["worst_error_over_allowed"].get<double>(), 0);
}

TEST_F(Cli, verify_takes_another_seed_and_a_filter) {
  const Answer answer = run("verify --filter varlen --seed 99 --verbose");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "varlen"));
  EXPECT_FALSE(holds(answer.text, "heads_major"));
}

TEST_F(Cli, kernels_says_which_code_changed_since_it_was_verified) {
  const std::string results = "--results " + file("results");
  const Answer none = run("kernels --strict --json " + file("kernels.json") + " " + results);
  EXPECT_EQ(none.code, 1) << none.text;
  const Json kernels = json("kernels.json")["kernels"];
  ASSERT_GE(kernels.size(), 3U);
  Json record{{"kernels", Json::object()}};
  for (const Json& kernel : kernels) {
    EXPECT_EQ(kernel["verified"], "never verified");
    record["kernels"][kernel["header"].get<std::string>()] = {
        {"hash", kernel["hash"]}, {"archs", {{"sm_75", {{"gpu", "a GPU"}, {"date", "2026-01-02"}, {"by", "test"}}}}}};
  }
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/verified.json")) << record;
  const Answer all = run("kernels --strict " + results);
  EXPECT_EQ(all.code, 0) << all.text;
  EXPECT_TRUE(holds(all.text, "sm_75 on a GPU, 2026-01-02")) << all.text;
  record["kernels"]["attention/forward.cuh"]["hash"] = "of other code";
  std::ofstream(file("results/gpu/verified.json")) << record;
  EXPECT_EQ(run("kernels " + results).code, 0);
  const Answer changed = run("kernels --strict " + results);
  EXPECT_EQ(changed.code, 1);
  EXPECT_TRUE(holds(changed.text, "attention/forward.cuh  changed since it was verified: sm_75 on a GPU"))
      << changed.text;
}

TEST_F(Cli, runs_at_the_same_time_may_share_a_record) {
  const std::vector<std::string> kernels = {"attention/backward.cuh",     "attention/backward_convert.cuh",
                                            "attention/backward_dq.cuh",  "attention/backward_sm90.cuh",
                                            "attention/forward.cuh",      "attention/forward_sm90.cuh",
                                            "attention/split_combine.cuh"};
  std::vector<std::thread> threads;
  for (const std::string& kernel : kernels) {
    threads.emplace_back([&, kernel] {
      const Answer answer = run("kernels --record " + file("record.json") + " --by hand --kernel " + kernel, kFakeGpu);
      EXPECT_EQ(answer.code, 0) << answer.text;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(json("record.json")["kernels"].size(), kernels.size());
}

TEST_F(Cli, kernels_from_a_folder_are_named_and_never_recorded_as_verified) {
  std::filesystem::copy(TESSERA_KERNELS, file("kernels"), std::filesystem::copy_options::recursive);
  std::ofstream(file("kernels/attention/forward.cuh"), std::ios::app) << "// a comment\n";
  std::ofstream(file("kernels/attention/backward.cuh"), std::ios::app) << "int x;\n";
  const std::string from = "TESSERA_KERNEL_SOURCES=" + file("kernels");
  run("kernels --json " + file("library.json"));
  const Answer answer = run("kernels --json " + file("folder.json"), from);
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, file("kernels"))) << answer.text;
  EXPECT_EQ(json("folder.json")["kernel_sources"], file("kernels"));
  const Json library = json("library.json")["kernels"], folder = json("folder.json")["kernels"];
  for (std::size_t n = 0; n < library.size(); ++n) {
    EXPECT_EQ(library[n]["hash"] == folder[n]["hash"], library[n]["header"] != "attention/backward.cuh");
  }
  for (const char* arguments :
       {"verify --device cuda --suite full --record ", "kernels --by hand --kernel attention/forward.cuh --record "}) {
    const Answer refused = run(arguments + file("record.json"), from);
    EXPECT_EQ(refused.code, 2) << refused.text;
    EXPECT_TRUE(holds(refused.text, "TESSERA_KERNEL_SOURCES")) << refused.text;
    EXPECT_FALSE(std::filesystem::exists(file("record.json")));
  }
  EXPECT_TRUE(holds(run("doctor", from).text, file("kernels")));
  EXPECT_EQ(run("kernels", "TESSERA_KERNEL_SOURCES=" + file("nothing")).code, 2);
}

// The same program, linked with a tessera_plan_run that spoils one value (wrong_result.cc).
TEST_F(Cli, a_wrong_result_fails_verify_and_has_no_time_but_a_mark_in_bench) {
  const std::string filter = " --suite quick --filter fp32/b1_sq65_sk65_h2:1_d64 --json " + file("wrong.json");
  const Answer verify = run_program(TESSERA_WRONG_PROGRAM, "verify" + filter);
  EXPECT_EQ(verify.code, 1) << verify.text;
  const Json verified = json("wrong.json");
  ASSERT_EQ(verified["failed"], 2) << "forward and backward";
  EXPECT_EQ(verified["passed"], 0);
  const char* tensors[] = {"out: ", "dq: "};
  for (std::size_t n = 0; n < 2; ++n) {
    EXPECT_EQ(verified["cases"][n]["outcome"], "failed");
    EXPECT_TRUE(holds(verified["cases"][n]["detail"].get<std::string>(), tensors[n])) << verify.text;
    EXPECT_GT(verified["cases"][n]["error_over_allowed"].get<double>(), 1);
  }

  const Answer bench = run_program(TESSERA_WRONG_PROGRAM, "bench --check --min-time 0.01" + filter);
  EXPECT_EQ(bench.code, 1) << bench.text;
  EXPECT_TRUE(holds(bench.text, "WRONG")) << bench.text;
  EXPECT_TRUE(holds(bench.text, "2 of 2 cases gave a wrong result")) << bench.text;
  for (const Json& c : json("wrong.json")["cases"]) {
    EXPECT_FALSE(c["wrong"].get<std::string>().empty());
    EXPECT_FALSE(c.contains("median_s"));
    EXPECT_FALSE(c.contains("flops_per_s"));
  }
  // Not for another reason: without the spoiled value the same command passes.
  EXPECT_EQ(run("bench --check --min-time 0.01" + filter).code, 0);
}

TEST_F(Cli, verify_samples_long_cases) {
  const Answer answer = run("verify --suite long --filter sq2048 --verbose --json " + file("verify.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json report = json("verify.json");
  EXPECT_EQ(report["passed"], 2) << "forward and backward";
  for (const Json& c : report["cases"]) EXPECT_GT(c["error_over_allowed"].get<double>(), 0);
}

TEST_F(Cli, verify_repeats_and_compares_bitwise) {
  const Answer answer = run("verify --filter bwd/bf16/b2_sq33 --repeat 5 --json " + file("verify.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "each case 5 times: 0 ")) << answer.text;
  const Json report = json("verify.json");
  EXPECT_EQ(report["repeat"], 5);
  ASSERT_GT(report["cases"].size(), 5U);
  for (const Json& c : report["cases"]) {
    EXPECT_FALSE(c["runs_differ"].get<bool>());
    EXPECT_EQ(c["kernel"], "cpu_attention");
  }
}

TEST_F(Cli, bench_reports_speed_and_a_measured_ceiling) {
  const Answer answer =
      run("bench --suite quick --filter fp32/b1_sq65_sk65_h2:1_d64 --min-time 0.01 --json " + file("bench.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "GFLOP/s"));
  const Json report = json("bench.json");
  ASSERT_TRUE(report.is_object());
  ASSERT_EQ(report["cases"].size(), 2U) << "forward and backward";
  for (const Json& c : report["cases"]) {
    EXPECT_GT(c["median_s"].get<double>(), 0);
    EXPECT_GE(c["p95_s"].get<double>(), c["median_s"].get<double>());
    EXPECT_GT(c["flops_per_s"].get<double>(), 0);
    EXPECT_GT(c["part_of_ceiling"].get<double>(), 0);
  }
  EXPECT_GT(report["ceilings"]["copy_bytes_per_s"].get<double>(), 0);
}

// A launch on the fake GPU takes 50 us more where its L2 cache was written over.
TEST_F(Cli, bench_on_a_gpu_flushes_l2_before_each_call_and_does_not_time_that) {
  const std::string fake = std::string(kFakeGpu) + " FAKE_CUDA_L2=";
  for (const char* way : {"", "--evidence "}) {
    const std::string command = std::string("bench --device cuda --suite quick --min-time 0.01 ") + way +
                                "--filter fwd/bf16/b1_sq65_sk65_h2:1_d64 --json " + file("bench.json");
    double median[2] = {};
    for (const int l2 : {0, 1 << 20}) {
      const Answer answer = run(command, fake + std::to_string(l2));
      ASSERT_EQ(answer.code, 0) << answer.text;
      const Json found = json("bench.json");
      const bool flushes = l2 > 0 && *way == '\0';
      EXPECT_EQ(found["l2_flush_bytes"], flushes ? 4 * l2 : 0);
      EXPECT_EQ(holds(answer.text, "L2 is flushed"), flushes) << answer.text;
      const Json one = found["cases"][0];
      median[l2 > 0] = one["median_s"].get<double>();
      const double cold_costs = flushes ? 50e-6 : 0;
      EXPECT_NEAR(one["median_s"].get<double>() - one["graph_s"].get<double>(), cold_costs, 0.1e-6) << answer.text;
      EXPECT_NEAR(one["p99_s"].get<double>(), one["median_s"].get<double>(), 0.1e-6);
      EXPECT_GE(one["runs"].get<int>(), *way != '\0' ? 100 : 5);
    }
    // Without an L2 cache every launch finds nothing there, and so does each behind a flush.
    const double warm_saves = *way == '\0' ? 0 : 50e-6;
    EXPECT_NEAR(median[1], median[0] - warm_saves, 0.1e-6) << "what is written to flush is in the time";
  }
}

TEST_F(Cli, evidence_is_a_checked_result_and_a_hundred_single_calls) {
  const Answer answer = run("bench --evidence --filter b2_sq128_sk128_h8_d64 --json " + file("bench.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json report = json("bench.json");
  ASSERT_EQ(report["cases"].size(), 3U);
  for (const Json& c : report["cases"]) {
    EXPECT_EQ(c["runs"], 100);
    EXPECT_GT(c["error_over_allowed"].get<double>(), 0);
    EXPECT_LE(c["median_s"].get<double>(), c["p95_s"].get<double>());
    EXPECT_LE(c["p95_s"].get<double>(), c["p99_s"].get<double>());
  }
}

Json peers_of_one_cell(double ours, double theirs) {
  const auto entrant = [](double median) {
    return Json{{"status", "ok"}, {"median_s", median}, {"error_over_allowed", 0.2}};
  };
  Json row{{"op", "forward"}, {"cell", "bf16/<one>"}, {"small", false}, {"dtype", "bf16"},
           {"batch", 1},      {"seq", 512},           {"heads", 2},     {"dim", 64},
           {"causal", true},  {"flops", 1e9},         {"bytes", 1e6},   {"unfused_bytes", 2e6}};
  row["entrants"] = {{"tessera", entrant(ours)}, {"fa2", entrant(theirs)}, {"cudnn", {{"status", "wrong"}}}};
  return {{"environment", {{"date", "2026-01-02"}, {"gpu", "A & B"}, {"torch", "2.0"}, {"tessera", "0.1.0"}}},
          {"rows", {row}}};
}

TEST_F(Cli, report_is_one_page_that_shows_losses_and_asks_for_nothing) {
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(2e-3, 1e-3);
  const std::string common = "report --results " + file("results") + " --history " + file("history.db");
  ASSERT_EQ(run(common + " --output " + file("report.html") + " --json " + file("runs.json")).code, 0);
  EXPECT_EQ(json("runs.json")["new_runs"], 1);
  std::ifstream in(file("report.html"));
  const std::string page((std::istreambuf_iterator<char>(in)), {});
  EXPECT_TRUE(holds(page, "A &amp; B"));
  EXPECT_TRUE(holds(page, "bf16/&lt;one&gt;"));
  EXPECT_TRUE(holds(page, "class=\"loss\""));
  EXPECT_TRUE(holds(page, ">0.50<"));
  EXPECT_TRUE(holds(page, ">wrong<"));
  for (const char* never : {"<script", "http:", "https:", "src=", "url("}) EXPECT_FALSE(holds(page, never)) << never;

  // The same file is one run; another one is a second, and the page then has a table over time.
  run(common + " --output " + file("report.html") + " --json " + file("runs.json"));
  EXPECT_EQ(json("runs.json")["new_runs"], 0);
  EXPECT_EQ(json("runs.json")["runs"].size(), 1U);
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(1e-3, 1e-3);
  run(common + " --output " + file("report.html") + " --json " + file("runs.json"));
  EXPECT_EQ(json("runs.json")["runs"].size(), 2U);
  std::ifstream again(file("report.html"));
  EXPECT_TRUE(holds(std::string((std::istreambuf_iterator<char>(again)), {}), "Over time"));
}

TEST_F(Cli, report_shows_decode_beside_peers_with_losses_and_says_which_op_ran) {
  std::filesystem::create_directories(file("results/gpu"));
  Json peers = peers_of_one_cell(1e-3, 1e-3);
  Json decode = peers["rows"][0];
  decode["op"] = "decode";
  decode["cell"] = "bf16/b1_s1024_h32:8_d128";
  decode["small"] = true;
  decode["bytes"] = 4e7;
  decode["entrants"]["tessera"] = {{"status", "ok"}, {"median_s", 2e-5}, {"graph_s", 1.5e-5}, {"through", "forward"}};
  decode["entrants"]["fa2"] = {{"status", "ok"}, {"median_s", 1e-5}, {"graph_s", 0.5e-5}};
  peers["rows"].push_back(decode);
  std::ofstream(file("results/gpu/peers.json")) << peers;
  std::ofstream(file("README.md")) << "<!-- made by `tessera report --readme`: do not edit -->\n"
                                      "<!-- end of what `tessera report` made -->\n";
  const std::string common = "report --results " + file("results");
  ASSERT_EQ(run(common + " --output " + file("report.html") + " --history " + file("history.db")).code, 0);
  ASSERT_EQ(run(common + " --readme " + file("README.md")).code, 0);
  std::ifstream in(file("report.html"));
  const std::string page((std::istreambuf_iterator<char>(in)), {});
  const std::string part = page.substr(std::min(page.size(), page.find("Decode bandwidth")));
  EXPECT_TRUE(holds(part, "Tessera ran through the forward."));
  EXPECT_TRUE(holds(part, "<td>10.0 / 5.0 / 4.00</td><td>20.0 / 15.0 / 2.00</td>")) << part;
  EXPECT_TRUE(holds(part, "class=\"loss\" style=\"background:rgba(201,42,42,0.68)\">0.50</td>")) << part;
  EXPECT_TRUE(holds(part, ">wrong<"));
  EXPECT_TRUE(holds(page, "<td>decode</td><td class=\"bad\">0.500</td>")) << "among the sums at the top";
  std::ifstream readme(file("README.md"));
  const std::string text((std::istreambuf_iterator<char>(readme)), {});
  EXPECT_TRUE(holds(text, "| `bf16/b1_s1024_h32:8_d128` | wrong | 10.0, 4.00 | 20.0, 2.00 |")) << text;
  EXPECT_TRUE(holds(text, "Tessera through the forward")) << text;
}

TEST_F(Cli, tables_in_a_readme_drift_when_results_change) {
  std::filesystem::create_directories(file("results/gpu"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(2e-3, 1e-3);
  std::ofstream(file("README.md")) << "before\n<!-- made by `tessera report --readme`: do not edit -->\nold\n"
                                      "<!-- end of what `tessera report` made -->\nafter\n";
  const std::string command =
      "report --results " + file("results") + " --readme " + file("README.md") + " --picture " + file("speed.svg");
  EXPECT_EQ(run(command + " --check").code, 1);
  EXPECT_EQ(run(command).code, 0);
  EXPECT_EQ(run(command + " --check").code, 0);
  std::ifstream in(file("README.md"));
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(text.rfind("before\n", 0), 0U);
  EXPECT_TRUE(holds(text, "| forward | fa2 | 0.50 | 0.50 |")) << text;
  EXPECT_FALSE(holds(text, "old"));
  EXPECT_TRUE(text.ends_with("after\n"));
  std::ofstream(file("results/gpu/peers.json")) << peers_of_one_cell(1e-3, 1e-3);
  const Answer drifted = run(command + " --check");
  EXPECT_EQ(drifted.code, 1);
  EXPECT_TRUE(holds(drifted.text, "README.md is not what the results say")) << drifted.text;
  EXPECT_TRUE(holds(run("report --readme " + file("results/gpu/peers.json") + " --results " + file("results")).text,
                    "no part"));
}

TEST_F(Cli, explain_works_for_a_gpu_that_is_not_there) {
  const Answer answer = run("explain --arch cpu,sm_75,sm_90a --json " + file("explain.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "sm_75"));
  const Json report = json("explain.json");
  ASSERT_EQ(report["answers"].size(), 3U);
  for (const Json& a : report["answers"]) EXPECT_FALSE(a["text"].get<std::string>().empty());
}

TEST_F(Cli, explain_takes_every_option_of_the_contract) {
  for (const char* arguments :
       {"--causal", "--causal top_left --sk 77", "--op backward --dlse --deterministic --alibi",
        "--varlen --sq 9 --sk 30 --causal bottom_right", "--window 5,-1 --align top_left --sk 9",
        "--op decode --sq 1 --sk 500 --page-size 16 --hq 8 --hkv 2", "--softcap 30 --scale 0.1",
        "--op decode --sq 2 --sk 64 --cache-lengths --causal --lse", "--d 192 --dv 128"}) {
    const Answer answer = run(std::string("explain --dtype fp16 ") + arguments);
    EXPECT_EQ(answer.code, 0) << arguments << "\n" << answer.text;
    EXPECT_TRUE(holds(answer.text, "cpu")) << answer.text;
  }
}

TEST_F(Cli, cache_lists_clears_and_prints_its_folder) {
  EXPECT_EQ(run("cache path").text, file("cache") + "\n");
  const Answer list = run("cache list --json " + file("list.json"));
  EXPECT_EQ(list.code, 0) << list.text;
  EXPECT_EQ(json("list.json")["entries"].size(), 0U);
  const Answer clear = run("cache clear --json " + file("clear.json"));
  EXPECT_EQ(clear.code, 0) << clear.text;
  EXPECT_EQ(json("clear.json")["removed"], 0);
}

TEST_F(Cli, compile_prints_a_row_per_kernel_and_fills_the_cache) {
  const Answer answer = run("compile --arch sm_80 --kernel backward_preprocess_fp16 --json " + file("compile.json"));
  if (answer.code == 3) GTEST_SKIP() << "no NVRTC here";
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json report = json("compile.json");
  ASSERT_GE(report["rows"].size(), 1U);
  for (const Json& row : report["rows"]) {
    EXPECT_TRUE(row["passed"].get<bool>());
    EXPECT_EQ(row["arch"], "sm_80");
    EXPECT_GT(row["registers"].get<int>(), 0);
    EXPECT_EQ(row["spill_store_bytes"], 0);
  }
  run("cache list --json " + file("list.json"));
  EXPECT_EQ(json("list.json")["entries"].size(), report["rows"].size());
  EXPECT_TRUE(holds(run("compile --arch sm_80 --kernel backward_preprocess_fp16").text, "cached"));
}

}  // namespace
