// Bodies of tessera/gemm.h.
#include "tessera/gemm.h"

#include "api/plan.h"
#include "gemm/check.h"
#include "gemm/family.h"

using Family = tessera::GemmFamily;
using tessera::gemm::check;

tessera_status tessera_gemm_plan_create(tessera_gemm_op op, const tessera_gemm* args, tessera_plan** plan) {
  return tessera::api::plan_create_body<Family, check>(op, args, plan);
}

tessera_status tessera_gemm_plan_run(const tessera_plan* plan, const tessera_gemm* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return tessera::api::plan_run_body<Family, check, tessera_gemm_op>(plan, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_gemm_run(tessera_gemm_op op, const tessera_gemm* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
  return tessera::api::run_body<Family, check>(op, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_gemm_workspace(tessera_gemm_op op, const tessera_gemm* args, size_t* bytes) {
  return tessera::api::workspace_body<Family, check>(op, args, bytes);
}

tessera_status tessera_gemm_explain(tessera_gemm_op op, const tessera_gemm* args, const char* arch,
                                    tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return tessera::api::explain_body<Family, check>(op, args, arch, format, text, capacity, needed);
}
