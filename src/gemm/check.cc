#include "gemm/check.h"

#include <array>
#include <optional>

#include "base/arguments.h"
#include "base/format.h"
#include "base/tensor.h"

namespace tessera::gemm {
namespace {

constexpr std::uint32_t kKnownFlags = TESSERA_GEMM_A_TRANSPOSED | TESSERA_GEMM_B_TRANSPOSED | TESSERA_GEMM_OUT_PADDED;

class Checker {
 public:
  Checker(GemmOp op, const tessera_gemm& in, Look look, CheckedGemm& out)
      : in_(in), look_(look), out_(out), problem_(out.args.problem) {
    problem_.op = op;
  }

  Status run() {
    TESSERA_CHECK(check_presence());
    TESSERA_CHECK(check_options());
    TESSERA_CHECK(check_device());
    TESSERA_CHECK(read_tensors());
    TESSERA_CHECK(check_groups());
    TESSERA_CHECK(check_dims());
    if ((in_.flags & TESSERA_GEMM_OUT_PADDED) != 0) TESSERA_CHECK(check_padding());
    fill_views();
    return {};
  }

 private:
  enum Kind : std::uint8_t { kOperandA, kOperandB, kVector, kMatrix };  // which dims it must have
  struct Slot {
    const char* name;
    const tessera_tensor* tessera_gemm::*given;
    bool needed;
    bool written;
    bool may_be_fp32;  // beside a's type
    Kind kind;
    GemmView GemmArgs::*view;
  };
  static const std::array<Slot, 9> kSlots;

  Status check_presence() {
    for (const Slot& slot : kSlots) {
      if (slot.needed && in_.*slot.given == nullptr) return invalid(format("{} is null; gemm needs it", slot.name));
    }
    if (in_.gate != nullptr && in_.saved != nullptr)
      return invalid("saved is given with gate; one of them is accepted");
    if (in_.preactivation != nullptr && (in_.gate != nullptr || in_.saved != nullptr)) {
      return invalid(format("preactivation is given with {}; a product without either writes it",
                            in_.gate != nullptr ? "gate" : "saved"));
    }
    if ((in_.gate_bias != nullptr) != (in_.gate != nullptr && in_.bias != nullptr)) {
      return invalid(in_.gate_bias != nullptr
                         ? "gate_bias is given without gate and bias; it is accepted with both"
                         : "gate_bias is null, but gate and bias are given; both products have a bias or neither");
    }
    problem_.bias = in_.bias != nullptr;
    problem_.gated = in_.gate != nullptr;
    problem_.gradient = in_.saved != nullptr;
    problem_.preactivation = in_.preactivation != nullptr;
    problem_.residual = in_.residual != nullptr;
    return {};
  }

  Status check_options() {
    if ((in_.flags & ~kKnownFlags) != 0) {
      return invalid(
          format("flags has unknown bits {:#x}; TESSERA_GEMM_A_TRANSPOSED, _B_TRANSPOSED and _OUT_PADDED are known",
                 in_.flags & ~kKnownFlags));
    }
    problem_.a_transposed = (in_.flags & TESSERA_GEMM_A_TRANSPOSED) != 0;
    problem_.b_transposed = (in_.flags & TESSERA_GEMM_B_TRANSPOSED) != 0;
    switch (in_.activation) {
      case TESSERA_ACTIVATION_NONE:
      case TESSERA_ACTIVATION_RELU:
      case TESSERA_ACTIVATION_SILU:
      case TESSERA_ACTIVATION_GELU_TANH:
      case TESSERA_ACTIVATION_GELU_ERF:
        break;
      default:
        return invalid(
            format("activation is {}; TESSERA_ACTIVATION_NONE, _RELU, _SILU, _GELU_TANH and _GELU_ERF are known",
                   static_cast<int>(in_.activation)));
    }
    static_assert(TESSERA_ACTIVATION_RELU == kRelu && TESSERA_ACTIVATION_SILU == kSilu &&
                  TESSERA_ACTIVATION_GELU_TANH == kGeluTanh && TESSERA_ACTIVATION_GELU_ERF == kGeluErf);
    problem_.activation = static_cast<int>(in_.activation);
    return {};
  }

