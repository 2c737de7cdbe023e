// Products of bf16 with fp32 sums: AMX if the CPU has it, vdpbf16ps if it only has avx512_bf16. Both read the same packed
// forms; only the product differs. Written with intrinsics because Highway 1.0.3 has neither instruction.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/products.h"

// After every header whose inline functions other files use too: those must stay runnable on any CPU.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16")

namespace tessera::cpu {
namespace {

constexpr std::int64_t kW = 16;

using Bits = std::uint16_t;  // of a bf16

constexpr std::int64_t kPairLine = 32;  // elements in a line of lhs, and in a line of pairs of rhs

__mmask32 first_32(std::int64_t count) {
  return count >= 32 ? 0xFFFFFFFFu : count <= 0 ? 0u : static_cast<__mmask32>((1u << count) - 1u);
}
__mmask16 first_16(std::int64_t count) {
  return count >= 16 ? 0xFFFFu : count <= 0 ? 0u : static_cast<__mmask16>((1u << count) - 1u);
}

// Columns of rows `row` and `row + 1` side by side, zeros for a row that does not exist.
__m512i load_pair(const Source& source, std::int64_t rows, std::int64_t row, std::int64_t col, __mmask16 columns) {
  const Bits* from = static_cast<const Bits*>(source.data) + row * source.stride + col;
  const __m256i none = _mm256_setzero_si256();
  const __m256i even = row < rows ? _mm256_maskz_loadu_epi16(columns, from) : none;
  const __m256i odd = row + 1 < rows ? _mm256_maskz_loadu_epi16(columns, from + source.stride) : none;
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xDD);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// [cols / 32][capacity][32]
void pack_lhs(const Source& source, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst) {
  Bits* to = static_cast<Bits*>(dst);
  for (std::int64_t row = 0; row < round_up(rows, kPad); ++row) {
    const Bits* from = static_cast<const Bits*>(source.data) + row * source.stride;
    for (std::int64_t col = 0; col < cols; col += kPairLine) {
      const __m512i line =
          row < rows ? _mm512_maskz_loadu_epi16(first_32(cols - col), from + col) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + (col / kPairLine * capacity + row) * kPairLine, line);
    }
  }
}

// [rows / 32][round_up(cols, 32)][32]: columns become the rows of the lhs.
void pack_lhs_t(const Source& source, std::int64_t rows, std::int64_t cols, std::int64_t, void* dst) {
  const std::int64_t lines = round_up(cols, kPad);
  for (std::int64_t row = 0; row < rows; row += kPairLine) {
    Bits* to = static_cast<Bits*>(dst) + row * lines;
    for (std::int64_t col = 0; col < lines; col += kW) {
      const __mmask16 columns = first_16(cols - col);
      __m512i block[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) block[i] = load_pair(source, rows, row + 2 * i, col, columns);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (col + i) * kPairLine, block[i]);
    }
  }
}

// [cols / W][capacity / 2][W][2]
void pack_rhs(const Source& source, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst) {
  Bits* to = static_cast<Bits*>(dst);
  for (std::int64_t row = 0; row < round_up(rows, kPad); row += 2) {
    for (std::int64_t col = 0; col < cols; col += kW) {
      _mm512_storeu_si512(to + (col / kW * capacity + row) * kW,
                          load_pair(source, rows, row, col, first_16(cols - col)));
    }
  }
}

// [rows / W][capacity / 2][W][2]: pairs of columns are already side by side in memory.
void pack_rhs_t(const Source& source, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst) {
  for (std::int64_t row = 0; row < rows; row += kW) {
    Bits* to = static_cast<Bits*>(dst) + row * capacity;
    const Bits* from = static_cast<const Bits*>(source.data) + row * source.stride;
    for (std::int64_t col = 0; col < cols; col += kPairLine) {
      const __mmask32 columns = first_32(cols - col);
      __m512i block[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        block[i] =
            row + i < rows ? _mm512_maskz_loadu_epi16(columns, from + i * source.stride + col) : _mm512_setzero_si512();
      }
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + col * kW + i * kPairLine, block[i]);
    }
  }
}

constexpr std::int64_t kTile = 16;       // rows of a tile register
constexpr std::int64_t kTileBytes = 64;  // bytes in a row of one
constexpr std::int64_t kResident = 4;    // tiles of rhs kept in registers

