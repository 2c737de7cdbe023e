#include <functional>
#include <initializer_list>

#include "base/format.h"
#include "verify/loss/cases.h"
#include "verify/random.h"

namespace tessera::verify::loss {
namespace {

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

using Change = std::function<void(Case&)>;

Case make(DType dtype, std::int64_t rows, std::int64_t components, std::initializer_list<Change> changes = {}) {
  Case c;
  c.problem.dtype = dtype;
  c.problem.rows = rows;
  c.problem.components = components;
  for (const Change& change : changes) change(c);
  complete(c);
  return c;
}
Change gradient() {
  return [](Case& c) { c.problem.gradient = true; };
}
Change reduction(Reduction r) {
  return [=](Case& c) { c.problem.reduction = r; };
}
Change own_target() {
  return [](Case& c) { c.problem.target_dtype = c.problem.dtype; };
}
Change padded() {
  return [](Case& c) { c.padded = true; };
}
Change distribution(Distribution d) {
  return [=](Case& c) { c.distribution = d; };
}

std::vector<Case> quick() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    out.push_back(make(dtype, 130, 10, {gradient()}));
    out.push_back(make(dtype, 70, 7, {gradient(), reduction(Reduction::kNone), own_target(), padded()}));
  }
  return out;
}

std::vector<Case> full() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const std::int64_t components : {1, 2, 5, 10, 33, 100, 512}) {
      out.push_back(make(dtype, 77, components, {gradient(), reduction(Reduction::kNone)}));
    }
    out.push_back(make(dtype, 1, 3, {gradient()}));
    out.push_back(make(dtype, 1000, 10));
    out.push_back(make(dtype, 1000, 10, {reduction(Reduction::kSum), own_target(), padded()}));
    out.push_back(make(dtype, 0, 10, {reduction(Reduction::kSum), gradient()}));
    out.push_back(make(dtype, 70000, 3, {gradient()}));  // every CTA has several rows
  }
  return out;
}

std::vector<Case> hostile() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const Distribution d :
         {Distribution::kFar, Distribution::kNarrow, Distribution::kWide, Distribution::kOneSided}) {
      for (const std::int64_t components : {1, 10}) {
        out.push_back(make(dtype, 200, components, {gradient(), distribution(d), reduction(Reduction::kNone)}));
      }
      out.push_back(make(dtype, 200, 10, {gradient(), distribution(d)}));
    }
  }
  return out;
}

std::vector<Case> sanitize() {
  return {make(DType::kBFloat16, 130, 10, {gradient()}),
          make(DType::kFloat32, 70, 33, {gradient(), reduction(Reduction::kNone), padded()})};
}

std::vector<Case> bench() {
  std::vector<Case> out;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) out.push_back(make(dtype, 8000, 10, {gradient()}));
  return out;
}

std::vector<Case> bench_gpu() {
  std::vector<Case> out;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    out.push_back(make(dtype, 32000, 10));
    out.push_back(make(dtype, 32000, 10, {gradient()}));
  }
  return out;
}

std::vector<Case> evidence() { return {make(DType::kBFloat16, 32000, 10, {gradient()})}; }

}  // namespace

const char* name_of(Distribution distribution) {
  switch (distribution) {
    case Distribution::kNormal:
      return "normal";
    case Distribution::kFar:
      return "far";
    case Distribution::kNarrow:
      return "narrow";
    case Distribution::kWide:
      return "wide";
    case Distribution::kOneSided:
      return "one_sided";
  }
  return "?";
}

double Case::flops() const { return 20 * static_cast<double>(problem.rows) * static_cast<double>(problem.components); }

double Case::unfused_bytes() const { return 8 * bytes(); }

double Case::bytes() const {
  const LossProblem& p = problem;
  const double matrix =
      3 * static_cast<double>(p.rows) * static_cast<double>(p.components) * static_cast<double>(size_of(p.dtype));
  return matrix * (p.gradient ? 2 : 1) + static_cast<double>(p.rows) * static_cast<double>(size_of(p.target_dtype));
}

void complete(Case& c) {
  const LossProblem& p = c.problem;
  // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain computation
  // may be exact by luck. A 16-bit result needs one rounding of its own.
  c.floor = p.dtype == DType::kFloat32 ? 4 : 1;
  std::vector<std::string> parts;
  if (p.reduction != Reduction::kMean) parts.emplace_back(tessera::name_of(p.reduction));
  if (p.gradient) parts.emplace_back("gradient");
  if (p.target_dtype != DType::kFloat32) parts.push_back(format("target_{}", tessera::name_of(p.target_dtype)));
  if (c.padded) parts.emplace_back("padded");
  if (c.distribution != Distribution::kNormal) parts.emplace_back(name_of(c.distribution));
  c.name = format("gmm_nll/{}/r{}_k{}", tessera::name_of(p.dtype), p.rows, p.components);
  if (!parts.empty()) c.name += "/" + join(parts, "+");
}

Inputs make_inputs(const Case& c) {
  const LossProblem& p = c.problem;
  Inputs in;
  in.problem = p;
  in.params = HostTensor(1, p.rows, p.components, 3);
  in.target = HostTensor(1, 1, 1, p.rows);
  const RandomStream values(c.seed, 0), targets(c.seed, 1);
  for (std::int64_t n = 0; n < in.params.size(); ++n) {
    double& value = in.params.data[static_cast<std::size_t>(n)];
    const double unit = values.normal(n);
    const auto which = n % 3;
    value = unit;
    if (which == 0 && c.distribution == Distribution::kOneSided) value = 300 * unit;
    if (which == 2) {
      value = c.distribution == Distribution::kNarrow ? -80 : c.distribution == Distribution::kWide ? 80 : unit / 2;
    }
  }
  for (std::int64_t n = 0; n < p.rows; ++n) {
    double& value = in.target.data[static_cast<std::size_t>(n)];
    value = 2 * targets.normal(n);
    if (c.distribution == Distribution::kFar) value = n % 2 == 0 ? 1e4 : -1e4;
  }
  round_all(p.dtype, in.params);
  round_all(p.target_dtype, in.target);
  return in;
}

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names{"quick", "full", "hostile", "sanitize", "bench", "bench-gpu", "evidence"};
  return names;
}

std::vector<Case> suite(std::string_view name) {
  if (name == "quick") return quick();
  if (name == "full") return full();
  if (name == "hostile") return hostile();
  if (name == "sanitize") return sanitize();
  if (name == "bench") return bench();
  if (name == "bench-gpu") return bench_gpu();
  if (name == "evidence") return evidence();
  return {};
}

}  // namespace tessera::verify::loss
