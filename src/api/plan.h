// The plan behind the C ABI's handle, and what the C bodies of every family share.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "api/error.h"
#include "base/arguments.h"
#include "base/format.h"
#include "base/tensor.h"
#include "cuda/memory.h"
#include "engine/plan.h"
#include "tessera/tessera.h"

struct tessera_plan {
  std::unique_ptr<tessera::engine::Plan> plan;
  std::shared_ptr<const void> call;  // a KeptCall of the plan's family, or null
};

namespace tessera::api {

// The plan with its family's type; null if another family made it.
template <class Family>
const engine::PlanOf<Family>* plan_of(const tessera_plan& plan) {
  // By text: a literal may have an address of its own in each file that uses it.
  if (std::strcmp(plan.plan->family, Family::kName) != 0) return nullptr;
  return static_cast<const engine::PlanOf<Family>*>(plan.plan.get());
}

// A family may keep the call that a plan was made with: one that repeats it is not checked again.
template <class Family>
concept KeepsCalls = requires {
  typename Family::KeptCall;
};

// args passed as `checked`: a Problem and views, and the device they are on.
template <class Family, class Checked>
Status create_plan(const auto& args, const Checked& checked, tessera_plan** plan) {
  auto made = engine::make_plan<Family>(checked.device, checked.args.problem, engine::Explained::kYes);
  if (!made.ok()) return made.status();
  std::shared_ptr<const void> call;
  if constexpr (KeepsCalls<Family>) call = Family::KeptCall::of(args, checked, (*made)->recipe.problem);
  *plan = new tessera_plan{std::move(*made), std::move(call)};
  return {};
}

// The arguments, if they repeat the call that the plan was made with.
template <class Family>
bool repeats_call(const tessera_plan& plan, const auto* args, std::optional<typename Family::Args>& repeated) {
  if constexpr (KeepsCalls<Family>) {
    const auto* call = static_cast<const typename Family::KeptCall*>(plan.call.get());
    return call != nullptr && args != nullptr && call->repeats(*args, repeated);
  }
  return false;
}

template <class Family, class Checked>
Status run_plan(const engine::PlanOf<Family>& plan, Checked& checked, void* workspace, std::size_t bytes,
                void* stream) {
  const auto& planned = plan.recipe.problem;
  if (!Family::covers(planned, checked.args.problem)) {
    return invalid(
        format("args are not what the plan was made for: {}", Family::difference(planned, checked.args.problem)));
  }
  if (checked.device.type != plan.place.type || checked.device.index != plan.place.index) {
    return invalid(format("args are on {}; the plan was made for {}", describe(checked.device), describe(plan.place)));
  }
  // The workspace is laid out for the planned bounds.
  checked.args.problem = planned;
  return engine::run<Family>(plan, checked.args, workspace, bytes, stream);
}

// Plans and runs once. Without a workspace (null, of 0 bytes), takes what is needed for the duration of the call.
template <class Family, class Checked>
Status run_once(const Checked& checked, void* workspace, std::size_t bytes, void* stream) {
  const auto plan = engine::make_plan<Family>(checked.device, checked.args.problem, engine::Explained::kNo);
  if (!plan.ok()) return plan.status();
  const std::size_t needed = (*plan)->workspace;
  if (workspace != nullptr || bytes > 0 || needed == 0) {
    return engine::run<Family>(**plan, checked.args, workspace, bytes, stream);
  }
  if (checked.device.type == TESSERA_CPU) {
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(needed);
    return engine::run<Family>(**plan, checked.args, scratch.get(), needed, stream);
  }
  auto scratch = cuda::StreamBuffer::make(checked.device.index, needed, static_cast<cuda::CUstream>(stream));
  if (!scratch.ok()) return scratch.status();
  const Status ran = engine::run<Family>(**plan, checked.args, scratch->data(), needed, stream);
  const Status freed = scratch->release();
  return ran.ok() ? freed : ran;
}

// arch: null for the device that the arguments are on.
template <class Family, class Checked>
Result<engine::Explanation> explanation_of(const Checked& checked, const char* arch) {
  const auto& problem = checked.args.problem;
  auto device = arch == nullptr                 ? engine::device_at(checked.device)
                : std::strcmp(arch, "cpu") == 0 ? engine::device_at({TESSERA_CPU, 0})
                                                : engine::cuda_device(arch);
  if (!device.ok()) return device.status();
  const auto selection = arch == nullptr ? engine::select_at<Family>(checked.device, *device, problem)
                                         : engine::select<Family>(problem, *device);
  return engine::explain<Family>(problem, *device, selection);
}

inline Status write_text(const std::string& full, char* text, std::size_t capacity, std::size_t* needed) {
  if (text == nullptr && capacity > 0) return invalid("text is null, but capacity is not 0");
  if (capacity > 0) {
    const std::size_t length = std::min(full.size(), capacity - 1);
    std::memcpy(text, full.data(), length);
    text[length] = '\0';
  }
  if (needed != nullptr) *needed = full.size() + 1;
  return {};
}

// The bodies of a family's C functions. check: its checks, Result<Checked>(op, args, look).

template <class Family, auto check>
tessera_status plan_create_body(auto op, const auto* args, tessera_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto checked = check(op, args, Look::kEverything);
    return checked.ok() ? create_plan<Family>(*args, *checked, plan) : checked.status();
  });
}

template <class Family, auto check, class Op>
tessera_status plan_run_body(const tessera_plan* plan, const auto* args, void* workspace, std::size_t bytes,
                             void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto* own = plan_of<Family>(*plan);
    if (own == nullptr) return invalid(format("plan is of {}, not of {}", plan->plan->family, Family::kName));
    if (std::optional<typename Family::Args> repeated; repeats_call<Family>(*plan, args, repeated)) {
      return engine::run<Family>(*own, *repeated, workspace, bytes, stream);
    }
    auto checked = check(static_cast<Op>(own->recipe.problem.op), args, Look::kEverything);
    return checked.ok() ? run_plan<Family>(*own, *checked, workspace, bytes, stream) : checked.status();
  });
}

template <class Family, auto check>
tessera_status run_body(auto op, const auto* args, void* workspace, std::size_t bytes, void* stream) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kEverything);
    return checked.ok() ? run_once<Family>(*checked, workspace, bytes, stream) : checked.status();
  });
}

template <class Family, auto check>
tessera_status workspace_body(auto op, const auto* args, std::size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return invalid("bytes is null");
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    const auto plan = engine::choose<Family>(checked->device, checked->args.problem, engine::Explained::kNo);
    if (!plan.ok()) return plan.status();
    *bytes = (*plan)->workspace;
    return {};
  });
}

template <class Family, auto check>
tessera_status explain_body(auto op, const auto* args, const char* arch, tessera_explain_format form, char* text,
                            std::size_t capacity, std::size_t* needed) {
  return guarded([&]() -> Status {
    if (form != TESSERA_EXPLAIN_TEXT && form != TESSERA_EXPLAIN_JSON) {
      return invalid(format("format is {}; TESSERA_EXPLAIN_TEXT and _JSON are known", static_cast<int>(form)));
    }
    const auto checked = check(op, args, Look::kShapes);
    if (!checked.ok()) return checked.status();
    const auto explanation = explanation_of<Family>(*checked, arch);
    if (!explanation.ok()) return explanation.status();
    const bool json = form == TESSERA_EXPLAIN_JSON;
    return write_text(json ? json_text_of(*explanation) : text_of(*explanation), text, capacity, needed);
  });
}

}  // namespace tessera::api
