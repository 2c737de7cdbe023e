// `tessera doctor`: what is on this machine, what is missing, and what will be used.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/console.h"
#include "cpu/attention.h"
#include "cuda/device.h"
#include "jit/cache.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "ops/format.h"
#include "select/attention.h"
#include "tessera/tessera.h"
#include "tune/tuned.h"

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

// Compute capability below 7.5 is older than any kernel.
bool is_served(const cuda::DeviceInfo& d) { return d.major * 10 + d.minor >= 75; }

Json report_cuda(std::vector<cuda::DeviceInfo>* usable) {
  const Result<std::vector<cuda::DeviceInfo>> found = cuda::devices();
  Json json{{"devices", Json::array()}};
  if (!found.ok() || found->empty()) {
    const std::string reason = found.ok() ? "the driver knows no device" : found.status().message();
    line("cuda", missing(reason));
    json["reason"] = reason;
    return json;
  }
  for (const cuda::DeviceInfo& d : *found) {
    const std::string text = fmt::format(
        "cuda:{} {}, {}, {} SMs, {}, driver for CUDA {}.{}", d.index, d.name, cuda::arch_of(d), d.multiprocessors,
        bytes_text(static_cast<double>(d.memory_bytes)), d.driver_version / 1000, d.driver_version % 1000 / 10);
    line(d.index == 0 ? "cuda" : "", is_served(d) ? good(text) : missing(text + ": older than sm_75"));
    if (is_served(d)) usable->push_back(d);
    json["devices"].push_back({{"index", d.index},
                               {"name", d.name},
                               {"arch", cuda::arch_of(d)},
                               {"multiprocessors", d.multiprocessors},
                               {"memory_bytes", d.memory_bytes},
                               {"driver_version", d.driver_version}});
  }
  return json;
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
  if (const jit::KernelSources& sources = jit::kernel_sources(); !sources.folder.empty()) {
    const std::string text = fmt::format("kernels come from {} (TESSERA_KERNEL_SOURCES)", sources.folder);
    line("", paint(Style::kWarn, sources.status.ok() ? text : sources.status.message()));
    json["kernel_sources"] = sources.folder;
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

Json report_tuning() {
  const std::string file = tune::table_file();
  Json json{{"file", file}, {"off", tune::tuning_forbidden()}, {"entries", 0}};
  if (file.empty() || access(file.c_str(), F_OK) != 0) {
    line("tuning", more("nothing was tuned: `tessera tune attention` does"));
    return json;
  }
  const Result<tune::Table> table = tune::Table::open(file, tune::Table::Access::kRead);
  const Result<std::vector<tune::Entry>> entries = table.ok() ? table->entries() : table.status();
  if (!entries.ok()) {
    line("tuning", missing(fmt::format("{}: not used", file)));
    line("", more(entries.status().message()));
    json["reason"] = entries.status().message();
    return json;
  }
  const auto current = std::count_if(entries->begin(), entries->end(),
                                     [](const tune::Entry& e) { return e.source == tune::source_hash(); });
  json["entries"] = entries->size();
  json["of_these_kernels"] = current;
  line("tuning", good(fmt::format("{}, {} {}, {} of these kernels", file, entries->size(),
                                  entries->size() == 1 ? "entry" : "entries", current)));
  if (tune::tuning_forbidden()) line("", paint(Style::kWarn, "TESSERA_NO_TUNING is set: plans do not read it"));
  return json;
}

// The ops that a GPU's kernels serve, asked for the most usual problem there is, in the type that every GPU has.
std::vector<std::string> ops_served(const cuda::DeviceInfo& gpu) {
  std::vector<std::string> ops;
  const Result<select::Device> device = select::cuda_device(cuda::arch_of(gpu));
  if (!device.ok()) return ops;
  for (const auto& [op, name] : {std::pair{AttentionOp::kForward, "forward"},
                                 {AttentionOp::kBackward, "backward"},
                                 {AttentionOp::kDecode, "decode"}}) {
    AttentionProblem p;
    p.op = op;
    p.dtype = DType::kFloat16;
    p.batch = 1;
    p.seq_q = p.seq_k = 2048;
    p.heads_q = p.heads_kv = 16;
    p.dim_qk = p.dim_v = 128;
    p.scale = 1;
    if (!select::select_attention(p, *device).candidates.empty()) ops.emplace_back(name);
  }
  return ops;
}

int run(const std::string& json_file) {
  fmt::print("{}\n", paint(Style::kBold, fmt::format("tessera {}", tessera_version())));
  Json json{{"version", tessera_version()}};
  bool nvrtc = false;
  std::vector<cuda::DeviceInfo> gpus;
  json["cpu"] = report_cpu();
  json["cuda"] = report_cuda(&gpus);
  json["nvrtc"] = report_nvrtc(&nvrtc);
  json["cache"] = report_cache();
  json["tuning"] = report_tuning();

  std::string verdict = "forward, backward and decode run on the CPU";
  std::vector<std::string> on_gpu;
  if (gpus.empty()) {
    verdict += "; there is no GPU to use";
  } else if (!nvrtc) {
    verdict += "; a GPU is here, but no NVRTC to compile its kernels with";
  } else {
    on_gpu = ops_served(gpus.front());
    verdict += fmt::format(", {} also on cuda:{} ({})", on_gpu.empty() ? "none" : join(on_gpu, " and "),
                           gpus.front().index, gpus.front().name);
  }
  fmt::print("\n{}.\n", verdict);
  json["verdict"] = verdict;
  json["gpu_serves"] = on_gpu;
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
