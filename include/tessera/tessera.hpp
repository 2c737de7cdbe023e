// Tessera for C++20: a thin layer over the C ABI. Views instead of raw structs, exceptions instead of status codes.
//
//   std::vector<float> q(...), k(...), v(...), o(...);
//   tessera::attention_forward({.q = {q.data(), tessera::kFloat32, {B, S, H, D}}, .k = ..., .v = ..., .out = ...,
//                               .causal = true});
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "tessera/attention.h"
#include "tessera/gemm.h"
#include "tessera/loss.h"
#include "tessera/mlp.h"
#include "tessera/moe.h"
#include "tessera/norm.h"

namespace tessera {

class Error : public std::runtime_error {
 public:
  Error(tessera_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  tessera_status status() const noexcept { return status_; }

 private:
  tessera_status status_;
};

inline constexpr tessera_dtype kFloat32{TESSERA_FLOAT, 32, 1};
inline constexpr tessera_dtype kFloat16{TESSERA_FLOAT, 16, 1};
inline constexpr tessera_dtype kBFloat16{TESSERA_BFLOAT, 16, 1};
inline constexpr tessera_dtype kFloat8E4m3{TESSERA_FLOAT8_E4M3FN, 8, 1};
inline constexpr tessera_dtype kInt32{TESSERA_INT, 32, 1};

// A view of memory that the caller owns. A default-constructed Tensor means that none is given.
class Tensor {
 public:
  static constexpr std::size_t kMaxRank = 4;

  Tensor() = default;

  // strides in elements; none: row-major and compact.
  Tensor(const void* data, tessera_dtype dtype, std::initializer_list<std::int64_t> shape,
         std::initializer_list<std::int64_t> strides = {}, tessera_device device = {TESSERA_CPU, 0})
      : data_(const_cast<void*>(data)), dtype_(dtype), device_(device), rank_(static_cast<std::int32_t>(shape.size())) {
    if (shape.size() > kMaxRank || (strides.size() != 0 && strides.size() != shape.size())) {
      throw Error(TESSERA_INVALID_ARGUMENT, "a Tensor has at most 4 dims, and a stride for each or none");
    }
    has_strides_ = strides.size() != 0;
    std::copy(shape.begin(), shape.end(), shape_.begin());
    std::copy(strides.begin(), strides.end(), strides_.begin());
  }

  bool given() const noexcept { return rank_ > 0; }

  // The C view; it points into this Tensor.
  tessera_tensor view() const noexcept {
    return {data_,
            device_,
            rank_,
            dtype_,
            const_cast<std::int64_t*>(shape_.data()),
            has_strides_ ? const_cast<std::int64_t*>(strides_.data()) : nullptr,
            0};
  }

 private:
  void* data_ = nullptr;
  tessera_dtype dtype_{};
  tessera_device device_{TESSERA_CPU, 0};
  std::int32_t rank_ = 0;
  bool has_strides_ = false;
  std::array<std::int64_t, kMaxRank> shape_{};
  std::array<std::int64_t, kMaxRank> strides_{};
};

// The arguments of all three ops; tessera_attention in attention.h says what each is.
struct Attention {
  Tensor q{}, k{}, v{}, out{}, lse{};
  Tensor dout{}, dlse{}, dq{}, dk{}, dv{};
  float scale = 0;
  float softcap = 0;
  Tensor alibi_slopes{};
  bool causal = false;
  bool deterministic = false;
  tessera_alignment alignment = TESSERA_ALIGN_UNSPECIFIED;
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  std::int64_t attention_chunk = 0;
  Tensor cu_seqlens_q{}, cu_seqlens_k{};
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  Tensor cache_seqlens{}, page_table{};
  Tensor k_new{}, v_new{};
  Tensor rotary_cos{}, rotary_sin{}, rotary_seqlens{};
  bool rotary_interleaved = false;
  Tensor cache_batch_idx{}, leftpad_k{}, status{};
  bool batch_invariant = false;
  bool fp8 = false;           // forward: q, k and v are rounded to e4m3 first
  bool fp8_rotate = false;    // and q and k rotated before that
  bool fp8_residual = false;  // or what it takes from the largest key channels kept
  bool fp8_fast = false;      // forward of e4m3: sums of many keys may be truncated
  Tensor q_scale{}, k_scale{}, v_scale{};
  bool scale_per_page = false;   // decode with a cache of e4m3: k_scale and v_scale lie beside its pages
  bool scale_per_token = false;  // or beside its keys
};

// The arguments of the quantiser; tessera_quantize_fp8 in attention.h says what each is.
struct QuantizeFp8 {
  Tensor x{}, out{}, scale{}, cu_seqlens{};
  std::int64_t max_seqlen = 0;
  bool rotate = false;
};

namespace detail {

inline void throw_unless_ok(tessera_status status) {
  if (status != TESSERA_OK) throw Error(status, tessera_last_error());
}

// Arguments as the C struct. It points into them and into itself, so it is neither copied nor moved.
template <class Args, std::size_t kTensors>
class LoweredArgs {
 public:
  LoweredArgs(const LoweredArgs&) = delete;
  LoweredArgs& operator=(const LoweredArgs&) = delete;

