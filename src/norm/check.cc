#include "norm/check.h"

#include <array>
#include <cmath>
#include <optional>

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "base/tensor.h"

namespace tessera::norm {
namespace {

constexpr unsigned kForward = 1u << TESSERA_NORM_FORWARD;
constexpr unsigned kBackward = 1u << TESSERA_NORM_BACKWARD;
constexpr unsigned kRotary = 1u << TESSERA_NORM_ROTARY;

class Checker {
 public:
  Checker(tessera_norm_op op, const tessera_norm& in, Look look, CheckedNorm& out)
      : op_(1u << op), in_(in), look_(look), out_(out), problem_(out.args.problem) {
    problem_.op = static_cast<NormOp>(op);
  }

  Status run() {
    TESSERA_CHECK(check_presence());
    TESSERA_CHECK(check_options());
    TESSERA_CHECK(check_device());
    TESSERA_CHECK(read_tensors());
    TESSERA_CHECK(op_ == kRotary ? check_rotary_dims() : check_dims());
    fill_views();
    return {};
  }

 private:
  enum Kind : std::uint8_t { kRows, kVector, kStatistic, kTable, kPositions };
  struct Slot {
    const char* name;
    const tessera_tensor* tessera_norm::*given;
    unsigned needed;  // ops that need it
    unsigned takes;   // ops that accept it
    unsigned written;
    Kind kind;
    NormView NormArgs::*view;
  };
  static const std::array<Slot, 16> kSlots;

  Status check_presence() {
    const bool centered = (in_.flags & TESSERA_NORM_CENTERED) != 0;
    for (const Slot& slot : kSlots) {
      const bool given = in_.*slot.given != nullptr;
      if ((slot.needed & op_) != 0 && !given) {
        return invalid(format("{} is null; {} needs it", slot.name, name_of(problem_.op)));
      }
      if (given && (slot.takes & op_) == 0) {
        return invalid(format("{} is given; {} does not take it", slot.name, name_of(problem_.op)));
      }
    }
    const auto centered_only = [&](const char* name, const tessera_tensor* tensor) {
      if (tensor == nullptr || centered) return Status();
      return invalid(format("{} is given; RMSNorm has none (TESSERA_NORM_CENTERED is LayerNorm)", name));
    };
    TESSERA_CHECK(centered_only("bias", in_.bias));
    TESSERA_CHECK(centered_only("mean", in_.mean));
    TESSERA_CHECK(centered_only("dbias", in_.dbias));
    if ((in_.residual != nullptr) != (in_.sum != nullptr)) {
      return invalid(format("{} is null, but {} is given; they are given together",
                            in_.sum != nullptr ? "residual" : "sum", in_.sum != nullptr ? "sum" : "residual"));
    }
    if (centered && (in_.rstd != nullptr) != (in_.mean != nullptr)) {
      return invalid(format("{} is null, but {} is given; LayerNorm has both", in_.mean != nullptr ? "rstd" : "mean",
                            in_.mean != nullptr ? "mean" : "rstd"));
    }
    problem_.centered = centered;
    problem_.residual = in_.residual != nullptr || in_.dsum != nullptr;
    problem_.weight = in_.weight != nullptr;
    problem_.bias = in_.bias != nullptr;
    problem_.statistics = op_ == kForward && in_.rstd != nullptr;
    problem_.parameters = in_.dweight != nullptr || in_.dbias != nullptr;
    problem_.positions = in_.positions != nullptr;
    return {};
  }

  Status check_options() {
    const std::uint32_t known =
        op_ == kRotary ? TESSERA_NORM_INTERLEAVED | TESSERA_NORM_INVERSE : +TESSERA_NORM_CENTERED;
    if ((in_.flags & ~known) != 0) {
      return invalid(format("flags has bits {:#x} that {} does not know; it knows {:#x}", in_.flags & ~known,
                            name_of(problem_.op), known));
    }
    problem_.interleaved = (in_.flags & TESSERA_NORM_INTERLEAVED) != 0;
    problem_.inverse = (in_.flags & TESSERA_NORM_INVERSE) != 0;
    if (op_ == kForward && !(in_.eps >= 0 && std::isfinite(in_.eps))) {
      return invalid(format("eps is {}; a finite number that is not negative is accepted", in_.eps));
    }
    out_.args.eps = in_.eps;
    return {};
  }

  Status check_device() {
    out_.device = in_.x->device;
    TESSERA_CHECK(tessera::check_device("x", out_.device));
    for (const Slot& slot : kSlots) {
      const tessera_tensor* given = in_.*slot.given;
      if (given != nullptr) TESSERA_CHECK(check_same_device(slot.name, given->device, "x", out_.device));
    }
    return {};
  }

