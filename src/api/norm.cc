// Bodies of tessera/norm.h.
#include "tessera/norm.h"

#include "api/plan.h"
#include "norm/check.h"
#include "norm/family.h"

using Family = tessera::NormFamily;
using tessera::norm::check;

tessera_status tessera_norm_plan_create(tessera_norm_op op, const tessera_norm* args, tessera_plan** plan) {
  return tessera::api::plan_create_body<Family, check>(op, args, plan);
}

tessera_status tessera_norm_plan_run(const tessera_plan* plan, const tessera_norm* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return tessera::api::plan_run_body<Family, check, tessera_norm_op>(plan, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_norm_run(tessera_norm_op op, const tessera_norm* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
  return tessera::api::run_body<Family, check>(op, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_norm_workspace(tessera_norm_op op, const tessera_norm* args, size_t* bytes) {
  return tessera::api::workspace_body<Family, check>(op, args, bytes);
}

tessera_status tessera_norm_explain(tessera_norm_op op, const tessera_norm* args, const char* arch,
                                    tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return tessera::api::explain_body<Family, check>(op, args, arch, format, text, capacity, needed);
}