  const Args* get() const noexcept { return &args_; }

 protected:
  explicit LoweredArgs(const Args& initial) : args_(initial) {}

  const tessera_tensor* tensor(const Tensor& t) {
    if (!t.given()) return nullptr;
    views_[count_] = t.view();
    return &views_[count_++];
  }

  Args args_;

 private:
  std::array<tessera_tensor, kTensors> views_{};
  std::size_t count_ = 0;
};

// A plan that is destroyed with this object.
template <class Op, class Args, class Lowered, auto create, auto run_plan>
class PlanOf {
 public:
  PlanOf(Op op, const Args& args) {
    tessera_plan* plan = nullptr;
    throw_unless_ok(create(op, Lowered(args).get(), &plan));
    plan_.reset(plan);
  }
  void run(const Args& args, void* workspace, std::size_t bytes, void* stream = nullptr) const {
    throw_unless_ok(run_plan(plan_.get(), Lowered(args).get(), workspace, bytes, stream));
  }
  std::size_t workspace() const noexcept { return tessera_plan_workspace(plan_.get()); }
  std::string explain(tessera_explain_format format = TESSERA_EXPLAIN_TEXT) const {
    return tessera_plan_explain(plan_.get(), format);
  }

 private:
  struct Destroy {
    void operator()(tessera_plan* plan) const noexcept { tessera_plan_destroy(plan); }
  };
  std::unique_ptr<tessera_plan, Destroy> plan_;
};

class LoweredAttention : public LoweredArgs<tessera_attention, 26> {
 public:
  explicit LoweredAttention(const Attention& a) : LoweredArgs(TESSERA_ATTENTION_INIT) {
    args_.q = tensor(a.q);
    args_.k = tensor(a.k);
    args_.v = tensor(a.v);
    args_.out = tensor(a.out);
    args_.lse = tensor(a.lse);
    args_.dout = tensor(a.dout);
    args_.dlse = tensor(a.dlse);
    args_.dq = tensor(a.dq);
    args_.dk = tensor(a.dk);
    args_.dv = tensor(a.dv);
    args_.scale = a.scale;
    args_.softcap = a.softcap;
    args_.alibi_slopes = tensor(a.alibi_slopes);
    if (a.causal) args_.flags |= TESSERA_CAUSAL;
    if (a.deterministic) args_.flags |= TESSERA_DETERMINISTIC;
    if (a.rotary_interleaved) args_.flags |= TESSERA_ROTARY_INTERLEAVED;
    if (a.batch_invariant) args_.flags |= TESSERA_BATCH_INVARIANT;
    if (a.fp8) args_.flags |= TESSERA_FP8;
    if (a.fp8_rotate) args_.flags |= TESSERA_FP8_ROTATE;
    if (a.fp8_residual) args_.flags |= TESSERA_FP8_RESIDUAL;
    if (a.fp8_fast) args_.flags |= TESSERA_FP8_FAST;
    if (a.scale_per_page) args_.flags |= TESSERA_SCALE_PER_PAGE;
    if (a.scale_per_token) args_.flags |= TESSERA_SCALE_PER_TOKEN;
    args_.alignment = a.alignment;
    args_.window_left = a.window_left;
    args_.window_right = a.window_right;
    args_.attention_chunk = a.attention_chunk;
    args_.cu_seqlens_q = tensor(a.cu_seqlens_q);
    args_.cu_seqlens_k = tensor(a.cu_seqlens_k);
    args_.max_seqlen_q = a.max_seqlen_q;
    args_.max_seqlen_k = a.max_seqlen_k;
    args_.cache_seqlens = tensor(a.cache_seqlens);
    args_.page_table = tensor(a.page_table);
    args_.k_new = tensor(a.k_new);
    args_.v_new = tensor(a.v_new);
    args_.rotary_cos = tensor(a.rotary_cos);
    args_.rotary_sin = tensor(a.rotary_sin);
    args_.rotary_seqlens = tensor(a.rotary_seqlens);
    args_.cache_batch_idx = tensor(a.cache_batch_idx);
    args_.leftpad_k = tensor(a.leftpad_k);
    args_.status = tensor(a.status);
    args_.q_scale = tensor(a.q_scale);
    args_.k_scale = tensor(a.k_scale);
    args_.v_scale = tensor(a.v_scale);
  }
};

class LoweredQuantizeFp8 : public LoweredArgs<tessera_quantize_fp8, 4> {
 public:
  explicit LoweredQuantizeFp8(const QuantizeFp8& a) : LoweredArgs(TESSERA_QUANTIZE_FP8_INIT) {
    args_.x = tensor(a.x);
    args_.out = tensor(a.out);
    args_.scale = tensor(a.scale);
    args_.cu_seqlens = tensor(a.cu_seqlens);
    args_.max_seqlen = a.max_seqlen;
    if (a.rotate) args_.flags |= TESSERA_FP8_ROTATE;
  }
};

// The library allocates the workspace.
inline void run(tessera_attention_op op, const Attention& attention, void* stream) {
  throw_unless_ok(tessera_attention_run(op, LoweredAttention(attention).get(), nullptr, 0, stream));
}

}  // namespace detail

inline void attention_forward(const Attention& attention, void* stream = nullptr) {
  detail::run(TESSERA_ATTENTION_FORWARD, attention, stream);
}
inline void attention_backward(const Attention& attention, void* stream = nullptr) {
  detail::run(TESSERA_ATTENTION_BACKWARD, attention, stream);
}
inline void attention_decode(const Attention& attention, void* stream = nullptr) {
  detail::run(TESSERA_ATTENTION_DECODE, attention, stream);
}
inline void attention_quantize_fp8(const QuantizeFp8& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_attention_quantize_fp8(detail::LoweredQuantizeFp8(args).get(), stream));
}

// Arguments checked and a kernel chosen once, to be run many times: a run neither compiles nor allocates.
using Plan = detail::PlanOf<tessera_attention_op, Attention, detail::LoweredAttention, tessera_attention_plan_create,
                            tessera_attention_plan_run>;

// Which kernel serves this, and why the others do not. arch as in tessera_attention_explain.
inline std::string explain(tessera_attention_op op, const Attention& attention, const char* arch = nullptr,
                           tessera_explain_format format = TESSERA_EXPLAIN_TEXT) {
  const detail::LoweredAttention lowered(attention);
  std::size_t needed = 0;
  detail::throw_unless_ok(tessera_attention_explain(op, lowered.get(), arch, format, nullptr, 0, &needed));
  std::string text(needed, '\0');
  detail::throw_unless_ok(
      tessera_attention_explain(op, lowered.get(), arch, format, text.data(), text.size(), nullptr));
  text.resize(needed - 1);
  return text;
}

// The arguments of a product with its epilogue; tessera_gemm in gemm.h says what each is.
struct Gemm {
  Tensor a{}, b{}, out{};
  Tensor bias{}, gate{}, gate_bias{}, saved{}, preactivation{}, residual{};
  Tensor offsets{};  // of a grouped product
  tessera_activation activation = TESSERA_ACTIVATION_NONE;
  bool a_transposed = false;
  bool b_transposed = false;
  bool out_padded = false;
};

namespace detail {

class LoweredGemm : public LoweredArgs<tessera_gemm, 10> {
 public:
  explicit LoweredGemm(const Gemm& g) : LoweredArgs(TESSERA_GEMM_INIT) {
    args_.a = tensor(g.a);
    args_.b = tensor(g.b);
    args_.out = tensor(g.out);
    args_.bias = tensor(g.bias);
    args_.gate = tensor(g.gate);
    args_.gate_bias = tensor(g.gate_bias);
    args_.saved = tensor(g.saved);
    args_.preactivation = tensor(g.preactivation);
    args_.residual = tensor(g.residual);
    args_.offsets = tensor(g.offsets);
    args_.activation = g.activation;
    if (g.a_transposed) args_.flags |= TESSERA_GEMM_A_TRANSPOSED;
    if (g.b_transposed) args_.flags |= TESSERA_GEMM_B_TRANSPOSED;
    if (g.out_padded) args_.flags |= TESSERA_GEMM_OUT_PADDED;
  }
};

}  // namespace detail

// The library allocates the workspace.
inline void gemm_dense(const Gemm& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_gemm_run(TESSERA_GEMM_DENSE, detail::LoweredGemm(args).get(), nullptr, 0, stream));
}

