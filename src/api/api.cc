// Bodies of the C ABI: check, select, run. Nothing is decided here.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api/check.h"
#include "api/error.h"
#include "api/tensor.h"
#include "cpu/attention.h"
#include "cuda/code_arch.h"
#include "ops/attention_backward.h"
#include "ops/attention_backward_sm90.h"
#include "ops/attention_forward.h"
#include "ops/attention_forward_sm90.h"
#include "ops/format.h"
#include "select/attention.h"
#include "select/device.h"
#include "select/kernels.h"
#include "tessera/tessera.h"
#include "tune/tuned.h"

using tessera::AttentionProblem;
using tessera::format;
using tessera::Result;
using tessera::Status;
using tessera::api::check_attention;
using tessera::api::CheckedAttention;
using tessera::api::guarded;
using tessera::api::invalid;
using tessera::api::Look;
using tessera::select::Candidate;
using tessera::select::Device;

struct tessera_plan {
  AttentionProblem problem;
  tessera_device place{};
  Device device;
  Candidate chosen;
  std::string explanation;
  std::vector<const tessera::cuda::Kernel*> kernels;  // on a GPU, in the order of their launches
};

namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 256;

std::atomic<std::int32_t> requested_threads{0};  // 0: the default

std::int32_t threads_in_use() {
  const std::int32_t requested = requested_threads.load(std::memory_order_relaxed);
  return requested > 0 ? requested : tessera::cpu::default_threads();
}

Result<Device> device_at(tessera_device place) {
  if (place.type == TESSERA_CPU) return tessera::select::cpu_device(threads_in_use());
  auto info = tessera::cuda::device(place.index);
  if (!info.ok()) return info.status();
  const auto code = tessera::cuda::code_arch_of(*info);
  if (!code.ok()) return code.status();
  Device device;
  device.kind = Device::Kind::kCuda;
  device.name = format("cuda:{}, {}, {}", place.index, info->name, code->target.arch);
  device.compute = code->compute;
  device.specific = code->specific;
  device.multiprocessors = info->multiprocessors;
  device.shared_memory_per_block = code->shared_memory_per_block;
  return device;
}

// With what the tuning table knows of this GPU.
tessera::select::Selection selection_at(tessera_device place, const Device& device, const AttentionProblem& problem) {
  std::optional<tessera::select::TunedForward> tuned;
  if (place.type != TESSERA_CPU) {
    if (const auto info = tessera::cuda::device(place.index); info.ok()) {
      tuned = tessera::tune::find_tuned(*info, problem);
    }
  }
  return tessera::select::select_attention(problem, device, tuned ? &*tuned : nullptr);
}

enum class Explained : bool { kNo, kYes };

Result<tessera_plan> make_plan(const CheckedAttention& checked, Explained explained) {
  auto device = device_at(checked.device);
  if (!device.ok()) return device.status();
  auto selection = selection_at(checked.device, *device, checked.args.problem);
  tessera_plan plan;
  if (selection.candidates.empty() || explained == Explained::kYes) {
    plan.explanation = tessera::select::explain(checked.args.problem, *device, selection);
  }
  if (selection.candidates.empty()) return Status(TESSERA_UNSUPPORTED, plan.explanation);
  plan.problem = checked.args.problem;
  plan.place = checked.device;
  plan.device = *std::move(device);
  plan.chosen = std::move(selection.candidates.front());
  // Room to align within: callers may pass any pointer.
  if (plan.chosen.workspace > 0) plan.chosen.workspace += kWorkspaceAlignment - 1;
  return plan;
}

// Compiles what is in no cache. A run of a plan must not have to.
Status load_kernels(tessera_plan& plan) {
  std::vector<tessera::jit::KernelInstance> instances;
  if (plan.chosen.forward) instances = {tessera::select::instance_of(*plan.chosen.forward)};
  if (plan.chosen.forward_sm90) instances = {tessera::select::instance_of(*plan.chosen.forward_sm90)};
  if (plan.chosen.backward) instances = tessera::backward_kernels(*plan.chosen.backward, plan.problem.vectors);
  if (plan.chosen.backward_sm90) instances = tessera::backward_sm90_kernels(*plan.chosen.backward_sm90);
  for (const tessera::jit::KernelInstance& instance : instances) {
    const auto kernel = tessera::cuda::load_kernel(plan.place.index, instance);
    if (!kernel.ok()) return kernel.status();
    plan.kernels.push_back(*kernel);
  }
  return {};
}

