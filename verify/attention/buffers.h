// A case's tensors as the C ABI takes them.
#pragma once

#include <string>
#include <vector>

#include "tessera/attention.h"
#include "verify/attention/cases.h"
#include "verify/case.h"

namespace tessera::cases {

using verify::Buffer;

class Buffers final : public verify::Call {
 public:
  // backward reads o and lse from `saved`, the oracle's, rounded to their types. Inputs without values (make_shapes)
  // are filled with repeating random ones. The case and the inputs must outlive the object.
  Buffers(const Case& c, const oracle::Inputs& inputs, const oracle::Outputs* saved);

  std::vector<Buffer*> buffers() override;
  tessera_status plan(tessera_plan** plan) override;
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) override;

  tessera_attention_op op() const;
  const tessera_attention& args() const { return args_; }

  // o and lse as a forward of the same case left them.
  void take_saved(const Buffers& forward);

  // What the op wrote, read from host memory. Rows that belong to no sequence are taken from `expected`: nothing is
  // promised about them.
  oracle::Outputs results(const oracle::Outputs& expected) const;

  // Decode: empty, or a message about the cache if it is not, byte for byte, what it must be after the append; likewise
  // about status.
  std::string cache_damage(const oracle::Outputs& expected) const;

 private:
  void set_append();
  void fill_args();
  void excuse_unused_rows(oracle::Outputs& results, const oracle::Outputs& expected) const;

  const Case& case_;
  const oracle::Inputs& inputs_;
  Buffer q_{"q"}, k_{"k"}, v_{"v"}, o_{"out"}, lse_{"lse"}, d_o_{"dout"}, d_lse_{"dlse"}, dq_{"dq"}, dk_{"dk"},
      dv_{"dv"}, slopes_{"alibi_slopes"}, cu_q_{"cu_seqlens_q"}, cu_k_{"cu_seqlens_k"}, cache_lengths_{"cache_seqlens"},
      page_table_{"page_table"}, k_new_{"k_new"}, v_new_{"v_new"}, rotary_cos_{"rotary_cos"}, rotary_sin_{"rotary_sin"},
      rotary_lengths_{"rotary_seqlens"}, cache_batch_idx_{"cache_batch_idx"}, leftpad_{"leftpad_k"}, status_{"status"},
      q_scale_{"q_scale"}, k_scale_{"k_scale"}, v_scale_{"v_scale"};
  tessera_attention args_ = TESSERA_ATTENTION_INIT;
};

}  // namespace tessera::cases
