// Bodies of tessera/attention.h.
#include "tessera/attention.h"

#include "api/error.h"
#include "api/plan.h"
#include "attention/check.h"
#include "attention/family.h"
#include "attention/kept_call.h"
#include "attention/quantize_fp8.h"

using Family = tessera::AttentionFamily;
using tessera::attention::check;

tessera_status tessera_attention_plan_create(tessera_attention_op op, const tessera_attention* args,
                                             tessera_plan** plan) {
  return tessera::api::plan_create_body<Family, check>(op, args, plan);
}

tessera_status tessera_attention_plan_run(const tessera_plan* plan, const tessera_attention* args, void* workspace,
                                          size_t workspace_bytes, void* stream) {
  return tessera::api::plan_run_body<Family, check, tessera_attention_op>(plan, args, workspace, workspace_bytes,
                                                                          stream);
}

tessera_status tessera_attention_run(tessera_attention_op op, const tessera_attention* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return tessera::api::run_body<Family, check>(op, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_attention_workspace(tessera_attention_op op, const tessera_attention* args, size_t* bytes) {
  return tessera::api::workspace_body<Family, check>(op, args, bytes);
}

tessera_status tessera_attention_explain(tessera_attention_op op, const tessera_attention* args, const char* arch,
                                         tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return tessera::api::explain_body<Family, check>(op, args, arch, format, text, capacity, needed);
}

tessera_status tessera_attention_quantize_fp8(const tessera_quantize_fp8* args, void* stream) {
  return tessera::api::guarded([&] { return tessera::attention::quantize_fp8(args, stream); });
}
