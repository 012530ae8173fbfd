// The instruction set that this library is compiled for: what the compiler was told says which.
// Nothing outside this folder asks.
#pragma once

#if defined(ROOTLACE_TWIN)
#include "amx_twin.h"
#else
#include "amx.h"
#endif

namespace rootlace {

// The vectors that are there beside a tile unit.
#if defined(__AVX512BF16__)
#define ROOTLACE_VECTORS "avx512-bf16"
#elif defined(__AVX512F__)
#define ROOTLACE_VECTORS "avx512"
#elif defined(__AVX2__)
#define ROOTLACE_VECTORS "avx2"
#elif defined(__ARM_NEON)
#define ROOTLACE_VECTORS "neon"
#else
#define ROOTLACE_VECTORS "generic"
#endif

#if defined(ROOTLACE_TWIN)
constexpr const char* INSTRUCTIONS = "amx-twin";
#elif defined(__AMX_BF16__)
constexpr const char* INSTRUCTIONS = "amx";
#else
constexpr const char* INSTRUCTIONS = ROOTLACE_VECTORS;
#endif
#undef ROOTLACE_VECTORS

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