Status run(const tessera_plan& plan, const CheckedAttention& checked, void* workspace, std::size_t bytes,
           void* stream) {
  if (bytes < plan.chosen.workspace) {
    return invalid(format("workspace_bytes is {}; {} are needed", bytes, plan.chosen.workspace));
  }
  if (workspace == nullptr && plan.chosen.workspace > 0) {
    return invalid(format("workspace is null; {} bytes are needed", plan.chosen.workspace));
  }
  const auto address =
      (reinterpret_cast<std::uintptr_t>(workspace) + kWorkspaceAlignment - 1) & ~(kWorkspaceAlignment - 1);
  void* const scratch = reinterpret_cast<void*>(address);
  const auto on = static_cast<tessera::cuda::CUstream>(stream);
  if (plan.chosen.forward) {
    return tessera::enqueue_forward(*plan.kernels.front(), checked.args, *plan.chosen.forward, on);
  }
  if (plan.chosen.forward_sm90) {
    return tessera::enqueue_forward_sm90(*plan.kernels.front(), checked.args, *plan.chosen.forward_sm90, scratch, on);
  }
  if (plan.chosen.backward) {
    return tessera::enqueue_backward(plan.kernels, checked.args, *plan.chosen.backward, scratch, on);
  }
  if (plan.chosen.backward_sm90) {
    return tessera::enqueue_backward_sm90(plan.kernels, checked.args, *plan.chosen.backward_sm90, scratch, on);
  }
  return tessera::cpu::run(checked.args, plan.device.threads, scratch);
}

// A packed batch may be run with other lengths than it was planned with, as long as none is longer; strides matter to
// the copy engine alone.
bool covers(const tessera_plan& plan, const AttentionProblem& asked) {
  const AttentionProblem& planned = plan.problem;
  if (asked == planned) return true;
  AttentionProblem given = asked;
  if (planned.varlen && given.varlen && given.seq_q <= planned.seq_q && given.seq_k <= planned.seq_k) {
    given.seq_q = planned.seq_q;
    given.seq_k = planned.seq_k;
  }
  if (!planned.vectors) given.vectors = false;
  const bool by_copy_engine = plan.chosen.forward_sm90 || plan.chosen.backward_sm90;
  if (!planned.tensor_maps || !by_copy_engine) given.tensor_maps = planned.tensor_maps;
  return given == planned;
}

// What sets the problem given apart from the one planned, in the caller's words.
std::string difference(const AttentionProblem& planned, const AttentionProblem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("packed by cu_seqlens", planned.varlen, given.varlen);
  compare("batch", planned.batch, given.batch);
  compare("Sq", planned.seq_q, given.seq_q);
  compare("Sk", planned.seq_k, given.seq_k);
  compare("rows of q", planned.total_q, given.total_q);
  compare("rows of k", planned.total_k, given.total_k);
  compare("Hq", planned.heads_q, given.heads_q);
  compare("Hkv", planned.heads_kv, given.heads_kv);
  compare("Dqk", planned.dim_qk, given.dim_qk);
  compare("Dv", planned.dim_v, given.dim_v);
  compare("scale", planned.scale, given.scale);
  compare("softcap", planned.softcap, given.softcap);
  compare("causal", planned.causal, given.causal);
  compare("window_left", planned.window_left, given.window_left);
  compare("window_right", planned.window_right, given.window_right);
  compare("bottom-right alignment", planned.alignment == tessera::Alignment::kBottomRight,
          given.alignment == tessera::Alignment::kBottomRight);
  compare("alibi_slopes given", planned.alibi, given.alibi);
  compare("page_table given", planned.paged, given.paged);
  compare("page size", planned.page_size, given.page_size);
  compare("pages", planned.num_pages, given.num_pages);
  compare("pages of a sequence", planned.max_pages_per_seq, given.max_pages_per_seq);
  compare("lse given", planned.with_lse, given.with_lse);
  compare("dlse given", planned.with_dlse, given.with_dlse);
  compare("deterministic", planned.deterministic, given.deterministic);
  compare("every row at a multiple of 16 bytes", planned.vectors, given.vectors);
  compare("strides of all inputs positive", planned.tensor_maps, given.tensor_maps);
  return text;
}

}  // namespace

std::string& tessera::api::last_error() {
  thread_local std::string message;
  return message;
}

const char* tessera_version(void) {
#define TESSERA_TEXT_(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_(x)
  return TESSERA_TEXT(TESSERA_VERSION_MAJOR) "." TESSERA_TEXT(TESSERA_VERSION_MINOR) "." TESSERA_TEXT(
      TESSERA_VERSION_PATCH);
#undef TESSERA_TEXT
#undef TESSERA_TEXT_
}

