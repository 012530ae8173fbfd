// Instruction set of this library, chosen by the compiler's macros, which no code outside this folder reads.
//
// `Isa` has the vectors: numbers of a register, rows and vectors of sums that fit in registers, and the functions of
// plain.h. If `HAS_TILES`, `TileUnit` multiplies tiles.
#pragma once

#if defined(ROOTLACE_VECTORS)
#include "twins.h"
namespace rootlace {
using Isa = ROOTLACE_VECTORS;
}
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "avx2.h"
#elif defined(__ARM_NEON)
#include "neon.h"
#else
#include "scalar.h"
#endif
#if defined(ROOTLACE_TWIN)
#include "amx_twin.h"
#else
#include "amx.h"
#endif

namespace rootlace {

using Native = Isa::Native;
using NativeInts = Isa::NativeInts;
constexpr int NATIVE = Isa::NATIVE;

#if defined(ROOTLACE_TWIN)
using TileUnit = TwinTiles;
constexpr bool HAS_TILES = true;
constexpr const char* INSTRUCTIONS = "amx-twin";
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && !defined(ROOTLACE_VECTORS)
using TileUnit = AmxTiles;
constexpr bool HAS_TILES = true;
constexpr const char* INSTRUCTIONS = "amx";
#else
using TileUnit = AmxTiles;
constexpr bool HAS_TILES = false;
constexpr const char* INSTRUCTIONS = Isa::NAME;
#endif

}  // namespace rootlace
