// Bodies of tessera/mlp.h.
#include "tessera/mlp.h"

#include "api/plan.h"
#include "mlp/check.h"
#include "mlp/family.h"

using Family = tessera::MlpFamily;
using tessera::mlp::check;

tessera_status tessera_mlp_plan_create(tessera_mlp_op op, const tessera_mlp* args, tessera_plan** plan) {
  return tessera::api::plan_create_body<Family, check>(op, args, plan);
}

tessera_status tessera_mlp_plan_run(const tessera_plan* plan, const tessera_mlp* args, void* workspace,
                                    size_t workspace_bytes, void* stream) {
  return tessera::api::plan_run_body<Family, check, tessera_mlp_op>(plan, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_mlp_run(tessera_mlp_op op, const tessera_mlp* args, void* workspace, size_t workspace_bytes,
                               void* stream) {
  return tessera::api::run_body<Family, check>(op, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_mlp_workspace(tessera_mlp_op op, const tessera_mlp* args, size_t* bytes) {
  return tessera::api::workspace_body<Family, check>(op, args, bytes);
}

tessera_status tessera_mlp_explain(tessera_mlp_op op, const tessera_mlp* args, const char* arch,
                                   tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return tessera::api::explain_body<Family, check>(op, args, arch, format, text, capacity, needed);
}
