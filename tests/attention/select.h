// What the tests of attention's selection share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/family.h"
#include "attention/gpu.h"
#include "engine/select.h"

namespace tessera::attention {

using engine::cpu_device;
using engine::cuda_device;
using engine::Tuned;
using Candidate = engine::Candidate<AttentionFamily>;
using Selection = engine::Selection<AttentionFamily>;

inline AttentionProblem problem(AttentionOp op, std::int64_t seq, std::int64_t dim) {
  AttentionProblem p;
  p.op = op;
  p.dtype = DType::kFloat16;
  p.batch = 2;
  p.seq_q = p.seq_k = seq;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.dim_qk = p.dim_v = dim;
  p.scale = 0.125f;
  return p;
}

inline std::vector<Device> gpus() {
  std::vector<Device> list;
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"}) list.push_back(*cuda_device(arch));
  Device newer = *cuda_device("sm_90a");  // an architecture to come, with little shared memory
  newer.name = "sm_120";
  newer.compute = 120;
  newer.shared_memory_per_block = 99 * 1024;
  list.push_back(newer);
  return list;
}

inline Selection select(const AttentionProblem& p, const Device& device, const Tuned* tuned = nullptr) {
  return engine::select<AttentionFamily>(p, device, tuned);
}

inline Candidate chosen(const AttentionProblem& p, const Device& device) {
  return select(p, device).candidates.front();
}

inline std::string kernel_of(const Candidate& candidate) { return candidate.implementation->name; }

// The candidate's Config of its step "main", if that is a T.
template <class T>
std::optional<T> main_of(const engine::Config& config) {
  return engine::from_fields<T>(engine::fields_of_step(config, "main"));
}
template <class T>
std::optional<T> main_of(const Candidate& candidate) {
  return main_of<T>(candidate.offer.config);
}

inline engine::SearchSpace search_space(const AttentionProblem& p, const Device& device) {
  return engine::search_space<AttentionFamily>(p, device);
}

inline const engine::Refusal* refusal_of(const Selection& selection, const std::string& kernel) {
  for (const engine::Refusal& r : selection.refusals) {
    if (r.kernel == kernel) return &r;
  }
  return nullptr;
}

}  // namespace tessera::attention
