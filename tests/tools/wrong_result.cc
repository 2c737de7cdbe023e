// Takes the place of tessera_attention_plan_run (the linker's --wrap) and spoils the first value that it wrote, as a kernel that
// is slightly wrong would. fp32 on the CPU.
#include "tessera/attention.h"

extern "C" {

// NOLINTBEGIN: the linker's names
tessera_status __real_tessera_attention_plan_run(const tessera_plan* plan, const tessera_attention* args,
                                                 void* workspace, size_t workspace_bytes, void* stream);

tessera_status __wrap_tessera_attention_plan_run(const tessera_plan* plan, const tessera_attention* args,
                                                 void* workspace, size_t workspace_bytes, void* stream) {
  const tessera_status status = __real_tessera_attention_plan_run(plan, args, workspace, workspace_bytes, stream);
  const tessera_tensor* written = args->dq != nullptr ? args->dq : args->out;
  if (status == TESSERA_OK) {
    *reinterpret_cast<float*>(static_cast<char*>(written->data) + written->byte_offset) += 0.001F;
  }
  return status;
}
// NOLINTEND
}
