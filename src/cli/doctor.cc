// `tessera doctor`: what is on this machine, what is missing, and what will be used.
#include <fmt/format.h>

#include <fstream>
#include <memory>

#include "cli/commands.h"
#include "cli/console.h"
#include "cpu/attention.h"
#include "jit/cache.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "tessera/tessera.h"

namespace tessera::cli {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void line(const char* what, const std::string& text) { fmt::print("  {:<10}{}\n", what, text); }

std::string good(const std::string& text) { return paint(Style::kGood, "ok") + "  " + text; }
std::string missing(const std::string& text) { return paint(Style::kWarn, "--") + "  " + text; }
std::string more(const std::string& text) { return "    " + paint(Style::kDim, text); }

Json report_cpu() {
  const int threads = tessera_num_threads();
  const std::string model = cpu_model();
  const std::string isa = cpu::isa_name();
  line("cpu", good(fmt::format("{}, {}, {} thread{}", model, isa, threads, threads == 1 ? "" : "s")));
  return {{"model", model}, {"isa", isa}, {"threads", threads}};
}

Json report_nvrtc(bool* there) {
  const Result<jit::NvrtcInfo> info = jit::nvrtc_info();
  *there = info.ok();
  Json json{{"found", info.ok()}};
  if (info.ok()) {
    line("nvrtc", good(fmt::format("{}.{}, {} ({})", info->major, info->minor, info->path, info->reason)));
    json["version"] = fmt::format("{}.{}", info->major, info->minor);
    json["path"] = info->path;
    json["reason"] = info->reason;
  } else {
    line("nvrtc", missing("not found; looked for"));
  }
  for (const jit::NvrtcPlace& place : jit::nvrtc_places()) {
    if (!info.ok())
      line("", more(fmt::format("{} ({}{})", place.path, place.reason, place.exists ? "" : ", not there")));
    json["places"].push_back({{"path", place.path}, {"reason", place.reason}, {"exists", place.exists}});
  }
  if (jit::compiling_forbidden()) {
    line("", paint(Style::kWarn, "TESSERA_NO_COMPILE is set: kernels come from the cache only"));
    json["compiling_forbidden"] = true;
  }
  return json;
}

Json report_cache() {
  const jit::DiskCache cache = jit::DiskCache::from_environment();
  const jit::CacheState state = cache.state();
  std::uint64_t bytes = 0;
  std::size_t entries = 0;
  if (state.readable) {
    for (const jit::CacheEntry& entry : cache.list()) {
      bytes += entry.bytes;
      ++entries;
    }
  }
  if (state.readable && state.writable) {
    line("cache", good(fmt::format("{}, {} {}, {}", state.directory, entries, entries == 1 ? "entry" : "entries",
                                   bytes_text(static_cast<double>(bytes)))));
  } else {
    line("cache", missing(fmt::format("{}: {}", state.directory.empty() ? "no folder" : state.directory,
                                      state.readable ? "can be read but not written" : "not used")));
    line("", more(state.reason));
  }
  return {{"directory", state.directory}, {"readable", state.readable}, {"writable", state.writable},
          {"reason", state.reason},       {"entries", entries},         {"bytes", bytes}};
}

int run(const std::string& json_file) {
  fmt::print("{}\n", paint(Style::kBold, fmt::format("tessera {}", tessera_version())));
  Json json{{"version", tessera_version()}};
  bool nvrtc = false;
  json["cpu"] = report_cpu();
  json["nvrtc"] = report_nvrtc(&nvrtc);
  json["cache"] = report_cache();
  const std::string verdict = "attention runs on the CPU by default";
  fmt::print("\n{}\n", verdict);
  json["verdict"] = verdict;
  json["default_device"] = "cpu";
  return write_json(json_file, json);
}

}  // namespace

Command add_doctor(CLI::App& parent) {
  auto json = std::make_shared<std::string>();
  CLI::App* app = parent.add_subcommand("doctor", "Show what this machine has and what will be used");
  app->add_option("--json", *json, "Write the findings to this file")->type_name("FILE");
  app->footer(
      "A machine without a GPU or without NVRTC is no failure: doctor says what that leaves, and exits with 0.\n\n"
      "Examples:\n"
      "  tessera doctor\n"
      "  TESSERA_CACHE_DIR=/tmp/kernels tessera doctor --json doctor.json");
  return {app, [json] { return run(*json); }};
}

}  // namespace tessera::cli
