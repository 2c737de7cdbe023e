#include "verify/device.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>

#include "attention/cpu/run.h"
#include "base/format.h"
#include "cuda/code_arch.h"
#include "cuda/memory.h"
#include "tessera/tessera.h"

namespace tessera::verify {
namespace {

constexpr std::size_t kMinSamples = 5;

// Fills what the op writes with NaN.
void poison_outputs(Call& call) {
  for (Buffer* b : call.buffers()) {
    if (b->written) b->poison();
  }
}

class CpuDevice final : public Device {
 public:
  std::string name() const override {
    const int threads = tessera_num_threads();
    return format("cpu ({}, {} thread{})", cpu::isa_name(), threads, threads == 1 ? "" : "s");
  }
  engine::Device as_selected() const override { return engine::cpu_device(tessera_num_threads()); }
  Status upload(Call&) override { return {}; }
  Status poison(Call& call) override {
    poison_outputs(call);
    return {};
  }
  Status fetch(Call&) override { return {}; }
  Status download(Call&) override { return {}; }

  Result<void*> workspace(std::size_t bytes) override {
    if (bytes <= size_) return memory_.get();
    const std::size_t rounded = (bytes + 255) / 256 * 256;
    memory_.reset(std::aligned_alloc(256, rounded));
    size_ = memory_ == nullptr ? 0 : rounded;
    if (memory_ == nullptr) return Status(TESSERA_OUT_OF_MEMORY, format("no memory for {} B of scratch", bytes));
    return memory_.get();
  }

