#include "cli/device.h"

#include <fmt/format.h>

#include <cstdlib>

#include "cli/console.h"
#include "cpu/attention.h"
#include "tessera/tessera.h"

namespace tessera::cli {
namespace {

class CpuDevice final : public Device {
 public:
  std::string name() const override {
    const int threads = tessera_num_threads();
    return fmt::format("cpu ({}, {} thread{})", cpu::isa_name(), threads, threads == 1 ? "" : "s");
  }
  bool is_cpu() const override { return true; }
  Status upload(cases::Buffers&) override { return {}; }
  Status download(cases::Buffers&) override { return {}; }
  Status synchronize() override { return {}; }

  Result<void*> workspace(std::size_t bytes) override {
    if (bytes <= size_) return memory_.get();
    const std::size_t rounded = (bytes + 255) / 256 * 256;
    memory_.reset(std::aligned_alloc(256, rounded));
    size_ = memory_ == nullptr ? 0 : rounded;
    if (memory_ == nullptr) return Status(TESSERA_OUT_OF_MEMORY, fmt::format("no memory for {} B of scratch", bytes));
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace

Result<std::unique_ptr<Device>> open_device(const std::string& spelling) {
  if (spelling == "cpu") return std::unique_ptr<Device>(std::make_unique<CpuDevice>());
  return Status(TESSERA_INVALID_ARGUMENT, fmt::format("--device is '{}'; cpu, cuda or cuda:N is accepted", spelling));
}

int exit_code_of(const Status& status) {
  switch (status.code()) {
    case TESSERA_OK:
      return kSuccess;
    case TESSERA_INVALID_ARGUMENT:
      return kBadUsage;
    case TESSERA_NO_DEVICE:
    case TESSERA_COMPILE_FAILED:
      return kMissing;
    default:
      return kCheckFailed;
  }
}

}  // namespace tessera::cli
