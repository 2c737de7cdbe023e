#include "plain_kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <vector>

#include "attention/decode_config.h"
#include "attention/forward_config.h"
#include "attention/forward_sm90_config.h"

namespace tessera::emulated {
namespace {

float from_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}
std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct Input {
  const std::uint16_t* data;
  Strides strides;
};

// What encode() below left in a map's words, read as a tensor. A packed map begins `seq` rows before the tensor.
Input input_of(const AtomMaps& maps, bool packed, Index seq) {
  const TensorMap* map = maps.by_width;
  while (map->words[0] == 0) ++map;
  const auto stride = [&](int n) { return static_cast<Index>(map->words[n]) / 2; };
  const auto address = map->words[0] + (packed ? static_cast<unsigned long long>(seq) * map->words[1] : 0);
  return {reinterpret_cast<const std::uint16_t*>(address), {packed ? 0 : stride(3), stride(1), stride(2)}};
}

template <class Params>
void attend(const Params& p, const Input& q, const Input& k, const Input& v, Index batches, int dim_qk, int dim_v) {
  std::vector<float> weights, sums(static_cast<std::size_t>(dim_v));
  for (Index b = 0; b < batches; ++b) {
    const bool packed = p.cu_seqlens_q != nullptr;
    const Index first_q = packed ? p.cu_seqlens_q[b] : 0, first_k = packed ? p.cu_seqlens_k[b] : 0;
    const Index len_q = packed ? p.cu_seqlens_q[b + 1] - first_q : p.seq_q;
    const Index len_k = packed ? p.cu_seqlens_k[b + 1] - first_k : p.seq_k;
    const Index offset = p.band.bottom_right ? len_k - len_q : 0;
    for (Index h = 0; h < p.heads_q; ++h) {
      const Index hk = h / p.group;
      for (Index i = 0; i < len_q; ++i) {
        const Index begin = std::max<Index>(0, i + offset - p.band.left);
        const Index end = std::min<Index>(len_k, i + offset + p.band.right + 1);
        weights.assign(static_cast<std::size_t>(std::max<Index>(0, end - begin)), 0);
        std::fill(sums.begin(), sums.end(), 0.0F);
        const std::uint16_t* row = q.data + b * q.strides.batch + (first_q + i) * q.strides.seq + h * q.strides.head;
        float largest = -std::numeric_limits<float>::infinity(), total = 0;
        for (Index j = begin; j < end; ++j) {
          const std::uint16_t* key = k.data + b * k.strides.batch + (first_k + j) * k.strides.seq + hk * k.strides.head;
          float score = 0;
          for (int d = 0; d < dim_qk; ++d) score += from_bf16(row[d]) * from_bf16(key[d]);
          weights[static_cast<std::size_t>(j - begin)] = score *= p.scale;
          largest = std::max(largest, score);
        }
        for (Index j = begin; j < end; ++j) {
          const std::uint16_t* value =
              v.data + b * v.strides.batch + (first_k + j) * v.strides.seq + hk * v.strides.head;
          const float weight = std::exp(weights[static_cast<std::size_t>(j - begin)] - largest);
          total += weight;
          for (int d = 0; d < dim_v; ++d) sums[static_cast<std::size_t>(d)] += weight * from_bf16(value[d]);
        }
        auto* out = static_cast<std::uint16_t*>(p.o) + b * p.o_strides.batch + (first_q + i) * p.o_strides.seq +
                    h * p.o_strides.head;
        for (int d = 0; d < dim_v; ++d) {
          out[d] = to_bf16(total > 0 ? sums[static_cast<std::size_t>(d)] / total : 0);
        }
        if (p.lse == nullptr) continue;
        p.lse[b * p.lse_strides.batch + h * p.lse_strides.head + first_q + i] =
            total > 0 ? largest + std::log(total) : -std::numeric_limits<float>::infinity();
      }
    }
  }
}

// Head dims are in no Params; heads lie side by side in all that is tried here.
void attention_forward(const cuda::LaunchConfig& config, const void* params) {
  const auto& p = *static_cast<const AttentionForwardParams*>(params);
  const Index batches = config.grid_x / (p.q_tiles * p.heads_q);
  attend(p, {static_cast<const std::uint16_t*>(p.q), p.q_strides},
         {static_cast<const std::uint16_t*>(p.k), p.k_strides}, {static_cast<const std::uint16_t*>(p.v), p.v_strides},
         batches, static_cast<int>(p.q_strides.head), static_cast<int>(p.o_strides.head));
}

void attention_forward_sm90(const cuda::LaunchConfig&, const void* params) {
  const auto& p = *static_cast<const AttentionForwardSm90Params*>(params);
  const bool packed = p.cu_seqlens_q != nullptr;
  const Input q = input_of(p.q, packed, p.seq_q);
  attend(p, q, input_of(p.k, packed, p.seq_k), input_of(p.v, packed, p.seq_k), p.columns / p.heads_q,
         static_cast<int>(q.strides.head), static_cast<int>(p.o_strides.head));
}

// Decode, whole: what the kernel that combines partial results does is done here already.
struct Decode {
  const AttentionDecodeParams& p;
  const DecodeSchedule& s;
  Index dim_qk, dim_v;