  Status check_device() {
    out_.device = in_.a->device;
    TESSERA_CHECK(tessera::check_device("a", out_.device));
    for (const Slot& slot : kSlots) {
      const tessera_tensor* given = in_.*slot.given;
      if (given != nullptr) TESSERA_CHECK(check_same_device(slot.name, given->device, "a", out_.device));
    }
    if (in_.offsets != nullptr) TESSERA_CHECK(check_same_device("offsets", in_.offsets->device, "a", out_.device));
    return {};
  }

  Status read_tensors() {
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      const tessera_tensor* given = in_.*slot.given;
      if (given == nullptr) continue;
      const bool grouped = problem_.op == GemmOp::kGrouped;
      const int least = slot.kind == kVector ? (grouped ? 2 : 1) : 2;
      const int most = slot.kind == kVector ? least : (grouped ? 3 : 2);
      const TensorRule rule{slot.name, Element::kFloating, slot.written ? Access::kWrite : Access::kRead, least, most};
      CheckedTensor& checked = checked_[i].emplace();
      TESSERA_CHECK(check_tensor(*given, rule, look_ == Look::kEverything, checked));
      const DType own = dtype_of(checked.dtype);
      const DType of_a = dtype_of(checked_[0]->dtype);
      if (own != of_a && !(slot.may_be_fp32 && own == DType::kFloat32)) {
        return invalid(format("{} is {}, but a is {}; {}", slot.name, describe(checked.dtype),
                              describe(checked_[0]->dtype),
                              slot.may_be_fp32 ? "the same or fp32 is accepted" : "they must be the same"));
      }
    }
    problem_.dtype = dtype_of(checked_[0]->dtype);
    problem_.out_dtype = dtype_of(of("out")->dtype);
    if (const auto& residual = of("residual"); residual && dtype_of(residual->dtype) != problem_.out_dtype) {
      return invalid(format("residual is {}, but out is {}; they must be the same", describe(residual->dtype),
                            describe(of("out")->dtype)));
    }
    return {};
  }

  // Which tensors have a matrix per group, and how many groups there are.
  Status check_groups() {
    GemmProblem& p = problem_;
    if (p.op != GemmOp::kGrouped) {
      if (in_.offsets != nullptr) return invalid("offsets is given; TESSERA_GEMM_GROUPED takes it");
      return {};
    }
    const CheckedTensor& a = *checked_[0];
    const CheckedTensor& b = *checked_[1];
    p.grouping = in_.offsets == nullptr ? kBatched : b.rank == 3 ? kRaggedRows : kRaggedSums;
    if (p.grouping == kRaggedRows && p.a_transposed) {
      return invalid(
          "flags has TESSERA_GEMM_A_TRANSPOSED, but offsets divide the rows of a; b has 2 dims if they divide K");
    }
    if (p.grouping == kRaggedSums && !(p.a_transposed && p.b_transposed)) {
      return invalid("offsets divide K, since b has 2 dims; TESSERA_GEMM_A_TRANSPOSED and _B_TRANSPOSED are needed");
    }
    p.groups = b.rank == 3 ? b.shape[0] : 0;
    p.a_shared = p.grouping == kBatched && a.rank == 2;
    if (in_.offsets != nullptr) {
      CheckedTensor offsets;
      const TensorRule rule{"offsets", Element::kInt32, Access::kRead, 1, 1};
      TESSERA_CHECK(check_tensor(*in_.offsets, rule, look_ == Look::kEverything, offsets));
      if (offsets.shape[0] < 1) return invalid("offsets has length 0; there is one entry more than groups");
      if (b.rank == 3 && offsets.shape[0] != p.groups + 1) {
        return invalid(format("offsets has length {}, but b has {} groups; there is one entry more than groups",
                              offsets.shape[0], p.groups));
      }
      p.groups = offsets.shape[0] - 1;
      out_.args.offsets = static_cast<const std::int32_t*>(offsets.data);
    }
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      if (!checked_[i] || slot.kind == kVector || (slot.kind == kOperandA && p.grouping == kBatched)) continue;
      const bool layers = slot.kind == kMatrix     ? out_has_layers(p.grouping)
                          : slot.kind == kOperandB ? p.grouping != kRaggedSums
                                                   : false;
      const int rank = layers ? 3 : 2;
      if (checked_[i]->rank != rank) {
        return invalid(format("{} has {} dims; {} are accepted if {}", slot.name, checked_[i]->rank, rank,
                              p.grouping == kBatched      ? "there are no offsets"
                              : p.grouping == kRaggedRows ? "offsets divide the rows of a (b has 3 dims)"
                                                          : "offsets divide K (b has 2 dims)"));
      }
    }
    return {};
  }