// For few terms, kSteps * 32: a panel of rhs stays in tiles 4 to 7 while the rows of lhs stream through tiles 1 to 3 and their
// sums through tile 0. 128 terms: 1.0 to 1.25 times the speed of blocks of 2 x 2 sums with up to 128 rows, 0.83 with 256.
template <int kSteps>
void amx_panel(const Bits* lhs, std::int64_t lhs_stride, const Bits* rhs, float* result, std::int64_t rows,
               bool accumulate) {
  _tile_loadd(4, rhs, kTileBytes);
  if constexpr (kSteps > 1) _tile_loadd(5, rhs + kTile * kPairLine, kTileBytes);
  if constexpr (kSteps > 2) _tile_loadd(6, rhs + 2 * kTile * kPairLine, kTileBytes);
  if constexpr (kSteps > 3) _tile_loadd(7, rhs + 3 * kTile * kPairLine, kTileBytes);
  for (std::int64_t row = 0; row < rows; row += kTile, lhs += kTile * kPairLine, result += kTile * kW) {
    if (accumulate) {
      _tile_loadd(0, result, kTileBytes);
    } else {
      _tile_zero(0);
    }
    _tile_loadd(1, lhs, kTileBytes);
    _tile_dpbf16ps(0, 1, 4);
    if constexpr (kSteps > 1) {
      _tile_loadd(2, lhs + lhs_stride, kTileBytes);
      _tile_dpbf16ps(0, 2, 5);
    }
    if constexpr (kSteps > 2) {
      _tile_loadd(3, lhs + 2 * lhs_stride, kTileBytes);
      _tile_dpbf16ps(0, 3, 6);
    }
    if constexpr (kSteps > 3) {
      _tile_loadd(1, lhs + 3 * lhs_stride, kTileBytes);
      _tile_dpbf16ps(0, 1, 7);
    }
    _tile_stored(0, result, kTileBytes);
  }
}

// For many terms: the sums of kTiles tiles of lhs by kPanels panels of rhs, one or two of each, stay in tiles 0 to 3 while a
// step loads every operand once. 256 and 512 terms: 1.15 to 1.35 times the speed of the above.
template <int kTiles, int kPanels>
void amx_block(const Bits* lhs, std::int64_t lhs_stride, const Bits* rhs, std::int64_t rhs_stride, float* result,
               std::int64_t result_stride, std::int64_t steps, bool accumulate) {
  constexpr bool kTwoTiles = kTiles == 2, kTwoPanels = kPanels == 2;
  float* const below = result + kTile * kW;
  if (accumulate) {
    _tile_loadd(0, result, kTileBytes);
    if constexpr (kTwoTiles) _tile_loadd(1, below, kTileBytes);
    if constexpr (kTwoPanels) _tile_loadd(2, result + result_stride, kTileBytes);
    if constexpr (kTwoTiles && kTwoPanels) _tile_loadd(3, below + result_stride, kTileBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t step = 0; step < steps; ++step, lhs += lhs_stride, rhs += kTile * kPairLine) {
    _tile_loadd(4, lhs, kTileBytes);
    _tile_loadd(6, rhs, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwoTiles) _tile_loadd(5, lhs + kTile * kPairLine, kTileBytes);
    if constexpr (kTwoTiles) _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTwoPanels) _tile_loadd(7, rhs + rhs_stride, kTileBytes);
    if constexpr (kTwoPanels) _tile_dpbf16ps(2, 4, 7);
    if constexpr (kTwoTiles && kTwoPanels) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, result, kTileBytes);
  if constexpr (kTwoTiles) _tile_stored(1, below, kTileBytes);
  if constexpr (kTwoPanels) _tile_stored(2, result + result_stride, kTileBytes);
  if constexpr (kTwoTiles && kTwoPanels) _tile_stored(3, below + result_stride, kTileBytes);
}

template <int kPanels>
void amx_panels(const Bits* lhs, std::int64_t lhs_stride, const Bits* rhs, std::int64_t rhs_stride, float* result,
                std::int64_t result_stride, std::int64_t m, std::int64_t steps, bool accumulate) {
  std::int64_t row = 0;
  for (; row + kTile < m; row += 2 * kTile) {
    amx_block<2, kPanels>(lhs + row * kPairLine, lhs_stride, rhs, rhs_stride, result + row * kW, result_stride, steps,
                          accumulate);
  }
  if (row < m) {
    amx_block<1, kPanels>(lhs + row * kPairLine, lhs_stride, rhs, rhs_stride, result + row * kW, result_stride, steps,
                          accumulate);
  }
}

