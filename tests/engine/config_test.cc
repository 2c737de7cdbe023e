// Configs by names: to text, to a struct, and back.
#include "engine/config.h"

#include <gtest/gtest.h>

#include <limits>

namespace tessera::engine {
namespace {

struct SomeConfig {
  DType dtype;
  int rows;
  bool masked;

  bool operator==(const SomeConfig&) const = default;
};
void visit_fields(const SomeConfig& c, auto&& visit) {
  visit("dtype", c.dtype);
  visit("rows", c.rows);
  visit("masked", c.masked);
}

// Of the same types, under other names.
struct RenamedConfig {
  DType dtype;
  int rows;
  bool causal;
};
void visit_fields(const RenamedConfig& c, auto&& visit) {
  visit("dtype", c.dtype);
  visit("rows", c.rows);
  visit("causal", c.causal);
}

// With one field less.
struct OlderConfig {
  DType dtype;
  int rows;
};
void visit_fields(const OlderConfig& c, auto&& visit) {
  visit("dtype", c.dtype);
  visit("rows", c.rows);
}

constexpr SomeConfig kSome{DType::kBFloat16, 128, true};

TEST(Config, its_text_is_json_by_names) {
  EXPECT_EQ(text_of(main_config(kSome)), R"({"main": {"dtype": "bf16", "rows": 128, "masked": true}})");
  EXPECT_EQ(text_of(fields_of(OlderConfig{DType::kFloat16, -3})), R"({"dtype": "fp16", "rows": -3})");
  EXPECT_EQ(text_of(Config{}), "{}");
}

TEST(Config, comes_back_from_its_text) {
  const Config configs[] = {
      {},
      main_config(kSome),
      {{"preprocess", {}}, {"main", fields_of(kSome)}, {"dq", fields_of(OlderConfig{DType::kFloat32, -1})}},
      {{"main", {{"largest", std::numeric_limits<std::int64_t>::max()}, {"flag", false}}}},
      {{"main",
        {{"smallest", std::numeric_limits<std::int64_t>::min()}, {"text", std::string("a \"b\", {c}: \\ \n")}}}},
  };
  for (const Config& config : configs) {
    const auto back = config_from_text(text_of(config));
    ASSERT_TRUE(back) << text_of(config);
    EXPECT_EQ(*back, config) << text_of(config);
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const SomeConfig config{dtype, 7, false};
    EXPECT_EQ(from_main<SomeConfig>(*config_from_text(text_of(main_config(config)))), config);
  }
}

TEST(Config, text_that_is_none_gives_nothing) {
  for (const char* text :
       {"", "main", "null", "[]", "3", R"("main")", R"({"main": 3})", R"({"main": []})", R"({"main": {"rows": null}})",
        R"({"main": {"rows": 1.5}})", R"({"main": {"rows": [1]}})", R"({"main": {"rows": {"rows": 1}}})",
        R"({"main": {"rows": 1})", R"({"main": {"rows": 1}} x)", R"({"main": {rows: 1}})"}) {
    EXPECT_FALSE(config_from_text(text)) << text;
  }
}

TEST(Config, fields_give_back_the_struct_in_any_order) {
  Fields fields = fields_of(kSome);
  EXPECT_EQ(from_fields<SomeConfig>(&fields), kSome);
  std::swap(fields.front(), fields.back());
  EXPECT_EQ(from_fields<SomeConfig>(&fields), kSome);
}

TEST(Config, a_missing_field_is_refused) {
  for (std::size_t missing = 0; missing < 3; ++missing) {
    Fields fields = fields_of(kSome);
    fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(missing));
    EXPECT_FALSE(from_fields<SomeConfig>(&fields)) << missing;
  }
  const Fields none;
  EXPECT_FALSE(from_fields<SomeConfig>(&none));
  EXPECT_FALSE(from_fields<SomeConfig>(nullptr));
}

TEST(Config, an_unknown_field_is_refused) {
  Fields more = fields_of(kSome);
  more.push_back({"extra", std::int64_t{0}});
  EXPECT_FALSE(from_fields<SomeConfig>(&more));
  Fields twice = fields_of(kSome);
  twice.push_back(twice.front());
  EXPECT_FALSE(from_fields<SomeConfig>(&twice)) << "the same field twice";
  Fields renamed = fields_of(kSome);
  renamed[1].name = "Rows";
  EXPECT_FALSE(from_fields<SomeConfig>(&renamed));
}

TEST(Config, a_field_of_another_type_or_out_of_range_is_refused) {
  const auto is_refused = [](std::size_t field, const auto& value) {
    Fields fields = fields_of(kSome);
    fields[field].value = value;
    return !from_fields<SomeConfig>(&fields);
  };
  EXPECT_FALSE(is_refused(0, std::string("fp16")));
  EXPECT_TRUE(is_refused(0, std::string("fp8")));
  EXPECT_TRUE(is_refused(0, std::string()));
  EXPECT_TRUE(is_refused(0, std::int64_t{1}));
  EXPECT_TRUE(is_refused(0, true));
  EXPECT_FALSE(is_refused(1, std::int64_t{-5}));
  EXPECT_TRUE(is_refused(1, std::int64_t{1} << 40));
  EXPECT_TRUE(is_refused(1, true));
  EXPECT_TRUE(is_refused(1, 128.0));
  EXPECT_TRUE(is_refused(1, std::string("128")));
  EXPECT_FALSE(is_refused(2, false));
  EXPECT_TRUE(is_refused(2, std::int64_t{1}));
  EXPECT_TRUE(is_refused(2, std::string("true")));
}

TEST(Config, a_config_of_another_struct_is_refused) {
  EXPECT_FALSE(from_main<RenamedConfig>(main_config(kSome)));
  EXPECT_FALSE(from_main<OlderConfig>(main_config(kSome)));
  EXPECT_FALSE(from_main<SomeConfig>(main_config(OlderConfig{DType::kFloat16, 1})));
}

TEST(Config, a_recipe_with_more_steps_than_main_is_refused) {
  const Config two = {{"main", fields_of(kSome)}, {"dq", {}}};
  EXPECT_FALSE(from_main<SomeConfig>(two));
  EXPECT_EQ(from_fields<SomeConfig>(fields_of_step(two, "main")), kSome);
  EXPECT_EQ(fields_of_step(two, "convert"), nullptr);
  EXPECT_FALSE(from_main<SomeConfig>({{"dq", fields_of(kSome)}}));
  EXPECT_FALSE(from_main<SomeConfig>({}));
}

}  // namespace
}  // namespace tessera::engine
