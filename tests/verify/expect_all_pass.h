// Every case of a family's suite on the CPU, against the oracle.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <type_traits>
#include <vector>

#include "tests/sanitizers.h"
#include "verify/check.h"
#include "verify/device.h"

namespace tessera::verify {

// Cases that are too large for a test are run by the program's `verify`.
template <class Stored>
void expect_all_pass(
    const std::vector<Stored>& cases, std::unique_ptr<Case> (*as_case)(const Stored&), int repeat,
    std::type_identity_t<bool (*)(const Stored&)> is_too_large = [](const Stored&) { return false; }) {
  auto device = open_device("cpu");
  ASSERT_TRUE(device.ok());
  // Sanitizers make the library much slower and need every path once, not every shape.
  const std::size_t every = tests::sanitizers().empty() ? 1 : 3;
  for (std::size_t i = 0; i < cases.size(); i += every) {
    const Stored& c = cases[i];
    if (is_too_large(c)) continue;
    const Report report = check(*as_case(c), **device, repeat, 0);
    EXPECT_EQ(report.outcome, Outcome::kPassed) << c.name << ": " << report.detail;
  }
}

}  // namespace tessera::verify