void multiply_amx(const void* lhs_data, std::int64_t lhs_stride, const void* rhs_data, std::int64_t rhs_stride,
                  float* result, std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k,
                  bool accumulate) {
  const std::int64_t steps = round_up(k, kPairLine) / kPairLine;
  const Bits* const lhs = static_cast<const Bits*>(lhs_data);
  const Bits* rhs = static_cast<const Bits*>(rhs_data);
  if (steps > kResident) {
    for (; panels > 0; panels -= 2, rhs += 2 * rhs_stride, result += 2 * result_stride) {
      const auto run = panels > 1 ? amx_panels<2> : amx_panels<1>;
      run(lhs, lhs_stride, rhs, rhs_stride, result, result_stride, m, steps, accumulate);
    }
    return;
  }
  const auto run = steps == 4 ? amx_panel<4> : steps == 3 ? amx_panel<3> : steps == 2 ? amx_panel<2> : amx_panel<1>;
  for (; panels > 0; --panels, rhs += rhs_stride, result += result_stride) {
    run(lhs, lhs_stride, rhs, result, round_up(m, kTile), accumulate);
  }
}

// The outer product of fp32_products.cc with pairs instead of single values.
template <int MR, int NV>
void dot_block(const Bits* lhs, std::int64_t lhs_stride, const Bits* rhs, std::int64_t rhs_stride, float* result,
               std::int64_t result_stride, std::int64_t steps, bool accumulate) {
  __m512 acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      acc[i][j] = _mm512_setzero_ps();
    }
  }
  for (std::int64_t step = 0; step < steps; ++step, lhs += lhs_stride) {
    for (int pair = 0; pair < 16; ++pair, rhs += kPairLine) {
      __m512bh b[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) {
        b[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(rhs + j * rhs_stride));
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        std::int32_t two;
        std::memcpy(&two, lhs + i * kPairLine + 2 * pair, sizeof(two));
        const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(two));
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], a, b[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      float* to = result + j * result_stride + i * kW;
      _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(acc[i][j], _mm512_loadu_ps(to)) : acc[i][j]);
    }
  }
}

template <int NV>
void dot_panels(const Bits* lhs, std::int64_t lhs_stride, const Bits* rhs, std::int64_t rhs_stride, float* result,
                std::int64_t result_stride, std::int64_t rows, std::int64_t steps, bool accumulate) {
  std::int64_t row = 0;
  for (; row + 6 <= rows; row += 6) {
    dot_block<6, NV>(lhs + row * kPairLine, lhs_stride, rhs, rhs_stride, result + row * kW, result_stride, steps,
                     accumulate);
  }
  for (; row < rows; row += 2) {
    dot_block<2, NV>(lhs + row * kPairLine, lhs_stride, rhs, rhs_stride, result + row * kW, result_stride, steps,
                     accumulate);
  }
}

void multiply_dot(const void* lhs_data, std::int64_t lhs_stride, const void* rhs_data, std::int64_t rhs_stride,
                  float* result, std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k,
                  bool accumulate) {
  const Bits* lhs = static_cast<const Bits*>(lhs_data);
  const Bits* rhs = static_cast<const Bits*>(rhs_data);
  const std::int64_t steps = round_up(k, kPairLine) / kPairLine;
  const std::int64_t rows = round_up(m, 2);
  while (panels > 0) {
    const int now = panels >= 4 && panels != 5 ? 4 : panels >= 2 ? 2 : 1;
    const auto block = now == 4 ? dot_panels<4> : now == 2 ? dot_panels<2> : dot_panels<1>;
    block(lhs, lhs_stride, rhs, rhs_stride, result, result_stride, rows, steps, accumulate);
    rhs += now * rhs_stride;
    result += now * result_stride;
    panels -= now;
  }
}

// All eight tiles are 16 rows of 64 bytes.
void configure_tiles() {
  struct alignas(64) Config {
    std::uint8_t palette;
    std::uint8_t start_row;
    std::uint8_t reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
  };
  Config config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  // GCC 12's _tile_loadconfig names only the first 8 bytes as its input, and the rest may be optimised away.
  asm volatile("ldtilecfg %0" : : "m"(config));
}

void release_tiles() { _tile_release(); }

constexpr Products kAmxProducts = {kW,         kPairLine,    sizeof(Bits), pack_lhs,        pack_lhs_t,   pack_rhs,
                                   pack_rhs_t, multiply_amx, multiply_amx, configure_tiles, release_tiles};
constexpr Products kDotProducts = {kW,         kPairLine,    sizeof(Bits), pack_lhs, pack_lhs_t, pack_rhs,
                                   pack_rhs_t, multiply_dot, multiply_dot, nullptr,  nullptr};

}  // namespace
}  // namespace tessera::cpu
#pragma GCC pop_options

namespace tessera::cpu {

const Products* bf16_products(Bf16Isa isa) {
  switch (isa) {
    case Bf16Isa::kAmx:
      return &kAmxProducts;
    case Bf16Isa::kAvx512Bf16:
      return &kDotProducts;
    default:
      return nullptr;
  }
}

}  // namespace tessera::cpu
