// Bodies of tessera/attention.h.
#include "tessera/attention.h"

#include "api/error.h"
#include "api/plan.h"
#include "attention/check.h"
#include "attention/family.h"
#include "attention/quantize_fp8.h"

using tessera::AttentionFamily;
using tessera::format;
using tessera::invalid;
using tessera::Status;
using tessera::api::guarded;
using tessera::attention::check;
using tessera::attention::Look;

tessera_status tessera_attention_plan_create(tessera_attention_op op, const tessera_attention* args,
                                             tessera_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto checked = check(op, args, Look::kEverything);
    return checked.ok() ? tessera::api::create_plan<AttentionFamily>(*checked, plan) : checked.status();
  });
}

tessera_status tessera_attention_plan_run(const tessera_plan* plan, const tessera_attention* args, void* workspace,
                                          size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto* own = tessera::api::plan_of<AttentionFamily>(*plan);
    if (own == nullptr) return invalid(format("plan is of {}, not of attention", plan->plan->family));
    auto checked = check(static_cast<tessera_attention_op>(own->recipe.problem.op), args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_plan<AttentionFamily>(*own, *checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_attention_run(tessera_attention_op op, const tessera_attention* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_once<AttentionFamily>(*checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_attention_workspace(tessera_attention_op op, const tessera_attention* args, size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return invalid("bytes is null");
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    const auto plan = tessera::engine::choose<AttentionFamily>(checked->device, checked->args.problem,
                                                               tessera::engine::Explained::kNo);
    if (!plan.ok()) return plan.status();
    *bytes = (*plan)->workspace;
    return {};
  });
}

tessera_status tessera_attention_explain(tessera_attention_op op, const tessera_attention* args, const char* arch,
                                         tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kShapes);
    if (!checked.ok()) return checked.status();
    const auto explanation = tessera::api::explanation_of<AttentionFamily>(*checked, arch);
    if (!explanation.ok()) return explanation.status();
    const bool json = format == TESSERA_EXPLAIN_JSON;
    return tessera::api::write_text(json ? json_text_of(*explanation) : text_of(*explanation), text, capacity, needed);
  });
}

tessera_status tessera_attention_quantize_fp8(const tessera_quantize_fp8* args, void* stream) {
  return guarded([&]() -> Status { return tessera::attention::quantize_fp8(args, stream); });
}
