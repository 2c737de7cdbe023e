#include <thread>

#include "tests/tools/cli_fixture.h"
#include "verify/family.h"

namespace tessera::test {
namespace {

TEST_F(Cli, every_command_has_help_with_examples) {
  const Answer all = run("--help");
  EXPECT_EQ(all.code, 0);
  for (const char* command : {"doctor", "verify", "fuzz", "bench", "explain", "compile", "cache", "kernels", "report",
                              "tune", "tune attention", "cases", "explain attention"}) {
    EXPECT_TRUE(holds(all.text, std::string(command).substr(0, 4)));
    const Answer help = run(std::string(command) + " --help");
    EXPECT_EQ(help.code, 0) << command;
    EXPECT_TRUE(holds(help.text, "Examples:")) << command;
    EXPECT_TRUE(holds(help.text, "--json") || std::string(command) == "explain") << command;
  }
  EXPECT_EQ(run("--version").text, "tessera 0.2.0\n");
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
      {"explain attention --op sideways", "sideways"},
      {"explain attention --sq ten", "ten"},
      {"explain attention --arch sm_12", "sm_12"},
      {"explain attention --sq 5 --sk 7 --causal", "alignment"},
      {"explain attention --hq 8 --hkv 3", "8"},
      {"compile --arch sm_12", "sm_12"},
      {"cache", "subcommand"},
      {"tune", "tune attention"},
      {"tune attention --cases no_such_case", "no_such_case"},
      {"tune attention --cases fwd --d 64", "--cases"},
      {"tune attention --hq 8 --hkv 3", "multiple"},
      {"tune attention --budget 0", "--budget"},
      {"tune attention --dry-run --arch sm_12", "sm_12"},
      {"tune attention --dry-run --arch cpu", "nothing to tune"},
      {"tune attention --list", "--list"},
      {"tune --list --clear", "--clear"},
      {"doctor --nonsense", "--nonsense"},
      {"doctor --json /nonexistent/folder/file", "/nonexistent/folder/file"},
      {"report --json /", "--json"},
      {"report --results /nonexistent", "/nonexistent"},
      {"fuzz --problems 0", "0 is not a number above 0"},
      {"fuzz --seconds -1", "-1 is not 0 or above"},
      {"verify --seed -3", "--seed"},
      {"verify --seed 99999999999999999999", "--seed"},
      {"verify --resume x.json", "--resume"},
      {"kernels --kernel norm/rotary.cuh", "--record"},
      {"compile --brief --pairs", "--pairs"},
      {"explain attention --causal top_left --align bottom_right", "--align"},
      {"explain attention --dtype e4m3 --scale-block 65", "--scale-block is 65"},
      {"explain attention --scale-block 64", "--scale-block"},
      {"explain norm --heads 3", "--heads"},
      {"explain norm --op rotary --layer", "--layer"},
      {"explain gemm --groups 0", "--groups is 0"},
  };
  for (const auto& [arguments, part] : wrong) {
    const Answer answer = run(arguments);
    EXPECT_EQ(answer.code, 2) << arguments << "\n" << answer.text;
    EXPECT_TRUE(holds(answer.text, "error: ")) << arguments << "\n" << answer.text;
    EXPECT_TRUE(holds(answer.text, part)) << arguments << "\n" << answer.text;
  }
}

TEST_F(Cli, output_that_cannot_be_written_is_a_failure) {
  EXPECT_EQ(run("cases > /dev/full").code, 1);
  EXPECT_EQ(run("cases --json /dev/full > /dev/null").code, 2);
}

TEST_F(Cli, a_device_or_a_compiler_that_is_not_there_exits_with_3) {
  const Answer device = run("verify --device cuda:9999");
  EXPECT_EQ(device.code, 3) << device.text;
  for (const char* command : {"tune attention --device cuda:9999 --d 64", "explain attention --arch cuda:9999"}) {
    const Answer answer = run(command);
    EXPECT_EQ(answer.code, 3) << answer.text;
    EXPECT_TRUE(holds(answer.text, "error: ")) << answer.text;
  }
  EXPECT_FALSE(std::filesystem::exists(file("cache/tuning.sqlite")));
  const Answer compiler = run("compile", "TESSERA_NVRTC=" + file("nothing.so"));
  EXPECT_EQ(compiler.code, 3) << compiler.text;
  EXPECT_TRUE(holds(compiler.text, "nothing.so"));
}

// Of all Configs, or trials of Configs, those of the portable forward.
Json of_forward(const Json& list) {
  Json own = Json::array();
  for (const Json& one : list) {
    if (one["kernel"] == "attention_forward") own.push_back(one);
  }
  return own;
}

TEST_F(Cli, tune_says_without_a_gpu_what_it_would_search) {
  const Answer answer = run("tune attention --d 80 --dry-run --arch sm_90a --json " + file("space.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json found = json("space.json")["problems"];
  ASSERT_EQ(found.size(), 1U);
  EXPECT_GT(found[0]["configs"].size(), 500U);
  EXPECT_TRUE(holds(answer.text, std::to_string(found[0]["configs"].size()))) << answer.text;
  const Answer older =
      run("tune attention --cases fwd/bf16/b8_sq2048 --dry-run --arch sm_80 --json " + file("80.json"));
  EXPECT_EQ(older.code, 0) << older.text;
  EXPECT_EQ(json("80.json")["problems"].size(), 8U) << "four head dims, causal and not";
  EXPECT_LE(of_forward(json("80.json")["problems"][0]["configs"]).size(), 3U);
  for (const verify::Family* family : verify::families()) {
    const Answer filtered = run(format("tune {} --cases bf16 --dry-run", family->name));
    EXPECT_EQ(filtered.code, 0) << "the filter that --help shows: " << filtered.text;
  }
}

// On a driver that computes the portable forward on the host, and says that less shared memory is faster.
constexpr const char* kFakeGpu = "LD_LIBRARY_PATH=" TESSERA_FAKE_DRIVER "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}";
constexpr const char* kSmallProblem = "tune attention --d 16 --sq 500 --hq 2 --b 1 --budget 60 --json ";

TEST_F(Cli, tune_keeps_the_winner_and_plans_take_it) {
  const Answer tuned = run(kSmallProblem + file("tune.json"), kFakeGpu);
  ASSERT_EQ(tuned.code, 0) << tuned.text;
  EXPECT_TRUE(holds(tuned.text, "gain")) << tuned.text;
  const Json problem = json("tune.json")["problems"][0];
  EXPECT_NEAR(problem["default"]["us"].get<double>(), 110, 0.01) << "128 x 96";
  EXPECT_NEAR(problem["winner"]["us"].get<double>(), 106, 0.01) << "64 x 64";
  EXPECT_EQ(of_forward(problem["trials"]).size(), 3U);
  const Answer list = run("tune --list --json " + file("list.json"));
  EXPECT_EQ(list.code, 0) << list.text;
  const Json entries = json("list.json")["entries"];
  ASSERT_EQ(entries.size(), 1U);
  EXPECT_EQ(entries[0]["config"], problem["winner"]["config"]);
  EXPECT_EQ(entries[0]["gpu"], "Fake GPU, sm_80");
  EXPECT_FALSE(entries[0]["stale"].get<bool>());

  const std::string explain = "explain attention --sq 520 --hq 2 --d 16 --arch cuda:0";
  const Answer after = run(explain + " --json " + file("explain.json"), kFakeGpu);
  EXPECT_EQ(after.code, 0) << after.text;
  const Json chosen = json("explain.json")["answers"][0]["chosen"];
  EXPECT_EQ(chosen["kernel"], "attention_forward");
  EXPECT_EQ(chosen["config"], problem["winner"]["config"]);
  EXPECT_TRUE(chosen["tuned"].get<bool>());
  EXPECT_NEAR(chosen["measured_us"].get<double>(), 106, 0.01);
  EXPECT_TRUE(holds(after.text, "tuned on this GPU, default 110.0 us; measured 106 us")) << after.text;
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
    for (const Json& trial : of_forward(problem["trials"])) {
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
  EXPECT_TRUE(holds(answer.text,
                    "attention_forward, attention_backward, attention_decode, gemm_dense, gemm_grouped, mlp_forward, "
                    "mlp_backward, moe_forward, moe_backward, norm_forward, norm_backward, norm_rotary, loss_gmm_nll, "
                    "loss_linear_cross_entropy, loss_mlp_gmm_nll run on the CPU"));
  EXPECT_FALSE(holds(answer.text, "\033")) << "colour where stdout is no terminal";
  const Json found = json("doctor.json");
  ASSERT_TRUE(found.is_object());
  EXPECT_EQ(found["version"], "0.2.0");
  EXPECT_GE(found["cpu"]["threads"].get<int>(), 1);
  EXPECT_FALSE(found["cpu"]["isa"].get<std::string>().empty());
  EXPECT_EQ(found["cache"]["directory"], file("cache"));
}

TEST_F(Cli, a_gpu_newer_than_any_known_one_runs_the_newest_portable_code_and_doctor_says_so) {
  const auto on = [](int arch) { return format("{} FAKE_CUDA_ARCH={}", kFakeGpu, arch); };
  const Answer unknown = run("doctor --json " + file("doctor.json"), on(150));
  EXPECT_EQ(unknown.code, 0) << unknown.text;
  EXPECT_TRUE(holds(unknown.text, "it runs portable code, the PTX of sm_121")) << unknown.text;
  EXPECT_FALSE(json("doctor.json")["gpu_serves"].empty()) << unknown.text;
  EXPECT_TRUE(holds(run("doctor", on(100)).text, "has not run on such a GPU"));
  EXPECT_FALSE(holds(run("doctor", on(90)).text, "has not run on such a GPU"));
  const Answer explained = run("explain attention --sq 512 --d 64 --arch cuda:0", on(150));
  EXPECT_EQ(explained.code, 0) << explained.text;
  EXPECT_TRUE(holds(explained.text, "attention_forward")) << explained.text;
}

TEST_F(Cli, explain_knows_blackwell_by_name_and_leaves_hoppers_kernels_out) {
  for (const char* arch : {"sm_87", "sm_100", "sm_103", "sm_120", "sm_121"}) {
    for (const char* op : {"forward", "backward", "decode"}) {
      const Answer answer = run(format("explain attention --op {} --sq {} --sk 512 --d 128 --arch {} --json {}", op,
                                       std::string(op) == "decode" ? 1 : 512, arch, file("explain.json")));
      ASSERT_EQ(answer.code, 0) << arch << " " << op << "\n" << answer.text;
      EXPECT_TRUE(json("explain.json")["answers"][0]["chosen"].is_object()) << arch << " " << op;
      EXPECT_TRUE(op == std::string("decode") || holds(answer.text, "needs TMA and wgmma (sm_90a)")) << answer.text;
    }
  }
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
  EXPECT_EQ(report["passed"], tessera::verify::suite("quick").size());
  EXPECT_EQ(report["cases"].size(), tessera::verify::suite("quick").size());
  EXPECT_GT(report["worst_error_over_allowed"].get<double>(), 0);
}

TEST_F(Cli, verify_says_what_it_had_no_time_for_and_fails) {
  const Answer answer = run("verify --suite quick --filter fwd/bf16 --seconds 0.001 --json " + file("verify.json"));
  EXPECT_EQ(answer.code, 1) << answer.text;
  const Json report = json("verify.json");
  EXPECT_GT(report["not_run"], 0);
  EXPECT_TRUE(holds(answer.text, "not run:")) << answer.text;
  EXPECT_EQ(report["passed"], report["cases"].size());
}

TEST_F(Cli, verify_takes_another_seed_and_a_filter) {
  const Answer answer = run("verify --filter varlen --seed 99 --verbose");
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "varlen"));
  EXPECT_FALSE(holds(answer.text, "heads_major"));
}

TEST_F(Cli, kernels_says_which_code_changed_since_it_was_verified) {
  const std::string results = "--results " + file("results");
  const Answer missing = run("kernels " + results);
  EXPECT_EQ(missing.code, 2);
  EXPECT_TRUE(holds(missing.text, "there is no folder")) << missing.text;
  std::filesystem::create_directories(file("results"));
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
  const std::vector<std::string> kernels = {"attention/backward.cuh",      "attention/backward_convert.cuh",
                                            "attention/backward_dq.cuh",   "attention/backward_sm90.cuh",
                                            "attention/forward.cuh",       "attention/forward_sm90.cuh",
                                            "attention/decode_combine.cuh"};
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

TEST_F(Cli, verify_resumes_what_passed_with_the_same_code) {
  const std::string command =
      "verify --device cuda --filter fwd/fp16/b1_sq65_sk65 --resume " + file("v.json") + " --json " + file("v.json");
  const Answer first = run(command, kFakeGpu);
  EXPECT_EQ(first.code, 1) << "the stand-in computes nothing";
  EXPECT_TRUE(holds(first.text, "note: --resume: there is nothing in " + file("v.json"))) << first.text;
  Json found = json("v.json");
  const std::size_t cases = found["cases"].size();
  ASSERT_GT(cases, 1U);
  for (Json& c : found["cases"]) c["outcome"] = "passed";
  std::ofstream(file("v.json")) << found;
  const Answer all = run(command, kFakeGpu);
  EXPECT_EQ(all.code, 0) << all.text;
  EXPECT_TRUE(holds(all.text, format("{} of them passed in an earlier run", cases))) << all.text;
  EXPECT_EQ(json("v.json")["cases"], found["cases"]);

  std::ofstream(file("now.json")) << found;
  found["cases"][0]["code"] = "of other code";
  std::ofstream(file("v.json")) << found;
  const Answer both =
      run("verify --device cuda --filter fwd/fp16/b1_sq65_sk65 --resume " + file("now.json") + " " + file("v.json"),
          kFakeGpu);
  EXPECT_EQ(both.code, 0) << "a pass with other code hides none with this one: " << both.text;
  const Answer changed = run(command, kFakeGpu);
  EXPECT_EQ(changed.code, 1) << changed.text;
  EXPECT_EQ(json("v.json")["failed"], 1);
  EXPECT_EQ(json("v.json")["cases"][0]["outcome"], "failed");
  EXPECT_EQ(json("v.json")["passed"], cases - 1);
}

TEST_F(Cli, kernels_from_a_folder_are_named_and_never_recorded_as_verified) {
  std::filesystem::copy(TESSERA_KERNELS, file("kernels"), std::filesystem::copy_options::recursive);
  std::ofstream(file("kernels/attention/forward.cuh"), std::ios::app) << "// a comment\n";
  std::ofstream(file("kernels/attention/backward.cuh"), std::ios::app) << "int x;\n";
  const std::string from = "TESSERA_KERNEL_SOURCES=" + file("kernels");
  const std::string no_records = " --results " + file("kernels");
  run("kernels --json " + file("library.json") + no_records);
  const Answer answer = run("kernels --json " + file("folder.json") + no_records, from);
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

TEST_F(Cli, fuzz_tries_the_same_problems_for_the_same_seed_and_records_them) {
  const std::string command = "fuzz --problems 40 --threads 2 --seed 7 --json ";
  const Answer answer = run(command + file("fuzz.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json found = json("fuzz.json");
  EXPECT_EQ(found["problems"], 40);
  EXPECT_EQ(found["failed"], 0);
  EXPECT_EQ(found["first_seed"], 7);
  EXPECT_GE(found["last_seed"], 46);
  EXPECT_GT(found["kernels"]["cpu_attention"]["problems"], 0);
  EXPECT_GT(found["kernels"]["cpu_gemm"]["problems"], 0);

  const Answer wrong = run_program(TESSERA_WRONG_PROGRAM, command + file("wrong.json"));
  EXPECT_EQ(wrong.code, 1) << wrong.text;
  ASSERT_FALSE(json("wrong.json")["failures"].empty());
  const Json first = json("wrong.json")["failures"][0];
  const Answer again = run_program(TESSERA_WRONG_PROGRAM, format("fuzz --problems 1 --seed {}", first["seed"].dump()));
  EXPECT_EQ(again.code, 1);
  EXPECT_TRUE(holds(again.text, first["name"].get<std::string>())) << again.text;
}

// The same program, linked with a tessera_attention_plan_run that spoils one value (wrong_result.cc).
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
      EXPECT_GE(one["runs"].get<int>(), *way != '\0' ? 300 : 5);
    }
    // Without an L2 cache every launch finds nothing there, and so does each behind a flush.
    const double warm_saves = *way == '\0' ? 0 : 50e-6;
    EXPECT_NEAR(median[1], median[0] - warm_saves, 0.1e-6) << "what is written to flush is in the time";
  }
}

TEST_F(Cli, evidence_is_a_checked_result_and_single_calls_that_give_the_same) {
  const Answer answer = run("bench --evidence --filter b2_sq128_sk128_h8_d64 --json " + file("bench.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json report = json("bench.json");
  ASSERT_EQ(report["cases"].size(), 3U);
  for (const Json& c : report["cases"]) {
    EXPECT_EQ(c["runs"], 300);
    EXPECT_EQ(c["equal_runs"], 300);
    EXPECT_GT(c["error_over_allowed"].get<double>(), 0);
    EXPECT_LE(c["median_s"].get<double>(), c["p95_s"].get<double>());
    EXPECT_LE(c["p95_s"].get<double>(), c["p99_s"].get<double>());
  }
}

TEST_F(Cli, explain_works_for_a_gpu_that_is_not_there) {
  const Answer answer = run("explain attention --arch cpu,sm_75,sm_90a --json " + file("explain.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  EXPECT_TRUE(holds(answer.text, "sm_75"));
  const Json report = json("explain.json");
  ASSERT_EQ(report["answers"].size(), 3U);
  EXPECT_TRUE(report["answers"][0]["chosen"]["kernel"] == "cpu_attention") << report.dump();
  EXPECT_TRUE(report["answers"][1]["chosen"].is_null()) << "bf16 needs sm_80";
  EXPECT_TRUE(holds(report["answers"][1]["refused"].dump(), "bf16 needs sm_80"));
  EXPECT_EQ(report["answers"][2]["chosen"]["kernel"], "attention_forward_sm90");
  EXPECT_FALSE(report["answers"][2]["offered"].empty());
  EXPECT_FALSE(holds(answer.text, "attention_backward")) << "a kernel of another op";
  const Json printed = Json::parse(run("explain attention --arch sm_80 --json -").text, nullptr, false);
  EXPECT_EQ(printed["answers"].size(), 1U) << "the JSON alone";
  EXPECT_FALSE(holds(run("explain gemm").text, "e+")) << "long times are whole microseconds";
}

TEST_F(Cli, verify_fails_if_every_case_was_refused) {
  const Answer answer = run("verify --device cuda --filter dec/fp32", kFakeGpu);
  EXPECT_EQ(answer.code, 1) << answer.text;
  EXPECT_TRUE(holds(answer.text, "nothing was verified")) << answer.text;
}

// The stand-in driver computes decode, so that what judges it is tried: caches that the op writes to, refused sequences,
// sequences that are run alone.
TEST_F(Cli, verify_on_a_gpu_judges_caches_status_and_sequences_alone) {
  for (const char* filter : {"dec/bf16/b3_sq1_sk100_h4:2_d64/lens", "dec/bf16/b3_sq4_sk112_h4:2_d64/causal"}) {
    const Answer answer = run(std::string("verify --device cuda --repeat 2 --filter ") + filter, kFakeGpu);
    EXPECT_EQ(answer.code, 0) << answer.text;
    EXPECT_TRUE(holds(answer.text, "0 failed, 0 refused")) << answer.text;
  }
}

TEST_F(Cli, cases_lists_a_suite_with_named_fields) {
  const Answer answer = run("cases --suite peers --json " + file("cases.json"));
  EXPECT_EQ(answer.code, 0) << answer.text;
  const Json list = json("cases.json")["cases"];
  ASSERT_EQ(list.size(), 102U) << "32 + 7 + 5 + 2 shapes forward and backward, 9 + 1 decode";
  EXPECT_EQ(list[0]["name"], "forward/bf16/b32_s512_h32_d64");
  EXPECT_EQ(list[0]["fields"]["seq_k"], 512);
  EXPECT_EQ(list[0]["flops"], 4.0 * 32 * 32 * 512 * 512 * 64);
  EXPECT_EQ(list[0]["tags"][0], "table");
}

TEST_F(Cli, explain_takes_every_option_of_the_contract) {
  for (const char* arguments :
       {"--causal", "--causal top_left --sk 77", "--op backward --dlse --deterministic --alibi",
        "--varlen --sq 9 --sk 30 --causal bottom_right", "--window 5,-1 --align top_left --sk 9",
        "--op decode --sq 1 --sk 500 --page-size 16 --hq 8 --hkv 2", "--softcap 30 --scale 0.1",
        "--op decode --sq 2 --sk 64 --cache-lengths --causal --lse", "--d 192 --dv 128",
        "--op decode --sq 1 --sk 64 --append 1 --rotary 32 --interleaved --leftpad --batch-invariant",
        "--op decode --sq 2 --sk 64 --append 4 --cache-batch-idx --causal",
        "--op decode --sq 1 --sk 64 --e4m3-cache"}) {
    const Answer answer = run(std::string("explain attention --dtype fp16 ") + arguments);
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
}  // namespace tessera::test
