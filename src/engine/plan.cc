#include "engine/plan.h"

#include "cpu/threads.h"
#include "cuda/code_arch.h"

namespace tessera::engine {
namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 256;

}  // namespace

const char* Plan::text() const {
  std::call_once(text_once_, [&] { text_ = text_of(explanation); });
  return text_.c_str();
}

const char* Plan::json() const {
  std::call_once(json_once_, [&] { json_ = json_text_of(explanation); });
  return json_.c_str();
}

Result<Device> device_at(tessera_device place) {
  if (place.type == TESSERA_CPU) return cpu_device(cpu::threads_in_use());
  auto info = cuda::device(place.index);
  if (!info.ok()) return info.status();
  const auto code = cuda::code_arch_of(*info);
  if (!code.ok()) return code.status();
  Device device;
  device.kind = Device::Kind::kCuda;
  device.name = format("cuda:{}, {}, {}", place.index, info->name, code->target.arch);
  device.compute = code->compute;
  device.specific = code->specific;
  device.multiprocessors = info->multiprocessors;
  device.shared_memory_per_block = code->shared_memory_per_block;
  if (code->own) device.index = place.index;
  return device;
}

std::size_t with_room_to_align(std::size_t workspace) {
  return workspace > 0 ? workspace + kWorkspaceAlignment - 1 : 0;
}

Result<void*> usable_workspace(const Plan& plan, void* workspace, std::size_t bytes) {
  if (bytes < plan.workspace) {
    return invalid(format("workspace_bytes is {}; {} are needed", bytes, plan.workspace));
  }
  if (workspace == nullptr && plan.workspace > 0) {
    return invalid(format("workspace is null; {} bytes are needed", plan.workspace));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return reinterpret_cast<void*>((address + kWorkspaceAlignment - 1) & ~(kWorkspaceAlignment - 1));
}

Status load_kernels(const std::vector<Step>& steps, Plan& plan) {
  for (const Step& step : steps) {
    if (!step.kernel) continue;
    const auto kernel = cuda::load_kernel(plan.place.index, *step.kernel);
    if (!kernel.ok()) return kernel.status();
    plan.kernels.push_back(*kernel);
  }
  return {};
}

}  // namespace tessera::engine
