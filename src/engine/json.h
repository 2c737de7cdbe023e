// JSON of the engine's values; a header of its own, because nlohmann/json is slow to compile.
#pragma once

#include <nlohmann/json.hpp>

#include "engine/config.h"

namespace tessera::engine {

using Json = nlohmann::ordered_json;

Json json_of(const Fields& fields);
Json json_of(const Config& config);

}  // namespace tessera::engine
