// Bodies of tessera/gemm.h.
#include "tessera/gemm.h"

#include "api/error.h"
#include "api/plan.h"
#include "gemm/check.h"
#include "gemm/family.h"

using tessera::format;
using tessera::GemmFamily;
using tessera::invalid;
using tessera::Status;
using tessera::api::guarded;
using tessera::gemm::check;
using tessera::gemm::Look;

tessera_status tessera_gemm_plan_create(tessera_gemm_op op, const tessera_gemm* args, tessera_plan** plan) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto checked = check(op, args, Look::kEverything);
    return checked.ok() ? tessera::api::create_plan<GemmFamily>(*checked, plan) : checked.status();
  });
}

tessera_status tessera_gemm_plan_run(const tessera_plan* plan, const tessera_gemm* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return guarded([&]() -> Status {
    if (plan == nullptr) return invalid("plan is null");
    const auto* own = tessera::api::plan_of<GemmFamily>(*plan);
    if (own == nullptr) return invalid(format("plan is of {}, not of gemm", plan->plan->family));
    auto checked = check(static_cast<tessera_gemm_op>(own->recipe.problem.op), args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_plan<GemmFamily>(*own, *checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_gemm_run(tessera_gemm_op op, const tessera_gemm* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    return tessera::api::run_once<GemmFamily>(*checked, workspace, workspace_bytes, stream);
  });
}

tessera_status tessera_gemm_workspace(tessera_gemm_op op, const tessera_gemm* args, size_t* bytes) {
  return guarded([&]() -> Status {
    if (bytes == nullptr) return invalid("bytes is null");
    const auto checked = check(op, args, Look::kEverything);
    if (!checked.ok()) return checked.status();
    const auto plan =
        tessera::engine::choose<GemmFamily>(checked->device, checked->args.problem, tessera::engine::Explained::kNo);
    if (!plan.ok()) return plan.status();
    *bytes = (*plan)->workspace;
    return {};
  });
}

tessera_status tessera_gemm_explain(tessera_gemm_op op, const tessera_gemm* args, const char* arch,
                                    tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return guarded([&]() -> Status {
    const auto checked = check(op, args, Look::kShapes);
    if (!checked.ok()) return checked.status();
    const auto explanation = tessera::api::explanation_of<GemmFamily>(*checked, arch);
    if (!explanation.ok()) return explanation.status();
    const bool json = format == TESSERA_EXPLAIN_JSON;
    return tessera::api::write_text(json ? json_text_of(*explanation) : text_of(*explanation), text, capacity, needed);
  });
}
