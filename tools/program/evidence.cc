#include "program/evidence.h"

#include <algorithm>
#include <bit>

#include "base/format.h"
#include "bench/compare_config.h"
#include "jit/config_text.h"

namespace tessera::tools {
namespace {

jit::KernelInstance instance_of(const CompareConfig& config) {
  return {.name = format("compare_{}", name_of(config.dtype)),
          .header = "bench/compare.cuh",
          .entry = "compare",
          .params = "CompareParams",
          .config = jit::config_text("CompareConfig", config),
          .threads = kCompareThreads,
          .min_blocks = 1};
}

}  // namespace

Result<Evidence> Evidence::begin(verify::Call& call, verify::Device& device, const std::map<std::string, double>& spare,
                                 bool equal_runs_promised, int calls) {
  Evidence evidence(device, equal_runs_promised, calls);
  evidence.differs_.resize(static_cast<std::size_t>(calls));
  for (verify::Buffer* buffer : call.buffers()) {
    if (!buffer->written) continue;
    if (!buffer->before.empty()) {
      return Status(TESSERA_UNSUPPORTED, format("{} is read and written: a second call is another one", buffer->name));
    }
    const auto found = spare.find(buffer->name);
    Output output{buffer, found == spare.end() ? 0 : found->second, {}, {}};
    if (device.is_cpu()) {
      output.first = buffer->storage;
    } else {
      Result<cuda::DeviceBuffer> memory = cuda::DeviceBuffer::make(device.cuda_index(), buffer->storage.size());
      if (!memory.ok()) return memory.status();
      if (Status s = memory->upload(buffer->storage.data(), buffer->storage.size()); !s.ok()) return s;
      output.on_device = std::move(*memory);
      const Result<const cuda::Kernel*> kernel = cuda::load_kernel(device.cuda_index(), instance_of({buffer->dtype()}));
      if (!kernel.ok()) return kernel.status();
      output.kernel = *kernel;
    }
    evidence.outputs_.push_back(std::move(output));
  }
  if (!device.is_cpu()) {
    const std::size_t bytes = static_cast<std::size_t>(calls) * evidence.outputs_.size() * sizeof(CompareTally);
    Result<cuda::DeviceBuffer> tallies = cuda::DeviceBuffer::make(device.cuda_index(), bytes);
    if (!tallies.ok()) return tallies.status();
    if (Status s = tallies->fill_bytes(0); !s.ok()) return s;
    evidence.tallies_ = std::move(*tallies);
  }
  if (Status s = device.poison(call); !s.ok()) return s;
  return evidence;
}

Status Evidence::compare(int n) {
  std::size_t at = static_cast<std::size_t>(n) * outputs_.size();
  for (Output& output : outputs_) {
    verify::Buffer& buffer = *output.buffer;
    if (device_->is_cpu()) {
      judge(n, output, buffer.storage == output.first ? 0 : 1, 0);
      buffer.poison();
      continue;
    }
    const auto elements = static_cast<long long>(buffer.storage.size() / size_of(buffer.dtype()));
    const CompareParams params{buffer.tensor.data, output.on_device.data(), elements,
                               tallies_.as<CompareTally>() + at++};
    const long long ctas = (elements + kCompareThreads - 1) / kCompareThreads;
    const cuda::Grid grid{static_cast<unsigned>(std::min(ctas, 8LL * output.kernel->multiprocessors)), 1, 1};
    if (Status s = cuda::launch(*output.kernel, grid, &params, static_cast<cuda::CUstream>(device_->stream()));
        !s.ok()) {
      return s;
    }
  }
  return {};
}

void Evidence::judge(int n, const Output& output, std::uint64_t differing, double difference) {
  if (differing == 0) return;
  differs_[static_cast<std::size_t>(n)] = true;
  const bool right = !equal_runs_promised_ && difference <= output.spare;
  if (right) {
    if (difference > 0) largest_ = std::max(largest_, difference / output.spare);
  } else if (wrong_.empty()) {
    wrong_ = format("call {}: {} elements of {} differ from a right result by up to {:.3g}, allowed {:.3g}", n + 1,
                    differing, output.buffer->name, difference, output.spare);
  }
}

Status Evidence::finish() {
  if (device_->is_cpu()) return {};
  std::vector<CompareTally> tallies(static_cast<std::size_t>(calls_) * outputs_.size());
  if (Status s = tallies_.download(tallies.data(), tallies.size() * sizeof(CompareTally)); !s.ok()) return s;
  std::size_t at = 0;
  for (int n = 0; n < calls_; ++n) {
    for (const Output& output : outputs_) {
      const CompareTally& tally = tallies[at++];
      judge(n, output, tally.differing, std::bit_cast<float>(tally.largest));
    }
  }
  return {};
}

int Evidence::equal() const { return static_cast<int>(std::count(differs_.begin(), differs_.end(), false)); }

}  // namespace tessera::tools
