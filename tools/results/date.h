#pragma once

#include <string>

namespace tessera::results {

// "2026-11-15", in UTC: the date that results and records carry.
std::string today();

}  // namespace tessera::results