  Status check_dims() {
    const CheckedTensor& a = *checked_[0];
    const CheckedTensor& b = *checked_[1];
    GemmProblem& p = problem_;
    p.m = a.shape[a.rank - (p.a_transposed ? 1 : 2)];
    p.k = a.shape[a.rank - (p.a_transposed ? 2 : 1)];
    p.n = b.shape[b.rank - (p.b_transposed ? 1 : 2)];
    const auto match_groups = [&](std::size_t i) {
      const CheckedTensor& t = *checked_[i];
      if (p.op != GemmOp::kGrouped || t.rank == (kSlots[i].kind == kVector ? 1 : 2) || t.shape[0] == p.groups) {
        return Status();
      }
      return invalid(
          format("{} has size = {} in dim 0, but there are {} groups", kSlots[i].name, t.shape[0], p.groups));
    };
    TESSERA_CHECK(match_groups(0));
    for (std::size_t i = 1; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const Slot& slot = kSlots[i];
      const CheckedTensor& t = *checked_[i];
      TESSERA_CHECK(match_groups(i));
      const auto match = [&](int of_matrix, std::int64_t want, const char* giver) {
        const int dim = slot.kind == kVector ? t.rank - 1 : t.rank - 2 + of_matrix;
        if (t.shape[dim] == want) return Status();
        return invalid(format("{} has {} = {} in dim {}, but {} gives {}", slot.name,
                              slot.kind == kVector ? "length" : "size", t.shape[dim], dim, giver, want));
      };
      switch (slot.kind) {
        case kOperandA:
          break;
        case kOperandB:
          TESSERA_CHECK(match(p.b_transposed ? 0 : 1, p.k, "a"));
          TESSERA_CHECK(match(p.b_transposed ? 1 : 0, p.n, "b"));
          break;
        case kVector:
          TESSERA_CHECK(match(0, p.n, "b"));
          break;
        case kMatrix:
          TESSERA_CHECK(match(0, p.m, "a"));
          TESSERA_CHECK(match(1, p.n, "b"));
          break;
      }
    }
    return {};
  }

