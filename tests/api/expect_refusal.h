// What every call of the C ABI with an invalid argument returns.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tessera/tessera.h"

namespace tessera {

// names: what the message must contain. promise: the case, for the test's own message.
inline void expect_refusal(tessera_status status, const char* names, const char* promise) {
  EXPECT_EQ(status, TESSERA_INVALID_ARGUMENT) << promise;
  EXPECT_NE(std::string(tessera_last_error()).find(names), std::string::npos)
      << promise << ": " << tessera_last_error();
}

}  // namespace tessera