const char* tessera_status_name(tessera_status status) {
  switch (status) {
    case TESSERA_OK:
      return "ok";
    case TESSERA_INVALID_ARGUMENT:
      return "invalid_argument";
    case TESSERA_UNSUPPORTED:
      return "unsupported";
    case TESSERA_OUT_OF_MEMORY:
      return "out_of_memory";
    case TESSERA_NO_DEVICE:
      return "no_device";
    case TESSERA_COMPILE_FAILED:
      return "compile_failed";
    case TESSERA_CUDA_FAILED:
      return "cuda_failed";
    case TESSERA_INTERNAL:
      return "internal";
  }
  return "unknown";
}

const char* tessera_last_error(void) { return tessera::api::last_error().c_str(); }

tessera_status tessera_set_num_threads(int32_t threads) {
  return guarded([&]() -> Status {
    constexpr std::int32_t kMost = 1024;
    if (threads < 0 || threads > kMost) {
      return invalid(format("threads is {}; 1 to {} are accepted, 0 for the default", threads, kMost));
    }
    requested_threads.store(threads, std::memory_order_relaxed);
    return {};
  });
}

int32_t tessera_num_threads(void) { return threads_in_use(); }

tessera_status tessera_plan_create(tessera_attention_op op, const tessera_attention* args, tessera_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    auto checked = check_attention(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    auto made = make_plan(*checked, Explained::kYes);
    if (!made.ok()) return made.status();
    if (Status s = load_kernels(*made); !s.ok()) return s;
    *plan = new tessera_plan(*std::move(made));
    return {};
  });
}

void tessera_plan_destroy(tessera_plan* plan) { delete plan; }

size_t tessera_plan_workspace(const tessera_plan* plan) { return plan != nullptr ? plan->chosen.workspace : 0; }

const char* tessera_plan_explain(const tessera_plan* plan) { return plan != nullptr ? plan->explanation.c_str() : ""; }

tessera_status tessera_plan_run(const tessera_plan* plan, const tessera_attention* args, void* workspace,
                                size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto op = static_cast<tessera_attention_op>(plan->problem.op);
    auto checked = check_attention(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    if (!covers(*plan, checked->args.problem)) {
      return invalid(
          format("args are not what the plan was made for: {}", difference(plan->problem, checked->args.problem)));
    }
    if (checked->device.type != plan->place.type || checked->device.index != plan->place.index) {
      return invalid(format("args are on {}; the plan was made for {}", tessera::api::describe(checked->device),
                            tessera::api::describe(plan->place)));
    }
    // Scratch is cut by the longest lengths, and shorter ones may be cut into more pieces.
    checked->args.problem = plan->problem;
    return run(*plan, *checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_attention_workspace(tessera_attention_op op, const tessera_attention* args, size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return invalid("bytes is null");
    auto checked = check_attention(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    auto plan = make_plan(*checked, Explained::kNo);
    if (!plan.ok()) return plan.status();
    *bytes = plan->chosen.workspace;
    return {};
  });
}

tessera_status tessera_attention_run(tessera_attention_op op, const tessera_attention* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    auto checked = check_attention(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    auto plan = make_plan(*checked, Explained::kNo);
    if (!plan.ok()) return plan.status();
    if (Status s = load_kernels(*plan); !s.ok()) return s;
    return run(*plan, *checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_attention_explain(tessera_attention_op op, const tessera_attention* args, const char* arch,
                                         char* text, size_t capacity, size_t* needed) {
  return guarded([&]() -> Status {
    if (text == nullptr && capacity > 0) return invalid("text is null, but capacity is not 0");
    auto checked = check_attention(op, args, Look::kShapes);
    if (!checked.ok()) return checked.status();
    auto device = arch == nullptr                 ? device_at(checked->device)
                  : std::strcmp(arch, "cpu") == 0 ? Result<Device>(tessera::select::cpu_device(threads_in_use()))
                                                  : tessera::select::cuda_device(arch);
    if (!device.ok()) return device.status();
    const auto selection = arch == nullptr ? selection_at(checked->device, *device, checked->args.problem)
                                           : tessera::select::select_attention(checked->args.problem, *device);
    const std::string full = tessera::select::explain(checked->args.problem, *device, selection);
    if (capacity > 0) {
      const std::size_t length = std::min(full.size(), capacity - 1);
      std::memcpy(text, full.data(), length);
      text[length] = '\0';
    }
    if (needed != nullptr) *needed = full.size() + 1;
    return {};
  });
}
