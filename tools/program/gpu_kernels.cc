#include "program/gpu_kernels.h"

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <optional>

#include "base/format.h"
#include "bench/mma_peak_config.h"
#include "cuda/code_arch.h"
#include "cuda/kernel.h"
#include "cuda/memory.h"
#include "jit/config_text.h"
#include "jit/jit.h"
#include "verify/family.h"

namespace tessera::tools {
namespace {

using cuda::DeviceBuffer;

// A temporary cache folder, so that the user's entries do not change the figures.
class ScratchCache {
 public:
  ScratchCache() {
    if (const char* was = getenv("TESSERA_CACHE_DIR"); was != nullptr) former_ = was;
    std::error_code error;
    std::string path = (std::filesystem::temp_directory_path(error) / "tessera-bench-XXXXXX").string();
    if (error || mkdtemp(path.data()) == nullptr) return;
    path_ = path;
    setenv("TESSERA_CACHE_DIR", path_.c_str(), 1);
  }
  ~ScratchCache() {
    if (path_.empty()) return;
    if (former_) {
      setenv("TESSERA_CACHE_DIR", former_->c_str(), 1);
    } else {
      unsetenv("TESSERA_CACHE_DIR");
    }
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchCache(const ScratchCache&) = delete;
  ScratchCache& operator=(const ScratchCache&) = delete;

 private:
  std::optional<std::string> former_;
  std::string path_;
};

Result<FirstUse> measure_first_use(int device, const jit::Target& target, const jit::KernelInstance& instance) {
  using Clock = std::chrono::steady_clock;
  FirstUse use;
  use.instance = instance.name;
  auto begin = Clock::now();
  const Result<jit::Found> compiled = jit::get(instance, target);
  if (!compiled.ok()) return compiled.status();
  use.compile = std::chrono::duration<double>(Clock::now() - begin).count();
  jit::clear_memory_cache();
  begin = Clock::now();
  const Result<jit::Found> found = jit::get(instance, target);
  if (!found.ok()) return found.status();
  use.from_disk = std::chrono::duration<double>(Clock::now() - begin).count();
  const Result<const cuda::Kernel*> kernel = cuda::load_kernel(device, instance);
  if (!kernel.ok()) return kernel.status();
  use.load = (*kernel)->load_seconds;
  return use;
}

Result<double> measure_copy(verify::Device& device, double min_time) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;  // far past the L2 of any GPU
  Result<DeviceBuffer> from = DeviceBuffer::make(device.cuda_index(), kBytes);
  if (!from.ok()) return from.status();
  Result<DeviceBuffer> to = DeviceBuffer::make(device.cuda_index(), kBytes);
  if (!to.ok()) return to.status();
  if (Status s = from->fill_bytes(1); !s.ok()) return s;
  const Result<const cuda::Driver*> driver = cuda::driver();
  if (!driver.ok()) return driver.status();
  const Result<cuda::ContextScope> scope = cuda::ContextScope::enter(device.cuda_index());
  if (!scope.ok()) return scope.status();
  const auto address = [](const DeviceBuffer& b) { return reinterpret_cast<cuda::CUdeviceptr>(b.data()); };
  Result<std::vector<double>> samples = device.time(min_time, [&](void* stream) {
    return cuda::status_of(
        **driver, (*driver)->copy_on_device(address(*to), address(*from), kBytes, static_cast<cuda::CUstream>(stream)),
        "cuMemcpyDtoDAsync");
  });
  if (!samples.ok()) return samples.status();
  return 2.0 * kBytes / summarise(*samples).median;
}

jit::KernelInstance instance_of(const MmaPeakConfig& config) {
  return {.name = format("mma_peak_{}", name_of(config.dtype)),
          .header = "bench/mma_peak.cuh",
          .entry = "mma_peak",
          .params = "MmaPeakParams",
          .config = jit::config_text("MmaPeakConfig", config),
          .threads = kMmaPeakThreads,
          .min_blocks = 2};
}

jit::KernelInstance wgmma_instance_of(const MmaPeakConfig& config) {
  return {.name = format("wgmma_peak_{}", name_of(config.dtype)),
          .header = "bench/wgmma_peak.cuh",
          .entry = "wgmma_peak",
          .params = "MmaPeakParams",
          .config = jit::config_text("MmaPeakConfig", config),
          .threads = kWgmmaPeakThreads,
          .min_blocks = 1,
          .dynamic_smem_bytes = kWgmmaPeakSharedBytes};
}

}  // namespace

Timing summarise(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double part) {
    return samples[static_cast<std::size_t>(std::lround(part * static_cast<double>(samples.size() - 1)))];
  };
  return {at(0.5), at(0.95), at(0.99), (at(0.95) - at(0.05)) / at(0.5), static_cast<int>(samples.size())};
}

