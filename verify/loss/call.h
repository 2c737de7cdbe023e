// What the calls of all losses share: a plan of their op, and its run.
#pragma once

#include "tessera/loss.h"
#include "verify/case.h"

namespace tessera::verify {

class LossCall : public Call {
 public:
  tessera_status plan(tessera_plan** plan) final { return tessera_loss_plan_create(op_, &args_, plan); }
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) final {
    return tessera_loss_plan_run(plan, &args_, workspace, bytes, stream);
  }
  const tessera_loss& args() const { return args_; }

 protected:
  explicit LossCall(tessera_loss_op op) : op_(op) {}

  tessera_loss args_ = TESSERA_LOSS_INIT;

 private:
  tessera_loss_op op_;
};

}  // namespace tessera::verify
