#include "jit/gate.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "base/arch.h"
#include "base/format.h"
#include "jit/nvrtc.h"

namespace tessera::jit {
namespace {

int arch_number(const std::string& arch) { return arch.rfind("sm_", 0) == 0 ? std::atoi(arch.c_str() + 3) : 0; }

GateRow judge(const CompileRequest& request, bool use_cache) {
  GateRow row;
  row.kernel = request.instance.name;
  row.config = request.instance.config;
  row.arch = request.target.arch;
  row.dynamic_smem_bytes = request.instance.dynamic_smem_bytes;
  Result<Found> found = Status();
  if (use_cache) {
    found = get(request);
  } else if (auto image = compile(request); image.ok()) {
    found = Found{*image, Origin::kCompiled};
  } else {
    found = image.status();
  }
  if (!found.ok()) {
    row.failure = found.status().message();
    return row;
  }
  row.resources = found->image->resources;
  row.origin = found->origin;
  if (row.origin == Origin::kCompiled) row.seconds = found->image->compile_seconds;
  if (!request.target.ptx) row.failure = refusal(row.resources, row.dynamic_smem_bytes, row.arch);
  return row;
}

}  // namespace

std::string refusal(const Resources& r, int dynamic_smem_bytes, const std::string& arch) {
  const ArchLimits limits = limits_of(arch_number(arch));
  if (limits.arch == 0) return format("the limits of {} are not known", arch);
  std::vector<std::string> reasons;
  if (r.registers < 0 || r.spill_store_bytes < 0) reasons.emplace_back("ptxas printed no report");
  if (r.spill_store_bytes > 0 || r.spill_load_bytes > 0) {
    reasons.push_back(format("spills {} bytes out and {} in", r.spill_store_bytes, r.spill_load_bytes));
  }
  if (const int smem = r.static_smem_bytes + dynamic_smem_bytes; smem > limits.shared_memory_per_block) {
    reasons.push_back(format("{} bytes of shared memory, {} allows {}", smem, arch, limits.shared_memory_per_block));
  }
  if (r.wgmma_serialized) reasons.emplace_back("ptxas serialised wgmma");
  return join(reasons, "; ");
}

int GateReport::failures() const {
  return static_cast<int>(std::count_if(rows.begin(), rows.end(), [](const GateRow& row) { return !row.passed(); }));
}

Result<GateReport> run_gate(const std::vector<CompileRequest>& requests, const GateOptions& options) try {
  if (const auto compiler = nvrtc_info(); !compiler.ok()) return compiler.status();
  const auto start = std::chrono::steady_clock::now();
  GateReport report;
  report.rows.resize(requests.size());
  std::atomic<std::size_t> next{0};
  std::mutex progress_mutex;
  int done = 0;
  const auto work = [&] {
    for (std::size_t i = next.fetch_add(1); i < requests.size(); i = next.fetch_add(1)) {
      try {
        report.rows[i] = judge(requests[i], options.use_cache);
      } catch (const std::bad_alloc&) {
        report.rows[i].failure = "out of memory";  // short enough to need no allocation
      }
      const std::lock_guard lock(progress_mutex);
      ++done;
      if (options.progress) options.progress(report.rows[i], done, static_cast<int>(requests.size()));
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < std::min<int>(options.threads, static_cast<int>(requests.size())); ++t) {
    try {
      helpers.emplace_back(work);
    } catch (const std::exception&) {
      break;  // out of threads or memory: fewer threads do the same work
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
} catch (const std::bad_alloc&) {
  return Status(TESSERA_OUT_OF_MEMORY, "out of host memory in the compile gate");
}

}  // namespace tessera::jit
