#include "jit/gate.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

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

// ".dim = 64", ".causal = true", ...: the fields of a designated initialiser, each with its value.
std::vector<std::string> fields_of(const CompileRequest& request) {
  const KernelInstance& instance = request.instance;
  std::vector<std::string> fields{request.target.arch, format("min_blocks {}", instance.min_blocks)};
  std::size_t from = instance.config.find('{');
  while (from < instance.config.size()) {
    const std::size_t end = std::min(instance.config.find(',', from + 1), instance.config.size());
    fields.push_back(instance.config.substr(from + 1, end - from - 1));
    from = end;
  }
  return fields;
}

}  // namespace

std::vector<CompileRequest> pairwise(const std::vector<CompileRequest>& requests) {
  std::map<std::string, std::map<std::pair<std::string, std::string>, bool>> covered;  // by kernel
  std::vector<std::vector<bool*>> pairs;
  for (const CompileRequest& request : requests) {
    const std::vector<std::string> fields = fields_of(request);
    auto& of_kernel = covered[request.instance.header + " " + request.instance.entry];
    std::vector<bool*>& own = pairs.emplace_back();
    for (std::size_t i = 0; i < fields.size(); ++i) {
      for (std::size_t j = i + 1; j < fields.size(); ++j) own.push_back(&of_kernel[{fields[i], fields[j]}]);
    }
  }
  // The one with the most pairs that are still missing, until none is.
  std::vector<CompileRequest> kept;
  for (;;) {
    std::size_t best = 0;
    std::ptrdiff_t most = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const std::ptrdiff_t missing = std::count_if(pairs[i].begin(), pairs[i].end(), [](const bool* c) { return !*c; });
      if (missing > most) most = missing, best = i;
    }
    if (most == 0) return kept;
    for (bool* c : pairs[best]) *c = true;
    kept.push_back(requests[best]);
  }
}

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
