// The call that a plan was made with. A call that differs from it only in addresses needs no second check.
//
// Threads may share it, because nothing is written after of(). Nothing in it can grow stale: it is part of its plan, it
// keeps what the check says about descriptions and not what memory holds, and each call brings its own addresses.
// Kernels, their Configs and the device are the plan's, whether or not a call is checked again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/check.h"
#include "base/tensor.h"

namespace tessera::attention {

class KeptCall {
 public:
  // given has passed check() as `checked`, and the plan is for `planned`. Null if a repeated call would have to be
  // checked anyway: if the check reads host memory, if a tensor is empty, or if the struct is of another version's size.
  static std::unique_ptr<const KeptCall> of(const tessera_attention& given, const CheckedAttention& checked,
                                            const AttentionProblem& planned);

  // True, and args filled, if `given` differs only in addresses, and these are accepted. If not, check() knows why.
  bool repeats(const tessera_attention& given, std::optional<AttentionArgs>& args) const;

 private:
  using Words = std::array<std::uint64_t, sizeof(tessera_attention) / sizeof(std::uint64_t)>;

  struct KeptTensor {
    std::size_t word;         // of the tensor's pointer among the struct's words
    std::size_t address_at;   // bytes into AttentionArgs
    std::uintptr_t low_bits;  // that an address must not have
    tessera_device device;
    std::int32_t rank;
    tessera_dtype dtype;
    std::uint64_t byte_offset;
    bool has_strides;
    std::array<std::int64_t, CheckedTensor::kMaxRank> shape, strides;

    bool describes(const tessera_tensor& tensor) const;
  };

  static void set_address(const KeptTensor& tensor, std::uintptr_t address, AttentionArgs& args);

  Words words_{};
  Words compared_{};  // all ones, or 0 for the pointer of a tensor that was given
  std::vector<KeptTensor> tensors_;
  bool shared_lengths_ = false;  // cu_seqlens_q and cu_seqlens_k are the same memory, so sequences' lengths agree
  AttentionArgs args_;           // without the tensors' addresses
};

}  // namespace tessera::attention
