// What attention's heuristics choose, as a table: a change of them shows as a diff that somebody reviews.
//
// A row is what `tessera explain attention FLAGS --arch ARCH` is asked, and the main kernel that it must come to. Where
// measurements say that another kernel or tile is better, change the row with the heuristic.
#include <gtest/gtest.h>

#include <sstream>

#include "engine/device.h"
#include "verify/attention/family.h"
#include "verify/family.h"

namespace tessera::verify {
namespace {

struct Row {
  const char* arch;
  const char* flags;
  const char* kernel;  // its instance's name: kernel, type, head dims, tile and variant; "": none serves the problem
};

constexpr Row kRows[] = {
    // e4m3: sums of more than 1,024 visible keys are promoted, unless truncated ones are allowed.
    {"sm_90a", "--sq 4096 --hq 16 --d 128 --fp8", "attention_forward_fp8_sm90_bf16_d128x128_192x96_rounds_q_promotes"},
    {"sm_90a", "--sq 4096 --hq 16 --d 128 --fp8 --fp8-fast",
     "attention_forward_fp8_sm90_bf16_d128x128_192x96_rounds_q"},
    {"sm_90a", "--sq 4096 --hq 16 --d 128 --fp8 --causal --window 255 0",
     "attention_forward_fp8_sm90_bf16_d128x128_192x96_masked_dynamic_rounds_q"},
    {"sm_90a", "--sq 4096 --hq 8 --d 256 --fp8",
     "attention_forward_fp8_sm90_bf16_d256x256_128x96_rounds_q_promotes_q_in_sums"},
    {"sm_89", "--sq 4096 --hq 16 --d 256 --fp8 --causal --window 255 0",
     "attention_forward_fp8_bf16_d256x256_64w4_masked"},
    {"sm_90a", "--op decode --sq 512 --sk 8192 --hq 32 --hkv 8 --d 128 --causal",
     "attention_forward_sm90_bf16_d128x128_192x80_masked_cache"},
    {"sm_90a", "--op decode --sq 2048 --sk 32768 --hq 32 --hkv 8 --d 128 --causal --page-size 64",
     "attention_forward_sm90_bf16_d128x128_192x80_masked_dynamic_cache_page16"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 64", "attention_forward_sm90_bf16_d64x64_192x128"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 64 --causal", "attention_forward_sm90_bf16_d64x64_192x128_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 80", "attention_forward_sm90_bf16_d80x80_192x112"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 80 --causal", "attention_forward_sm90_bf16_d80x80_192x112_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 128", "attention_forward_sm90_bf16_d128x128_192x80"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 128 --causal",
     "attention_forward_sm90_bf16_d128x128_192x80_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 192", "attention_forward_sm90_bf16_d192x192_128x96"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 192 --causal",
     "attention_forward_sm90_bf16_d192x192_128x96_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 256", "attention_forward_sm90_bf16_d256x256_128x64"},
    {"sm_90a", "--b 2 --sq 8192 --hq 16 --d 256 --causal",
     "attention_forward_sm90_bf16_d256x256_128x64_masked_dynamic"},
    {"sm_90a", "--b 4 --sq 512 --hq 16 --d 64 --causal", "attention_forward_sm90_bf16_d64x64_192x64_masked"},
    {"sm_90a", "--b 4 --sq 512 --hq 16 --d 128", "attention_forward_sm90_bf16_d128x128_192x64"},
    {"sm_90a", "--b 4 --sq 1024 --hq 16 --d 64 --causal", "attention_forward_sm90_bf16_d64x64_192x64_masked"},
    {"sm_90a", "--b 4 --sq 1024 --hq 16 --d 128", "attention_forward_sm90_bf16_d128x128_192x80"},
    {"sm_90a", "--b 4 --sq 2048 --hq 16 --d 64 --causal", "attention_forward_sm90_bf16_d64x64_192x128_masked_dynamic"},
    {"sm_90a", "--b 4 --sq 2048 --hq 16 --d 128", "attention_forward_sm90_bf16_d128x128_192x80"},
    {"sm_90a", "--b 4 --sq 16384 --hq 16 --d 64 --causal", "attention_forward_sm90_bf16_d64x64_192x128_masked_dynamic"},
    {"sm_90a", "--b 4 --sq 16384 --hq 16 --d 128", "attention_forward_sm90_bf16_d128x128_192x80"},
    {"sm_90a", "--b 1 --sq 512 --hq 8 --d 64", "attention_forward_sm90_bf16_d64x64_64x128_split"},
    {"sm_90a", "--b 1 --sq 512 --hq 8 --d 128 --causal", "attention_forward_sm90_bf16_d128x128_64x80_split_masked"},
    {"sm_90a", "--b 32 --sq 128 --hq 16 --d 64", "attention_forward_sm90_bf16_d64x64_128x48"},
    {"sm_90a", "--b 32 --sq 512 --hq 8 --d 256", "attention_forward_sm90_bf16_d256x256_128x64_dynamic"},
    {"sm_90a", "--b 64 --sq 17 --hq 25 --d 96", "attention_forward_sm90_bf16_d96x96_64x32"},
    {"sm_90a", "--b 64 --sq 17 --hq 25 --d 64", "attention_forward_sm90_bf16_d64x64_64x32"},
    {"sm_90a", "--b 64 --sq 64 --hq 16 --d 128", "attention_forward_sm90_bf16_d128x128_64x64"},
    {"sm_90a", "--b 64 --sq 564 --sk 64 --hq 8 --d 64", "attention_forward_sm90_bf16_d64x64_64x64_few_keys"},
    {"sm_90a", "--b 1 --sq 8192 --hq 8 --d 192 --causal", "attention_forward_sm90_bf16_d192x192_128x96_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 4096 --hq 16 --d 192 --dv 128 --causal",
     "attention_forward_sm90_bf16_d192x128_128x128_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 4096 --hq 16 --d 128 --causal --window 512 0",
     "attention_forward_sm90_bf16_d128x128_192x80_masked_dynamic"},
    {"sm_90a", "--b 2 --sq 4096 --hq 16 --d 128 --softcap 30",
     "attention_forward_sm90_bf16_d128x128_128x112_score_mod"},
    {"sm_90a", "--b 2 --sq 4096 --hq 16 --d 64 --causal --alibi",
     "attention_forward_sm90_bf16_d64x64_128x112_masked_score_mod_dynamic"},
    {"sm_90a", "--dtype fp16 --b 2 --sq 4096 --hq 16 --d 96", "attention_forward_sm90_fp16_d96x96_192x96"},
    {"sm_90a", "--b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_forward_sm90_bf16_d128x128_64x80_split_pack_gqa"},
    {"sm_90a", "--b 1 --sq 4 --sk 16384 --hq 32 --hkv 4 --d 64 --causal bottom_right",
     "attention_forward_sm90_bf16_d64x64_64x128_split_pack_gqa_masked"},
    {"sm_90a", "--b 16 --sq 1 --sk 8192 --hq 32 --d 128", "attention_forward_bf16_d128x128_64x64w4_halves"},
    {"sm_90a", "--b 1 --sq 1 --sk 1024 --hq 64 --hkv 1 --d 256",
     "attention_forward_sm90_bf16_d256x256_128x64_pack_gqa"},
    {"sm_90a", "--b 2 --sq 16 --sk 4096 --hq 16 --d 80", "attention_forward_bf16_d80x80_64x64w4_halves"},
    {"sm_90a", "--b 2 --sq 64 --sk 4096 --hq 16 --d 128 --softcap 30",
     "attention_forward_sm90_bf16_d128x128_64x64_split_score_mod"},
    {"sm_90", "--b 2 --sq 4096 --hq 16 --d 128 --causal", "attention_forward_bf16_d128x128_128x32w4_masked"},
    {"sm_80", "--b 2 --sq 4096 --hq 16 --d 64", "attention_forward_bf16_d64x64_128x96w4"},
    {"sm_80", "--b 2 --sq 4096 --hq 16 --d 80 --causal", "attention_forward_bf16_d80x80_128x64w4_masked"},
    {"sm_80", "--b 2 --sq 4096 --hq 16 --d 128 --causal", "attention_forward_bf16_d128x128_128x32w4_masked"},
    {"sm_80", "--b 2 --sq 4096 --hq 16 --d 256", "attention_forward_bf16_d256x256_64x64w4"},
    {"sm_80", "--b 2 --sq 4096 --hq 16 --d 128 --softcap 30", "attention_forward_bf16_d128x128_64x64w4_score_mod"},
    {"sm_86", "--b 2 --sq 4096 --hq 16 --d 64", "attention_forward_bf16_d64x64_128x96w4"},
    {"sm_86", "--b 2 --sq 4096 --hq 16 --d 80 --causal", "attention_forward_bf16_d80x80_128x64w4_masked"},
    {"sm_86", "--b 2 --sq 4096 --hq 16 --d 128 --causal", "attention_forward_bf16_d128x128_128x32w4_masked"},
    {"sm_86", "--b 2 --sq 4096 --hq 16 --d 256", "attention_forward_bf16_d256x256_64x64w4"},
    {"sm_86", "--b 2 --sq 4096 --hq 16 --d 128 --softcap 30", "attention_forward_bf16_d128x128_64x64w4_score_mod"},
    {"sm_80", "--b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128", "attention_forward_bf16_d128x128_64x64w4_halves"},
    {"sm_75", "--dtype fp16 --b 2 --sq 4096 --hq 16 --d 64 --causal", "attention_forward_fp16_d64x64_64x64w4_masked"},
    {"sm_75", "--dtype fp16 --b 2 --sq 4096 --hq 16 --d 128", "attention_forward_fp16_d128x128_64x64w4"},
    {"sm_75", "--dtype fp16 --b 2 --sq 4096 --hq 16 --d 256 --causal",
     "attention_forward_fp16_d256x256_64x32w4_masked"},
    {"sm_75", "--dtype fp16 --b 2 --sq 4096 --hq 16 --d 192 --softcap 30",
     "attention_forward_fp16_d192x192_64x16w4_score_mod"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 8192 --d 64", "attention_backward_sm90_bf16_d64x64_64x128_sliced"},
    {"sm_90a", "--op backward --b 1 --hq 33 --sq 8192 --d 64", "attention_backward_sm90_bf16_d64x64_64x128"},
    {"sm_90a", "--op backward --b 1 --hq 8 --sq 205000 --sk 200000 --d 64",
     "attention_backward_sm90_bf16_d64x64_64x128_in_step"},
    {"sm_90a", "--op backward --b 1 --hq 8 --sq 131072 --d 128",
     "attention_backward_sm90_bf16_d128x128_64x128_sliced_in_step"},
    {"sm_90a", "--op backward --b 1 --hq 8 --sq 131072 --d 128 --deterministic",
     "attention_backward_sm90_bf16_d128x128_64x128_deterministic_sliced"},
    {"sm_90a", "--op backward --b 1 --hq 8 --sq 131072 --d 128 --causal",
     "attention_backward_sm90_bf16_d128x128_64x128_masked"},
    // A head's Q, dO and dQ sums exceed 32 MB, or just do not.
    {"sm_90a", "--op backward --b 1 --hq 33 --sq 32800 --sk 32768 --d 128",
     "attention_backward_sm90_bf16_d128x128_64x128_in_step"},
    {"sm_90a", "--op backward --b 1 --hq 33 --sq 32768 --d 128", "attention_backward_sm90_bf16_d128x128_64x128"},
    // Two waves of CTAs, or one.
    {"sm_90a", "--op backward --b 1 --hq 2 --sq 66000 --sk 16896 --d 128",
     "attention_backward_sm90_bf16_d128x128_64x128_in_step"},
    {"sm_90a", "--op backward --b 1 --hq 1 --sq 66000 --sk 16896 --d 128",
     "attention_backward_sm90_bf16_d128x128_64x128"},
    {"sm_90a", "--op backward --b 1 --hq 2 --sq 66000 --sk 16896 --d 64 --softcap 30 --alibi --align top_left",
     "attention_backward_sm90_bf16_d64x64_64x128_score_mod_in_step"},
    {"sm_90a", "--op backward --b 1 --hq 16 --hkv 8 --sq 131072 --d 64",
     "attention_backward_sm90_bf16_d64x64_64x128_sliced"},
    {"sm_90a", "--op backward --b 64 --hq 8 --sq 564 --sk 64 --d 64",
     "attention_backward_sm90_bf16_d64x64_64x64_writes_dq"},
    {"sm_90a", "--op backward --b 64 --hq 8 --sq 564 --sk 100 --d 80 --deterministic",
     "attention_backward_sm90_bf16_d80x80_64x128_writes_dq"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 8192 --d 80 --causal",
     "attention_backward_sm90_bf16_d80x80_64x128_masked"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 8192 --d 128 --causal",
     "attention_backward_sm90_bf16_d128x128_64x128_masked"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 512 --d 128", "attention_backward_sm90_bf16_d128x128_64x128"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 16 --sk 4096 --d 128", "attention_backward_bf16_d128x128_16x64w4"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 256 --causal",
     "attention_backward_wide_sm90_bf16_d256x256_64x64_masked_cluster"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 136",
     "attention_backward_wide_sm90_bf16_d136x136_64x64_cluster"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 128 --dv 192",
     "attention_backward_wide_sm90_bf16_d128x192_64x64"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 192 --dv 128 --causal",
     "attention_backward_wide_sm90_bf16_d192x128_64x64_masked_cluster"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 256 --deterministic",
     "attention_backward_wide_sm90_bf16_d256x256_64x64_deterministic_cluster"},
    // Key tiles with several query heads each take turns only if they must.
    {"sm_90a", "--op backward --b 2 --hq 32 --hkv 8 --sq 4096 --d 96 --causal",
     "attention_backward_sm90_bf16_d96x96_64x128_masked"},
    {"sm_90a", "--op backward --b 4 --hq 64 --hkv 8 --sq 4096 --d 128 --causal",
     "attention_backward_sm90_bf16_d128x128_64x128_masked"},
    {"sm_90a", "--op backward --b 1 --hq 56 --hkv 8 --sq 8192 --d 128 --causal --deterministic",
     "attention_backward_sm90_bf16_d128x128_64x128_masked_deterministic_split"},
    {"sm_90a", "--op backward --b 1 --hq 32 --hkv 8 --sq 2048 --d 128 --causal",
     "attention_backward_sm90_bf16_d128x128_64x128_masked_split"},
    {"sm_90a", "--op backward --b 8 --hq 32 --hkv 8 --sq 2048 --d 128 --causal",
     "attention_backward_sm90_bf16_d128x128_64x128_masked"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 128 --softcap 30",
     "attention_backward_sm90_bf16_d128x128_64x128_score_mod"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 8192 --d 64 --causal --deterministic",
     "attention_backward_sm90_bf16_d64x64_64x128_masked_deterministic_sliced"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 8192 --d 128 --deterministic",
     "attention_backward_sm90_bf16_d128x128_64x128_deterministic_sliced"},
    {"sm_90a", "--op backward --b 2 --hq 16 --sq 4096 --d 128 --hkv 4 --causal",
     "attention_backward_sm90_bf16_d128x128_64x128_masked"},
    {"sm_80", "--op backward --b 2 --sq 4096 --hq 16 --d 64", "attention_backward_bf16_d64x64_64x64w4"},
    {"sm_80", "--op backward --b 2 --sq 4096 --hq 16 --d 128 --causal",
     "attention_backward_bf16_d128x128_32x128w8_masked"},
    {"sm_80", "--op backward --b 2 --sq 4096 --hq 16 --d 128 --causal --deterministic",
     "attention_backward_bf16_d128x128_32x128w8_no_dq_masked"},
    {"sm_80", "--op backward --b 2 --sq 4096 --hq 16 --d 256", "attention_backward_bf16_d256x256_32x64w8"},
    {"sm_86", "--op backward --b 2 --sq 4096 --hq 16 --d 64", "attention_backward_bf16_d64x64_32x64w4"},
    {"sm_86", "--op backward --b 2 --sq 4096 --hq 16 --d 128 --causal",
     "attention_backward_bf16_d128x128_32x64w4_masked"},
    {"sm_86", "--op backward --b 2 --sq 4096 --hq 16 --d 128 --causal --deterministic",
     "attention_backward_bf16_d128x128_32x64w4_no_dq_masked"},
    {"sm_86", "--op backward --b 2 --sq 4096 --hq 16 --d 256", "attention_backward_bf16_d256x256_16x64w8"},
    {"sm_75", "--op backward --dtype fp16 --b 2 --sq 4096 --hq 16 --d 64 --causal",
     "attention_backward_fp16_d64x64_32x64w4_masked"},
    {"sm_75", "--op backward --dtype fp16 --b 2 --sq 4096 --hq 16 --d 128 --deterministic",
     "attention_backward_fp16_d128x128_32x64w8_no_dq"},
    {"sm_75", "--op backward --dtype fp16 --b 2 --sq 4096 --hq 16 --d 256", "attention_backward_fp16_d256x256_16x32w4"},
    {"sm_75", "--b 2 --sq 4096 --hq 16 --d 64", ""},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k128w1x8_s3c1"},
    {"sm_90a", "--op decode --b 64 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k64w1x4_s3c2"},
    {"sm_90a", "--op decode --b 1 --sq 1 --sk 1024 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k128w1x4_s3c1_cluster8"},
    {"sm_90a", "--op decode --b 4 --sq 1 --sk 512 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k128w1x4_s3c1_cluster2"},
    {"sm_90a", "--op decode --b 1 --sq 1 --sk 4160 --hq 32 --hkv 32 --d 128",
     "attention_decode_bf16_d128x128_k128w1x4_s3c1_cluster3"},
    {"sm_90a", "--op decode --b 1 --sq 1 --sk 4160 --hq 16 --hkv 16 --d 128",
     "attention_decode_bf16_d128x128_k128w1x4_s3c1_cluster6"},
    {"sm_90a", "--op decode --b 1 --sq 1 --sk 8192 --hq 32 --hkv 32 --d 128",
     "attention_decode_bf16_d128x128_k64w1x4_s3c2"},
    {"sm_90a", "--op decode --b 1 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k64w1x4_s3c2"},
    {"sm_90a", "--op decode --b 1 --sq 1 --sk 1024 --hq 32 --hkv 8 --d 128 --batch-invariant",
     "attention_decode_bf16_d128x128_k64w1x4_s3c2"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 256",
     "attention_decode_bf16_d256x256_k64w1x4_s3c1"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 64",
     "attention_decode_bf16_d64x64_k128w1x8_s3c1"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 80",
     "attention_decode_bf16_d80x80_k128w1x8_s3c1"},
    {"sm_90a", "--op decode --b 64 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 64",
     "attention_decode_bf16_d64x64_k128w1x4_s3c2"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --page-size 16",
     "attention_decode_bf16_d128x128_k128w1x8_s3c1_tma16_paged"},
    {"sm_90a", "--op decode --b 64 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --page-size 16",
     "attention_decode_bf16_d128x128_k64w1x4_s2c2_tma16_paged"},
    {"sm_90a", "--op decode --b 16 --sq 16 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k16w4x1_s3c2"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --softcap 30",
     "attention_decode_bf16_d128x128_k128w1x8_s3c1_score_mod"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --e4m3-cache",
     "attention_decode_bf16_d128x128_k256w1x8_s2c1_e4m3"},
    {"sm_90a", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --e4m3-cache --page-size 16",
     "attention_decode_bf16_d128x128_k128w1x4_s2c2_tma16_paged_e4m3"},
    {"sm_89", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --e4m3-cache",
     "attention_decode_bf16_d128x128_k128w1x4_s2c1_e4m3"},
    {"sm_86", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --e4m3-cache", ""},
    {"sm_80", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k64w1x4_s2c2"},
    {"sm_80", "--op decode --b 1 --sq 1 --sk 1024 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k64w1x4_s2c2"},
    {"sm_86", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_bf16_d128x128_k64w1x4_s2c1"},
    {"sm_86", "--op decode --b 16 --sq 16 --sk 8192 --hq 32 --hkv 8 --d 256",
     "attention_decode_bf16_d256x256_k16w2x1_s2c1"},
    {"sm_75", "--op decode --dtype fp16 --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128",
     "attention_decode_fp16_d128x128_k64w1x4_s1c1"},
    {"sm_75", "--op decode --dtype fp16 --b 16 --sq 16 --sk 8192 --hq 32 --hkv 8 --d 256",
     "attention_decode_fp16_d256x256_k32w1x2_s1c1"},
    {"sm_75", "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128", ""},
    {"sm_90a", "--op decode --dtype fp32 --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128", ""},
    {"sm_90a", "--dtype fp32 --b 2 --sq 512 --hq 16 --d 64", ""},
};

// "--sq 4096 --causal" as the program gives it to a family.
FlagValues flags_of(const std::string& text) {
  FlagValues values;
  std::istringstream words(text);
  std::string flag;
  for (std::string word; words >> word;) {
    if (word.starts_with("--")) {
      flag = word;
      values[flag];
    } else {
      values[flag].push_back(word);
    }
  }
  return values;
}

// The instance of the chosen kernel's main step.
std::string chosen_instance(const Case& c, const engine::Device& device) {
  const engine::Explanation explanation = c.explain(device);
  if (explanation.options.empty()) return "";
  const engine::Explanation::Option& best = explanation.options.front();
  for (const jit::KernelInstance& instance : c.kernels_of({best.kernel, best.config}, device)) {
    if (instance.name.starts_with(best.kernel)) return instance.name;
  }
  return best.kernel + " without a main step";
}

TEST(AttentionChoice, is_what_the_table_says) {
  for (const Row& row : kRows) {
    const auto c = attention_family().described(flags_of(row.flags));
    ASSERT_TRUE(c.ok()) << row.flags << ": " << c.status().message();
    const auto device = engine::cuda_device(row.arch);
    ASSERT_TRUE(device.ok()) << row.arch;
    EXPECT_EQ(chosen_instance(**c, *device), row.kernel)
        << "tessera explain attention " << row.flags << " --arch " << row.arch;
  }
}

}  // namespace
}  // namespace tessera::verify