  struct Sequence {
    Index batch, length, first_key, position, row;  // length: before the append
    bool refused;
  };

  Index page_of(Index b, Index key) const { return s.page_table[b * s.page_table_stride + key / s.page_size.by]; }

  Sequence sequence_of(Index b) const {
    const Index length = s.cache_seqlens != nullptr ? s.cache_seqlens[b] : s.capacity;
    const Index position = s.rotary_seqlens != nullptr ? s.rotary_seqlens[b] : length;
    const Index row = s.cache_batch_idx != nullptr ? s.cache_batch_idx[b] : b;
    const Index first_key = s.leftpad_k != nullptr ? s.leftpad_k[b] : 0;
    const bool rotates = p.rotary_dim > 0;
    bool refused = length < 0 || length + s.seq_new > s.capacity || first_key < 0 ||
                   (s.cache_batch_idx != nullptr && (row < 0 || row >= s.cache_rows)) ||
                   (rotates && (position < 0 || position + std::max<Index>(s.seq_new, s.seq_q.by) > s.rotary_rows));
    for (Index key = length; !refused && s.page_table != nullptr && key < length + s.seq_new; ++key) {
      refused = page_of(b, key) < 0 || page_of(b, key) >= s.num_pages;
    }
    return {b, length, first_key, position, row, refused};
  }

  std::uint16_t* cache_row(void* cache, const Strides& strides, const Sequence& of, Index head, Index key) const {
    auto* data = static_cast<std::uint16_t*>(cache) + head * strides.head;
    if (s.page_table == nullptr) return data + of.row * strides.batch + key * strides.seq;
    return data + page_of(of.batch, key) * strides.batch + key % s.page_size.by * strides.seq;
  }

  void rotate(std::uint16_t* row, Index position) const {
    const int half = p.rotary_dim / 2;
    const auto* cos = static_cast<const std::uint16_t*>(p.rotary_cos) + position * p.rotary_cos_stride;
    const auto* sin = static_cast<const std::uint16_t*>(p.rotary_sin) + position * p.rotary_sin_stride;
    for (int i = 0; i < half; ++i) {
      std::uint16_t& first = row[p.rotary_interleaved ? 2 * i : i];
      std::uint16_t& second = row[p.rotary_interleaved ? 2 * i + 1 : i + half];
      const float x = from_bf16(first), y = from_bf16(second), c = from_bf16(cos[i]), t = from_bf16(sin[i]);
      first = to_bf16(x * c - y * t);
      second = to_bf16(x * t + y * c);
    }
  }

  void append(const Sequence& of, Index head) const {
    for (Index i = 0; i < s.seq_new; ++i) {
      const auto write = [&](const void* from, const Strides& from_strides, void* cache, const Strides& strides,
                             Index dim) {
        std::uint16_t* row = cache_row(cache, strides, of, head, of.length + i);
        std::memcpy(row,
                    static_cast<const std::uint16_t*>(from) + of.batch * from_strides.batch + i * from_strides.seq +
                        head * from_strides.head,
                    static_cast<std::size_t>(dim) * 2);
        return row;
      };
      rotate(write(p.k_new, p.k_new_strides, p.k, p.k_strides, dim_qk), of.position + i);
      write(p.v_new, p.v_new_strides, p.v, p.v_strides, dim_v);
    }
  }