  Status read_tensors() {
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      const Slot& slot = kSlots[i];
      const tessera_tensor* given = in_.*slot.given;
      if (given == nullptr) continue;
      const bool one = slot.kind == kVector || slot.kind == kStatistic;
      const int least = one || slot.kind == kPositions ? 1 : slot.kind == kRows && op_ == kRotary ? 4 : 2;
      const int most = slot.kind == kPositions ? 2 : least;
      const Element element = slot.kind == kPositions   ? Element::kInt32
                              : slot.kind == kStatistic ? Element::kFloat32
                                                        : Element::kFloating;
      const TensorRule rule{slot.name, element, (slot.written & op_) != 0 ? Access::kWrite : Access::kRead, least,
                            most};
      CheckedTensor& checked = checked_[i].emplace();
      TESSERA_CHECK(check_tensor(*given, rule, look_ == Look::kEverything, checked));
      if (slot.kind == kPositions || slot.kind == kStatistic) continue;
      const DType own = dtype_of(checked.dtype), of_x = dtype_of(checked_[0]->dtype);
      if (own != of_x && !(slot.kind == kTable && own == DType::kFloat32)) {
        return invalid(format("{} is {}, but x is {}; {}", slot.name, describe(checked.dtype),
                              describe(checked_[0]->dtype),
                              slot.kind == kTable ? "the same or fp32 is accepted" : "they must be the same"));
      }
    }
    problem_.dtype = dtype_of(checked_[0]->dtype);
    return {};
  }

  Status match(const char* name, const CheckedTensor& t, int dim, std::int64_t want, const char* giver) {
    if (t.shape[dim] == want) return {};
    return invalid(format("{} has size {} in dim {}, but {} gives {}", name, t.shape[dim], dim, giver, want));
  }

  Status check_dims() {
    const CheckedTensor& x = *checked_[0];
    problem_.rows = x.shape[0];
    problem_.columns = x.shape[1];
    if (problem_.columns == 0) return invalid("x has rows of 0 elements, which have no mean");
    for (std::size_t i = 1; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const Slot& slot = kSlots[i];
      if (slot.kind == kRows || slot.kind == kStatistic) {
        TESSERA_CHECK(match(slot.name, *checked_[i], 0, problem_.rows, "x"));
      }
      if (slot.kind == kRows || slot.kind == kVector) {
        TESSERA_CHECK(match(slot.name, *checked_[i], slot.kind == kRows ? 1 : 0, problem_.columns, "x"));
      }
    }
    return {};
  }

  Status check_rotary_dims() {
    NormProblem& p = problem_;
    const CheckedTensor& x = *checked_[0];
    const CheckedTensor& cos = *of("cos");
    const CheckedTensor& sin = *of("sin");
    p.batch = x.shape[0];
    p.seq = x.shape[1];
    p.heads = x.shape[2];
    p.columns = x.shape[3];
    p.rows = saturating_product(p.batch, p.seq, p.heads);
    p.rotated = 2 * cos.shape[1];
    p.table_dtype = dtype_of(cos.dtype);
    out_.args.table_rows = cos.shape[0];
    for (int dim = 0; dim < 4; ++dim) TESSERA_CHECK(match("out", *of("out"), dim, x.shape[dim], "x"));
    for (int dim = 0; dim < 2; ++dim) TESSERA_CHECK(match("sin", sin, dim, cos.shape[dim], "cos"));
    if (dtype_of(sin.dtype) != p.table_dtype) {
      return invalid(
          format("sin is {}, but cos is {}; they must be the same", describe(sin.dtype), describe(cos.dtype)));
    }
    if (p.rotated > p.columns) {
      return invalid(
          format("cos has {} columns, for {} rotated dims, but x has {}", cos.shape[1], p.rotated, p.columns));
    }
    if (const auto& positions = of("positions")) {
      const int last = positions->rank - 1;
      TESSERA_CHECK(match("positions", *positions, last, p.seq, "x"));
      if (last == 1) TESSERA_CHECK(match("positions", *positions, 0, p.batch, "x"));
    } else if (out_.args.table_rows < p.seq) {
      return invalid(format("cos has {} rows, but x has {} tokens and positions is null", cos.shape[0], p.seq));
    }
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
    for (int dim = 0; dim + 1 < t.rank; ++dim) {
      if (t.strides[dim] * bytes % 16 != 0) return false;
    }
    return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
  }