  Result<std::vector<double>> time(double min_time, const std::function<Status(void*)>& call) override {
    if (Status s = call(nullptr); !s.ok()) return s;  // pages touched, caches and branch predictors warmed
    std::vector<double> samples;
    for (double total = 0; samples.size() < kMinSamples || total < min_time; total += samples.back()) {
      const auto begin = std::chrono::steady_clock::now();
      if (Status s = call(nullptr); !s.ok()) return s;
      samples.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return samples;
  }

  Result<std::vector<double>> time_single(int calls, const std::function<Status(void*)>& call,
                                          const std::function<Status(int)>& then) override {
    std::vector<double> samples;
    for (int n = 0; n < calls; ++n) {
      const auto begin = std::chrono::steady_clock::now();
      if (Status s = call(nullptr); !s.ok()) return s;
      samples.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      if (Status s = then(n); !s.ok()) return s;
    }
    return samples;
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

class CudaDevice final : public Device {
 public:
  // selected: engine::device_at's of this GPU, with the code that it is to run.
  CudaDevice(cuda::DeviceInfo info, const cuda::CodeArch& code, engine::Device selected, cuda::Stream stream)
      : info_(std::move(info)), code_(code), selected_(std::move(selected)), stream_(std::move(stream)) {
    const std::string own = cuda::arch_of(info_);
    name_ = format("cuda:{} ({}, {}", info_.index, info_.name, own);
    name_ += code.target.arch != own ? format(", as {})", code.target.arch) : ")";
    selected_.name = code.target.arch;
  }

  std::string name() const override { return name_; }
  engine::Device as_selected() const override { return selected_; }
  int cuda_index() const override { return info_.index; }
  void* stream() const override { return stream_.get(); }
  void use() const override { cuda::set_code_arch(code_); }

  void keep_memory() override { keeps_ = true; }

  Status upload(Call& call) override {
    let_go();
    for (Buffer* b : call.buffers()) {
      Result<cuda::DeviceBuffer> memory = allocate(b->storage.size());
      if (!memory.ok()) return memory.status();
      if (Status s = memory->upload(b->storage.data(), b->storage.size()); !s.ok()) return s;
      b->tensor.data = memory->data();
      b->tensor.device = {TESSERA_CUDA, info_.index};
      held_.emplace(b, std::move(*memory));
    }
    return {};
  }

  Status poison(Call& call) override {
    poison_outputs(call);
    for (Buffer* b : call.buffers()) {
      const auto at = held_.find(b);
      if (at == held_.end() || !b->written) continue;
      if (Status s = at->second.upload(b->storage.data(), b->storage.size()); !s.ok()) return s;
    }
    return {};
  }

  Status fetch(Call& call) override {
    if (Status s = stream_.synchronize(); !s.ok()) return s;
    for (Buffer* b : call.buffers()) {
      const auto at = held_.find(b);
      if (at == held_.end() || !b->written) continue;
      if (Status s = at->second.download(b->storage.data(), b->storage.size()); !s.ok()) return s;
    }
    return {};
  }

  Status download(Call& call) override {
    if (Status s = stream_.synchronize(); !s.ok()) return s;
    for (Buffer* b : call.buffers()) {
      const auto at = held_.find(b);
      if (at == held_.end()) continue;
      if (Status s = at->second.download(b->storage.data(), b->storage.size()); !s.ok()) return s;
      b->tensor.data = b->storage.data();
      b->tensor.device = {TESSERA_CPU, 0};
    }
    let_go();
    return {};
  }

  Result<void*> workspace(std::size_t bytes) override {
    if (bytes > scratch_.bytes()) {
      Result<cuda::DeviceBuffer> memory = cuda::DeviceBuffer::make(info_.index, bytes / 4 * 4 + 4);
      if (!memory.ok()) return memory.status();
      scratch_ = std::move(*memory);
    }
    // Poisoned, so that sums and counters that are not zeroed first are noticed: NaN in every type, and as an integer large
    // (-1 would be 0 after the first step).
    constexpr unsigned kPoison = 0x7fffffff;
    if (bytes > 0) {
      if (Status s = scratch_.fill_words32(kPoison); !s.ok()) return s;
    }
    return scratch_.data();
  }

  // Several times the cache, since it does not keep exactly what was written last.
  std::size_t flush_bytes() const override { return 4 * static_cast<std::size_t>(info_.l2_bytes); }

  // Several calls are queued at a time, each behind a flush: by the time it has run, the next launch has arrived.
  Result<std::vector<double>> time(double min_time, const std::function<Status(void*)>& call) override {
    constexpr std::size_t kQueued = 10;
    if (Status s = call(stream_.get()); !s.ok()) return s;
    std::vector<cuda::Event> events;  // begin, end, begin, end, ...
    for (std::size_t n = 0; n < 2 * kQueued; ++n) {
      Result<cuda::Event> event = cuda::Event::make(info_.index);
      if (!event.ok()) return event.status();
      events.push_back(std::move(*event));
    }
    std::vector<double> samples;
    const auto start = std::chrono::steady_clock::now();
    for (std::size_t queued = 1; queued > 0;) {  // the first shows how long one takes, its flush included
      for (std::size_t n = 0; n < queued; ++n) {
        if (Status s = enqueue_timed(events[2 * n], events[2 * n + 1], call); !s.ok()) return s;
      }
      if (Status s = stream_.synchronize(); !s.ok()) return s;
      for (std::size_t n = 0; n < queued; ++n) {
        const Result<double> seconds = events[2 * n + 1].seconds_since(events[2 * n]);
        if (!seconds.ok()) return seconds.status();
        samples.push_back(*seconds);
      }
      const double spent = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      const double wanted = std::ceil((min_time - spent) * static_cast<double>(samples.size()) / spent);
      const std::size_t missing = kMinSamples - std::min(kMinSamples, samples.size());
      queued = std::max(missing, static_cast<std::size_t>(std::clamp(wanted, 0.0, double{kQueued})));
    }
    return samples;
  }

  Result<std::vector<double>> time_single(int calls, const std::function<Status(void*)>& call,
                                          const std::function<Status(int)>& then) override {
    const Result<cuda::Event> begin = cuda::Event::make(info_.index), end = cuda::Event::make(info_.index);
    if (!begin.ok()) return begin.status();
    if (!end.ok()) return end.status();
    std::vector<double> samples;
    for (int n = 0; n < calls; ++n) {
      if (Status s = stream_.synchronize(); !s.ok()) return s;
      if (Status s = begin->record(stream_.get()); !s.ok()) return s;
      if (Status s = call(stream_.get()); !s.ok()) return s;
      if (Status s = end->record(stream_.get()); !s.ok()) return s;
      if (Status s = end->synchronize(); !s.ok()) return s;
      const Result<double> seconds = end->seconds_since(*begin);
      if (!seconds.ok()) return seconds.status();
      samples.push_back(*seconds);
      if (Status s = then(n); !s.ok()) return s;
    }
    return samples;
  }

  Result<Overheads> overheads(double seconds_of_call, const std::function<Status(void*)>& call) override {
    const int repeats =
        std::clamp(static_cast<int>(10e-3 / std::max(seconds_of_call, 1e-8)), 3, 20);  // few of long calls are enough
    std::vector<double> host;
    for (int n = 0; n < repeats; ++n) {
      if (Status s = stream_.synchronize(); !s.ok()) return s;
      const auto begin = std::chrono::steady_clock::now();
      if (Status s = call(stream_.get()); !s.ok()) return s;
      host.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    if (Status s = stream_.synchronize(); !s.ok()) return s;
    std::nth_element(host.begin(), host.begin() + repeats / 2, host.end());
    const Result<cuda::Graph> graph = cuda::Graph::capture(stream_, [&](cuda::CUstream stream) {
      for (int n = 0; n < repeats; ++n) {
        if (Status s = call(stream); !s.ok()) return s;
      }
      return Status();
    });
    if (!graph.ok()) return graph.status();
    const Result<double> seconds =
        cuda::time_on_stream(stream_, 3, [&](cuda::CUstream stream) { return graph->launch(stream); });
    if (!seconds.ok()) return seconds.status();
    return Overheads{host[static_cast<std::size_t>(repeats / 2)], *seconds / repeats};
  }

 private:
  // With keep_memory(), sizes are powers of two, so that a buffer of an earlier call fits.
  Result<cuda::DeviceBuffer> allocate(std::size_t bytes) {
    if (!keeps_) return cuda::DeviceBuffer::make(info_.index, bytes);
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    const auto kept = spare_.find(size);
    if (kept == spare_.end()) return cuda::DeviceBuffer::make(info_.index, size);
    cuda::DeviceBuffer memory = std::move(kept->second);
    spare_.erase(kept);
    return memory;
  }
  void let_go() {
    for (auto& [buffer, memory] : held_) {
      if (keeps_) spare_.emplace(memory.bytes(), std::move(memory));
    }
    held_.clear();
  }

  Status flush() {
    if (flush_bytes() == 0) return {};
    if (cache_.bytes() == 0) {
      Result<cuda::DeviceBuffer> memory = cuda::DeviceBuffer::make(info_.index, flush_bytes());
      if (!memory.ok()) return memory.status();
      cache_ = std::move(*memory);
    }
    return cache_.enqueue_fill(0, stream_.get());
  }

  Status enqueue_timed(const cuda::Event& begin, const cuda::Event& end, const std::function<Status(void*)>& call) {
    if (Status s = flush(); !s.ok()) return s;
    if (Status s = begin.record(stream_.get()); !s.ok()) return s;
    if (Status s = call(stream_.get()); !s.ok()) return s;
    return end.record(stream_.get());
  }

  cuda::DeviceInfo info_;
  cuda::CodeArch code_;
  std::string name_;
  engine::Device selected_;
  cuda::Stream stream_;
  cuda::DeviceBuffer scratch_;
  cuda::DeviceBuffer cache_;  // written to flush the L2 cache
  std::map<const Buffer*, cuda::DeviceBuffer> held_;
  bool keeps_ = false;
  std::multimap<std::size_t, cuda::DeviceBuffer> spare_;  // by size
};

}  // namespace

std::string arch_code_in_force(const std::string& arch_code) {
  return arch_code.empty() ? cuda::code_arch_in_environment() : arch_code;
}

Result<std::unique_ptr<Device>> open_device(const std::string& spelling, const std::string& arch_code) {
  if (Status s = arch_code.empty() ? Status() : cuda::check_arch_name(arch_code); !s.ok()) {
    return Status(s.code(), format("--arch-code: {}", s.message()));
  }
  if (spelling == "cpu" && !arch_code.empty() && arch_code != "native") {
    return Status(TESSERA_INVALID_ARGUMENT,
                  format("--arch-code {} is code for a GPU; it needs --device cuda", arch_code));
  }
  if (spelling == "cpu") return std::unique_ptr<Device>(std::make_unique<CpuDevice>());
  int index = 0;
  const bool numbered = spelling.rfind("cuda:", 0) == 0;
  const char* const end = spelling.data() + spelling.size();
  if (numbered) {
    const auto [stop, error] = std::from_chars(spelling.data() + 5, end, index);
    if (error != std::errc() || stop != end) index = -1;
  }
  if (index < 0 || (!numbered && spelling != "cuda")) {
    return Status(TESSERA_INVALID_ARGUMENT, format("--device is '{}'; cpu, cuda or cuda:N is accepted", spelling));
  }
  Result<cuda::DeviceInfo> info = cuda::device(index);
  if (!info.ok()) return info.status();
  if (!arch_code.empty()) {
    const Result<cuda::CodeArch> asked = cuda::code_arch_for(*info, arch_code);
    if (!asked.ok()) return Status(asked.status().code(), format("--arch-code: {}", asked.status().message()));
    cuda::set_code_arch(*asked);
  }
  const Result<cuda::CodeArch> code = cuda::code_arch_of(*info);
  if (!code.ok()) return code.status();
  Result<engine::Device> selected = engine::device_at({TESSERA_CUDA, index});
  if (!selected.ok()) return selected.status();
  Result<cuda::Stream> stream = cuda::Stream::make(index);
  if (!stream.ok()) return stream.status();
  return std::unique_ptr<Device>(
      std::make_unique<CudaDevice>(std::move(*info), *code, std::move(*selected), std::move(*stream)));
}

}  // namespace tessera::verify