// One product per group; tessera/gemm.h says which dims are the groups'.
inline void gemm_grouped(const Gemm& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_gemm_run(TESSERA_GEMM_GROUPED, detail::LoweredGemm(args).get(), nullptr, 0, stream));
}

// As Plan, for products.
using GemmPlan =
    detail::PlanOf<tessera_gemm_op, Gemm, detail::LoweredGemm, tessera_gemm_plan_create, tessera_gemm_plan_run>;

// The arguments of an MLP; tessera_mlp in mlp.h says what each is.
struct Mlp {
  Tensor x{}, up{}, down{}, out{}, dout{};
  Tensor gate{}, up_bias{}, gate_bias{}, down_bias{}, residual{};
  Tensor before{}, before_gate{}, hidden{};
  Tensor dx{}, dup{}, ddown{}, dgate{}, dbefore{}, dbefore_gate{};
  tessera_activation activation = TESSERA_ACTIVATION_SILU;
  bool hidden_padded = false;
};

// The arguments of a mixture of experts; tessera_moe in moe.h says what each is.
struct Moe {
  Tensor x{}, logits{}, up{}, down{}, gate{}, out{}, dout{};
  Tensor experts{}, weights{}, positions{}, offsets{};
  Tensor balance_loss{}, dbalance_loss{}, before{}, before_gate{}, x_rows{};
  Tensor dx{}, dlogits{}, dweights{}, dup{}, ddown{}, dgate{};
  tessera_activation activation = TESSERA_ACTIVATION_SILU;
  tessera_moe_scoring scoring = TESSERA_MOE_SOFTMAX;
  bool normalize = false;
};

