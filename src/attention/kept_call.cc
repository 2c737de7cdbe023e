#include "attention/kept_call.h"

#include <algorithm>
#include <cstring>

namespace tessera::attention {
namespace {

struct Slot {
  std::size_t given;    // bytes into tessera_attention: the tensor's pointer
  std::size_t address;  // bytes into AttentionArgs: where its memory is
  bool activation;      // of those that AttentionProblem::vectors is about
};

#define TESSERA_SLOT(tensor, field, activation) \
  { offsetof(tessera_attention, tensor), offsetof(AttentionArgs, field), activation }
constexpr Slot kSlots[] = {
    TESSERA_SLOT(q, q.data, true),
    TESSERA_SLOT(k, k.data, true),
    TESSERA_SLOT(v, v.data, true),
    TESSERA_SLOT(out, o.data, true),
    TESSERA_SLOT(lse, lse.data, false),
    TESSERA_SLOT(dout, d_o.data, true),
    TESSERA_SLOT(dlse, d_lse.data, false),
    TESSERA_SLOT(dq, dq.data, true),
    TESSERA_SLOT(dk, dk.data, true),
    TESSERA_SLOT(dv, dv.data, true),
    TESSERA_SLOT(alibi_slopes, alibi_slopes, false),
    TESSERA_SLOT(cu_seqlens_q, cu_seqlens_q, false),
    TESSERA_SLOT(cu_seqlens_k, cu_seqlens_k, false),
    TESSERA_SLOT(cache_seqlens, cache_seqlens, false),
    TESSERA_SLOT(page_table, page_table, false),
    TESSERA_SLOT(k_new, k_new.data, true),
    TESSERA_SLOT(v_new, v_new.data, true),
    TESSERA_SLOT(rotary_cos, rotary_cos, false),
    TESSERA_SLOT(rotary_sin, rotary_sin, false),
    TESSERA_SLOT(rotary_seqlens, rotary_seqlens, false),
    TESSERA_SLOT(cache_batch_idx, cache_batch_idx, false),
    TESSERA_SLOT(leftpad_k, leftpad_k, false),
    TESSERA_SLOT(status, status, false),
    TESSERA_SLOT(q_scale, q_scale.data, false),
    TESSERA_SLOT(k_scale, k_scale.data, false),
    TESSERA_SLOT(v_scale, v_scale.data, false),
};
#undef TESSERA_SLOT

// struct_size; scale and softcap; flags and alignment; windows, max_seqlens, chunk
constexpr std::size_t kOptionWords = 8;
static_assert(sizeof(tessera_attention) == (std::size(kSlots) + kOptionWords) * sizeof(std::uint64_t),
              "a new tensor needs a slot");

bool check_reads_host_memory(const CheckedAttention& checked) {
  const AttentionProblem& p = checked.args.problem;
  return checked.device.type == TESSERA_CPU && (p.op == AttentionOp::kDecode || p.varlen || p.fp8);
}

}  // namespace

std::unique_ptr<const KeptCall> KeptCall::of(const tessera_attention& given, const CheckedAttention& checked,
                                             const AttentionProblem& planned) {
  if (given.struct_size != sizeof given || check_reads_host_memory(checked)) return nullptr;
  auto kept = std::make_unique<KeptCall>();
  std::memcpy(kept->words_.data(), &given, sizeof given);
  kept->compared_.fill(~std::uint64_t{0});
  for (const Slot& slot : kSlots) {
    const std::size_t word = slot.given / sizeof(std::uint64_t);
    const auto* tensor = reinterpret_cast<const tessera_tensor*>(kept->words_[word]);
    if (tensor == nullptr) continue;
    kept->compared_[word] = 0;
    const bool vectors = slot.activation && planned.vectors && checked.device.type == TESSERA_CUDA;
    const int alignment = vectors ? 16 : tensor->dtype.bits / 8;
    KeptTensor one{.word = word,
                   .address_at = slot.address,
                   .low_bits = static_cast<std::uintptr_t>(alignment - 1),
                   .device = tensor->device,
                   .rank = tensor->ndim,
                   .dtype = tensor->dtype,
                   .byte_offset = tensor->byte_offset,
                   .has_strides = tensor->strides != nullptr,
                   .shape = {},
                   .strides = {}};
    const std::int64_t* const shape = tensor->shape;
    if (std::find(shape, shape + one.rank, 0) != shape + one.rank) return nullptr;
    std::copy_n(shape, one.rank, one.shape.begin());
    if (one.has_strides) std::copy_n(tensor->strides, one.rank, one.strides.begin());
    kept->tensors_.push_back(one);
  }
  kept->shared_lengths_ = checked.args.cu_seqlens_q == checked.args.cu_seqlens_k;
  kept->args_ = checked.args;
  kept->args_.problem = planned;
  for (const KeptTensor& tensor : kept->tensors_) set_address(tensor, 0, kept->args_);  // each call has its own
  return kept;
}

bool KeptCall::KeptTensor::describes(const tessera_tensor& tensor) const {
  if (tensor.ndim != rank || tensor.device.type != device.type || tensor.device.index != device.index ||
      tensor.dtype.code != dtype.code || tensor.dtype.bits != dtype.bits || tensor.dtype.lanes != dtype.lanes ||
      tensor.byte_offset != byte_offset || tensor.shape == nullptr || (tensor.strides != nullptr) != has_strides) {
    return false;
  }
  std::int64_t differences = 0;
  for (int d = 0; d < rank; ++d) differences |= tensor.shape[d] ^ shape[d];
  for (int d = 0; d < rank && has_strides; ++d) differences |= tensor.strides[d] ^ strides[d];
  return differences == 0;
}

void KeptCall::set_address(const KeptTensor& tensor, std::uintptr_t address, AttentionArgs& args) {
  std::memcpy(reinterpret_cast<char*>(&args) + tensor.address_at, &address, sizeof address);
}

bool KeptCall::repeats(const tessera_attention& given, std::optional<AttentionArgs>& args) const {
  if (given.struct_size != sizeof given) return false;
  Words words;
  std::memcpy(words.data(), &given, sizeof given);
  std::uint64_t differences = 0;
  for (std::size_t i = 0; i < words.size(); ++i) differences |= (words[i] ^ words_[i]) & compared_[i];
  if (differences != 0) return false;

  args.emplace(args_);
  for (const KeptTensor& kept : tensors_) {
    const auto* tensor = reinterpret_cast<const tessera_tensor*>(words[kept.word]);
    if (tensor == nullptr || tensor->data == nullptr || !kept.describes(*tensor)) return false;
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(tensor->data) + tensor->byte_offset;
    if ((address & kept.low_bits) != 0) return false;
    set_address(kept, address, *args);
  }
  return (args->cu_seqlens_q == args->cu_seqlens_k) == shared_lengths_;
}

}  // namespace tessera::attention
