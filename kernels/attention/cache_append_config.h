// Config and Params of attention/cache_append.cuh.
#pragma once

#include "tile/kv_cache.h"
#include "tile/types.h"

namespace tessera {

struct CacheAppendConfig {
  DType dtype;
  int vector;  // elements per load and store: 8 (16 bytes), or 1 if a pointer or a stride does not allow it
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const CacheAppendConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("vector", config.vector);
  visit("threads", config.threads);
}

struct CacheAppendParams {
  KvCache cache;              // its lengths are those before the append
  const int* rotary_seqlens;  // [B], may be null
  int* lengths;               // [B], written: those after the append, -1 if the sequence is refused
  const void* q;              // [B, Sq, Hq, Dqk]; read if there is rotary embedding
  void* q_rotated;            // [B, Sq, Hq, Dqk], compact
  const void* k_new;          // [B, Sn, Hkv, Dqk]
  const void* v_new;          // [B, Sn, Hkv, Dv]
  void* k;
  void* v;
  const void* rotary_cos;  // [positions, rotary_dim / 2]
  const void* rotary_sin;
  Strides q_strides;
  Strides k_new_strides;
  Strides v_new_strides;
  Strides k_strides;  // .batch: of a page, if paged
  Strides v_strides;
  Index rotary_cos_stride;
  Index rotary_sin_stride;
  int rotary_rows;
  int rotary_dim;  // 0: no rotary embedding
  int rotary_interleaved;
  int rotary_advances;  // query i is at the first new key's position plus i, else at that position
  int seq_q;
  int seq_new;
  int heads_q;
  int heads_kv;
  int dim_qk;
  int dim_v;
  unsigned ctas;  // of a sequence
};

}  // namespace tessera
