// A case's tensors as the C ABI takes them.
#pragma once

#include <deque>
#include <vector>

#include "tessera/mlp.h"
#include "verify/mlp/cases.h"

namespace tessera::verify::mlp {

class Buffers final : public Call {
 public:
  // Inputs without values (make_shapes) are filled with repeating random ones.
  Buffers(const Case& c, const Tensors& inputs);

  std::vector<Buffer*> buffers() override;
  tessera_status plan(tessera_plan** plan) override;
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) override;

  const tessera_mlp& args() const { return args_; }
  tessera_mlp_op op() const { return static_cast<tessera_mlp_op>(problem_.op); }
  HostTensor result(MlpTensor tensor) const;

 private:
  MlpProblem problem_;
  std::deque<Buffer> buffers_;  // by MlpTensor
  tessera_mlp args_ = TESSERA_MLP_INIT;
};

// The field of an argument struct.
const tessera_tensor*& field_of(tessera_mlp& args, MlpTensor tensor);

}  // namespace tessera::verify::mlp