  void attend(const Sequence& of, Index h, Index i) const {
    const Index length = of.refused ? 0 : of.length + s.seq_new, at = i + length - s.seq_q.by, head = h / p.group;
    std::vector<std::uint16_t> q(static_cast<std::size_t>(dim_qk));
    std::memcpy(q.data(),
                static_cast<const std::uint16_t*>(p.q) + of.batch * p.q_strides.batch + i * p.q_strides.seq +
                    h * p.q_strides.head,
                q.size() * 2);
    if (!of.refused) rotate(q.data(), of.position + (p.rotary_advances != 0 ? i : 0));
    const Index begin = std::max<Index>({0, at - s.band.left, of.first_key});
    const Index end = std::min<Index>(length, at + s.band.right + 1);
    std::vector<float> scores;
    float largest = -std::numeric_limits<float>::infinity(), total = 0;
    for (Index j = begin; j < end; ++j) {
      const std::uint16_t* key = cache_row(p.k, p.k_strides, of, head, j);
      float score = 0;
      for (Index d = 0; d < dim_qk; ++d) score += from_bf16(q[static_cast<std::size_t>(d)]) * from_bf16(key[d]);
      score *= p.scale;
      if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
      if (p.alibi_slopes != nullptr) {
        score -= p.alibi_slopes[of.batch * p.alibi_batch_stride + h] * static_cast<float>(std::abs(at - j));
      }
      scores.push_back(score);
      largest = std::max(largest, score);
    }
    std::vector<float> sums(static_cast<std::size_t>(dim_v));
    for (Index j = begin; j < end; ++j) {
      const std::uint16_t* value = cache_row(p.v, p.v_strides, of, head, j);
      const float weight = std::exp(scores[static_cast<std::size_t>(j - begin)] - largest);
      total += weight;
      for (Index d = 0; d < dim_v; ++d) sums[static_cast<std::size_t>(d)] += weight * from_bf16(value[d]);
    }
    auto* out =
        static_cast<std::uint16_t*>(p.o) + of.batch * p.o_strides.batch + i * p.o_strides.seq + h * p.o_strides.head;
    for (Index d = 0; d < dim_v; ++d) out[d] = to_bf16(total > 0 ? sums[static_cast<std::size_t>(d)] / total : 0);
    if (p.lse == nullptr) return;
    p.lse[of.batch * p.lse_strides.batch + h * p.lse_strides.head + i] =
        total > 0 ? largest + std::log(total) : -std::numeric_limits<float>::infinity();
  }
};

void attention_decode(const cuda::LaunchConfig&, const void* params) {
  const auto& p = *static_cast<const AttentionDecodeParams*>(params);
  const Decode decode{p, p.schedule, p.q_strides.head, p.o_strides.head};
  for (Index b = 0; b < p.schedule.batch; ++b) {
    const Decode::Sequence sequence = decode.sequence_of(b);
    if (p.status != nullptr) p.status[b] = sequence.refused ? 1 : 0;
    for (Index head = 0; head < p.schedule.columns / static_cast<Index>(p.row_blocks.by); ++head) {
      if (!sequence.refused) decode.append(sequence, head);
      for (Index h = head * p.group; h < (head + 1) * p.group; ++h) {
        for (Index i = 0; i < static_cast<Index>(p.schedule.seq_q.by); ++i) decode.attend(sequence, h, i);
      }
    }
  }
}

}  // namespace

Compute plain_kernel(const char* name) {
  const std::string_view entry = name;
  if (entry == "tessera_attention_forward") return attention_forward;
  if (entry == "tessera_attention_forward_sm90") return attention_forward_sm90;
  if (entry == "tessera_attention_decode") return attention_decode;
  return nullptr;
}

}  // namespace tessera::emulated