  void fill_views() {
    NormProblem& p = problem_;
    const bool on_gpu = out_.device.type == TESSERA_CUDA;
    for (std::size_t i = 0; i < kSlots.size(); ++i) {
      if (!checked_[i]) continue;
      const Slot& slot = kSlots[i];
      const CheckedTensor& t = *checked_[i];
      NormView& view = out_.args.*slot.view;
      view.data = t.data;
      switch (slot.kind) {
        case kRows:
          if (op_ == kRotary) {
            view.batch_stride = t.strides[0];
            view.row_stride = t.strides[1];
            view.head_stride = t.strides[2];
          } else {
            view.row_stride = t.strides[0];
          }
          break;
        case kTable:
          view.row_stride = t.strides[0];
          break;
        case kPositions:
          view.batch_stride = t.rank == 2 ? t.strides[0] : 0;
          view.row_stride = 1;
          break;
        default:
          break;
      }
      const bool vectors =
          slot.kind == kRows || slot.kind == kTable || (slot.kind == kVector && (slot.written & op_) == 0);
      if (on_gpu && vectors) p.aligned &= is_aligned(t);
    }
    if (!on_gpu) return;
    const std::int64_t elements = 16 / static_cast<std::int64_t>(size_of(p.dtype));
    if (op_ == kRotary) {
      // Chunks of 16 bytes of both halves, or of whole pairs, and of what is copied.
      const std::int64_t unit = p.interleaved ? elements : 2 * elements;
      p.aligned &= p.rotated % unit == 0 && p.columns % elements == 0;
    } else {
      p.aligned &= p.columns % elements == 0;
    }
  }

  const unsigned op_;
  const tessera_norm& in_;
  const Look look_;
  CheckedNorm& out_;
  NormProblem& problem_;
  std::array<std::optional<CheckedTensor>, 16> checked_;
};

constexpr std::array<Checker::Slot, 16> Checker::kSlots = {{
    {"x", &tessera_norm::x, kForward | kBackward | kRotary, kForward | kBackward | kRotary, 0, kRows, &NormArgs::x},
    {"out", &tessera_norm::out, kForward | kRotary, kForward | kRotary, kForward | kRotary, kRows, &NormArgs::out},
    {"weight", &tessera_norm::weight, 0, kForward | kBackward, 0, kVector, &NormArgs::weight},
    {"bias", &tessera_norm::bias, 0, kForward, 0, kVector, &NormArgs::bias},
    {"residual", &tessera_norm::residual, 0, kForward, 0, kRows, &NormArgs::residual},
    {"sum", &tessera_norm::sum, 0, kForward, kForward, kRows, &NormArgs::sum},
    {"rstd", &tessera_norm::rstd, kBackward, kForward | kBackward, kForward, kStatistic, &NormArgs::rstd},
    {"mean", &tessera_norm::mean, 0, kForward | kBackward, kForward, kStatistic, &NormArgs::mean},
    {"dout", &tessera_norm::dout, kBackward, kBackward, 0, kRows, &NormArgs::dout},
    {"dsum", &tessera_norm::dsum, 0, kBackward, 0, kRows, &NormArgs::dsum},
    {"dx", &tessera_norm::dx, kBackward, kBackward, kBackward, kRows, &NormArgs::dx},
    {"dweight", &tessera_norm::dweight, 0, kBackward, kBackward, kVector, &NormArgs::dweight},
    {"dbias", &tessera_norm::dbias, 0, kBackward, kBackward, kVector, &NormArgs::dbias},
    {"cos", &tessera_norm::cos, kRotary, kRotary, 0, kTable, &NormArgs::cos},
    {"sin", &tessera_norm::sin, kRotary, kRotary, 0, kTable, &NormArgs::sin},
    {"positions", &tessera_norm::positions, 0, kRotary, 0, kPositions, &NormArgs::positions},
}};

Status check_into(tessera_norm_op op, const tessera_norm* args, Look look, CheckedNorm& out) {
  if (op != TESSERA_NORM_FORWARD && op != TESSERA_NORM_BACKWARD && op != TESSERA_NORM_ROTARY) {
    return invalid(format("op is {}; TESSERA_NORM_FORWARD, _BACKWARD and _ROTARY are known", static_cast<int>(op)));
  }
  if (args == nullptr) return invalid("args is null");
  if (args->struct_size == sizeof(tessera_norm)) return Checker(op, *args, look, out).run();
  tessera_norm known = TESSERA_NORM_INIT;
  TESSERA_CHECK(read_arguments(args, sizeof(tessera_norm), "TESSERA_NORM_INIT", known));
  return Checker(op, known, look, out).run();
}

}  // namespace

Result<CheckedNorm> check(tessera_norm_op op, const tessera_norm* args, Look look) {
  Result<CheckedNorm> checked(std::in_place);
  if (Status s = check_into(op, args, look, *checked); !s.ok()) checked = std::move(s);
  return checked;
}

}  // namespace tessera::norm
