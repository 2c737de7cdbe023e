// A small problem from a number: what `tessera fuzz` tries.
#include <iterator>

#include "verify/gemm/cases.h"
#include "verify/random.h"

namespace tessera::verify {

std::unique_ptr<Case> random_gemm(std::uint64_t number) {
  const RandomStream stream(number, 0x66757a7a);
  std::int64_t next = 0;
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(stream.bits(next++) % n); };
  const auto one_in = [&](std::uint64_t n) { return below(n) == 0; };
  const auto length = [&] {
    constexpr std::int64_t kEdges[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129};
    return one_in(2) ? kEdges[below(std::size(kEdges))] : 1 + below(150);
  };
  gemm::Case c;
  GemmProblem& p = c.problem;
  p.dtype = one_in(16) ? DType::kFloat32 : one_in(2) ? DType::kFloat16 : DType::kBFloat16;
  p.out_dtype = one_in(6) ? DType::kFloat32 : p.dtype;
  p.m = length();
  p.n = length();
  p.k = length();
  if (one_in(16) && p.m < 40 && p.n < 40) p.k *= 20;  // few elements and a long sum: K is split
  p.a_transposed = one_in(3);
  p.b_transposed = one_in(3);
  p.bias = one_in(2);
  constexpr int kActivations[] = {kRelu, kSilu, kGeluTanh, kGeluErf};
  switch (below(5)) {
    case 0:
      p.activation = kActivations[below(4)];
      p.preactivation = one_in(2);
      break;
    case 1:
      p.activation = kActivations[below(4)];
      p.gated = true;
      break;
    case 2:
      p.activation = kActivations[below(4)];
      p.gradient = true;
      break;
    default:
      break;
  }
  p.residual = one_in(3);
  constexpr gemm::Layout kLayouts[] = {gemm::Layout::kCompact, gemm::Layout::kPadded, gemm::Layout::kUnaligned};
  c.layout = kLayouts[below(3)];
  c.seed = number;
  c.floor = p.out_dtype == DType::kFloat32 ? 4 : 1;
  set_alignment(c);
  c.name = describe(c);
  return gemm_case(c);
}

}  // namespace tessera::verify
