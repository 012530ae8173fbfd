// The instruction set that this library is compiled for: what the compiler was told says which.
// Nothing outside this folder asks.
#pragma once

#if defined(ROOTLACE_TWIN)
#include "amx_twin.h"
#else
#include "amx.h"
#endif

namespace rootlace {

#if defined(ROOTLACE_TWIN)
using TileUnit = TwinTiles;
constexpr bool HAS_TILES = true;
#else
using TileUnit = AmxTiles;
#if defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
#endif

}  // namespace rootlace
