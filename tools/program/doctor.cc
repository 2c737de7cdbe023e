// `tessera doctor`: what this machine has, what is missing, and what will be used.
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "attention/cpu/run.h"
#include "base/arch.h"
#include "base/format.h"
#include "cuda/code_arch.h"
#include "cuda/device.h"
#include "engine/plan.h"
#include "engine/tuned.h"
#include "engine/tuning_table.h"
#include "jit/cache.h"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "program/commands.h"
#include "program/console.h"
#include "program/tuning.h"
#include "tessera/tessera.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void line(const char* what, const std::string& text) { print("  {:<10}{}\n", what, text); }

std::string good(const std::string& text) { return paint(Style::kGood, "ok") + "  " + text; }
std::string missing(const std::string& text) { return paint(Style::kWarn, "--") + "  " + text; }
std::string more(const std::string& text) { return "    " + paint(Style::kDim, text); }

Json report_cpu() {
  const int threads = tessera_num_threads();
  const std::string model = cpu_model();
  const std::string isa = cpu::isa_name();
  line("cpu", good(format("{}, {}, {} thread{}", model, isa, threads, threads == 1 ? "" : "s")));
  return {{"model", model}, {"isa", isa}, {"threads", threads}};
}

// Compute capability below 7.5 is older than any kernel.
bool is_served(const cuda::DeviceInfo& d) { return d.major * 10 + d.minor >= 75; }

// Hopper is what the kernels are verified and timed on; of the others it is known that their code compiles.
std::string word_about(const cuda::DeviceInfo& d) {
  const Result<cuda::CodeArch> code = cuda::code_arch_of(d);
  if (!code.ok()) return code.status().message();
  if (code->own && code->target.ptx) {
    const bool known = limits_of(code->compute).arch != 0;
    return format(
        "{}: it runs portable code, the PTX of {}, on which nothing has been verified or tuned",
        known ? "the compiler does not know this architecture" : "no architecture of this name is known to Tessera",
        code->target.arch);
  }
  if (d.major == 9 && d.minor == 0) return "";
  return format(
      "code for {} is compiled by every release's tests, but has not run on such a GPU; "
      "`tessera verify --device cuda:{}` checks it here",
      cuda::arch_of(d), d.index);
}

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
    const std::string text = format(
        "cuda:{} {}, {}, {} SMs, {}, driver for CUDA {}.{}", d.index, d.name, cuda::arch_of(d), d.multiprocessors,
        bytes_text(static_cast<double>(d.memory_bytes)), d.driver_version / 1000, d.driver_version % 1000 / 10);
    line(d.index == 0 ? "cuda" : "", is_served(d) ? good(text) : missing(text + ": older than sm_75"));
    const std::string word = is_served(d) ? word_about(d) : "";
    if (!word.empty()) line("", more(word));
    if (is_served(d)) usable->push_back(d);
    json["devices"].push_back({{"index", d.index},
                               {"name", d.name},
                               {"arch", cuda::arch_of(d)},
                               {"note", word},
                               {"multiprocessors", d.multiprocessors},
                               {"memory_bytes", d.memory_bytes},
                               {"driver_version", d.driver_version}});
  }
  return json;
}

// The compiler, and if it is not the one for PTX too, that one.
Json report_nvrtc(bool* usable) {
  const jit::NvrtcSearch search = jit::nvrtc_search();
  const Result<jit::NvrtcInfo>& info = search.info;
  *usable = info.ok() && info->fits;
  Json json{{"found", info.ok()}, {"driver_version", search.driver_version}};
  if (info.ok()) {
    const std::string text = format("{}.{}, {} ({}), build {}", info->major, info->minor, info->path, info->reason,
                                    info->build.substr(0, 12));
    line("nvrtc", info->fits ? good(text) : missing(text));
    if (!info->fits) line("", more(info->note));
    json["version"] = format("{}.{}", info->major, info->minor);
    json["path"] = info->path;
    json["reason"] = info->reason;
    json["build"] = info->build;
    json["fits"] = info->fits;
    json["note"] = info->note;
  } else {
    line("nvrtc", missing("not found; looked for"));
  }
  for (const jit::NvrtcPlace& place : search.places) {
    if (!info.ok() || place.outcome.rfind("passed over", 0) == 0) {
      line("", more(format("{} ({}): {}", place.path, place.reason, place.outcome)));
    }
    json["places"].push_back({{"path", place.path},
                              {"reason", place.reason},
                              {"exists", place.exists},
                              {"version", place.version},
                              {"used", place.used},
                              {"outcome", place.outcome}});
  }
  const Result<jit::NvrtcInfo> ptx = jit::nvrtc_info(true);
  if (info.ok() && ptx.ok() && (ptx->path != info->path || ptx->fits != info->fits)) {
    line("", more(ptx->fits ? format("for PTX: {}.{}, {}", ptx->major, ptx->minor, ptx->path)
                            : format("for PTX: {}", ptx->note)));
    json["ptx"] = {{"version", format("{}.{}", ptx->major, ptx->minor)}, {"path", ptx->path}, {"fits", ptx->fits}};
  }
  if (const jit::KernelSources& sources = jit::kernel_sources(); !sources.folder.empty()) {
    const std::string text = format("kernels come from {} (TESSERA_KERNEL_SOURCES)", sources.folder);
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
    line("cache", good(format("{}, {} {}, {}", state.directory, entries, entries == 1 ? "entry" : "entries",
                              bytes_text(static_cast<double>(bytes)))));
  } else {
    line("cache", missing(format("{}: {}", state.directory.empty() ? "no folder" : state.directory,
                                 state.readable ? "can be read but not written" : "not used")));
    line("", more(state.reason));
  }
  return {{"directory", state.directory}, {"readable", state.readable}, {"writable", state.writable},
          {"reason", state.reason},       {"entries", entries},         {"bytes", bytes}};
}

