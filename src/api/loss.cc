// Bodies of tessera/loss.h.
#include "tessera/loss.h"

#include "api/error.h"
#include "api/plan.h"
#include "loss/check.h"
#include "loss/family.h"

using tessera::format;
using tessera::invalid;
using tessera::LossFamily;
using tessera::Status;
using tessera::api::guarded;
using tessera::loss::check;
using tessera::loss::Look;

tessera_status tessera_loss_plan_create(tessera_loss_op op, const tessera_loss* args, tessera_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto checked = check(op, args, Look::kEverything);
    return checked.ok() ? tessera::api::create_plan<LossFamily>(*checked, plan) : checked.status();
  });
}

tessera_status tessera_loss_plan_run(const tessera_plan* plan, const tessera_loss* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto* own = tessera::api::plan_of<LossFamily>(*plan);
    if (own == nullptr) return invalid(format("plan is of {}, not of loss", plan->plan->family));
    auto checked = check(static_cast<tessera_loss_op>(own->recipe.problem.op), args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_plan<LossFamily>(*own, *checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_loss_run(tessera_loss_op op, const tessera_loss* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_once<LossFamily>(*checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_loss_workspace(tessera_loss_op op, const tessera_loss* args, size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return invalid("bytes is null");
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    const auto plan =
        tessera::engine::choose<LossFamily>(checked->device, checked->args.problem, tessera::engine::Explained::kNo);
    if (!plan.ok()) return plan.status();
    *bytes = (*plan)->workspace;
    return {};
  });
}

tessera_status tessera_loss_explain(tessera_loss_op op, const tessera_loss* args, const char* arch,
                                    tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kShapes);
    if (!checked.ok()) return checked.status();
    const auto explanation = tessera::api::explanation_of<LossFamily>(*checked, arch);
    if (!explanation.ok()) return explanation.status();
    const bool json = format == TESSERA_EXPLAIN_JSON;
    return tessera::api::write_text(json ? json_text_of(*explanation) : text_of(*explanation), text, capacity, needed);
  });
}
