// A small problem from a number: what `tessera fuzz` tries.
#include "verify/random.h"
#include "verify/gemm/cases.h"

namespace tessera::verify {

std::unique_ptr<Case> random_gemm(std::uint64_t number, std::uint64_t kind_number) {
  Draw kind(kind_number, 0x6b696e64), draw(number, 0x66757a7a);
  const auto length = [&] {
    constexpr std::int64_t kEdges[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129};
    return draw.one_in(2) ? draw.pick(kEdges) : 1 + draw.below(150);
  };
  gemm::Case c;
  GemmProblem& p = c.problem;
  p.dtype = kind.one_in(16) ? DType::kFloat32 : kind.one_in(2) ? DType::kFloat16 : DType::kBFloat16;
  p.out_dtype = kind.one_in(6) ? DType::kFloat32 : p.dtype;
  p.m = length();
  p.n = length();
  p.k = length();
  if (draw.one_in(16) && p.m < 40 && p.n < 40) p.k *= 20;  // few elements and a long sum: K is split
  p.a_transposed = kind.one_in(3);
  p.b_transposed = kind.one_in(3);
  p.bias = kind.one_in(2);
  constexpr int kActivations[] = {kRelu, kSilu, kGeluTanh, kGeluErf};
  switch (kind.below(5)) {
    case 0:
      p.activation = kind.pick(kActivations);
      p.preactivation = kind.one_in(2);
      break;
    case 1:
      p.activation = kind.pick(kActivations);
      p.gated = true;
      break;
    case 2:
      p.activation = kind.pick(kActivations);
      p.gradient = true;
      break;
    default:
      break;
  }
  p.residual = kind.one_in(3);
  constexpr gemm::Layout kLayouts[] = {gemm::Layout::kCompact, gemm::Layout::kPadded, gemm::Layout::kUnaligned};
  c.layout = kind.pick(kLayouts);
  if (c.layout == gemm::Layout::kPadded && kind.one_in(2)) c.layout = gemm::Layout::kFreePadding;
  c.seed = number;
  c.floor = p.out_dtype == DType::kFloat32 ? 4 : 1;
  set_alignment(c);
  c.name = describe(c);
  return gemm_case(c);
}

}  // namespace tessera::verify
