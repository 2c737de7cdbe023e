// Bodies of tessera/loss.h.
#include "tessera/loss.h"

#include "api/plan.h"
#include "loss/check.h"
#include "loss/family.h"

using Family = tessera::LossFamily;
using tessera::loss::check;

tessera_status tessera_loss_plan_create(tessera_loss_op op, const tessera_loss* args, tessera_plan** plan) {
  return tessera::api::plan_create_body<Family, check>(op, args, plan);
}

tessera_status tessera_loss_plan_run(const tessera_plan* plan, const tessera_loss* args, void* workspace,
                                     size_t workspace_bytes, void* stream) {
  return tessera::api::plan_run_body<Family, check, tessera_loss_op>(plan, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_loss_run(tessera_loss_op op, const tessera_loss* args, void* workspace, size_t workspace_bytes,
                                void* stream) {
  return tessera::api::run_body<Family, check>(op, args, workspace, workspace_bytes, stream);
}

tessera_status tessera_loss_workspace(tessera_loss_op op, const tessera_loss* args, size_t* bytes) {
  return tessera::api::workspace_body<Family, check>(op, args, bytes);
}

tessera_status tessera_loss_explain(tessera_loss_op op, const tessera_loss* args, const char* arch,
                                    tessera_explain_format format, char* text, size_t capacity, size_t* needed) {
  return tessera::api::explain_body<Family, check>(op, args, arch, format, text, capacity, needed);
}
