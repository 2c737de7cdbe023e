// Bodies of tessera/moe.h.
#include "tessera/moe.h"

#include "api/plan.h"
#include "moe/check.h"
#include "moe/family.h"

using Family = tessera::MoeFamily;
using tessera::moe::check;

tessera_status tessera_moe_plan_create(tessera_moe_op op, const tessera_moe* args, tessera_plan** plan) {
  return tessera::api::plan_create_body<Family, check>(op, args, plan);
}

tessera_status tessera_moe_plan_run(const tessera_plan* plan, const tessera_moe* args, void* workspace,
                                    size_t workspace_bytes, void* stream) {
  return tessera::api::plan_run_body<Family, check, tessera_moe_op>(plan, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_moe_run(tessera_moe_op op, const tessera_moe* args, void* workspace, size_t workspace_bytes,
                               void* stream) {
  return tessera::api::run_body<Family, check>(op, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_moe_workspace(tessera_moe_op op, const tessera_moe* args, size_t* bytes) {
  return tessera::api::workspace_body<Family, check>(op, args, bytes);
}

tessera_status tessera_moe_explain(tessera_moe_op op, const tessera_moe* args, const char* arch,
                                   tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return tessera::api::explain_body<Family, check>(op, args, arch, format, text, capacity, needed);
}