  // Rows do not overlap, so rows at multiples of 16 bytes have room for their padding.
  Status check_padding() {
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      if (!checked_[i] || !kSlots[i].written) continue;
      const CheckedTensor& t = *checked_[i];
      if (t.rank != 2) {
        return invalid(format("flags has TESSERA_GEMM_OUT_PADDED, but {} has {} dims; 2 are accepted with it",
                              kSlots[i].name, t.rank));
      }
      if (is_aligned(t)) continue;
      return invalid(
          format("{} has rows that do not start at multiples of 16 bytes; TESSERA_GEMM_OUT_PADDED needs them to",
                 kSlots[i].name));
    }
    const auto element = static_cast<std::int64_t>(size_of(problem_.dtype));
    problem_.out_padded = out_.device.type == TESSERA_CUDA && problem_.n * element % 16 != 0;
    return {};
  }

  const std::optional<CheckedTensor>& of(std::string_view name) const {
    std::size_t i = 0;
    while (name != kSlots[i].name) ++i;
    return checked_[i];
  }

  // Strides that do not matter are 0 by now.
  static bool is_aligned(const CheckedTensor& t) {
    const std::int64_t bytes = t.dtype.bits / 8;
    bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    for (int dim = 0; dim + 1 < t.rank; ++dim) aligned &= t.strides[dim] * bytes % 16 == 0;
    return aligned;
  }
  static bool allows_tensor_map(const CheckedTensor& t) {
    constexpr std::int64_t kEnd = std::int64_t{1} << 36;  // elements of a row; eight rows are below 2^40 bytes
    bool allows = true;
    for (int dim = 0; dim + 1 < t.rank; ++dim) {
      allows &= t.shape[dim] <= 1 || t.shape[t.rank - 1] == 0 || (t.strides[dim] > 0 && t.strides[dim] < kEnd);
    }
    return allows;
  }

  void fill_views() {
    GemmProblem& p = problem_;
    const bool on_gpu = out_.device.type == TESSERA_CUDA;
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const Slot& slot = kSlots[i];
      const CheckedTensor& t = *checked_[i];
      const int matrix_rank = slot.kind == kVector ? 1 : 2;
      out_.args.*slot.view = {t.data, slot.kind == kVector ? 0 : t.strides[t.rank - 2],
                              t.rank > matrix_rank ? t.strides[0] : 0};
      if (!on_gpu) continue;
      const bool is_out = slot.view == &GemmArgs::out;
      bool& aligned = slot.kind == kOperandA   ? p.a_aligned
                      : slot.kind == kOperandB ? p.b_aligned
                      : is_out                 ? p.out_aligned
                                               : p.epilogue_aligned;
      aligned &= is_aligned(t);
      if (slot.kind != kVector) p.tensor_maps &= allows_tensor_map(t);
    }
  }

  const tessera_gemm& in_;
  const Look look_;
  CheckedGemm& out_;
  GemmProblem& problem_;
  std::array<std::optional<CheckedTensor>, 9> checked_;
};

constexpr std::array<Checker::Slot, 9> Checker::kSlots = {{
    {"a", &tessera_gemm::a, true, false, false, kOperandA, &GemmArgs::a},
    {"b", &tessera_gemm::b, true, false, false, kOperandB, &GemmArgs::b},
    {"out", &tessera_gemm::out, true, true, true, kMatrix, &GemmArgs::out},
    {"bias", &tessera_gemm::bias, false, false, false, kVector, &GemmArgs::bias},
    {"gate", &tessera_gemm::gate, false, false, false, kOperandB, &GemmArgs::gate},
    {"gate_bias", &tessera_gemm::gate_bias, false, false, false, kVector, &GemmArgs::gate_bias},
    {"saved", &tessera_gemm::saved, false, false, false, kMatrix, &GemmArgs::saved},
    {"preactivation", &tessera_gemm::preactivation, false, true, false, kMatrix, &GemmArgs::preactivation},
    {"residual", &tessera_gemm::residual, false, false, true, kMatrix, &GemmArgs::residual},
}};

Status check_into(tessera_gemm_op op, const tessera_gemm* args, Look look, CheckedGemm& out) {
  static_assert(TESSERA_GEMM_DENSE == static_cast<int>(GemmOp::kDense) &&
                TESSERA_GEMM_GROUPED == static_cast<int>(GemmOp::kGrouped));
  if (op != TESSERA_GEMM_DENSE && op != TESSERA_GEMM_GROUPED) {
    return invalid(format("op is {}; TESSERA_GEMM_DENSE and TESSERA_GEMM_GROUPED are known", static_cast<int>(op)));
  }
  const auto known_op = static_cast<GemmOp>(op);
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_gemm)) return Checker(known_op, *args, look, out).run();
  tessera_gemm known = TESSERA_GEMM_INIT;
  TESSERA_CHECK(read_arguments(args, offsetof(tessera_gemm, bias), "TESSERA_GEMM_INIT", known));
  return Checker(known_op, known, look, out).run();
}

}  // namespace

Result<CheckedGemm> check(tessera_gemm_op op, const tessera_gemm* args, Look look) {
  Result<CheckedGemm> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::gemm