Json report_tuning() {
  const std::string file = engine::tuning_table_file();
  Json json{{"file", file}, {"off", engine::tuning_forbidden()}, {"entries", 0}};
  if (file.empty() || access(file.c_str(), F_OK) != 0) {
    line("tuning", more("nothing has been tuned: see `tessera tune --help`"));
    return json;
  }
  const Result<engine::TuningTable> table = engine::TuningTable::open(file, engine::TuningTable::Access::kRead);
  const Result<std::vector<engine::TuningEntry>> entries = table.ok() ? table->entries() : table.status();
  if (!entries.ok()) {
    line("tuning", missing(format("{}: not used", file)));
    line("", more(entries.status().message()));
    json["reason"] = entries.status().message();
    return json;
  }
  const std::set<std::string> sources = current_sources();
  const auto current = std::count_if(entries->begin(), entries->end(),
                                     [&](const engine::TuningEntry& e) { return sources.count(e.source) > 0; });
  json["entries"] = entries->size();
  json["of_these_kernels"] = current;
  line("tuning", good(format("{}, {} {}, {} of these kernels", file, entries->size(),
                             entries->size() == 1 ? "entry" : "entries", current)));
  if (engine::tuning_forbidden()) line("", paint(Style::kWarn, "TESSERA_NO_TUNING is set: plans do not read it"));
  return json;
}

// The ops that a device's kernels serve, of the cases that are tried first, in a type that every device has.
std::vector<std::string> ops_served(const engine::Device& device) {
  std::vector<std::string> ops;
  for (const auto& c : verify::suite("quick")) {
    if (c->dtype() != DType::kFloat16 || std::find(ops.begin(), ops.end(), c->op()) != ops.end()) continue;
    if (!c->explain(device).options.empty()) ops.push_back(c->op());
  }
  return ops;
}

int run(const std::string& json_file) {
  print("{}\n", paint(Style::kBold, format("tessera {}", tessera_version())));
  Json json{{"version", tessera_version()}};
  bool nvrtc = false;
  std::vector<cuda::DeviceInfo> gpus;
  json["cpu"] = report_cpu();
  json["cuda"] = report_cuda(&gpus);
  json["nvrtc"] = report_nvrtc(&nvrtc);
  json["cache"] = report_cache();
  json["tuning"] = report_tuning();

  std::string verdict = format("{} run on the CPU", join(ops_served(engine::cpu_device(tessera_num_threads())), ", "));
  std::vector<std::string> on_gpu;
  if (gpus.empty()) {
    verdict += "; there is no GPU to use";
  } else if (!nvrtc) {
    verdict += "; there is a GPU, but no NVRTC whose kernels it can load";
  } else {
    const Result<engine::Device> device = engine::device_at({TESSERA_CUDA, gpus.front().index});
    if (device.ok()) on_gpu = ops_served(*device);
    verdict += format("; {} also on cuda:{} ({})", on_gpu.empty() ? "none" : join(on_gpu, ", "), gpus.front().index,
                      gpus.front().name);
  }
  print("\n{}.\n", verdict);
  json["verdict"] = verdict;
  json["gpu_serves"] = on_gpu;
  return write_json(json_file, json);
}

}  // namespace

Command add_doctor(App parent) {
  auto json = std::make_shared<std::string>();
  const App app = parent.add_subcommand("doctor", "Show what this machine has and what will be used");
  app.add_option("--json", *json, "Write the findings to this file").output_file();
  app.footer(
      "A machine without a GPU or without NVRTC is no failure: doctor says what that leaves, and exits with 0.\n\n"
      "Examples:\n"
      "  tessera doctor\n"
      "  TESSERA_CACHE_DIR=/tmp/kernels tessera doctor --json doctor.json");
  return {app, [json] { return run(*json); }};
}

}  // namespace tessera::tools
