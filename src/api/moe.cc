// Bodies of tessera/moe.h.
#include "tessera/moe.h"

#include "api/error.h"
#include "api/plan.h"
#include "moe/check.h"
#include "moe/family.h"

using tessera::format;
using tessera::invalid;
using tessera::MoeFamily;
using tessera::Status;
using tessera::api::guarded;
using tessera::moe::check;
using tessera::moe::Look;

tessera_status tessera_moe_plan_create(tessera_moe_op op, const tessera_moe* args, tessera_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto checked = check(op, args, Look::kEverything);
    return checked.ok() ? tessera::api::create_plan<MoeFamily>(*checked, plan) : checked.status();
  });
}

tessera_status tessera_moe_plan_run(const tessera_plan* plan, const tessera_moe* args, void* workspace,
                                    size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto* own = tessera::api::plan_of<MoeFamily>(*plan);
    if (own == nullptr) return invalid(format("plan is of {}, not of moe", plan->plan->family));
    auto checked = check(static_cast<tessera_moe_op>(own->recipe.problem.op), args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_plan<MoeFamily>(*own, *checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_moe_run(tessera_moe_op op, const tessera_moe* args, void* workspace, size_t workspace_bytes,
                               void* stream) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_once<MoeFamily>(*checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_moe_workspace(tessera_moe_op op, const tessera_moe* args, size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return invalid("bytes is null");
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    const auto plan =
        tessera::engine::choose<MoeFamily>(checked->device, checked->args.problem, tessera::engine::Explained::kNo);
    if (!plan.ok()) return plan.status();
    *bytes = (*plan)->workspace;
    return {};
  });
}

tessera_status tessera_moe_explain(tessera_moe_op op, const tessera_moe* args, const char* arch,
                                   tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kShapes);
    if (!checked.ok()) return checked.status();
    const auto explanation = tessera::api::explanation_of<MoeFamily>(*checked, arch);
    if (!explanation.ok()) return explanation.status();
    const bool json = format == TESSERA_EXPLAIN_JSON;
    return tessera::api::write_text(json ? json_text_of(*explanation) : text_of(*explanation), text, capacity, needed);
  });
}