// The arguments of a norm or a rotary embedding; tessera_norm in norm.h says what each is.
struct Norm {
  Tensor x{}, out{}, weight{}, bias{};
  Tensor residual{}, sum{}, rstd{}, mean{};
  Tensor dout{}, dsum{}, dx{}, dweight{}, dbias{};
  Tensor cos{}, sin{}, positions{};
  float eps = 1e-5f;
  bool centered = false;     // LayerNorm
  bool interleaved = false;  // rotary
  bool inverse = false;      // rotary
};

// The arguments of a loss; tessera_loss in loss.h says what each is.
struct Loss {
  Tensor params{}, target{}, out{}, dparams{};
  Tensor hidden{}, weight{}, dout{}, dhidden{}, dweight{};
  Tensor x{}, up{}, down{};
  tessera_reduction reduction = TESSERA_REDUCTION_MEAN;
  tessera_activation activation = TESSERA_ACTIVATION_SILU;
};

namespace detail {

class LoweredMlp : public LoweredArgs<tessera_mlp, 19> {
 public:
  explicit LoweredMlp(const Mlp& m) : LoweredArgs(TESSERA_MLP_INIT) {
    args_.x = tensor(m.x);
    args_.up = tensor(m.up);
    args_.down = tensor(m.down);
    args_.out = tensor(m.out);
    args_.dout = tensor(m.dout);
    args_.gate = tensor(m.gate);
    args_.up_bias = tensor(m.up_bias);
    args_.gate_bias = tensor(m.gate_bias);
    args_.down_bias = tensor(m.down_bias);
    args_.residual = tensor(m.residual);
    args_.before = tensor(m.before);
    args_.before_gate = tensor(m.before_gate);
    args_.hidden = tensor(m.hidden);
    args_.dx = tensor(m.dx);
    args_.dup = tensor(m.dup);
    args_.ddown = tensor(m.ddown);
    args_.dgate = tensor(m.dgate);
    args_.dbefore = tensor(m.dbefore);
    args_.dbefore_gate = tensor(m.dbefore_gate);
    args_.activation = m.activation;
    if (m.hidden_padded) args_.flags |= TESSERA_MLP_HIDDEN_PADDED;
  }
};

class LoweredMoe : public LoweredArgs<tessera_moe, 22> {
 public:
  explicit LoweredMoe(const Moe& m) : LoweredArgs(TESSERA_MOE_INIT) {
    args_.x = tensor(m.x);
    args_.logits = tensor(m.logits);
    args_.up = tensor(m.up);
    args_.down = tensor(m.down);
    args_.gate = tensor(m.gate);
    args_.out = tensor(m.out);
    args_.dout = tensor(m.dout);
    args_.experts = tensor(m.experts);
    args_.weights = tensor(m.weights);
    args_.positions = tensor(m.positions);
    args_.offsets = tensor(m.offsets);
    args_.balance_loss = tensor(m.balance_loss);
    args_.dbalance_loss = tensor(m.dbalance_loss);
    args_.before = tensor(m.before);
    args_.before_gate = tensor(m.before_gate);
    args_.x_rows = tensor(m.x_rows);
    args_.dx = tensor(m.dx);
    args_.dlogits = tensor(m.dlogits);
    args_.dweights = tensor(m.dweights);
    args_.dup = tensor(m.dup);
    args_.ddown = tensor(m.ddown);
    args_.dgate = tensor(m.dgate);
    args_.activation = m.activation;
    args_.scoring = m.scoring;
    if (m.normalize) args_.flags |= TESSERA_MOE_NORMALIZE;
  }
};

class LoweredNorm : public LoweredArgs<tessera_norm, 16> {
 public:
  explicit LoweredNorm(const Norm& n) : LoweredArgs(TESSERA_NORM_INIT) {
    args_.x = tensor(n.x);
    args_.out = tensor(n.out);
    args_.weight = tensor(n.weight);
    args_.bias = tensor(n.bias);
    args_.residual = tensor(n.residual);
    args_.sum = tensor(n.sum);
    args_.rstd = tensor(n.rstd);
    args_.mean = tensor(n.mean);
    args_.dout = tensor(n.dout);
    args_.dsum = tensor(n.dsum);
    args_.dx = tensor(n.dx);
    args_.dweight = tensor(n.dweight);
    args_.dbias = tensor(n.dbias);
    args_.cos = tensor(n.cos);
    args_.sin = tensor(n.sin);
    args_.positions = tensor(n.positions);
    args_.eps = n.eps;
    if (n.centered) args_.flags |= TESSERA_NORM_CENTERED;
    if (n.interleaved) args_.flags |= TESSERA_NORM_INTERLEAVED;
    if (n.inverse) args_.flags |= TESSERA_NORM_INVERSE;
  }
};

class LoweredLoss : public LoweredArgs<tessera_loss, 12> {
 public:
  explicit LoweredLoss(const Loss& l) : LoweredArgs(TESSERA_LOSS_INIT) {
    args_.params = tensor(l.params);
    args_.target = tensor(l.target);
    args_.out = tensor(l.out);
    args_.dparams = tensor(l.dparams);
    args_.hidden = tensor(l.hidden);
    args_.weight = tensor(l.weight);
    args_.dout = tensor(l.dout);
    args_.dhidden = tensor(l.dhidden);
    args_.dweight = tensor(l.dweight);
    args_.x = tensor(l.x);
    args_.up = tensor(l.up);
    args_.down = tensor(l.down);
    args_.reduction = l.reduction;
    args_.activation = l.activation;
  }
};

}  // namespace detail