Result<Unit> measure_peak(verify::Device& device, bool wgmma, DType dtype, double min_time) {
  const Result<cuda::DeviceInfo> info = cuda::device(device.cuda_index());
  if (!info.ok()) return info.status();
  const MmaPeakConfig config{dtype};
  const Result<const cuda::Kernel*> kernel =
      cuda::load_kernel(device.cuda_index(), wgmma ? wgmma_instance_of(config) : instance_of(config));
  if (!kernel.ok()) return kernel.status();
  const Result<DeviceBuffer> out = DeviceBuffer::make(device.cuda_index(), sizeof(float));
  if (!out.ok()) return out.status();
  const MmaPeakParams params{out->as<float>(), wgmma ? 1500 : 20000, 12345};  // milliseconds each
  const cuda::Grid grid{static_cast<unsigned>(4 * info->multiprocessors), 1, 1};
  const Result<std::vector<double>> samples = device.time(min_time, [&](void* stream) {
    return cuda::launch(**kernel, grid, &params, static_cast<cuda::CUstream>(stream));
  });
  if (!samples.ok()) return samples.status();
  const double flops = (wgmma ? kWgmmaPeakFlops : kMmaPeakFlops) * params.iterations * grid.x;
  return Unit{format("{} {}", wgmma ? "wgmma" : "mma.sync", name_of(dtype)), flops / summarise(*samples).median};
}

Result<KernelBench> bench_gpu_kernels(verify::Device& device, const std::string& filter, double min_time,
                                      bool first_use, bool progress) {
  const ScratchCache cache;
  KernelBench out;
  const Result<cuda::DeviceInfo> info = cuda::device(device.cuda_index());
  if (!info.ok()) return info.status();
  const Result<cuda::CUcontext> context = cuda::primary_context(device.cuda_index());
  if (!context.ok()) return context.status();
  const Result<cuda::CodeArch> arch = cuda::code_arch_of(*info);
  if (!arch.ok()) return arch.status();
  const cuda::CodeArch& code = *arch;
  for (const jit::KernelInstance& instance :
       first_use ? verify::gate_instances(code.target.arch) : std::vector<jit::KernelInstance>()) {
    if (instance.name.find(filter) == std::string::npos) continue;
    Result<FirstUse> use = measure_first_use(device.cuda_index(), code.target, instance);
    if (!use.ok()) return use.status();
    out.first_use.push_back(std::move(*use));
  }

  Result<double> copy = measure_copy(device, min_time);
  if (!copy.ok()) return copy.status();
  out.copy_bandwidth = *copy;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    if (dtype == DType::kBFloat16 && code.compute < 80) continue;
    for (const bool wgmma : {false, true}) {
      if (wgmma && !code.specific) continue;
      Result<Unit> unit = measure_peak(device, wgmma, dtype, min_time);
      if (!unit.ok()) return unit.status();
      out.units.push_back(std::move(*unit));
    }
  }

  std::vector<verify::StepCase> steps;
  for (const verify::Family* family : verify::families()) {
    for (verify::StepCase& step : family->steps()) {
      if (step.name.find(filter) != std::string::npos) steps.push_back(std::move(step));
    }
  }
  Progress bar("kernels", steps.size(), progress);
  for (const verify::StepCase& step : steps) {
    bar.step(step.name);
    const Result<verify::StepRun> run = step.make(device.cuda_index());
    if (!run.ok()) return run.status();
    Result<std::vector<double>> samples = device.time(min_time, run->call);
    if (!samples.ok()) return samples.status();
    const Timing timing = summarise(std::move(*samples));
    out.rows.push_back({step.name, run->instance, timing, run->bytes / timing.median});
  }
  return out;
}

void print_bench(const KernelBench& bench) {
  using Align = Table::Align;
  if (!bench.rows.empty()) {
    Table table(
        {{"kernel", Align::kLeft}, {"instance", Align::kLeft}, {"median"}, {"p95"}, {"spread"}, {"GB/s"}, {"of copy"}});
    for (const KernelRow& row : bench.rows) {
      table.add({row.name, row.instance, seconds_text(row.timing.median), seconds_text(row.timing.p95),
                 format("{:.0f}%", 100 * row.timing.spread), format("{:.0f}", row.bytes / 1e9),
                 format("{:.0f}%", 100 * row.bytes / bench.copy_bandwidth)});
    }
    print("\n{}\n", paint(Style::kBold, "kernels that serve others"));
    table.print();
  }
  if (!bench.first_use.empty()) {
    Table table({{"kernel", Align::kLeft}, {"compile"}, {"load"}, {"first use"}, {"from disk"}, {"cached use"}});
    for (const FirstUse& use : bench.first_use) {
      table.add({use.instance, seconds_text(use.compile), seconds_text(use.load), seconds_text(use.compile + use.load),
                 seconds_text(use.from_disk), seconds_text(use.from_disk + use.load)});
    }
    print("\n{}\n", paint(Style::kBold, "first use of a kernel"));
    table.print();
  }
}

Json json_of(const KernelBench& bench) {
  Json json{{"copy_bytes_per_s", bench.copy_bandwidth}, {"rows", Json::array()}, {"first_use", Json::array()}};
  for (const KernelRow& row : bench.rows) {
    json["rows"].push_back({{"name", row.name},
                            {"instance", row.instance},
                            {"median_s", row.timing.median},
                            {"p95_s", row.timing.p95},
                            {"spread", row.timing.spread},
                            {"bytes_per_s", row.bytes},
                            {"part_of_copy", row.bytes / bench.copy_bandwidth}});
  }
  for (const FirstUse& use : bench.first_use) {
    json["first_use"].push_back(
        {{"instance", use.instance}, {"compile_s", use.compile}, {"from_disk_s", use.from_disk}, {"load_s", use.load}});
  }
  return json;
}

}  // namespace tessera::tools