// The library allocates the workspace.
inline void mlp_forward(const Mlp& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_mlp_run(TESSERA_MLP_FORWARD, detail::LoweredMlp(args).get(), nullptr, 0, stream));
}
inline void mlp_backward(const Mlp& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_mlp_run(TESSERA_MLP_BACKWARD, detail::LoweredMlp(args).get(), nullptr, 0, stream));
}
inline void moe_forward(const Moe& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_moe_run(TESSERA_MOE_FORWARD, detail::LoweredMoe(args).get(), nullptr, 0, stream));
}
inline void moe_backward(const Moe& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_moe_run(TESSERA_MOE_BACKWARD, detail::LoweredMoe(args).get(), nullptr, 0, stream));
}
inline void norm_forward(const Norm& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_norm_run(TESSERA_NORM_FORWARD, detail::LoweredNorm(args).get(), nullptr, 0, stream));
}
inline void norm_backward(const Norm& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_norm_run(TESSERA_NORM_BACKWARD, detail::LoweredNorm(args).get(), nullptr, 0, stream));
}
inline void norm_rotary(const Norm& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_norm_run(TESSERA_NORM_ROTARY, detail::LoweredNorm(args).get(), nullptr, 0, stream));
}
inline void loss_gmm_nll(const Loss& args, void* stream = nullptr) {
  detail::throw_unless_ok(tessera_loss_run(TESSERA_LOSS_GMM_NLL, detail::LoweredLoss(args).get(), nullptr, 0, stream));
}
inline void loss_linear_cross_entropy(const Loss& args, void* stream = nullptr) {
  detail::throw_unless_ok(
      tessera_loss_run(TESSERA_LOSS_LINEAR_CROSS_ENTROPY, detail::LoweredLoss(args).get(), nullptr, 0, stream));
}
inline void loss_mlp_gmm_nll(const Loss& args, void* stream = nullptr) {
  detail::throw_unless_ok(
      tessera_loss_run(TESSERA_LOSS_MLP_GMM_NLL, detail::LoweredLoss(args).get(), nullptr, 0, stream));
}

// As Plan, for MLPs.
using MlpPlan = detail::PlanOf<tessera_mlp_op, Mlp, detail::LoweredMlp, tessera_mlp_plan_create, tessera_mlp_plan_run>;

// As Plan, for mixtures of experts.
using MoePlan = detail::PlanOf<tessera_moe_op, Moe, detail::LoweredMoe, tessera_moe_plan_create, tessera_moe_plan_run>;

// As Plan, for norms.
using NormPlan =
    detail::PlanOf<tessera_norm_op, Norm, detail::LoweredNorm, tessera_norm_plan_create, tessera_norm_plan_run>;

// As Plan, for losses.
using LossPlan =
    detail::PlanOf<tessera_loss_op, Loss, detail::LoweredLoss, tessera_loss_plan_create, tessera_loss_plan_run>;

}  // namespace tessera
